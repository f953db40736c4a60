"""Iterate over every sample of a data set exactly once, deterministically, split between all workers.

1. Number the samples shard after shard and cut them into batches, independently of the number of workers. A sample
   therefore has the same neighbours in its batch, and bitwise equal outputs, at any world size. Each worker owns
   consecutive whole batches, at most the number of batches divided by the number of workers, rounded up.
2. Threads read, decode and preprocess one batch while the caller works on the previous one.
3. The last batches are padded. `mask` is False for padding and for bad samples. All workers therefore yield the same
   number of batches, of the same size.

    10 samples, 2 workers, batches of 3: worker 0 yields the samples 0 1 2, 3 4 5; worker 1 yields 6 7 8, 9 − −
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.decoder import BadSample
from data.images.decode import BadImage, decode
from data.images.preprocess import preprocess
from data.index.index import Index
from data.reader import ShardReader, read_labels
from data.remote.config import CacheConfig

# b: samples per batch, L: maximum number of labels per sample, h, w: height and width of a preprocessed image


@dataclass(frozen=True)
class EvaluationBatch:
    """One batch; padding and bad samples have pixels 0, labels −1 and `mask` False."""

    images: Tensor  # (b, 3, h, w) uint8; float32 in 0 … 255 after `resize_float`
    labels: Tensor  # (b, L) int64, padded with −1
    ids: Tensor  # (b, 2) int64: shard, sample; −1 for padding
    mask: Tensor  # (b,) bool
    bad: tuple[BadSample, ...]


@dataclass(frozen=True)
class LoadedSample:
    """One preprocessed sample: the image and its labels, or the reason why the sample is bad."""

    place: tuple[int, int]  # (shard, sample) numbers
    image: np.ndarray | None
    labels: tuple[int, ...]
    problem: BadSample | None


class EvaluationSet:
    """An iterable over batches of this worker's part of a data set; all workers yield the same number of batches.

    Iteration raises ValueError if `ops` produce images of different sizes, and the errors of `ShardReader.read`.
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
        threads: int | None = None,  # decoding threads; default: torch's number of threads
        cache: CacheConfig | None = None,
    ):
        self.index = index
        self.ops = ops
        self.batch_size = batch_size
        self.max_labels = max_labels
        self.threads = threads or torch.get_num_threads()
        self.reader = ShardReader(index, cache=cache)

        batches_of_set = -(-index.samples // batch_size)
        self.batches = -(-batches_of_set // world)
        samples_of_worker = self.batches * batch_size
        self.rows = range(index.samples)[rank * samples_of_worker : (rank + 1) * samples_of_worker]

        # The shape of the output depends only on the ops. The example is large, because central_crop rejects images
        # smaller than the crop.
        example = preprocess(np.zeros((1024, 1024, 3), np.uint8), ops)
        self.shape = example.shape
        self.dtype = example.dtype

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[EvaluationBatch]:
        running: deque[list[Future[LoadedSample]]] = deque()  # the current batch and the next one
        with ThreadPoolExecutor(self.threads) as pool:
            # A worker without further samples yields padded batches until all workers have yielded the same number.
            for first in range(0, self.batches * self.batch_size, self.batch_size):
                futures = []
                for row in self.rows[first : first + self.batch_size]:
                    place = self.place(row)
                    # Read in this thread: the reader may close the least recently used shard, from which another
                    # thread might be reading.
                    futures.append(pool.submit(self.load, place, self.reader.read(*place)))
                running.append(futures)
                if len(running) > 1:
                    yield self.collate(running.popleft())
            for futures in running:
                yield self.collate(futures)

    def place(self, row: int) -> tuple[int, int]:
        """Return the shard number of sample `row` of the data set, and the sample's number within that shard."""
        shard = int(np.searchsorted(self.index.starts, row, side="right")) - 1
        return shard, row - int(self.index.starts[shard])

    def load(self, place: tuple[int, int], stored: tuple[str, bytes, bytes]) -> LoadedSample:
        """Preprocess one sample, given as (key, image bytes, label bytes); for a bad sample, return the reason."""
        key, encoded, raw_labels = stored
        try:
            labels = read_labels(raw_labels, self.index, self.max_labels)
            image = preprocess(decode(encoded), self.ops)
        except BadImage as error:
            shard, _ = place
            problem = BadSample(self.index.shards[shard].name, key, str(error))
            return LoadedSample(place, None, (), problem)
        if image.shape != self.shape:
            raise ValueError(f"ops {self.ops!r} produce images of different sizes; end them with a crop or a resize")
        return LoadedSample(place, image, labels, None)

    def collate(self, futures: list[Future[LoadedSample]]) -> EvaluationBatch:
        """Wait for the rows of a batch, stack them, and pad them to `batch_size`."""
        images = np.zeros((self.batch_size, *self.shape), self.dtype)
        labels = np.full((self.batch_size, self.max_labels), -1)
        ids = np.full((self.batch_size, 2), -1)
        mask = np.zeros(self.batch_size, bool)
        bad = []
        for number, future in enumerate(futures):
            row = future.result()
            ids[number] = row.place
            # A bad sample keeps its id, but its mask stays False, so it does not count.
            if row.image is not None:
                images[number] = row.image
                labels[number, : len(row.labels)] = row.labels
                mask[number] = True
            if row.problem:
                bad.append(row.problem)
        return EvaluationBatch(
            torch.from_numpy(images).permute(0, 3, 1, 2),
            torch.from_numpy(labels),
            torch.from_numpy(ids),
            torch.from_numpy(mask),
            tuple(bad),
        )
