"""A decoding process: takes tasks from its loader, writes pixels into memory they share, answers what it did.

What becomes of a task:

1. The loader sends (task, offset): the slots to decode, and where in the shared memory the result belongs.
2. The order says which samples sit in these slots. The global batch is computed once for all tasks of its step.
3. For every slot, the reader gives the sample's bytes. A key made of the seed and the sample's id (epoch, shard,
   sample) gives its random numbers: crop, flip and distortion are the same whichever process decodes it.
4. The pixels, labels and ids are written into the row of the slot.
5. A bad sample is replaced by the next ones of its lane until one is good; each bad one is named in the answer.
6. The answer, `Done`, goes back through the pipe: the bad samples, and where the time went.

    DecodeTask(step=7, first=12, stop=16) with two labels a sample at most and images of 224 pixels fills
    images (4, 224, 224, 3), labels [[3, −1], [17, 4], …] and ids [[0, 21, 508], [0, 21, 77], …],
    and is answered by Done(bad=(BadSample("train-000021.tar", "n0144", "truncated"),), storage_s=0.002, decode_s=0.05)

The process is `python -m data.decoder CONNECTION MEMORY`, two inherited file descriptors. It imports no torch, holds
nothing that needs cleaning up, and ends when its loader does. The loader has a `DecoderProcess` for it:

1. `start` runs it, with one end of a socket pair and a piece of anonymous memory.
2. `brief` sends it the decoder: index, order, sizes, seed.
3. `give` sends it a task and one of the places of its memory that are free.
4. `answer` waits for the oldest task. Where the process dies, or says nothing for `timeout_s`, a new one is started, is
   given all pending tasks and writes them into the same places; after four processes it gives up with DataError.
5. `lend` gives the arrays of that task, without copying them. Their place is free again when nobody holds them.
6. `end` kills it. The kernel frees the memory with the last user of it.
"""

from __future__ import annotations

import os
import resource
import select
import shlex
import subprocess
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from mmap import mmap
from multiprocessing.connection import Connection
from socket import socketpair
from time import perf_counter, process_time
from typing import NamedTuple
from weakref import finalize

import cv2
import numpy as np

from data.checks import printable
from data.draws import Draws, key_of
from data.errors import DataError
from data.files import import_path
from data.images.augment import AugmentConfig, Encoded, augment, draw
from data.images.decode import BadImage, read_header
from data.index.index import Index
from data.order import Mixture, Order
from data.shards.reader import ShardReader, read_labels

# b samples of a micro-batch, L labels of a sample at most, S image side

MAX_REPLACEMENTS = 100  # bad samples in a row before the set is taken for unusable
MOST_PIXELS = 1 << 22  # of an image that is left encoded: 12 MB each once decoded
SEED_DOMAIN = 1  # keeps augmentation's draws apart from the order's
RESTARTS = 3  # times that one micro-batch may cost a process its life
MEASURED = 128  # images that are decoded to tell how fast it goes
PAGE = 4096  # bytes; every micro-batch begins on a page of its own


class DecodeTask(NamedTuple):
    """One micro-batch to decode: the slots `first` … `stop` − 1 of the global batch `step`."""

    step: int
    first: int
    stop: int


@dataclass(frozen=True)
class BadSample:
    """A sample that was replaced, and why."""

    shard: str
    key: str
    reason: str


class Arrays(NamedTuple):
    """The arrays of one micro-batch, somewhere in memory."""

    images: np.ndarray  # (b, S, S, 3) uint8
    labels: np.ndarray  # (b, L) int64, padded with −1
    ids: np.ndarray  # (b, 3) int64: epoch, shard, sample


@dataclass(frozen=True)
class BatchLayout:
    """How the arrays of one micro-batch of b samples lie in memory: ids, labels, images, end to end."""

    b: int
    image_size: int
    max_labels: int

    @property
    def bytes(self) -> int:
        """The memory that one micro-batch takes, in whole pages."""
        image_bytes = self.image_size**2 * 3
        size = self.b * (image_bytes + 8 * self.max_labels + 8 * 3)
        return -(-size // PAGE) * PAGE

    def arrays(self, memory: mmap | bytearray | np.ndarray, offset: int = 0) -> Arrays:
        """Return the arrays of the micro-batch that begins at `offset` of some memory."""
        side = self.image_size
        # The int64 arrays come first: they begin at multiples of 8 there, and bytes may begin anywhere.
        ids = np.ndarray((self.b, 3), np.int64, memory, offset)
        offset += ids.nbytes
        labels = np.ndarray((self.b, self.max_labels), np.int64, memory, offset)
        offset += labels.nbytes
        images = np.ndarray((self.b, side, side, 3), np.uint8, memory, offset)
        return Arrays(images, labels, ids)


@dataclass(frozen=True)
class Done:
    """The answer to a task: the bad samples, and where this process spent its time; the pixels are in the arrays."""

    bad: tuple[BadSample, ...]
    storage_s: float
    decode_s: float
    encoded: tuple[Encoded, ...] = ()  # rows that hold a JPEG, with `decode: gpu`
    given_up: str = ""  # why samples are no longer read by range, if so (data.remote.ranges)


class Decoder:
    """Turns a task into a micro-batch: a pure function, whichever process runs it."""

    def __init__(
        self,
        index: Index,
        order: Order | Mixture,
        layout: BatchLayout,
        cfg: AugmentConfig,
        seed: int,
        reader: ShardReader,
        leave_encoded: bool = False,  # JPEGs stay as they are, for the GPU
    ):
        self.index = index
        self.order = order
        self.layout = layout
        self.cfg = cfg
        self.seed = seed
        self.reader = reader
        self.leave_encoded = leave_encoded
        # The last global batch asked for, which the other micro-batches of its step will ask for too.
        self.step = -1
        self.ids = np.empty((0, 3), np.int64)
        # Of the task at hand.
        self.storage_s = 0.0
        self.encoded: list[Encoded] = []

    def __getstate__(self) -> dict[str, object]:
        """Return the decoder for another process, where the order takes the shards' sizes from the index."""
        # Those of a large set are mapped memory that processes share; pickled, each process would have a copy.
        return self.__dict__ | {"order": self.order.without_sizes()}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.order.with_sizes(self.index.shard_samples)

    def run(self, task: DecodeTask, arrays: Arrays) -> Done:
        """Fill the arrays' first rows; bad samples are replaced by the next good ones of their lanes.

        Raises DataError where a hundred in a row are bad, and what the reader raises.
        """
        start = perf_counter()
        self.storage_s = 0.0
        self.encoded = []
        # The global batch is computed whole (0.6 ms for 4,096 slots, docs/design/order.md) and kept for the other tasks
        # of its step.
        if task.step != self.step:
            self.step = task.step
            self.ids = np.stack(self.order.batch(task.step), 1)
        rows = task.stop - task.first
        arrays.ids[:rows] = self.ids[task.first : task.stop]

        # All of the task at once, because each takes the time of a request.
        self.reader.expect(arrays.ids[:rows, 1:])
        keys = key_of(SEED_DOMAIN, self.seed, *arrays.ids[:rows].T)  # (rows,) what augmentation is drawn from
        bad: list[BadSample] = []
        for row in range(rows):
            # The slot's own sample, or the first good one of those that replace it.
            for attempt in range(MAX_REPLACEMENTS):
                if attempt > 0:
                    # The id says which sample the row really holds. Crop and flip are drawn from that sample's own
                    # key: they do not depend on the slot that it fills.
                    arrays.ids[row] = self.order.replacement(task.step, task.first + row, attempt)
                    keys[row : row + 1] = key_of(SEED_DOMAIN, self.seed, *arrays.ids[row])
                problem = self.fill(row, int(keys[row]), arrays)
                if problem is None:
                    break
                bad.append(problem)
            else:
                raise DataError(
                    f"{MAX_REPLACEMENTS} bad samples in a row, the last {printable(bad[-1].key)} of "
                    f"{bad[-1].shard}: {bad[-1].reason}\n"
                    f"  python -m jobs data check {shlex.quote(str(self.index.tables))} lists them"
                )
        decode_s = perf_counter() - start - self.storage_s
        return Done(tuple(bad), self.storage_s, decode_s, tuple(self.encoded), self.reader.given_up)

    def fill(self, row: int, key: int, arrays: Arrays) -> BadSample | None:
        """Read and decode the sample that a row's id names; returns what is wrong with it, if anything is."""
        _, shard, sample = arrays.ids[row].tolist()
        # Reading is timed apart from decoding, so that a slow step can be put down to the one or the other. What the
        # reader raises is not caught: a shard that is missing or not the one that was indexed ends the run.
        start = perf_counter()
        name, encoded, raw_labels = self.reader.read(shard, sample)
        self.storage_s += perf_counter() - start

        image = arrays.images[row]
        try:
            labels: tuple[int, ...] = ()
            if self.layout.max_labels > 0:
                labels = read_labels(raw_labels, self.index, self.layout.max_labels)
            is_left_encoded = False
            if self.leave_encoded:
                # The row of shared memory bounds what may be left encoded; grey and CMYK are decoded here, as are
                # images that would take much of the GPU's memory.
                header = read_header(encoded)
                is_usual = header.kind == "jpeg" and header.channels == 3
                is_small = header.height * header.width <= MOST_PIXELS and len(encoded) <= image.nbytes
                is_left_encoded = is_usual and is_small
            if is_left_encoded:
                image.reshape(-1)[: len(encoded)] = np.frombuffer(encoded, np.uint8)
                # The same draws as in `augment`: the crop does not depend on who decodes.
                box, flip = draw(header, Draws(key), self.cfg)
                self.encoded.append(Encoded(row, len(encoded), (header.height, header.width), box, flip))
            else:
                augment(encoded, self.layout.image_size, Draws(key), self.cfg, image)
        except BadImage as error:
            return BadSample(self.index.shards[shard].name, name, str(error))
        # The memory still has the labels of the sample that was here some batches ago.
        arrays.labels[row] = -1
        arrays.labels[row, : len(labels)] = labels
        return None


def images_per_cpu_s(index: Index, image_size: int, cfg: AugmentConfig) -> float | None:
    """Measure how many images of the set's first shard one core decodes in a second; None if it cannot."""
    filled_shards = np.flatnonzero(index.shard_samples)
    if len(filled_shards) == 0:
        return None
    shard = int(filled_shards[0])
    images = min(MEASURED, index.shards[shard].samples)
    # `plan` asks this: it must not wait until a whole shard has been hashed.
    reader = ShardReader(index, verify=False)
    out = np.empty((image_size, image_size, 3), np.uint8)
    try:
        # The first image comes twice: before the clock starts, it loads what decoding needs.
        for images_of_round in (1, images):
            start = process_time()
            for sample in range(images_of_round):
                # A bad image costs time in training too, so it counts.
                with suppress(BadImage):
                    _, encoded, _ = reader.read(shard, sample)
                    augment(encoded, image_size, Draws(sample), cfg, out)
    except (DataError, OSError):
        return None
    return images / max(process_time() - start, 1e-9)


# ----------------------------------------------------------------------------- the process


def send_sign_of_life(connection: Connection) -> None:
    """Send the loader a sign of life, unless the pipe is full: sending would block, with a lock on a shard held."""
    _, writable, _ = select.select([], [connection], [], 0)
    if writable:
        connection.send(None)


def main(connection: Connection, memory: mmap) -> None:
    """Answer (task, offset) until the loader is gone, which EOFError or OSError says; first comes the decoder."""
    # A mapped shard holds a file, and many shards are open at once: ask for as many files as we may have.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    # The loader chose how many processes there are; each of them is to use one core.
    cv2.setNumThreads(1)

    try:
        decoder: Decoder = connection.recv()
    except DataError as error:  # the index's columns have gone: the loader, which waits for its first task, says so
        connection.recv()
        connection.send(error)
        return
    # A fetch may take longer than `timeout_s`: without these signs the loader would take it for a hang.
    if decoder.index.remote:
        decoder.reader.cache.progress = partial(send_sign_of_life, connection)
    try:
        while True:
            task, offset = connection.recv()
            answer: Done | Exception
            try:
                answer = decoder.run(task, decoder.layout.arrays(memory, offset))
            # An exception is an answer too: the loader raises it. If it ended this process, the loader would start
            # others on the same task, in vain.
            except Exception as error:
                answer = error
            connection.send(answer)
    finally:
        # Python ends when its threads have: they would first read every sample that was asked for.
        decoder.reader.stop()


# ----------------------------------------------------------------------------- the process, for its loader


class DecoderProcess:
    """One decoding process, its pipe, and the memory that it shares with us.

    `prefetch` tasks may be pending at most. The memory has a place for one micro-batch more, which may be lent.
    """

    def __init__(self, decoder: Decoder, prefetch: int):
        self.decoder = decoder
        batch_bytes = decoder.layout.bytes
        all_bytes = (prefetch + 1) * batch_bytes
        # Memory without a name: nothing can be left behind in /dev/shm, whoever is killed.
        self.file = os.memfd_create("patchline-batches")
        os.ftruncate(self.file, all_bytes)
        self.memory = mmap(self.file, 0)
        self.free_offsets = deque(range(0, all_bytes, batch_bytes))
        self.pending: deque[tuple[DecodeTask, int]] = deque()  # tasks and their offsets, the oldest first
        self.start()

    def start(self) -> None:
        """Start the process, which then waits for its decoder."""
        # The command may have been typed in any folder, so the module path leads to the repository; -P keeps the
        # current folder off it. OMP_NUM_THREADS: the loader chose how many processes there are, each of them is to
        # use one core.
        ours, theirs = socketpair()
        # Our copy of the child's end is closed after the start, or its death would not end the stream on our side.
        # The child inherits these two files alone: it has no copy of our end, and so its stream ends when we are
        # gone.
        with theirs:
            self.child = subprocess.Popen(
                [sys.executable, "-P", "-m", "data.decoder", str(theirs.fileno()), str(self.file)],
                pass_fds=(theirs.fileno(), self.file),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"},
            )
        self.connection = Connection(ours.detach())

    def brief(self) -> None:
        """Send the decoder; a step of its own, so that all processes are started before the first one is waited for."""
        # The index may be larger than what a socket holds: sending then lasts until the process has started and
        # reads. A process that is dead already is found by `answer`.
        with suppress(OSError):
            self.connection.send(self.decoder)

    def give(self, task: DecodeTask) -> None:
        """Queue a task; one that a dead process cannot take is given to the next."""
        # The last one that became free: the spare place takes no memory as long as nothing is held.
        offset = self.free_offsets.pop()
        self.pending.append((task, offset))
        # A process that is dead is found by `answer`, which gives all pending tasks to the next one.
        with suppress(OSError):
            self.connection.send((task, offset))

    def answer(self, timeout_s: float) -> tuple[DecodeTask, int, Done]:
        """Return the oldest task, the offset of its arrays, which `lend` must be given, and what became of it.

        Raises what the process met, and DataError where the task costs one process after another its life.
        """
        task, offset = self.pending[0]
        for _ in range(RESTARTS + 1):
            answer: Done | Exception | None = None
            # It may die, or be silent for `timeout_s`. None is a sign of life, as while a shard is arriving.
            with suppress(EOFError, OSError):
                while answer is None and self.connection.poll(timeout_s):
                    answer = self.connection.recv()
            if isinstance(answer, Exception):
                raise answer
            if answer is not None:
                self.pending.popleft()
                return task, offset, answer
            self.restart()
        raise DataError(
            f"step {task.step}, slots {task.first} … {task.stop - 1}: {RESTARTS + 1} processes died or were "
            f"silent for {timeout_s:g} s over them; `python -m jobs data check` finds bad samples"
        )

    def lend(self, offset: int) -> Arrays:
        """Return the arrays of an answered task; no other task overwrites them while one of them is held."""
        place = np.ndarray(self.decoder.layout.bytes, np.uint8, self.memory, offset)
        if self.free_offsets:
            # Every array and every tensor on the place holds it: it ends with the last of them.
            finalize(place, self.free_offsets.append, offset).atexit = False
        else:
            # Others are held so long that this is the last place, and the next task needs it.
            place = place.copy()
            self.free_offsets.append(offset)
        return self.decoder.layout.arrays(place)

    def restart(self) -> None:
        """Replace the process by a new one, which gets all pending tasks."""
        # What the old process had written is written again: a task gives the same bytes whoever runs it.
        self.stop()
        self.start()
        self.brief()
        with suppress(OSError):
            for task_and_offset in self.pending:
                self.connection.send(task_and_offset)

    def stop(self) -> None:
        """Kill the process, and wait until it is gone."""
        self.connection.close()
        self.child.kill()
        self.child.wait()

    def end(self) -> None:
        """Stop the process and give the memory back."""
        self.stop()
        os.close(self.file)  # the mapping goes with the last array on it


if __name__ == "__main__":
    # When the loader has ended, its end of the pipe is closed; Ctrl-C reaches this process as well as the loader.
    with suppress(EOFError, OSError, KeyboardInterrupt):
        main(Connection(int(sys.argv[1])), mmap(int(sys.argv[2]), 0))
