"""Collects the labels, predictions and features of all samples in a data set on rank 0, which writes features to disk.

1. Every worker computes the batches of its part of the data set and sends them to rank 0, which receives one at a time.
2. Rank 0 writes features at the position of the sample's number, so the order in the file is that of the data set at
   any world size. The file is preallocated, so that a full disk is detected at the first batch, and unnamed, so that it
   disappears with the process however the process ends.
3. A protocol reads the features in blocks that fit into memory: `blocks`.

    store = FeatureStore(index, folder)
    collect(model, store.watching(batches), store, torch.float32, device)
    store.rows, store.labels, store.features(store.rows[:100])          only on rank 0; other ranks' stores stay empty

A worker holds one batch in memory. Rank 0 holds two batches, and the labels and predictions of all samples (about ten
numbers each).
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
from models.catalog import normalise
from pipeline.losses import LOSSES, dense_targets
from pipeline.optimization import Loss

# N: samples in the set, b: rows of a batch, D: features, L: maximum number of labels per sample, K: best classes

BLOCK = 4096  # rows read at a time: 12 MiB of 768 features
FEATURE_BYTES = 4  # bytes per feature, a float32

Beat = Callable[[], None]  # called between two blocks of a long computation, which ends if it raises


class FeatureStore:
    """Stores labels, predictions and features by sample number in the data set; unreadable samples have no row."""

    def __init__(self, index: Index, folder: Path) -> None:
        self.index = index
        self.folder = folder  # folder for the unnamed file
        self.starts = index.starts
        self.is_there = np.zeros(index.samples, bool)
        self.all_labels = np.empty((0, 1), np.int64)  # (N, L) after the first batch, padded with −1
        self.all_predictions: np.ndarray | None = None  # (N, K), the best class first
        self.all_confidences = np.zeros(index.samples, np.float32)  # (N,), softmax of the best class
        self.all_losses = np.zeros(index.samples, np.float32)  # (N,)
        self.file: IO[bytes] | None = None
        self.width = 0  # D, the number of features
        self.row_bytes = 0  # bytes of a sample's features
        self.not_finite = 0  # samples whose logits or features contain NaN or infinity
        self.failure: OSError | None = None  # error after which nothing more is stored

    # -------------------------------------------------------------------------------------------- writing

    def watching(self, batches: Iterable[EvaluationBatch]) -> Iterator[EvaluationBatch]:
        """Iterate over batches; after a failed write, raise its OSError when the next batch is requested."""
        for batch in batches:
            yield batch
            if self.failure is not None:
                raise self.failure

    def keep(
        self,
        numbers: Tensor,
        labels: Tensor,
        features: Tensor | None = None,
        predictions: Tensor | None = None,
        confidences: Tensor | None = None,
        losses: Tensor | None = None,
    ) -> None:
        """Store the rows of a batch at their sample numbers (b,) in the data set; skip rows with the number −1.

        If the disk rejects the features (b, D), the error is stored in `failure`, and no more features are stored.
        """
        is_good = (numbers >= 0).cpu().numpy()
        rows = numbers.cpu().numpy()[is_good]
        if self.failure is not None or len(rows) == 0:
            return
        self.is_there[rows] = True
        if len(self.all_labels) == 0:
            self.all_labels = np.full((self.index.samples, labels.shape[1]), -1)
        self.all_labels[rows] = labels.cpu().numpy()[is_good]
        if predictions is not None:
            if self.all_predictions is None:
                self.all_predictions = np.full((self.index.samples, predictions.shape[1]), -1, np.int32)
            self.all_predictions[rows] = predictions.cpu().numpy()[is_good]
        if losses is not None:
            self.all_losses[rows] = losses.cpu().numpy()[is_good]
        is_finite = np.ones(len(rows), bool)
        if confidences is not None:
            self.all_confidences[rows] = confidences.cpu().numpy()[is_good]
            is_finite &= np.isfinite(self.all_confidences[rows])
        if features is not None:
            is_finite &= features.isfinite().all(dim=1).cpu().numpy()[is_good]
        self.not_finite += int((~is_finite).sum())
        if features is None:
            return
        try:
            if self.file is None:
                self.width = features.shape[1]
                self.row_bytes = self.width * FEATURE_BYTES
                self.file = tempfile.TemporaryFile(dir=self.folder, prefix="features-")  # noqa: SIM115 (until `close`)
                # Reserve all of it now, rather than find out after an hour that the disk is too small.
                os.posix_fallocate(self.file.fileno(), 0, max(self.index.samples * self.row_bytes, 1))
            rows_to_write = np.ascontiguousarray(features.cpu().numpy()[is_good], np.float32)
            first = 0
            for run in runs_of(rows):
                content = rows_to_write[first : first + len(run)].tobytes()
                offset = int(run[0]) * self.row_bytes
                # A single call may write only a part.
                written = 0
                while written < len(content):
                    written += os.pwrite(self.file.fileno(), content[written:], offset + written)
                first += len(run)
        except OSError as error:
            self.failure = OSError(error.errno, f"cannot keep features: {error.strerror}", str(self.folder))

    # -------------------------------------------------------------------------------------------- reading

    @property
    def rows(self) -> np.ndarray:
        """Return the numbers of the readable samples, in the order of the data set."""
        return np.flatnonzero(self.is_there)

    @property
    def labels(self) -> np.ndarray:
        """Return the labels (rows, L) of the readable samples, padded with −1; probes learn the first label."""
        return self.all_labels[self.rows]

    @property
    def predictions(self) -> np.ndarray:
        """Return the K highest-scoring classes (rows, K) of the readable samples, best first."""
        assert self.all_predictions is not None, "the pass over the set was made without the head"
        return self.all_predictions[self.is_there]

    def features(self, rows: np.ndarray) -> Tensor:
        """Read the float32 features (len(rows), D) of the samples with these numbers from the file."""
        assert self.file is not None, "the pass over the set was made without features"
        parts = []
        for run in runs_of(rows):
            size = len(run) * self.row_bytes
            stored = os.pread(self.file.fileno(), size, int(run[0]) * self.row_bytes)
            parts.append(np.frombuffer(stored, np.float32).reshape(len(run), self.width))
        return torch.from_numpy(np.concatenate(parts))

    def blocks(self, rows: np.ndarray | None = None, size: int = BLOCK) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over features in blocks: (slice of `rows`, features (size, D)); by default all readable samples."""
        if rows is None:
            rows = self.rows
        for first in range(0, len(rows), size):
            place = slice(first, min(first + size, len(rows)))
            yield place, self.features(rows[place])

    def close(self) -> None:
        """Close the file, which frees its disk space."""
        if self.file is not None:
            self.file.close()
            self.file = None


def runs_of(rows: np.ndarray) -> list[np.ndarray]:
    """Split row numbers into runs of consecutive numbers, each of which can be read or written with a single call."""
    if len(rows) == 0:
        return []
    return np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)


def collect(
    model: nn.Module,
    samples: Iterable[EvaluationBatch],
    store: FeatureStore,
    dtype: torch.dtype,
    device: torch.device,
    *,
    with_features: bool = True,
    best: int = 0,
    loss: Loss | None = None,
    on_computed: Callable[[], None] | None = None,
) -> None:
    """Collective: run the model once on a data set; rank 0's store receives features and the head's top `best` classes.

    The model runs in eval mode without gradients; its mode is restored afterwards. `on_computed` is called after a
    batch is computed and before it is sent. If `loss` is given, the store also receives this loss of each sample.
    `samples` must come from `store.watching`, so that a full disk raises an error on every worker.
    """
    rank = 0
    world = 1
    if dist.is_initialized():
        rank = dist.get_rank()
        world = dist.get_world_size()
    starts = torch.from_numpy(store.starts)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            # Every worker gets the same number of batches, because ZeRO 3 gathers weights in lockstep.
            for batch in samples:
                rows = model.features(normalise(batch.images, model.config, dtype, device))  # type: ignore[operator,arg-type]
                # Numbers of the samples in the set; −1 for padding and unreadable samples.
                shards, places = batch.ids.unbind(1)
                numbers = torch.where(batch.mask, starts[shards.clamp(min=0)] + places, -1)
                computed = {"numbers": numbers.to(device), "labels": batch.labels.to(device)}
                if best:
                    # Stable, so that among equal outputs the lowest class comes first on every device.
                    logits = model.head(rows).float()  # type: ignore[operator]
                    order = logits.sort(dim=1, descending=True, stable=True)
                    computed["predictions"] = order.indices[:, :best].contiguous()
                    # An order of logits with NaN or infinity means nothing; `keep` counts samples without a confidence.
                    confidences = logits.softmax(dim=1).amax(dim=1)
                    computed["confidences"] = confidences.where(logits.isfinite().all(dim=1), torch.nan)
                    if loss is not None:
                        # A set may have classes that the head does not have.
                        classes = logits.shape[1]
                        targets = dense_targets(batch.labels.where(batch.labels < classes, -1).to(device), classes)
                        computed["losses"] = LOSSES[loss](logits, targets)
                if with_features:
                    computed["features"] = rows.float().contiguous()
                if on_computed is not None:
                    on_computed()

                if rank != 0:
                    for tensor in computed.values():
                        dist.send(tensor, 0)
                    continue
                store.keep(**computed)
                # Receive from one worker after another into the same memory; a gather would hold all at once. The
                # tensors of all workers have the same shapes.
                received = {}
                if world > 1:
                    received = {name: torch.empty_like(tensor) for name, tensor in computed.items()}
                for source in range(1, world):
                    for tensor in received.values():
                        dist.recv(tensor, source)
                    store.keep(**received)
    finally:
        model.train(was_training)
