"""A deterministic pass over every sample exactly once, shared by all workers, in reference preprocessing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from data.decode import BadImage, decode
from data.index import Index
from data.preprocess import preprocess
from data.reader import Reader
from data.worker import BadSample, read_labels


@dataclass(frozen=True)
class EvaluationBatch:
    """`images` (b, 3, h, w) uint8 (float32 in 0 … 255 after `resize_float`), `labels` (b, L) padded with −1,
    `ids` (b, 2): shard, sample. `mask` (b,) is False on padding and on bad samples, whose pixels are 0."""

    images: torch.Tensor
    labels: torch.Tensor
    ids: torch.Tensor
    mask: torch.Tensor
    bad: tuple[BadSample, ...]


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
        limit: int | None = None,
        verify: bool = True,
    ):
        self.index, self.ops, self.batch_size, self.max_labels = index, ops, batch_size, max_labels
        total = index.samples if limit is None else min(limit, index.samples)
        share = -(-total // world)
        self.rows = range(min(rank * share, total), min((rank + 1) * share, total))
        self.batches = -(-share // batch_size)
        self.starts = np.cumsum([0, *index.shard_samples])
        self.reader = Reader(index, verify=verify)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[EvaluationBatch]:
        shape = None
        for first in range(0, self.batches * self.batch_size, self.batch_size):
            images, labels, ids, bad = [], [], [], []
            for row in self.rows[first : first + self.batch_size]:
                shard = int(np.searchsorted(self.starts, row, side="right")) - 1
                sample = row - int(self.starts[shard])
                image, found, problem = self.load(shard, sample)
                bad += [problem] if problem else []
                images.append(image)
                labels.append(found)
                ids.append((shard, sample))
            shape = shape or next((image.shape for image in images if image is not None), None)
            yield self.collate(images, labels, ids, tuple(bad), shape)

    def load(self, shard: int, sample: int) -> tuple[np.ndarray | None, tuple[int, ...], BadSample | None]:
        """One sample, preprocessed, or what is wrong with it."""
        key, encoded, raw = self.reader.read(shard, sample)
        try:
            return (
                preprocess(decode(encoded), self.ops),
                read_labels(raw, self.index.classes, self.max_labels),
                None,
            )
        except BadImage as error:
            return None, (), BadSample(self.index.shards[shard].name, key, str(error))

    def collate(self, images, labels, ids, bad, shape) -> EvaluationBatch:
        """Stack rows and pad them to `batch_size`."""
        b = self.batch_size
        if shape is None:  # nothing decoded yet: learn the size from the ops
            shape = preprocess(np.zeros((512, 512, 3), np.uint8), self.ops).shape
        float_out = (
            any(image is not None and image.dtype != np.uint8 for image in images) or "float" in self.ops
        )
        pixels = np.zeros((b, *shape), np.float32 if float_out else np.uint8)
        targets, places, mask = np.full((b, self.max_labels), -1), np.full((b, 2), -1), np.zeros(b, bool)
        for row, image in enumerate(images):
            places[row] = ids[row]
            if image is None:
                continue
            if image.shape != shape:
                raise ValueError(
                    f"ops {self.ops!r} give {shape} and {image.shape}; end them with a crop or resize"
                )
            pixels[row], mask[row] = image, True
            targets[row, : len(labels[row])] = labels[row]
        tensor = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        arrays = list(map(torch.from_numpy, (targets, places, mask)))
        return EvaluationBatch(tensor, arrays[0], arrays[1], arrays[2], bad)
