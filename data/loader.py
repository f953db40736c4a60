"""The training loader: this worker's micro-batches in order, decoded ahead of the step by a few processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from itertools import count, pairwise
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from time import perf_counter
from typing import Literal

import torch

from data.decoder import BadSample, Decoder, Done, Layout, Task
from data.errors import DataError
from data.images.augment import AugmentConfig
from data.images.gpu import decode_rows, torchcodec
from data.order import Mixture, Order
from data.shards.cache import Ahead, CacheConfig
from data.shards.index import Index
from data.shards.reader import Reader

# b samples of a micro-batch, L labels of a sample at most, S image side

RESTARTS = 3  # times that one micro-batch may cost a process its life


@dataclass(frozen=True)
class Wait:
    """Seconds that the training loop waited for a micro-batch, by what it waited for."""

    storage_s: float = 0.0
    decode_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True)
class Batch:
    """`images` (b, 3, S, S) uint8 in channels-last memory, `labels` (b, L) int64 padded with −1,
    `ids` (b, 3) int64: epoch, shard and sample that each row really holds."""

    step: int
    images: torch.Tensor
    labels: torch.Tensor
    ids: torch.Tensor
    bad: tuple[BadSample, ...]
    wait: Wait


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
        max_labels: int = 1,
        processes: int = 0,
        prefetch: int = 2,  # micro-batches a process may be ahead
        timeout_s: float = 120.0,
        cache: CacheConfig | None = None,
        decode: Literal["cpu", "gpu"] = "cpu",  # gpu: the images of a batch are on the GPU, see data.gpu
    ):
        if not (0 <= slots.start < slots.stop <= order.batch_size and slots.step == 1):
            raise ValueError(f"slots {slots} must be a contiguous part of range(0, {order.batch_size})")
        if index.shard_samples != tuple(order.shard_samples):
            raise ValueError("the order was made for other shards than the index has")
        self.slots, self.start_step = slots, start_step
        self.processes, self.prefetch, self.timeout_s = processes, prefetch, timeout_s
        self.parts = cut(slots, micro_batch, accumulation)
        self.layout = Layout(max(map(len, self.parts)), image_size, max_labels)
        self.cache = cache or CacheConfig()
        reader = Reader(index, cache=self.cache)
        self.decoder = Decoder(index, order, self.layout, augment or AugmentConfig(), seed, reader, decode == "gpu")
        if decode == "gpu":
            self.refused = copy(self.decoder)  # decodes here what the GPU did not
            self.refused.leave_encoded = False
            self.decode, self.device = torchcodec(), torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def memory_bytes(self) -> int:
        """Shared memory that the decoded micro-batches may fill, at most."""
        return self.processes * self.prefetch * self.layout.bytes

    def __iter__(self) -> Generator[Batch]:
        batches = self.from_processes() if self.processes else self.from_here()
        return self.fetching_ahead(batches) if self.decoder.index.remote else batches

    def fetching_ahead(self, batches: Generator[Batch]) -> Generator[Batch]:
        """The same batches, while a thread fetches the shards of coming steps."""
        ahead = Ahead(self.decoder.index, self.decoder.order, self.slots, self.start_step, self.cache)
        try:
            for batch in batches:
                ahead.reached(batch.step)
                yield batch
        except DataError:
            if ahead.failure:  # a process that waits for the storage is as silent as one that hangs
                raise ahead.failure from None
            raise
        finally:
            ahead.stop()
            batches.close()

    def tasks(self) -> Iterator[Task]:
        """(step, first slot, slot after the last) of every micro-batch to come."""
        for step in count(self.start_step):
            for part in self.parts:
                yield step, part.start, part.stop

    def from_here(self) -> Generator[Batch]:
        """Decode in this process, when the batch is asked for."""
        memory = bytearray(self.layout.bytes)
        for task in self.tasks():
            done = self.decoder.run(task, *self.layout.arrays(memory))
            yield self.take(task, memory, 0, done, done.storage_s + done.decode_s)

    def from_processes(self) -> Generator[Batch]:
        """Deal tasks to the processes in turn, and take their answers in the same turn."""
        tasks = self.tasks()
        crew = [Process(self.decoder, self.prefetch) for _ in range(self.processes)]
        try:
            for process in crew:
                process.brief()
            for _ in range(self.prefetch):
                for process in crew:
                    process.give(next(tasks))
            for turn in count():
                process = crew[turn % len(crew)]
                start = perf_counter()
                task, offset, done = process.answer(self.timeout_s)
                yield self.take(task, process.memory, offset, done, perf_counter() - start)
                process.give(next(tasks))
        finally:
            for process in crew:
                process.end()

    def take(self, task: Task, memory: mmap | bytearray, offset: int, done: Done, waited_s: float) -> Batch:
        """Copy a micro-batch out of shared memory; split the wait by what its process spent its time on."""
        start = perf_counter()
        rows = task[2] - task[1]
        images, labels, ids = (copied(torch.from_numpy(array[:rows])) for array in self.layout.arrays(memory, offset))
        bad = done.bad
        if done.encoded:
            images, refused = decode_rows(images, done.encoded, self.decoder.cfg.reduced, self.decode, self.device)
            for row in refused:
                more = self.decode_here(task, row, images, labels, ids)
                bad += tuple(one for one in more if one not in done.bad)  # what the row's process had replaced before
        images = images.to(self.device) if self.decoder.leave_encoded else images
        part = waited_s / max(done.storage_s + done.decode_s, 1e-9)
        wait = Wait(done.storage_s * part, done.decode_s * part, perf_counter() - start)
        return Batch(task[0], images.permute(0, 3, 1, 2), labels, ids, bad, wait)

    def decode_here(self, task: Task, row: int, *batch: torch.Tensor) -> tuple[BadSample, ...]:
        """Fill one row of (images, labels, ids) as `decode: cpu` would, replacements included."""
        arrays = self.layout.arrays(bytearray(self.layout.bytes))
        done = self.refused.run((task[0], task[1] + row, task[1] + row + 1), *arrays)
        for to, array in zip(batch, arrays, strict=True):
            to[row] = torch.from_numpy(array[0])
        return done.bad


def cut(slots: range, micro_batch: int, accumulation: int | None) -> list[range]:
    """The micro-batches of a step; a given number of them is equal to within one sample."""
    if accumulation is None:
        return [slots[first : first + micro_batch] for first in range(0, len(slots), micro_batch)]
    if accumulation * micro_batch < len(slots):
        raise ValueError(f"{accumulation} micro-batches of {micro_batch} do not hold {len(slots)} slots")
    edges = [len(slots) * part // accumulation for part in range(accumulation + 1)]
    return [slots[first:stop] for first, stop in pairwise(edges)]


def copied(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, pin_memory=torch.cuda.is_available()).copy_(tensor)


class Process:
    """One decoding process, its pipe, and the anonymous memory that the kernel frees with its last user."""

    def __init__(self, decoder: Decoder, prefetch: int):
        self.decoder = decoder
        self.file = os.memfd_create("patchline-batches")
        os.ftruncate(self.file, prefetch * decoder.layout.bytes)
        self.memory = mmap(self.file, 0)
        self.free = deque(number * decoder.layout.bytes for number in range(prefetch))
        self.pending: deque[tuple[Task, int]] = deque()
        self.start()

    def start(self) -> None:
        here, there = socketpair()
        with there:
            root = str(Path(__file__).parents[1])
            path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
            self.child = subprocess.Popen(
                [sys.executable, "-P", "-m", "data.decoder", str(there.fileno()), str(self.file)],
                pass_fds=(there.fileno(), self.file),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        self.connection = Connection(here.detach())

    def brief(self) -> None:
        """Say what there is to decode; apart from `start`, so that all processes start side by side."""
        with suppress(OSError):  # `answer` finds it dead
            self.connection.send(self.decoder)

    def give(self, task: Task) -> None:
        """Queue a task; one that a dead process cannot take is given to the next."""
        self.pending.append((task, self.free.popleft()))
        with suppress(OSError):  # `answer` finds it dead
            self.connection.send(self.pending[-1])

    def answer(self, timeout_s: float) -> tuple[Task, int, Done]:
        """Wait for the oldest task, replacing the process where it dies or says nothing for `timeout_s`."""
        task, offset = self.pending[0]
        for _ in range(RESTARTS + 1):
            with suppress(EOFError, OSError):
                if (answer := self.hear(timeout_s)) is not None:
                    break
            self.restart()
        else:
            raise DataError(
                f"step {task[0]}, slots {task[1]} … {task[2] - 1}: {RESTARTS + 1} processes died or were "
                f"silent for {timeout_s:g} s over them; `python -m jobs data check` finds bad samples"
            )
        if isinstance(answer, Exception):
            raise answer
        self.pending.popleft()
        self.free.append(offset)
        return task, offset, answer

    def hear(self, timeout_s: float) -> Done | Exception | None:
        """The next answer; None where nothing came for `timeout_s`, not even word that a shard is arriving."""
        while self.connection.poll(timeout_s):
            if (answer := self.connection.recv()) is not None:
                return answer
        return None

    def restart(self) -> None:
        self.stop()
        self.start()
        self.brief()
        with suppress(OSError):
            for item in self.pending:
                self.connection.send(item)

    def stop(self) -> None:
        self.connection.close()
        self.child.kill()
        self.child.wait()

    def end(self) -> None:
        """Stop it and give the memory back."""
        self.stop()
        os.close(self.file)  # the mapping goes with the last array on it
