"""The training loader: this worker's micro-batches, decoded ahead of the step by a few processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from data.augment import AugmentConfig, Draws, augment
from data.decode import BadImage
from data.errors import DataError
from data.index import Index
from data.order import Order
from data.reader import Reader
from data.tar import parse_labels

# b samples of a micro-batch, L labels of a sample at most, S image side

MAX_REPLACEMENTS = 100  # bad samples in a row before the set is taken for unusable
SEED_DOMAIN = 1  # keeps augmentation's draws apart from the order's


@dataclass(frozen=True)
class BadSample:
    """A sample that was replaced, and why."""

    shard: str
    key: str
    reason: str


@dataclass(frozen=True)
class Batch:
    """`images` (b, 3, S, S) uint8 in channels-last memory, `labels` (b, L) int64 padded with −1,
    `ids` (b, 3) int64: epoch, shard and sample that each row really holds."""

    step: int
    images: torch.Tensor
    labels: torch.Tensor
    ids: torch.Tensor
    bad: tuple[BadSample, ...]


class TrainLoader:
    """Iterates the micro-batches of this worker's `slots` of every global batch from `start_step` on.

    The pixels depend on index, order, image size, augmentation and seed alone: not on the number of workers,
    `processes`, `micro_batch`, or where the run started. Raises DataError where a shard cannot be used.
    """

    def __init__(
        self,
        index: Index,
        order: Order,
        *,
        image_size: int,
        slots: range,
        micro_batch: int,
        start_step: int = 0,
        seed: int = 0,
        augment: AugmentConfig | None = None,
        max_labels: int = 1,
        processes: int = 0,
        timeout_s: float = 120.0,
        verify: bool = True,
    ):
        if not (0 <= slots.start < slots.stop <= order.batch_size and slots.step == 1):
            raise ValueError(
                f"slots {slots} must be a contiguous, non-empty part of range(0, {order.batch_size})"
            )
        self.order, self.slots, self.micro_batch, self.start_step = order, slots, micro_batch, start_step
        self.processes, self.timeout_s = processes, timeout_s
        self.decoder = Decoder(
            index,
            order,
            image_size,
            seed,
            augment or AugmentConfig(),
            max_labels,
            Reader(index, verify=verify),
        )

    def __iter__(self) -> Iterator[Batch]:
        return iter(
            torch.utils.data.DataLoader(
                self.decoder,
                sampler=self.tasks(),
                batch_size=None,
                num_workers=self.processes,
                timeout=self.timeout_s if self.processes else 0,
                pin_memory=torch.cuda.is_available(),
            )
        )

    def tasks(self) -> Iterator[tuple[int, int, int]]:
        """(step, first slot, slot after the last) of every micro-batch to come."""
        for step in count(self.start_step):
            for first in range(self.slots.start, self.slots.stop, self.micro_batch):
                yield step, first, min(first + self.micro_batch, self.slots.stop)


@dataclass
class Decoder(torch.utils.data.Dataset):
    """Turns one task into one micro-batch; a pure function, whichever process runs it."""

    index: Index
    order: Order
    image_size: int
    seed: int
    augment: AugmentConfig
    max_labels: int
    reader: Reader

    def __getitem__(self, task: tuple[int, int, int]) -> Batch:
        step, first, stop = task
        size = self.image_size
        images = np.empty((stop - first, size, size, 3), np.uint8)
        labels = np.full((stop - first, self.max_labels), -1, np.int64)
        ids = np.stack(self.order.batch(step), 1)[first:stop]
        bad: list[BadSample] = []
        for row in range(stop - first):
            for attempt in range(1, MAX_REPLACEMENTS + 2):
                problem = self.fill(ids[row], images[row], labels[row])
                if problem is None:
                    break
                bad.append(problem)
                ids[row] = self.order.replacement(step, first + row, attempt)
            else:
                last = bad[-1]
                raise DataError(
                    f"{MAX_REPLACEMENTS} bad samples in a row, last {last}; try `python -m jobs data check`"
                )
        tensor = torch.from_numpy(images).permute(0, 3, 1, 2)
        return Batch(step, tensor, torch.from_numpy(labels), torch.from_numpy(ids), tuple(bad))

    def fill(self, ids: np.ndarray, image: np.ndarray, labels: np.ndarray) -> BadSample | None:
        """Read and decode one sample into its row; returns what is wrong with it, if anything is."""
        epoch, shard, sample = map(int, ids)
        key, encoded, raw = self.reader.read(shard, sample)
        try:
            found = read_labels(raw, self.index.classes, self.max_labels)
            augment(
                encoded,
                self.image_size,
                Draws(SEED_DOMAIN, self.seed, epoch, shard, sample),
                self.augment,
                image,
            )
        except BadImage as error:
            return BadSample(self.index.shards[shard].name, key, str(error))
        labels[:] = -1
        labels[: len(found)] = found
        return None


def read_labels(raw: bytes, classes: int, most: int) -> tuple[int, ...]:
    """Parse and check the labels of one sample; raises BadImage with a short reason."""
    try:
        found = parse_labels(raw)
    except ValueError:
        raise BadImage("no label") from None
    if max(found) >= classes:
        raise BadImage(f"label not below {classes}")
    if len(found) > most:
        raise BadImage(f"more than {most} labels")
    return found
