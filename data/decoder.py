"""A decoding process: takes tasks from its loader, writes pixels into memory they share, answers what it did.

What becomes of a task:

1. The loader sends (task, offset): the slots to decode, and where in the shared memory the result belongs.
2. The order says which samples sit in these slots. The global batch is computed once for all tasks of its step.
3. For every slot, the reader gives the sample's bytes. A key made of the seed and the sample's id (epoch, shard,
   sample) gives its random numbers: crop, flip and distortion are the same whichever process decodes it.
4. The pixels, labels and ids are written into the row of the slot.
5. A bad sample is replaced by the next ones of its lane until one is good; each bad one is named in the answer.
6. The answer, `Done`, goes back through the pipe: the bad samples, and where the time went.

    Task(step=7, first=12, stop=16) with two labels a sample at most and images of 224 pixels fills
    images (4, 224, 224, 3), labels [[3, −1], [17, 4], …] and ids [[0, 21, 508], [0, 21, 77], …],
    and is answered by Done(bad=(BadSample("train-000021.tar", "n0144", "truncated"),), storage_s=0.002, decode_s=0.05)

Run by `data.decoder_process` as `python -m data.decoder CONNECTION MEMORY`, two inherited file descriptors. It imports
no torch, holds nothing that needs cleaning up, and ends when its loader does.
"""

from __future__ import annotations

import resource
import select
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from mmap import mmap
from multiprocessing.connection import Connection
from time import perf_counter, process_time
from typing import NamedTuple

import cv2
import numpy as np

from data.checks import printable
from data.draws import Draws, key_of
from data.errors import DataError
from data.images.augment import AugmentConfig, Encoded, augment, draw
from data.images.decode import BadImage, read_header
from data.index.index import Index
from data.mixture import Mixture
from data.order import Order
from data.shards.reader import ShardReader, read_labels

# b samples of a micro-batch, L labels of a sample at most, S image side

MAX_REPLACEMENTS = 100  # bad samples in a row before the set is taken for unusable
MOST_PIXELS = 1 << 22  # of an image that is left encoded: 12 MB each once decoded
SEED_DOMAIN = 1  # keeps augmentation's draws apart from the order's
PAGE = 4096  # bytes; every micro-batch begins on a page of its own


class Task(NamedTuple):
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
class Layout:
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
        layout: Layout,
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

    def run(self, task: Task, arrays: Arrays) -> Done:
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
        keys = self.keys(arrays.ids[:rows])
        bad: list[BadSample] = []
        for row in range(rows):
            bad += self.fill_slot(task, row, int(keys[row]), arrays)
        decode_s = perf_counter() - start - self.storage_s
        return Done(tuple(bad), self.storage_s, decode_s, tuple(self.encoded), self.reader.given_up)

    def keys(self, ids: np.ndarray) -> np.ndarray:
        """Return what each sample's augmentation is drawn from: (b, 3) ids to (b,) uint64."""
        return key_of(SEED_DOMAIN, self.seed, *ids.T)

    def fill_slot(self, task: Task, row: int, key: int, arrays: Arrays) -> list[BadSample]:
        """Fill a row with its slot's sample or with the first good replacement; returns the bad ones before it."""
        bad: list[BadSample] = []
        for attempt in range(1, MAX_REPLACEMENTS + 1):
            problem = self.fill(row, key, arrays)
            if problem is None:
                return bad
            bad.append(problem)
            # The id says which sample the row really holds. Crop and flip are drawn from that sample's own key: they
            # do not depend on the slot that it fills.
            arrays.ids[row] = self.order.replacement(task.step, task.first + row, attempt)
            key = int(self.keys(arrays.ids[row : row + 1])[0])
        raise DataError(
            f"{MAX_REPLACEMENTS} bad samples in a row, the last {printable(bad[-1].key)} of {bad[-1].shard}: "
            f"{bad[-1].reason}; `python -m jobs data check` lists them"
        )

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
            labels = read_labels(raw_labels, self.index, self.layout.max_labels)
            left_encoded = self.leave_encoded and self.leave(row, encoded, key, image)
            if not left_encoded:
                augment(encoded, self.layout.image_size, Draws(key), self.cfg, image)
        except BadImage as error:
            return BadSample(self.index.shards[shard].name, name, str(error))
        # The memory still has the labels of the sample that was here some batches ago.
        arrays.labels[row] = -1
        arrays.labels[row, : len(labels)] = labels
        return None

    def leave(self, row: int, data: bytes, key: int, image: np.ndarray) -> bool:
        """Copy a JPEG into its row, with its draws beside it; False where it does not fit or is out of the ordinary."""
        # The row of shared memory bounds what may be left encoded; grey and CMYK are decoded here, as are images that
        # would take much of the GPU's memory.
        header = read_header(data)
        if header.kind != "jpeg" or header.channels != 3 or header.height * header.width > MOST_PIXELS:
            return False
        if len(data) > image.nbytes:
            return False
        image.reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
        # The same draws as in `augment`: the crop does not depend on who decodes.
        box, flip = draw(header, Draws(key), self.cfg)
        self.encoded.append(Encoded(row, len(data), (header.height, header.width), box, flip))
        return True


def images_per_cpu_s(index: Index, image_size: int, cfg: AugmentConfig, most: int = 128) -> float | None:
    """Measure how many images of the set's first shard one core decodes in a second; None if it cannot.

    `most` images are decoded.
    """
    filled_shards = np.flatnonzero(index.shard_samples)
    if len(filled_shards) == 0:
        return None
    shard = int(filled_shards[0])
    images = min(most, index.shards[shard].samples)
    # `plan` asks this: it must not wait until a whole shard has been hashed.
    reader = ShardReader(index, verify=False)
    out = np.empty((image_size, image_size, 3), np.uint8)
    try:
        # The first image comes twice: before the clock starts, it loads what decoding needs.
        measure_decoding(reader, shard, 1, cfg, out)
        seconds = measure_decoding(reader, shard, images, cfg, out)
    except (DataError, OSError):
        return None
    return images / max(seconds, 1e-9)


def measure_decoding(reader: ShardReader, shard: int, images: int, cfg: AugmentConfig, out: np.ndarray) -> float:
    """Measure the processor seconds that the first images of a shard take; `out` (S, S, 3) holds each in turn."""
    start = process_time()
    for sample in range(images):
        # A bad image costs time in training too, so it counts.
        with suppress(BadImage):
            _, encoded, _ = reader.read(shard, sample)
            augment(encoded, len(out), Draws(sample), cfg, out)
    return process_time() - start


# ----------------------------------------------------------------------------- the process


def send_sign_of_life(connection: Connection) -> None:
    """Send the loader a sign of life, unless the pipe is full: sending would block, with a lock on a shard held."""
    _, writable, _ = select.select([], [connection], [], 0)
    if writable:
        connection.send(None)


def main(connection: Connection, memory: mmap) -> None:
    """Serve (task, offset) until the loader is gone; the first message is the decoder itself."""
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
    decoder.reader.cache.progress = partial(send_sign_of_life, connection)
    try:
        serve(decoder, connection, memory)
    finally:
        # Python ends when its threads have: they would first read every sample that was asked for.
        decoder.reader.stop()


def serve(decoder: Decoder, connection: Connection, memory: mmap) -> None:
    """Answer one task after the other; raises EOFError and OSError when the loader is gone."""
    while True:
        task, offset = connection.recv()
        answer: Done | Exception
        try:
            answer = decoder.run(task, decoder.layout.arrays(memory, offset))
        # An exception is an answer too: the loader raises it. If it ended this process, the loader would start others
        # on the same task, in vain.
        except Exception as error:
            answer = error
        connection.send(answer)


if __name__ == "__main__":
    # When the loader has ended, its end of the pipe is closed; Ctrl-C reaches this process as well as the loader.
    with suppress(EOFError, OSError, KeyboardInterrupt):
        main(Connection(int(sys.argv[1])), mmap(int(sys.argv[2]), 0))
