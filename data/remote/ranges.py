"""Read single samples of remote shards by byte range, so that a cold start need not wait for whole shards.

The first batch of 4,096 samples comes from about 160 shards of a gigabyte each, a few dozen samples from each shard:
1. A decoding process requests all samples of its task, `AT_ONCE` in parallel (`Ranges.request`). One range covers image
   and label if they are adjacent in the tar, as they nearly always are.
2. The reader takes the samples one by one (`Ranges.take`) and compares each with its digest in the shard's table.
3. Meanwhile the whole shards arrive in the background (`data.remote.cache`); the reader uses them as soon as possible.
4. If a range fails, or the sample differs from the index, this process stops reading by range and waits for whole
   shards; the worker logs this once. A persistent error of the store is then raised by the download of the shard.

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

AT_ONCE = 8  # parallel requests per process
ATTEMPTS = 3  # attempts per range, before waiting for whole shards instead
LONGEST_S = 120.0  # longest wait for a sample; slightly more than all attempts on an unresponsive store
REPORT_EVERY_S = 0.25  # interval of the heartbeats to the loader during the wait
LARGEST_GAP = 1 << 16  # bytes between image and label up to which one request covers both

Place = tuple[int, int]  # (shard number, sample number in the shard)


class Ranges:
    """Reads samples by byte range in several threads; `given_up` is the reason why range reads have stopped, or ""."""

    def __init__(self, cache: Cache):
        self.given_up = ""
        self.stopped = False
        self.cache = Cache(replace(cache.cfg, attempts=min(ATTEMPTS, cache.cfg.attempts)), self.is_stopped)
        self.requested: dict[Place, Future[tuple[bytes, bytes]]] = {}
        self.pool: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return the state to pickle for another process, without threads or pending reads."""
        return self.__dict__ | {"requested": {}, "pool": None}

    def is_stopped(self) -> bool:
        """Return whether `stop` was called."""
        return self.stopped

    def stop(self) -> None:
        """Stop reading; may be called from any thread. Ranges already requested still arrive."""
        self.stopped = True
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def request(self, place: Place, url: str, row: SampleRow) -> None:
        """Start reading a sample, unless reading has stopped."""
        if self.pool is None:
            self.pool = ThreadPoolExecutor(AT_ONCE, "ranges")
        if place in self.requested or self.stopped:
            return
        try:
            self.requested[place] = self.pool.submit(self.read, url, row)
        except RuntimeError:
            # Another thread called `stop` after the check, and the pool accepts no more work.
            if not self.stopped:
                raise

    def take(
        self, place: Place, url: str, row: SampleRow, progress: Callable[[], object] = no_progress
    ) -> tuple[bytes, bytes]:
        """Return a sample's image and label; request the sample if needed, and wait for it.

        `progress` is called during the wait: all attempts together can take longer than the loader's timeout for a
        hanging process. Raises the errors of `Cache.with_retries`, or StorageError if reading has stopped or the sample
        does not arrive within `LONGEST_S`.
        """
        self.request(place, url, row)
        if place not in self.requested:
            raise StorageError(f"{redacted(url)}: stopped before the sample arrived")
        future = self.requested.pop(place)
        ends_at = time.monotonic() + LONGEST_S
        while True:
            try:
                return future.result(REPORT_EVERY_S)
            except CancelledError:
                raise StorageError(f"{redacted(url)}: stopped before the sample arrived") from None
            except TimeoutError:
                progress()
            if time.monotonic() > ends_at:
                future.cancel()
                raise StorageError(f"{redacted(url)}: a sample did not arrive within {LONGEST_S:g} s")

    def give_up(self, place: str, reason: str) -> None:
        """Stop reading by range permanently, and cancel pending requests."""
        self.given_up = f"{redacted(place)}: a sample could not be read by range ({reason}); waiting for whole shards"
        for future in self.requested.values():
            future.cancel()
        self.requested = {}

    def read(self, url: str, row: SampleRow) -> tuple[bytes, bytes]:
        """Return the image and label of a sample, in one request if they are close together."""
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
        """Return all bytes from `start` to `stop` − 1; if a response ends early, request the rest."""
        content = b""
        while start + len(content) < stop:
            content += self.cache.read(url, start + len(content), stop)
        return content
