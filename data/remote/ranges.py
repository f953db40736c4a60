"""Samples of remote shards that are not here yet, read by byte range: a cold start waits for these, not for shards.

The first batch of 4,096 has samples of some 160 shards of a gigabyte each, a few dozen of each. What becomes of them:
1. a decoding process asks for all samples of its task at once, `AT_ONCE` at a time (`Ranges.request`); image and label
   are one range where they lie together in the tar, as they do in nearly all;
2. the reader takes them one by one (`Ranges.take`), and compares each with its digest in the shard's table;
3. the shards come whole in the background (`data.remote.cache`); whichever is here is read instead;
4. where a range does not come, or is not the sample that was indexed, this process reads no more of them and waits
   for whole shards, which the worker says once. Whatever is wrong with the store is then met, and said, there.

    ranges.take((7, 508), "s3://bucket/train-000007.tar", SampleRow(b"cat-12", 6656, 108211, 115200, 3)) → image, label
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace

from data.checks import redacted
from data.errors import StorageError
from data.index.shard import SampleRow
from data.remote.cache import Cache, no_progress

AT_ONCE = 8  # requests of a process
ATTEMPTS = 3  # at a range, before whole shards are waited for
LONGEST_S = 120.0  # that a sample is waited for: some more than all attempts of a silent store take
REPORT_EVERY_S = 0.25  # signs of life to the loader while a sample is waited for
LARGEST_GAP = 1 << 16  # bytes between image and label that are read along rather than asked for apart

Place = tuple[int, int]  # a shard's number, and that of a sample in it


class Ranges:
    """Reads samples by range, several at once; `given_up` says why it does so no more, "" while it does."""

    def __init__(self, cache: Cache):
        self.given_up = ""
        self.stopped = False
        self.cache = Cache(replace(cache.cfg, attempts=min(ATTEMPTS, cache.cfg.attempts)), self.is_stopped)
        self.requested: dict[Place, Future[tuple[bytes, bytes]]] = {}
        self.pool: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return the state without threads and what they have read, for another process."""
        return self.__dict__ | {"requested": {}, "pool": None}

    def is_stopped(self) -> bool:
        """Return whether nobody waits for samples any more."""
        return self.stopped

    def stop(self) -> None:
        """Read nothing more, from any thread; what is on its way still arrives."""
        self.stopped = True
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def request(self, place: Place, url: str, row: SampleRow) -> None:
        """Begin to read a sample, unless nobody waits any more."""
        if self.pool is None:
            self.pool = ThreadPoolExecutor(AT_ONCE, "ranges")
        if place in self.requested or self.stopped:
            return
        try:
            self.requested[place] = self.pool.submit(self.read, url, row)
        except RuntimeError:
            # The pool takes nothing more where another thread has stopped us since we looked.
            if not self.stopped:
                raise

    def take(
        self, place: Place, url: str, row: SampleRow, progress: Callable[[], object] = no_progress
    ) -> tuple[bytes, bytes]:
        """Return the image and label of a sample, asked for before or now; raises DataError and StorageError.

        `progress` is called while it waits: attempts add up to more than the time after which a loader takes this
        process for one that hangs. What is not here after `LONGEST_S` is given up instead.
        """
        self.request(place, url, row)
        if place not in self.requested:
            raise StorageError(f"{redacted(url)}: left where it was")
        future = self.requested.pop(place)
        ends_at = time.monotonic() + LONGEST_S
        while True:
            try:
                return future.result(REPORT_EVERY_S)
            except CancelledError:
                raise StorageError(f"{redacted(url)}: left where it was") from None
            except TimeoutError:
                progress()
            if time.monotonic() > ends_at:
                future.cancel()
                raise StorageError(f"{redacted(url)}: a sample did not come in {LONGEST_S:g} s")

    def give_up(self, place: str, reason: str) -> None:
        """Read nothing by range from here on; of what was asked for, nothing is taken any more."""
        self.given_up = f"{redacted(place)}: a sample could not be read by range ({reason}); waiting for whole shards"
        for future in self.requested.values():
            future.cancel()
        self.requested = {}

    def read(self, url: str, row: SampleRow) -> tuple[bytes, bytes]:
        """Return the image and label of a sample, in one request where they lie close together."""
        image_stop = row.image + row.image_size
        label_stop = row.label + row.label_size
        gap = max(row.image, row.label) - min(image_stop, label_stop)
        if not row.image_size or not row.label_size or gap > LARGEST_GAP:
            image = self.bytes_of(url, row.image, image_stop)
            return image, self.bytes_of(url, row.label, label_stop)
        start = min(row.image, row.label)
        both = self.bytes_of(url, start, max(image_stop, label_stop))
        return both[row.image - start : image_stop - start], both[row.label - start : label_stop - start]

    def bytes_of(self, url: str, start: int, stop: int) -> bytes:
        """Return all bytes from `start` to `stop` − 1; where an answer breaks off, the rest is asked for."""
        content = b""
        while start + len(content) < stop:
            content += self.cache.read(url, start + len(content), stop)
        return content
