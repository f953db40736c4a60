"""A deterministic pass over every sample exactly once, shared by all workers, in reference preprocessing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from data.decoder import BadSample
from data.images.decode import BadImage, decode
from data.images.preprocess import preprocess
from data.shards.cache import CacheConfig
from data.shards.index import Index
from data.shards.labels import read_labels
from data.shards.reader import Reader


@dataclass(frozen=True)
class EvaluationBatch:
    """`images` (b, 3, h, w) uint8 (float32 in 0 … 255 after `resize_float`), `labels` (b, L) padded with −1,
    `ids` (b, 2): shard, sample. `mask` (b,) is False on padding and on bad samples, whose pixels are 0."""

    images: torch.Tensor
    labels: torch.Tensor
    ids: torch.Tensor
    mask: torch.Tensor
    bad: tuple[BadSample, ...]


@dataclass(frozen=True)
class Row:
    """One sample on its way into a batch."""

    place: tuple[int, int]
    image: np.ndarray | None
    labels: tuple[int, ...]
    problem: BadSample | None


class EvaluationSet:
    """Iterates this worker's part of a set: every sample once at any world size, batches equally many.

    Worker r of n owns samples r·m … (r+1)·m − 1 with m = ceil(N / n); the last batches are padded.
    """

    def __init__(
        self,
        index: Index,
        ops: str,
        *,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        max_labels: int = 1,
        threads: int | None = None,  # that decode; None: as many as torch computes with
        cache: CacheConfig | None = None,
    ):
        self.index, self.ops, self.batch_size, self.max_labels = index, ops, batch_size, max_labels
        share = -(-index.samples // world)
        self.rows = range(index.samples)[rank * share : (rank + 1) * share]
        self.batches = -(-share // batch_size)
        self.starts = np.cumsum([0, *index.shard_samples])
        self.reader, self.threads = Reader(index, cache=cache), threads or torch.get_num_threads()
        example = preprocess(np.zeros((1024, 1024, 3), np.uint8), ops)  # all images come out like it
        self.shape, self.dtype = example.shape, example.dtype

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[EvaluationBatch]:
        running: deque[list[Future[Row]]] = deque()  # the batch in hand and the next one
        with ThreadPoolExecutor(self.threads) as pool:
            for first in range(0, self.batches * self.batch_size, self.batch_size):
                places = map(self.place, self.rows[first : first + self.batch_size])
                running.append([pool.submit(self.load, at, self.reader.read(*at)) for at in places])
                if len(running) > 1:
                    yield self.collate([row.result() for row in running.popleft()])
            for rows in running:
                yield self.collate([row.result() for row in rows])

    def place(self, row: int) -> tuple[int, int]:
        """Shard and sample of the row-th sample of the set."""
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        return shard, row - int(self.starts[shard])

    def load(self, place: tuple[int, int], found: tuple[str, bytes, bytes]) -> Row:
        """One sample, preprocessed, or what is wrong with it."""
        key, encoded, raw = found
        try:
            labels = read_labels(raw, self.index.classes, self.max_labels)
            image = preprocess(decode(encoded), self.ops)
        except BadImage as error:
            problem = BadSample(self.index.shards[place[0]].name, key, str(error))
            return Row(place, None, (), problem)
        if image.shape != self.shape:
            raise ValueError(f"ops {self.ops!r} give images of several sizes; end them with a crop or a resize")
        return Row(place, image, labels, None)

    def collate(self, rows: list[Row]) -> EvaluationBatch:
        """Stack rows and pad them to `batch_size`."""
        b = self.batch_size
        images = np.zeros((b, *self.shape), self.dtype)
        labels, ids, mask = np.full((b, self.max_labels), -1), np.full((b, 2), -1), np.zeros(b, bool)
        for number, row in enumerate(rows):
            ids[number] = row.place
            if row.image is not None:
                images[number], mask[number] = row.image, True
                labels[number, : len(row.labels)] = row.labels
        bad = tuple(row.problem for row in rows if row.problem)
        made = [torch.from_numpy(array) for array in (images, labels, ids, mask)]
        return EvaluationBatch(made[0].permute(0, 3, 1, 2), made[1], made[2], made[3], bad)
