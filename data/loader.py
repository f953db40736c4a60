"""The training loader: yields one worker's micro-batches in order, decoded ahead of the step by several processes.

How a micro-batch is produced:

1. `split_slots` divides this worker's slots into micro-batches, identically in every step.
2. Each micro-batch of each step is a task: (step, first slot, slot after the last).
3. The tasks are assigned to the decoding processes in turn. Each process starts with `prefetch` tasks.
4. A process computes which samples belong to the slots, reads and decodes them, replaces bad samples with the next ones
   in the same lane, and writes the result into memory shared with the loader (`data.decoder`).
5. The loader collects the results in the same order. It yields each micro-batch directly from shared memory, or copies
   it into pinned memory if CUDA is available, and sends the process its next task. A process that dies or hangs is
   replaced (`data.decoder.DecoderProcess`).
6. For remote shards, a thread downloads the shards of upcoming steps (`data.remote.cache.Prefetcher`). Until a
   shard has arrived, its samples are read by byte range (`data.remote.ranges`).

With `processes=0`, the loader decodes each task in its own process, when the caller requests the micro-batch.

    TrainLoader(index, order, image_size=224, slots=range(8, 16), micro_batch=3, start_step=5, processes=2)
    splits a step into the slots 8 … 10, 11 … 13, 14 … 15, and assigns
        process 0: step 5 slots 8 … 10, step 5 slots 14 … 15, step 6 slots 11 … 13, …
        process 1: step 5 slots 11 … 13, step 6 slots 8 … 10, step 6 slots 14 … 15, …
    its first batch has step 5, images (3, 3, 224, 224), labels (3, 1), ids (3, 3)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from copy import copy
from dataclasses import dataclass, replace
from itertools import count, pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from data.checks import redacted
from data.decoder import Arrays, BadSample, BatchLayout, Decoder, DecoderProcess, DecodeTask, Done
from data.errors import DataError
from data.images.augment import AugmentConfig
from data.index.index import Index
from data.order import Mixture, Order
from data.reader import ShardReader
from data.remote.config import CacheConfig, shards_of

if TYPE_CHECKING:
    from data.remote.cache import Prefetcher

# b: samples per micro-batch, L: maximum number of labels per sample, S: side of an image

DEVICE_DECODER = "data.extras.gpu_decoding:DeviceDecoder"  # decodes JPEGs on the GPU if data.decode=gpu


@dataclass(frozen=True)
class Wait:
    """Seconds that the training loop waited for a micro-batch, by cause."""

    storage_s: float = 0.0
    decode_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True)
class Batch:
    """One micro-batch; its memory is not reused while any of its tensors exists."""

    step: int
    images: Tensor  # (b, 3, S, S) uint8, in channels-last memory
    labels: Tensor  # (b, L) int64, padded with −1
    ids: Tensor  # (b, 3) int64: epoch, shard and sample of each row, after replacements
    bad: tuple[BadSample, ...]  # the replaced samples
    wait: Wait
    masked: Tensor | None = None  # (b,) bool: rows with loss weight zero; None if there are none


class TrainLoader:
    """An iterable over the micro-batches of this worker's `slots` in every global batch, starting at `start_step`.

    The pixels depend only on index, order, image size, augmentation and seed; they do not depend on the number of
    workers, `processes`, `micro_batch` or `start_step`. A process is replaced, and its micro-batches decoded again,
    if it dies or is silent for `timeout_s` while no data of its shard arrives. Tensors are pinned if CUDA is
    available. Iteration raises the errors of `DecoderProcess.result`, and StorageError from downloads.
    """

    def __init__(
        self,
        index: Index,
        order: Order | Mixture,
        *,
        image_size: int,
        slots: range,
        micro_batch: int,
        accumulation: int | None = None,  # micro-batches per step; with fewer slots, some of them are empty
        start_step: int = 0,
        seed: int = 0,
        augment: AugmentConfig | None = None,
        max_labels: int = 1,  # 0: do not read labels
        processes: int = 0,
        prefetch: int = 2,  # micro-batches that a process may decode ahead
        timeout_s: float = 120.0,
        cache: CacheConfig | None = None,
        decode: Literal["cpu", "gpu"] = "cpu",  # gpu: images of a batch are on the GPU, see DEVICE_DECODER
    ):
        if not (0 <= slots.start < slots.stop <= order.batch_size and slots.step == 1):
            raise ValueError(f"slots must be a contiguous part of range(0, {order.batch_size}), found {slots}")
        if not np.array_equal(index.shard_samples, order.shard_samples):
            raise ValueError("the order was built for different shards than those in the index")
        self.slots = slots
        self.start_step = start_step
        self.processes = processes
        self.prefetch = prefetch
        self.timeout_s = timeout_s
        self.cache = cache or CacheConfig()
        self.prefetcher: Prefetcher | None = None  # set while shards are fetched in the background
        self.stopped = False  # whether downloads have been stopped permanently
        self.has_warned = False  # whether the end of range reads was logged

        self.parts = split_slots(slots, micro_batch, accumulation)
        # Every place in shared memory can hold the largest micro-batch, so any micro-batch can use any place.
        largest = max(map(len, self.parts))
        self.layout = BatchLayout(largest, image_size, max_labels)
        reader = ShardReader(index, cache=self.cache, by_range=True)
        self.decoder = Decoder(index, order, self.layout, augment or AugmentConfig(), seed, reader, decode == "gpu")

        if decode == "gpu":
            # Imported here, because TorchCodec is optional and CPU decoding does not need it.
            from data.optional import load_optional

            device_decoder = load_optional(DEVICE_DECODER, "data.decode=gpu")
            self.device_decoder = device_decoder(self.decoder.cfg.reduced)
            # Decodes images that the GPU rejects. A shallow copy, so that it shares the reader and its open shards.
            self.cpu_decoder = copy(self.decoder)
            self.cpu_decoder.leave_encoded = False

    def __iter__(self) -> Generator[Batch]:
        batches = self.from_processes() if self.processes else self.from_this_process()
        if self.decoder.index.remote:
            return self.with_prefetching(batches)
        return batches

    def with_prefetching(self, batches: Generator[Batch]) -> Generator[Batch]:
        """Yield the batches unchanged while a thread downloads the shards of upcoming steps."""
        from data.remote.cache import Prefetcher  # imported here: local shards need no object-store client

        prefetcher = Prefetcher(self.decoder.index, self.decoder.order, self.slots, self.start_step, self.cache)
        self.prefetcher = prefetcher
        try:
            for batch in batches:
                prefetcher.reached(batch.step)
                yield batch
                # Drop our reference: otherwise the next batch would have to be copied out of shared memory.
                del batch
        except DataError:
            # A process that waits for the storage looks like a hanging one. Report the storage error instead.
            if prefetcher.failure:
                raise prefetcher.failure from None
            raise
        finally:
            self.decoder.reader.stop()
            prefetcher.stop()
            # This ends the decoding processes, which belong to the generator.
            batches.close()
            # Let a later iteration of this loader read again.
            if not self.stopped:
                self.decoder.reader.resume()

    def tasks(self) -> Iterator[DecodeTask]:
        """Yield all upcoming micro-batches as tasks, step by step."""
        for step in count(self.start_step):
            for part in self.parts:
                yield DecodeTask(step, part.start, part.stop)

    def stop(self) -> None:
        """Stop all downloads permanently, so that the process can exit; may be called from any thread at any time."""
        self.stopped = True
        self.decoder.reader.stop()
        if self.prefetcher is not None:
            self.prefetcher.stop()

    def log_wait(self, log: Callable[[str], None]) -> None:
        """Log how many shards the first batch needs, and how many of those still have to be downloaded."""
        index = self.decoder.index
        shards = shards_of(self.decoder.order, self.slots, self.start_step)
        missing = []
        for shard in shards:
            if "://" in index.location(shard) and not self.decoder.reader.cache.has(index.shards[shard]):
                missing.append(shard)
        line = f"waiting for the first batch: {len(self.slots)} samples from {len(shards)} shards"
        if missing:
            size = sum(index.shards[shard].bytes for shard in missing)
            cached = f"{len(shards) - len(missing)} of them local, {len(missing)} ({size / 2**30:.3g} GiB) to download"
            log(f"{line}; {cached}, starting with {redacted(index.location(missing[0]))}")
        else:
            log(f"{line}, all of them local")

    def from_this_process(self) -> Generator[Batch]:
        """Decode each batch in this process when the caller requests it."""
        for task in self.tasks():
            arrays = self.layout.arrays(np.empty(self.layout.bytes, np.uint8))
            done = self.decoder.run(task, arrays)
            yield self.make_batch(task, arrays, done, done.storage_s + done.decode_s)

    def from_processes(self) -> Generator[Batch]:
        """Yield batches from the decoding processes, in a fixed rotation."""
        tasks = self.tasks()
        processes = [DecoderProcess(self.decoder, self.prefetch) for _ in range(self.processes)]
        try:
            for process in processes:
                process.send_decoder()
            # Use a fixed rotation instead of the first free process: the loader knows which process has the next
            # micro-batch, and need not reorder results.
            for _ in range(self.prefetch):
                for process in processes:
                    process.submit(next(tasks))

            for turn in count():
                process = processes[turn % len(processes)]
                start = perf_counter()
                task, offset, done = process.result(self.timeout_s)
                yield self.make_batch(task, process.arrays_at(offset), done, perf_counter() - start)
                process.submit(next(tasks))
        finally:
            for process in processes:
                process.close()

    def make_batch(self, task: DecodeTask, arrays: Arrays, done: Done, waited_s: float) -> Batch:
        """Return the batch of a decoded task, with the waiting time split into storage and decoding."""
        start = perf_counter()
        self.warn_once(done.given_up)
        rows = task.stop - task.first
        images = torch.from_numpy(arrays.images[:rows])
        if torch.cuda.is_available():
            images = copied(images)
        # Copy labels and ids: the caller keeps them longer than the images, and a view would keep the images' memory.
        labels = copied(torch.from_numpy(arrays.labels[:rows]))
        ids = copied(torch.from_numpy(arrays.ids[:rows]))
        bad = done.bad
        if self.decoder.leave_encoded:
            images, refused_bad = self.decode_on_device(task, done, images, labels, ids)
            bad += refused_bad

        # `waited_s` is the time the step lost. The process worked ahead during other steps, so its own seconds only
        # give the ratio of storage to decoding.
        share_of_wait = waited_s / max(done.storage_s + done.decode_s, 1e-9)
        wait = Wait(done.storage_s * share_of_wait, done.decode_s * share_of_wait, perf_counter() - start)
        # A view: pixels stay interleaved in memory, which is torch's channels-last format.
        return Batch(task.step, images.permute(0, 3, 1, 2), labels, ids, bad, wait)

    def warn_once(self, reason: str) -> None:
        """Log, only once for all decoding processes, why samples are no longer read by byte range."""
        if reason and not self.has_warned:
            self.has_warned = True
            logging.getLogger(__name__).warning(reason)

    def decode_on_device(
        self, task: DecodeTask, done: Done, images: Tensor, labels: Tensor, ids: Tensor
    ) -> tuple[Tensor, tuple[BadSample, ...]]:
        """Return the images (b, S, S, 3) decoded on the device, and the bad samples found.

        An image that the device rejects is decoded on the CPU, exactly as with `decode: cpu`. If the CPU rejects it
        too, a replacement is decoded. The image's row in `images`, `labels` and `ids` is overwritten with the result.
        """
        if not done.encoded:
            return images.to(self.device_decoder.device, non_blocking=True), ()
        images, refused = self.device_decoder.rows(images, done.encoded)
        # Decode each rejected row as a task of one slot; sample and replacements are the same as in the whole task.
        arrays = self.layout.arrays(bytearray(self.layout.bytes))
        bad: tuple[BadSample, ...] = ()
        for row in refused:
            slot = task.first + row
            result = self.cpu_decoder.run(DecodeTask(task.step, slot, slot + 1), arrays)
            self.warn_once(result.given_up)
            images[row] = torch.from_numpy(arrays.images[0])
            labels[row] = torch.from_numpy(arrays.labels[0])
            ids[row] = torch.from_numpy(arrays.ids[0])
            for problem in result.bad:
                if problem not in done.bad:  # otherwise the decoding process has already reported it
                    bad += (problem,)
        return images, bad


def split_slots(slots: range, micro_batch: int, accumulation: int | None) -> list[range]:
    """Split the slots of a step into `accumulation` nearly equal micro-batches.

    If `accumulation` is None, each micro-batch has `micro_batch` slots; the last one may have fewer.
    """
    if accumulation is None:
        edges = [*range(0, len(slots), micro_batch), len(slots)]
    elif accumulation * micro_batch < len(slots):
        raise ValueError(f"{accumulation} micro-batches of {micro_batch} samples are too few for {len(slots)} slots")
    else:
        # With more micro-batches than slots, some are empty: every worker must accumulate equally often.
        edges = [len(slots) * part // accumulation for part in range(accumulation + 1)]
    return [slots[first:stop] for first, stop in pairwise(edges)]


def prefetched_to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the micro-batches with images and labels copied to the device; ids stay in host memory.

    The host requests the next micro-batch while the device still computes the previous one. A separate CUDA stream
    lets the copy run during that computation, and the host does not wait for the copy.
    """
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)
    for batch in batches:
        with torch.cuda.stream(stream):
            images = batch.images.to(device, non_blocking=True)
            labels = batch.labels.to(device, non_blocking=True)
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(stream)
        # The memory belongs to the copy stream, which could reuse it for a later copy while the tensors are read.
        images.record_stream(computing)
        labels.record_stream(computing)
        yield replace(batch, images=images, labels=labels)


def copied(tensor: Tensor) -> Tensor:
    """Return a copy in separate memory, pinned if CUDA is available."""
    return torch.empty_like(tensor, pin_memory=torch.cuda.is_available()).copy_(tensor)
