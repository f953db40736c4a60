"""A decoding process: takes tasks from its loader, writes pixels into memory they share, answers what it did.

Run by `data.loader` as `python -m data.decoder CONNECTION MEMORY`, two inherited file descriptors. It imports
no torch, holds nothing that needs cleaning up, and ends when its loader does.
"""

from __future__ import annotations

import resource
import select
import sys
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from multiprocessing.connection import Connection
from time import perf_counter, process_time
from typing import Any

import cv2
import numpy as np

from data.errors import DataError
from data.images.augment import AugmentConfig, Encoded, augment, draw
from data.images.decode import BadImage, read_header
from data.images.draws import Draws
from data.order import Mixture, Order, key_of
from data.shards.index import Index
from data.shards.labels import read_labels
from data.shards.reader import Reader

# b samples of a micro-batch, L labels of a sample at most, S image side

MAX_REPLACEMENTS = 100  # bad samples in a row before the set is taken for unusable
MOST_PIXELS = 1 << 22  # of an image that is left encoded: 12 MB each once decoded
SEED_DOMAIN = 1  # keeps augmentation's draws apart from the order's

Task = tuple[int, int, int]  # step, first slot, slot after the last


@dataclass(frozen=True)
class BadSample:
    """A sample that was replaced, and why."""

    shard: str
    key: str
    reason: str


@dataclass(frozen=True)
class Layout:
    """The arrays of one micro-batch of b samples, laid end to end in `bytes` bytes of shared memory."""

    b: int
    image_size: int
    max_labels: int

    @property
    def bytes(self) -> int:
        size = self.b * (self.image_size**2 * 3 + 8 * self.max_labels + 8 * 3)
        return -(-size // 4096) * 4096

    def arrays(self, memory: Any, offset: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(images (b, S, S, 3) uint8, labels (b, L) int64, ids (b, 3) int64) on some memory."""
        ids = np.ndarray((self.b, 3), np.int64, memory, offset)
        labels = np.ndarray((self.b, self.max_labels), np.int64, memory, offset + ids.nbytes)
        side = self.image_size
        images = np.ndarray((self.b, side, side, 3), np.uint8, memory, offset + ids.nbytes + labels.nbytes)
        return images, labels, ids


@dataclass(frozen=True)
class Done:
    """What a task came to, besides its arrays; seconds of this process."""

    bad: tuple[BadSample, ...]
    storage_s: float
    decode_s: float
    encoded: tuple[Encoded, ...] = ()


class Decoder:
    """Turns a task into a micro-batch: a pure function, whichever process runs it."""

    def __init__(
        self,
        index: Index,
        order: Order | Mixture,
        layout: Layout,
        cfg: AugmentConfig,
        seed: int,
        reader: Reader,
        leave_encoded: bool = False,
    ):
        self.index, self.order, self.layout, self.cfg, self.seed = index, order, layout, cfg, seed
        self.reader, self.leave_encoded = reader, leave_encoded
        self.encoded: list[Encoded] = []  # of the task at hand
        self.step, self.ids = -1, np.empty((0, 3), np.int64)  # the last global batch asked for
        self.storage_s = 0.0

    def run(self, task: Task, images: np.ndarray, labels: np.ndarray, ids: np.ndarray) -> Done:
        """Fill the arrays' first rows; bad samples are replaced by the next good ones of their lanes."""
        step, first, stop = task
        start, self.storage_s = perf_counter(), 0.0
        if step != self.step:
            self.step, self.ids = step, np.stack(self.order.batch(step), 1)
        ids[: stop - first] = self.ids[first:stop]
        keys = self.keys(ids[: stop - first])
        bad: list[BadSample] = []
        self.encoded = []
        for row in range(stop - first):
            for attempt in range(1, MAX_REPLACEMENTS + 1):
                problem = self.fill(row, ids[row], int(keys[row]), images[row], labels[row])
                if problem is None:
                    break
                bad.append(problem)
                ids[row] = self.order.replacement(step, first + row, attempt)
                keys[row] = self.keys(ids[row : row + 1])[0]
            else:
                raise DataError(
                    f"{MAX_REPLACEMENTS} bad samples in a row, the last {bad[-1].key} of {bad[-1].shard}: "
                    f"{bad[-1].reason}; `python -m jobs data check` lists them"
                )
        decode_s = perf_counter() - start - self.storage_s
        return Done(tuple(bad), self.storage_s, decode_s, tuple(self.encoded))

    def keys(self, ids: np.ndarray) -> np.ndarray:
        """What each sample's augmentation is drawn from."""
        return key_of(SEED_DOMAIN, self.seed, *ids.T)

    def fill(self, row: int, ids: np.ndarray, key: int, image: np.ndarray, labels: np.ndarray) -> BadSample | None:
        """Read and decode one sample into its row; returns what is wrong with it, if anything is."""
        shard, sample = int(ids[1]), int(ids[2])
        start = perf_counter()
        name, encoded, raw = self.reader.read(shard, sample)
        self.storage_s += perf_counter() - start
        try:
            found = read_labels(raw, self.index.classes, self.layout.max_labels)
            if not (self.leave_encoded and self.leave(row, encoded, key, image)):
                augment(encoded, self.layout.image_size, Draws(key), self.cfg, image)
        except BadImage as error:
            return BadSample(self.index.shards[shard].name, name, str(error))
        labels[:] = -1
        labels[: len(found)] = found
        return None

    def leave(self, row: int, data: bytes, key: int, image: np.ndarray) -> bool:
        """Copy a JPEG into its row, with its draws beside it; False where it does not fit or is out of the ordinary."""
        header = read_header(data)
        if header.kind != "jpeg" or header.channels != 3 or header.height * header.width > MOST_PIXELS:
            return False
        if len(data) > image.nbytes:
            return False
        image.reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
        box, flip = draw(header, Draws(key), self.cfg)
        self.encoded.append(Encoded(row, len(data), (header.height, header.width), box, flip))
        return True


def images_per_cpu_s(index: Index, image_size: int, cfg: AugmentConfig, most: int = 128) -> float | None:
    """Measured here and now: images of the set's first shard that one core decodes in a second; None if it cannot."""
    shard = next((number for number, one in enumerate(index.shards) if one.samples), None)  # one may be empty
    if shard is None:
        return None
    reader, out = Reader(index, verify=False), np.empty((image_size, image_size, 3), np.uint8)
    images = min(most, index.shards[shard].samples)
    start = 0.0
    try:
        for sample in (0, *range(images)):  # the first one twice: it loads what decoding needs
            with suppress(BadImage):
                augment(reader.read(shard, sample)[1], image_size, Draws(sample), cfg, out)
            start = start or process_time()
    except (DataError, OSError):
        return None
    return images / max(process_time() - start, 1e-9)


def tell(connection: Connection) -> None:
    """Give the loader a sign of life, unless so many are unread that it would be waited for, holding a lock."""
    if select.select([], [connection], [], 0)[1]:
        connection.send(None)


def main(connection: Connection, memory: mmap) -> None:
    """Serve (task, offset) until the loader is gone."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a mapped shard holds a file
    cv2.setNumThreads(1)  # the loader chose how many processes there are
    decoder: Decoder = connection.recv()
    decoder.reader.cache.progress = lambda: tell(connection)  # a slow storage is no hang
    while True:
        task, offset = connection.recv()
        answer: Done | Exception
        try:
            answer = decoder.run(task, *decoder.layout.arrays(memory, offset))
        except Exception as error:  # whatever it is, the loader raises it
            answer = error
        connection.send(answer)


if __name__ == "__main__":
    with suppress(EOFError, OSError, KeyboardInterrupt):  # the loader ended, and so does this
        main(Connection(int(sys.argv[1])), mmap(int(sys.argv[2]), 0))
