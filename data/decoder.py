"""A decoding process: receives tasks from its loader and writes decoded pixels into memory that both share.

How a task is processed:

1. The loader sends (task, offset): the slots to decode, and the offset of the result in shared memory.
2. The order determines which samples belong to these slots. A global batch is computed once for all tasks of its step.
3. For every slot, the reader returns the bytes of the sample. The random numbers for crop, flip and distortion are
   derived from the seed and the sample's id (epoch, shard, sample), so they do not depend on the process.
4. The pixels, labels and ids are written into the row of the slot.
5. A bad sample is replaced with the next good one in its lane. The result names every bad sample.
6. The result, `Done`, goes back through the pipe: the bad samples, and the time spent reading and decoding.

    DecodeTask(step=7, first=12, stop=16), with up to two labels per sample and images of 224 pixels, fills
    images (4, 224, 224, 3), labels [[3, −1], [17, 4], …] and ids [[0, 21, 508], [0, 21, 77], …],
    and returns Done(bad=(BadSample("train-000021.tar", "n0144", "truncated"),), storage_s=0.002, decode_s=0.05)

The process runs `python -m data.decoder CONNECTION MEMORY` with two inherited file descriptors. It does not import
torch, needs no cleanup, and exits when its loader exits. The loader controls the process through `DecoderProcess`:

1. `start` starts the process with one end of a socket pair and a block of anonymous memory.
2. `send_decoder` sends the decoder: index, order, sizes, seed.
3. `submit` sends a task and the offset of a free slot in the shared memory.
4. `result` waits for the oldest task. If the process dies or is silent for `timeout_s`, a new process takes over all
   pending tasks and writes the results to the same offsets. After four processes, `result` raises DataError.
5. `arrays_at` returns the arrays of that task without a copy. Their memory is free again once nothing references them.
6. `close` kills the process. The kernel frees the memory once nothing uses it.
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
from time import perf_counter
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
from data.reader import ShardReader, read_labels

# b: samples per micro-batch, L: maximum number of labels per sample, S: side of an image

MAX_REPLACEMENTS = 100  # consecutive bad samples after which a data set counts as unusable
MAX_PIXELS = 1 << 22  # maximum size of an image that the GPU decodes: 12 MB after decoding
SEED_DOMAIN = 1  # keeps augmentation's random numbers separate from the order's
RESTARTS = 3  # restarts of a decoding process for a single micro-batch
PAGE = 4096  # bytes of a memory page; every micro-batch begins on a new page


class DecodeTask(NamedTuple):
    """One micro-batch to decode: the slots `first` … `stop` − 1 of the global batch `step`."""

    step: int
    first: int
    stop: int


@dataclass(frozen=True)
class BadSample:
    """A bad sample that was replaced, and the reason."""

    shard: str
    key: str
    reason: str


class Arrays(NamedTuple):
    """The arrays of one micro-batch, as views of the memory that holds it."""

    images: np.ndarray  # (b, S, S, 3) uint8
    labels: np.ndarray  # (b, L) int64, padded with −1
    ids: np.ndarray  # (b, 3) int64: epoch, shard, sample


@dataclass(frozen=True)
class BatchLayout:
    """The memory layout of a micro-batch of b samples: ids, labels and images, one after the other."""

    b: int
    image_size: int
    max_labels: int

    @property
    def bytes(self) -> int:
        """The size of one micro-batch, rounded up to whole pages."""
        image_bytes = self.image_size**2 * 3
        size = self.b * (image_bytes + 8 * self.max_labels + 8 * 3)
        return -(-size // PAGE) * PAGE

    def arrays(self, memory: mmap | bytearray | np.ndarray, offset: int = 0) -> Arrays:
        """Return the arrays of the micro-batch at `offset` in the given memory."""
        side = self.image_size
        # The int64 arrays come first, so that they are aligned to 8 bytes; images need no alignment.
        ids = np.ndarray((self.b, 3), np.int64, memory, offset)
        offset += ids.nbytes
        labels = np.ndarray((self.b, self.max_labels), np.int64, memory, offset)
        offset += labels.nbytes
        images = np.ndarray((self.b, side, side, 3), np.uint8, memory, offset)
        return Arrays(images, labels, ids)


@dataclass(frozen=True)
class Done:
    """The result of a task: the bad samples, and the seconds spent on storage and decoding."""

    bad: tuple[BadSample, ...]
    storage_s: float
    decode_s: float
    encoded: tuple[Encoded, ...] = ()  # rows that hold a JPEG instead of pixels, with `decode: gpu`
    given_up: str = ""  # why samples are no longer read by range; "" if they are (data.remote.ranges)


class Decoder:
    """Decodes the micro-batch of a task; the result depends only on the constructor's arguments and the task."""

    def __init__(
        self,
        index: Index,
        order: Order | Mixture,
        layout: BatchLayout,
        cfg: AugmentConfig,
        seed: int,
        reader: ShardReader,
        leave_encoded: bool = False,  # leave JPEGs encoded, for decoding on the GPU
    ):
        self.index = index
        self.order = order
        self.layout = layout
        self.cfg = cfg
        self.seed = seed
        self.reader = reader
        self.leave_encoded = leave_encoded
        # The most recent global batch; the other micro-batches of its step need it too.
        self.step = -1
        self.ids = np.empty((0, 3), np.int64)
        # State of the current task.
        self.storage_s = 0.0
        self.encoded: list[Encoded] = []

    def __getstate__(self) -> dict[str, object]:
        """Return the state to pickle, without the order's shard sizes: the receiver gets them from the index."""
        # Shard sizes of a large set are mapped memory that all processes share; pickling would copy them.
        return self.__dict__ | {"order": self.order.without_sizes()}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.order.with_sizes(self.index.shard_samples)

    def run(self, task: DecodeTask, arrays: Arrays) -> Done:
        """Fill the first rows of the arrays; replace each bad sample with the next good one in its lane.

        Raises DataError after 100 consecutive bad samples, or the errors of `ShardReader.read`.
        """
        start = perf_counter()
        self.storage_s = 0.0
        self.encoded = []
        # Compute the whole global batch (0.6 ms for 4,096 slots, docs/design/order.md) and keep it for the other tasks
        # of this step.
        if task.step != self.step:
            self.step = task.step
            self.ids = np.stack(self.order.batch(task.step), 1)
        rows = task.stop - task.first
        arrays.ids[:rows] = self.ids[task.first : task.stop]

        # Request all samples at once, because each request waits for the store.
        self.reader.expect(arrays.ids[:rows, 1:])
        keys = key_of(SEED_DOMAIN, self.seed, *arrays.ids[:rows].T)  # (rows,) keys of augmentation's random numbers
        bad: list[BadSample] = []
        for row in range(rows):
            # Try the slot's own sample, then its replacements.
            for attempt in range(MAX_REPLACEMENTS):
                if attempt > 0:
                    # Record the id of the replacement. Crop and flip use the replacement's own key, so they do not
                    # depend on the slot.
                    arrays.ids[row] = self.order.replacement(task.step, task.first + row, attempt)
                    keys[row : row + 1] = key_of(SEED_DOMAIN, self.seed, *arrays.ids[row])
                problem = self.fill(row, int(keys[row]), arrays)
                if problem is None:
                    break
                bad.append(problem)
            else:
                raise DataError(
                    f"{MAX_REPLACEMENTS} consecutive samples cannot be used; the last is {printable(bad[-1].key)} of "
                    f"{bad[-1].shard}: {bad[-1].reason}\n"
                    f"  to list them, run python -m jobs data check {shlex.quote(str(self.index.tables))}"
                )
        decode_s = perf_counter() - start - self.storage_s
        return Done(tuple(bad), self.storage_s, decode_s, tuple(self.encoded), self.reader.given_up)

    def fill(self, row: int, key: int, arrays: Arrays) -> BadSample | None:
        """Read and decode the sample for a row; if the sample is bad, return it with the reason, else None."""
        _, shard, sample = arrays.ids[row].tolist()
        # Time reading separately from decoding, to attribute slow steps. Errors of the reader propagate: a missing or
        # changed shard ends the run.
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
                # The encoded bytes must fit into the row of shared memory. Grey, CMYK and large images are decoded
                # here; large ones would take too much GPU memory.
                header = read_header(encoded)
                is_usual = header.kind == "jpeg" and header.channels == 3
                is_small = header.height * header.width <= MAX_PIXELS and len(encoded) <= image.nbytes
                is_left_encoded = is_usual and is_small
            if is_left_encoded:
                image.reshape(-1)[: len(encoded)] = np.frombuffer(encoded, np.uint8)
                # The same random numbers as in `augment`, so CPU and GPU decoding crop identically.
                box, flip = draw(header, Draws(key), self.cfg)
                self.encoded.append(Encoded(row, len(encoded), (header.height, header.width), box, flip))
            else:
                augment(encoded, self.layout.image_size, Draws(key), self.cfg, image)
        except BadImage as error:
            return BadSample(self.index.shards[shard].name, name, str(error))
        # Clear the labels of an earlier micro-batch in this memory.
        arrays.labels[row] = -1
        arrays.labels[row, : len(labels)] = labels
        return None


# ----------------------------------------------------------------------------- the process


def send_heartbeat(connection: Connection) -> None:
    """Send a heartbeat to the loader, unless the pipe is full: a send that blocks would keep a shard locked."""
    _, writable, _ = select.select([], [connection], [], 0)
    if writable:
        connection.send(None)


def main(connection: Connection, memory: mmap) -> None:
    """Receive the decoder, then run tasks until the loader exits (EOFError or OSError)."""
    # Raise the limit of open files to the maximum: every mapped shard holds one, and many are open.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    # One core per process; the loader chose the number of processes.
    cv2.setNumThreads(1)

    try:
        decoder: Decoder = connection.recv()
    except DataError as error:  # the index's columns are gone; report it as the result of the first task
        connection.recv()
        connection.send(error)
        return
    # A download may take longer than `timeout_s`. Heartbeats prevent the loader from restarting this process.
    if decoder.index.remote:
        decoder.reader.cache.progress = partial(send_heartbeat, connection)
    try:
        while True:
            task, offset = connection.recv()
            answer: Done | Exception
            try:
                answer = decoder.run(task, decoder.layout.arrays(memory, offset))
            # Send exceptions to the loader, which raises them. If they ended this process, the loader would retry the
            # task in other processes, in vain.
            except Exception as error:
                answer = error
            connection.send(answer)
    finally:
        # Python waits for its threads at exit; without this they would first read every requested sample.
        decoder.reader.stop()


# ----------------------------------------------------------------------------- the loader's side


class DecoderProcess:
    """One decoding process, its pipe, and the memory shared with the loader.

    Up to `prefetch` tasks may be pending. The memory has room for one more micro-batch, which the caller is using.
    """

    def __init__(self, decoder: Decoder, prefetch: int):
        self.decoder = decoder
        batch_bytes = decoder.layout.bytes
        all_bytes = (prefetch + 1) * batch_bytes
        # Anonymous memory: if processes are killed, nothing is left in /dev/shm.
        self.file = os.memfd_create("patchline-batches")
        os.ftruncate(self.file, all_bytes)
        self.memory = mmap(self.file, 0)
        self.free_offsets = deque(range(0, all_bytes, batch_bytes))
        self.pending: deque[tuple[DecodeTask, int]] = deque()  # tasks and their offsets, the oldest first
        self.start()

    def start(self) -> None:
        """Start the process, which then waits for its decoder."""
        # PYTHONPATH makes the repository importable from any working directory; -P keeps the working directory itself
        # off the import path. OMP_NUM_THREADS=1: the loader already decodes in several processes.
        ours, theirs = socketpair()
        # Close our copy of the child's end after the start; otherwise we would not notice the child's death. The child
        # inherits only these two files and no copy of our end, so it notices when this process ends.
        with theirs:
            self.child = subprocess.Popen(
                [sys.executable, "-P", "-m", "data.decoder", str(theirs.fileno()), str(self.file)],
                pass_fds=(theirs.fileno(), self.file),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"},
            )
        self.connection = Connection(ours.detach())

    def send_decoder(self) -> None:
        """Send the decoder to its process; separate from `start`, so that all processes start before a send blocks."""
        # An index may exceed the socket buffer, so the send blocks until the process reads. If the process is already
        # dead, `result` notices.
        with suppress(OSError):
            self.connection.send(self.decoder)

    def submit(self, task: DecodeTask) -> None:
        """Queue a task; if the process is dead, its successor gets the task."""
        # Reuse the place freed last: the spare place then takes no memory until it is needed.
        offset = self.free_offsets.pop()
        self.pending.append((task, offset))
        # `result` notices a dead process and sends all pending tasks to the next one.
        with suppress(OSError):
            self.connection.send((task, offset))

    def result(self, timeout_s: float) -> tuple[DecodeTask, int, Done]:
        """Wait for the oldest task; return it, the offset of its arrays for `arrays_at`, and its result.

        Re-raises exceptions from the process; raises DataError if the task kills one process after another.
        """
        task, offset = self.pending[0]
        for _ in range(RESTARTS + 1):
            answer: Done | Exception | None = None
            # None is a heartbeat, sent while a shard downloads. Death or silence for `timeout_s` ends the wait.
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
            f"step {task.step}, slots {task.first} … {task.stop - 1}: {RESTARTS + 1} processes died or did "
            f"not respond for {timeout_s:g} s while decoding them; to find bad samples, use `python -m jobs data check`"
        )

    def arrays_at(self, offset: int) -> Arrays:
        """Return the arrays of a finished task; their memory is not reused while any of them is referenced."""
        place = np.ndarray(self.decoder.layout.bytes, np.uint8, self.memory, offset)
        if self.free_offsets:
            # Every view of this place keeps it alive; the place becomes free with the last view.
            finalize(place, self.free_offsets.append, offset).atexit = False
        else:
            # The caller still holds all other places, and the next task needs this one: return a copy.
            place = place.copy()
            self.free_offsets.append(offset)
        return self.decoder.layout.arrays(place)

    def restart(self) -> None:
        """Replace the process with a new one and resend all pending tasks."""
        # The new process rewrites partial results: a task produces the same bytes in any process.
        self.stop()
        self.start()
        self.send_decoder()
        with suppress(OSError):
            for task_and_offset in self.pending:
                self.connection.send(task_and_offset)

    def stop(self) -> None:
        """Kill the process and wait until it has exited."""
        self.connection.close()
        self.child.kill()
        self.child.wait()

    def close(self) -> None:
        """Stop the process and release the memory."""
        self.stop()
        os.close(self.file)  # the mapping ends with the last array that uses it


if __name__ == "__main__":
    # The pipe is closed once the loader has ended; Ctrl-C reaches this process as well as the loader.
    with suppress(EOFError, OSError, KeyboardInterrupt):
        main(Connection(int(sys.argv[1])), mmap(int(sys.argv[2]), 0))
