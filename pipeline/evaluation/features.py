"""The features, predictions and labels of every sample of a set, kept by rank 0 alone: features on disk.

1. Every worker computes one batch of its part of the set and sends it to rank 0, which receives one batch at a time.
2. Rank 0 writes the features where the sample's number in the set says: the file is in the order of the set at any
   world size. It is preallocated, so that a disk without room is refused at the first batch, and has no name, so that
   it goes with the process however that ends.
3. A protocol reads as many rows at a time as fit in memory: `blocks`.

    store = FeatureStore(index, folder)
    collect(model, group.agreed(store.watching(batches)), store, torch.float32, device)
    store.rows, store.labels, store.features(store.rows[:100])          of rank 0; those of the others stay empty

A worker holds one batch; rank 0 two, and of each sample its label lists and predictions: some ten numbers.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.evaluation import EvaluationBatch
from data.index.index import Index

# N samples of the set, b rows of a batch, D features, L labels of a sample at most, K best classes

BLOCK = 4096  # rows that are read at a time: 12 MiB of 768 features
FEATURE_BYTES = 4  # float32


class FeatureStore:
    """Rows by the number of their sample in the set; samples that could not be read have none."""

    def __init__(self, index: Index, folder: Path) -> None:
        self.index = index
        self.folder = folder  # where the file without a name takes its room
        self.starts = np.append(0, np.cumsum(index.shard_samples))
        self.is_there = np.zeros(index.samples, bool)
        self.all_labels: np.ndarray | None = None  # (N, L), padded with −1
        self.all_predictions: np.ndarray | None = None  # (N, K), the best class first
        self.file: IO[bytes] | None = None
        self.width = 0  # D
        self.failure: OSError | None = None  # why nothing more could be kept

    # -------------------------------------------------------------------------------------------- writing

    def numbers(self, batch: EvaluationBatch) -> Tensor:
        """Return the numbers (b,) of a batch's samples in the set; −1 for padding and for what could not be read."""
        shards, samples = batch.ids.unbind(1)
        starts = torch.from_numpy(self.starts)
        return torch.where(batch.mask, starts[shards.clamp(min=0)] + samples, -1)

    def watching(self, batches: Iterable[EvaluationBatch]) -> Iterator[EvaluationBatch]:
        """Iterate batches; raise OSError, where the next one is asked for, once something could not be kept."""
        for batch in batches:
            yield batch
            if self.failure is not None:
                raise self.failure

    def keep(self, numbers: Tensor, labels: Tensor, features: Tensor | None, predictions: Tensor | None) -> None:
        """Keep what a worker has made of a batch; a disk that refuses is remembered in `failure`."""
        is_good = (numbers >= 0).cpu().numpy()
        rows = numbers.cpu().numpy()[is_good]
        if self.failure is not None or len(rows) == 0:
            return
        self.is_there[rows] = True
        if self.all_labels is None:
            self.all_labels = np.full((self.index.samples, labels.shape[1]), -1)
        self.all_labels[rows] = labels.cpu().numpy()[is_good]
        if predictions is not None:
            if self.all_predictions is None:
                self.all_predictions = np.full((self.index.samples, predictions.shape[1]), -1, np.int32)
            self.all_predictions[rows] = predictions.cpu().numpy()[is_good]
        if features is not None:
            try:
                self.write(rows, features.cpu().numpy()[is_good])
            except OSError as error:
                self.failure = OSError(error.errno, f"cannot keep features: {error.strerror}", str(self.folder))

    def write(self, rows: np.ndarray, features: np.ndarray) -> None:
        """Write features (b, D) at their rows. Raises OSError where the disk has no room."""
        if self.file is None:
            self.width = features.shape[1]
            self.file = tempfile.TemporaryFile(dir=self.folder, prefix="features-")  # noqa: SIM115 (as long as we live)
            # All of it now: an hour into the pass would be a bad moment to learn that the disk is too small.
            os.posix_fallocate(self.file.fileno(), 0, max(self.index.samples * self.row_bytes, 1))
        first = 0
        for run in runs_of(rows):
            part = np.ascontiguousarray(features[first : first + len(run)], np.float32)
            write_all(self.file.fileno(), part.tobytes(), int(run[0]) * self.row_bytes)
            first += len(run)

    # -------------------------------------------------------------------------------------------- reading

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a sample's features."""
        return self.width * FEATURE_BYTES

    @property
    def rows(self) -> np.ndarray:
        """Return the numbers of the samples that are there, in the order of the set."""
        return np.flatnonzero(self.is_there)

    @property
    def labels(self) -> np.ndarray:
        """Return the labels (rows, L) of the samples that are there, padded with −1."""
        if self.all_labels is None:
            return np.empty((0, 1), np.int64)
        return self.all_labels[self.is_there]

    @property
    def first_labels(self) -> np.ndarray:
        """Return the first label (rows,) of each sample that is there: what is learned from it."""
        return self.labels[:, 0]

    @property
    def predictions(self) -> np.ndarray:
        """Return the best classes (rows, K) of the samples that are there, the best first."""
        assert self.all_predictions is not None, "the pass over the set was made without the head"
        return self.all_predictions[self.is_there]

    def features(self, rows: np.ndarray) -> Tensor:
        """Return the features (len(rows), D) float32 of samples by their numbers, read from the file."""
        assert self.file is not None, "the pass over the set was made without features"
        parts = []
        for run in runs_of(rows):
            size = len(run) * self.row_bytes
            stored = os.pread(self.file.fileno(), size, int(run[0]) * self.row_bytes)
            parts.append(np.frombuffer(stored, np.float32).reshape(len(run), self.width))
        return torch.from_numpy(np.concatenate(parts))

    def blocks(self, rows: np.ndarray | None = None, size: int = BLOCK) -> Iterator[tuple[slice, Tensor]]:
        """Iterate features block by block: which of the `rows` (all that are there), and their features (size, D)."""
        chosen = self.rows if rows is None else rows
        for first in range(0, len(chosen), size):
            place = slice(first, min(first + size, len(chosen)))
            yield place, self.features(chosen[place])

    def close(self) -> None:
        """Give the file's room back."""
        if self.file is not None:
            self.file.close()
            self.file = None


def runs_of(rows: np.ndarray) -> list[np.ndarray]:
    """Cut rows where one does not follow the one before: each run is read or written at once."""
    return [run for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if len(run)]


def write_all(file: int, content: bytes, offset: int) -> None:
    """Write all of the content at an offset; a single call may write less."""
    written = 0
    while written < len(content):
        written += os.pwrite(file, content[written:], offset + written)


def normalise(images: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Bring uint8 pixels to [−1, 1] on the device (SPEC 2.5: value_range(-1, 1))."""
    return images.to(device, non_blocking=True).float().mul_(1 / 127.5).sub_(1).to(dtype)


def collect(
    model: nn.Module,
    samples: Iterable[EvaluationBatch],
    store: FeatureStore,
    dtype: torch.dtype,
    device: torch.device,
    *,
    with_features: bool = True,
    best: int = 0,
    on_computed: Callable[[], None] | None = None,
) -> None:
    """Collective: pass a set through the model once; rank 0's store keeps features, and the `best` classes of the head.

    The model computes in eval mode and without gradients; its mode is restored afterwards. `on_computed` is called
    between a batch's computation and its sending.
    `samples` comes from `store.watching`, so that every worker hears of a disk that is full.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            # Every worker gets equally many batches: ZeRO-3 gathers weights in lockstep.
            for batch in samples:
                rows = model.features(normalise(batch.images, dtype, device))  # type: ignore[operator]
                made = [store.numbers(batch).to(device), batch.labels.to(device)]
                if best:
                    # Stable, so that of equal outputs the lowest class comes first, whatever the device.
                    logits = model.head(rows).float()  # type: ignore[operator]
                    order = logits.sort(dim=1, descending=True, stable=True)
                    made.append(order.indices[:, :best].contiguous())
                if with_features:
                    made.append(rows.float().contiguous())
                if on_computed is not None:
                    on_computed()
                # On all workers but rank 0 there is nothing to keep, and going through the parts is what sends them.
                for part in at_rank_0(made):
                    predictions = part[2] if best else None
                    features = part[-1] if with_features else None
                    store.keep(part[0], part[1], features, predictions)
    finally:
        model.train(was_training)


def at_rank_0(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Collective: iterate, at rank 0, every worker's tensors, in the order of ranks; their shapes are the same."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield tensors
        return
    if dist.get_rank() != 0:
        for tensor in tensors:
            dist.send(tensor, 0)
        return
    yield tensors
    # One worker after the other into the same memory: a gather would hold those of all workers at once.
    received = [torch.empty_like(tensor) for tensor in tensors]
    for source in range(1, dist.get_world_size()):
        for tensor in received:
            dist.recv(tensor, source)
        yield received
