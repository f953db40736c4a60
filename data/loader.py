"""The training loader: this worker's micro-batches in order, decoded ahead of the step by a few processes.

What lies between a step and its images:

1. `cut` divides this worker's slots into micro-batches, the same ones in every step.
2. Each micro-batch of each step is a task: (step, first slot, slot after the last).
3. The tasks are dealt to the decoding processes in turn; each has `prefetch` of them before anything is asked for.
4. A process finds out which samples sit in the slots, reads and decodes them, replaces bad ones by the next of their
   lane, and writes the result into memory that it shares with the loader (`data.decoder`).
5. The loader takes the answers in the same turn, hands each micro-batch out as it lies in the shared memory (or copies
   it where there is CUDA, into pinned memory), and gives the process its next task. A process that dies or hangs is
   replaced (`data.decoder.DecoderProcess`).
6. Where shards are remote, a thread meanwhile fetches those of the coming steps (`data.remote.cache.Ahead`). Samples
   whose shards are not here yet are read by range (`data.remote.ranges`).

With `processes=0` the same tasks are decoded in this process, each when it is asked for.

    TrainLoader(index, order, image_size=224, slots=range(8, 16), micro_batch=3, start_step=5, processes=2)
    cuts a step into the slots 8 … 10, 11 … 13, 14 … 15, and deals
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
from data.remote.config import CacheConfig, shards_of
from data.shards.reader import ShardReader

if TYPE_CHECKING:
    from data.remote.cache import Ahead

# b samples of a micro-batch, L labels of a sample at most, S image side

DEVICE_DECODER = "data.extras.gpu_decoding:DeviceDecoder"  # decodes JPEGs on the GPU, with data.decode=gpu


@dataclass(frozen=True)
class Wait:
    """Seconds that the training loop waited for a micro-batch, by what it waited for."""

    storage_s: float = 0.0
    decode_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True)
class Batch:
    """One micro-batch, which nobody overwrites while a tensor of it is held."""

    step: int
    images: Tensor  # (b, 3, S, S) uint8, in channels-last memory
    labels: Tensor  # (b, L) int64, padded with −1
    ids: Tensor  # (b, 3) int64: epoch, shard and sample that each row really holds
    bad: tuple[BadSample, ...]  # what was replaced
    wait: Wait
    masked: Tensor | None = None  # (b,) bool: rows whose loss weighs nothing; None where there are none


class TrainLoader:
    """Iterates the micro-batches of this worker's `slots` of every global batch from `start_step` on.

    The pixels depend on index, order, image size, augmentation and seed alone: not on the number of workers,
    `processes`, `micro_batch`, or where the run started. A process that dies, or is silent for `timeout_s` while
    no piece of the shard that it waits for arrives, is replaced and its micro-batches are decoded again. Tensors
    are pinned where there is CUDA. Raises DataError and StorageError.
    """

    def __init__(
        self,
        index: Index,
        order: Order | Mixture,
        *,
        image_size: int,
        slots: range,
        micro_batch: int,
        accumulation: int | None = None,  # micro-batches of a step, however few the slots: empty ones if need be
        start_step: int = 0,
        seed: int = 0,
        augment: AugmentConfig | None = None,
        max_labels: int = 1,  # 0: labels are not read
        processes: int = 0,
        prefetch: int = 2,  # micro-batches a process may be ahead
        timeout_s: float = 120.0,
        cache: CacheConfig | None = None,
        decode: Literal["cpu", "gpu"] = "cpu",  # gpu: the images of a batch are on the GPU, see DEVICE_DECODER
    ):
        if not (0 <= slots.start < slots.stop <= order.batch_size and slots.step == 1):
            raise ValueError(f"slots {slots} must be a contiguous part of range(0, {order.batch_size})")
        if not np.array_equal(index.shard_samples, order.shard_samples):
            raise ValueError("the order was made for other shards than the index has")
        self.slots = slots
        self.start_step = start_step
        self.processes = processes
        self.prefetch = prefetch
        self.timeout_s = timeout_s
        self.cache = cache or CacheConfig()
        self.ahead: Ahead | None = None  # while shards are fetched in the background
        self.stopped = False  # for good: nothing more is fetched
        self.has_warned = False  # why samples are no longer read by range

        self.parts = cut(slots, micro_batch, accumulation)
        # Every place in the shared memory holds the largest micro-batch, so that any of them may go anywhere.
        largest = max(map(len, self.parts))
        self.layout = BatchLayout(largest, image_size, max_labels)
        reader = ShardReader(index, cache=self.cache, by_range=True)
        self.decoder = Decoder(index, order, self.layout, augment or AugmentConfig(), seed, reader, decode == "gpu")

        if decode == "gpu":
            # Imported here, because TorchCodec is optional, and no other run needs this module.
            from data.optional import load_optional

            device_decoder = load_optional(DEVICE_DECODER, "data.decode=gpu")
            self.device_decoder = device_decoder(self.decoder.cfg.reduced)
            # Decodes here what the GPU refused. A shallow copy, so that it shares the reader and its open shards.
            self.decoder_of_refused = copy(self.decoder)
            self.decoder_of_refused.leave_encoded = False

    def __iter__(self) -> Generator[Batch]:
        batches = self.from_processes() if self.processes else self.from_here()
        if self.decoder.index.remote:
            return self.fetching_ahead(batches)
        return batches

    def fetching_ahead(self, batches: Generator[Batch]) -> Generator[Batch]:
        """Give the same batches, while a thread fetches the shards of coming steps."""
        from data.remote.cache import Ahead  # not above: local shards need no client of a store

        ahead = Ahead(self.decoder.index, self.decoder.order, self.slots, self.start_step, self.cache)
        self.ahead = ahead
        try:
            for batch in batches:
                ahead.reached(batch.step)
                yield batch
                # While it is held, the next one has to be copied out of the memory that it lies in.
                del batch
        except DataError:
            # A process that waits for the storage is as silent as one that hangs: the storage is then the reason.
            if ahead.failure:
                raise ahead.failure from None
            raise
        finally:
            self.decoder.reader.stop()
            ahead.stop()
            # This ends the decoding processes, which the generator holds.
            batches.close()
            # Whoever iterates once more begins as this iteration did.
            if not self.stopped:
                self.decoder.reader.begin_again()

    def tasks(self) -> Iterator[DecodeTask]:
        """Give every micro-batch to come, step by step."""
        for step in count(self.start_step):
            for part in self.parts:
                yield DecodeTask(step, part.start, part.stop)

    def stop(self) -> None:
        """Fetch no more shards, whatever the iteration waits for; from any thread. The process may then end."""
        self.stopped = True
        self.decoder.reader.stop()
        if self.ahead is not None:
            self.ahead.stop()

    def log_wait(self, log: Callable[[str], None]) -> None:
        """Log what the first batch needs, and how much of it is here: of remote shards, those that the cache has."""
        index = self.decoder.index
        shards = shards_of(self.decoder.order, self.slots, self.start_step)
        missing = []
        for shard in shards:
            if "://" in index.location(shard) and not self.decoder.reader.cache.has(index.shards[shard]):
                missing.append(shard)
        line = f"waiting for the first batch: {len(self.slots)} samples of {len(shards)} shards"
        if missing:
            size = sum(index.shards[shard].bytes for shard in missing)
            there = f"{len(shards) - len(missing)} of them are here, {len(missing)} ({size / 2**30:.3g} GiB) are not"
            log(f"{line}; {there}: {redacted(index.location(missing[0]))} …")
        else:
            log(f"{line}, all of which are here")

    def from_here(self) -> Generator[Batch]:
        """Decode in this process, when the batch is asked for."""
        for task in self.tasks():
            arrays = self.layout.arrays(np.empty(self.layout.bytes, np.uint8))
            done = self.decoder.run(task, arrays)
            yield self.take(task, arrays, done, done.storage_s + done.decode_s)

    def from_processes(self) -> Generator[Batch]:
        """Deal tasks to the processes in turn, and take their answers in the same turn."""
        tasks = self.tasks()
        crew = [DecoderProcess(self.decoder, self.prefetch) for _ in range(self.processes)]
        try:
            for process in crew:
                process.brief()
            # In turn, not to whoever is free first: so we know which process has the next micro-batch, and no order
            # has to be restored.
            for _ in range(self.prefetch):
                for process in crew:
                    process.give(next(tasks))

            for turn in count():
                process = crew[turn % len(crew)]
                start = perf_counter()
                task, offset, done = process.answer(self.timeout_s)
                yield self.take(task, process.lend(offset), done, perf_counter() - start)
                process.give(next(tasks))
        finally:
            for process in crew:
                process.end()

    def take(self, task: DecodeTask, arrays: Arrays, done: Done, waited_s: float) -> Batch:
        """Make a batch of a task's arrays; split the wait by what its process spent its time on."""
        start = perf_counter()
        self.warn_once(done.given_up)
        rows = task.stop - task.first
        images = torch.from_numpy(arrays.images[:rows])
        if torch.cuda.is_available():
            images = copied(images)
        # Labels and ids are kept for longer than images, which would hold the images' memory too: they are copied.
        labels = copied(torch.from_numpy(arrays.labels[:rows]))
        ids = copied(torch.from_numpy(arrays.ids[:rows]))
        bad = done.bad
        if self.decoder.leave_encoded:
            images, refused_bad = self.decode_on_device(task, done, images, labels, ids)
            bad += refused_bad

        # The wait is what the step lost. The process worked ahead meanwhile: its own seconds only tell in which
        # proportion the wait was for storage and for decoding.
        share_of_wait = waited_s / max(done.storage_s + done.decode_s, 1e-9)
        wait = Wait(done.storage_s * share_of_wait, done.decode_s * share_of_wait, perf_counter() - start)
        # A view: the pixels of an image stay interleaved in memory, which is torch's channels-last.
        return Batch(task.step, images.permute(0, 3, 1, 2), labels, ids, bad, wait)

    def warn_once(self, reason: str) -> None:
        """Say why samples are no longer read by range; once, though every decoding process meets it."""
        if reason and not self.has_warned:
            self.has_warned = True
            logging.getLogger(__name__).warning(reason)

    def decode_on_device(
        self, task: DecodeTask, done: Done, images: Tensor, labels: Tensor, ids: Tensor
    ) -> tuple[Tensor, tuple[BadSample, ...]]:
        """Return the images (b, S, S, 3) on the device, the encoded ones decoded there; and what was bad.

        A row that the device refuses is decoded here as `decode: cpu` would, in place, label and id included.
        """
        if not done.encoded:
            return images.to(self.device_decoder.device, non_blocking=True), ()
        images, refused = self.device_decoder.rows(images, done.encoded)
        # One slot alone is a task too, and gives the same sample or the same replacement as in the whole micro-batch.
        arrays = self.layout.arrays(bytearray(self.layout.bytes))
        bad: tuple[BadSample, ...] = ()
        for row in refused:
            slot = task.first + row
            done_here = self.decoder_of_refused.run(DecodeTask(task.step, slot, slot + 1), arrays)
            self.warn_once(done_here.given_up)
            images[row] = torch.from_numpy(arrays.images[0])
            labels[row] = torch.from_numpy(arrays.labels[0])
            ids[row] = torch.from_numpy(arrays.ids[0])
            for problem in done_here.bad:
                if problem not in done.bad:  # else the row's process had already replaced it
                    bad += (problem,)
        return images, bad


def cut(slots: range, micro_batch: int, accumulation: int | None) -> list[range]:
    """Return the micro-batches of a step; a given number of them is equal to within one sample."""
    if accumulation is None:
        edges = [*range(0, len(slots), micro_batch), len(slots)]
    elif accumulation * micro_batch < len(slots):
        raise ValueError(f"{accumulation} micro-batches of {micro_batch} do not hold {len(slots)} slots")
    else:
        # More micro-batches than slots give some that are empty: every worker must accumulate equally often.
        edges = [len(slots) * part // accumulation for part in range(accumulation + 1)]
    return [slots[first:stop] for first, stop in pairwise(edges)]


def prefetched_to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Give the same micro-batches, their images and labels on the device; ids stay in host memory, where they are read.

    The host is ahead of the device: while it asks for a micro-batch, the device computes the one before, or gathers
    weights. On a stream of its own the copy does not wait for that, and the host does not wait for the copy.
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
        # Their memory is of the other stream: without this it could be given to a coming copy while they are read.
        images.record_stream(computing)
        labels.record_stream(computing)
        yield replace(batch, images=images, labels=labels)


def copied(tensor: Tensor) -> Tensor:
    """Return a copy in memory of its own, pinned where there is CUDA."""
    return torch.empty_like(tensor, pin_memory=torch.cuda.is_available()).copy_(tensor)
