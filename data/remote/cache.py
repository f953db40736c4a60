"""A local LRU cache of remote shards: each shard is downloaded once per node, and verified.

How a shard gets into the cache (`Cache.path`):
1. If a file named by the shard's sha256 has the shard's size, it is used, and the storage is not contacted.
2. Otherwise this process takes the lock of the shard. One process of a node downloads it while the others wait.
3. `make_room` deletes the least recently used shards until the new one fits within the limit.
4. `fetch` appends pieces of 16 MiB to `<sha256>.part` and resumes an earlier incomplete download.
5. A failed request is retried with exponential backoff and jitter (`with_retries`).
6. If the sha256 is correct, the file gets its final name; otherwise it is downloaded once more from the start.

`Prefetcher` does this in the background for upcoming steps. The order determines which shards the slots of a step need
(`shards_of`). A thread downloads the shards of one step after the other, `fetchers` at a time, up to
`CacheConfig.ahead` steps ahead of training, which reports its progress with `Prefetcher.reached`.

    cache.path("s3://bucket/train-000007.tar", shard)   →   ~/.cache/patchline/shards/9f3c….tar
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import file_digest
from io import BufferedReader
from pathlib import Path

from data.checks import redacted
from data.errors import DataError, StorageError
from data.files import error_text, locked, open_regular, state_folder, take_lock, with_home
from data.index.index import Index
from data.index.shard import Shard
from data.order import Mixture, Order
from data.remote.config import PIECE, CacheConfig, shards_of
from data.remote.urls import Answer, Retry, never, read_range

ABANDONED_S = 3600  # a download without growth for this long has no owner and may be evicted


def no_progress() -> None:
    """Do nothing: the default of `Cache.progress`."""


class Cache:
    """Returns local paths of remote shards, and downloads shards that no process on this node has fetched yet.

    Files are named by their digest. The least recently used are evicted; a mapped file stays readable after eviction.
    Downloads end early once `stopped()` is true. `progress` is called for every piece that arrives, in this process or
    in the process that this one is waiting for.
    """

    def __init__(self, cfg: CacheConfig, stopped: Callable[[], bool] = never):
        self.cfg = cfg
        self.stopped = stopped
        self.progress: Callable[[], object] = no_progress
        self.directory = state_folder() / "shards"
        if cfg.directory:
            self.directory = with_home(cfg.directory)

    def has(self, shard: Shard) -> bool:
        """Return whether a remote shard is in the cache."""
        # After a power failure, a file may have another size.
        return size_or_none(self.directory / f"{shard.sha256}.tar") == shard.bytes

    def path(self, url: str, shard: Shard) -> Path:
        """Return the local file of a remote shard; download it if needed.

        Raises StorageError if the storage does not respond or the cache cannot be written, or DataError if the
        downloaded shard differs from the index.
        """
        path = self.directory / f"{shard.sha256}.tar"
        if not self.has(shard):
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(
                    f"cannot create the cache folder {self.directory} ({error.strerror}); set another cache.directory"
                ) from None
            with self.turn(path):
                # Another process may have fetched it while we waited for the lock.
                if not self.has(shard):
                    try:
                        self.fetch(url, shard, path)
                    # An error of the local disk: errors of the storage arrive as StorageError.
                    except OSError as error:
                        error.filename = error.filename or str(self.directory)
                        raise StorageError(
                            f"{error_text(error)}\n"
                            "  expected enough disk space, inodes and open files for the shard cache\n"
                            f"  lower cache.limit_bytes ({self.cfg.limit_bytes}), set another cache.directory, or "
                            "free the disk; then run the same command again"
                        ) from None
        # Record the last use for eviction; the mtime, because many mounts do not update the atime. If another process
        # has evicted the file by now, `opened` notices.
        with suppress(FileNotFoundError):
            os.utime(path)
        return path

    def opened(self, url: str, shard: Shard) -> BufferedReader:
        """Open a remote shard's local file; fetch it again if it was just evicted. Raises the errors of `path`."""
        while True:
            path = self.path(url, shard)
            with suppress(FileNotFoundError):
                return open(path, "rb")

    def drop(self, shard: Shard, inode: int) -> None:
        """Delete a shard's cached copy if it still has this inode; keep a newer copy fetched by another process."""
        path = self.directory / f"{shard.sha256}.tar"
        with self.turn(path), suppress(FileNotFoundError):
            if path.stat().st_ino == inode:
                path.unlink()

    @contextmanager
    def turn(self, path: Path) -> Iterator[None]:
        """Hold the lock of a shard; while another process holds it to download the shard, report that progress."""
        # Poll the lock instead of blocking: a blocked call could neither be stopped nor report progress to the loader.
        part = path.with_suffix(".part")
        known_ns = -1
        with open(path.with_suffix(".lock"), "a", opener=open_regular) as file:
            while not take_lock(file.fileno(), Path(file.name), wait=False):
                if self.stopped():
                    raise StorageError(f"{path.name}: stopped while another process was downloading it")
                time.sleep(0.1)
                # Its time changes with every piece, and while the download waits as its store asks (`keep_alive`).
                with suppress(FileNotFoundError):
                    changed_ns = part.stat().st_mtime_ns
                    if changed_ns != known_ns:
                        known_ns = changed_ns
                        self.progress()
            yield

    # ------------------------------------------------------------------------------------------ fetching

    def fetch(self, url: str, shard: Shard, path: Path) -> None:
        """Download a shard to `.part`, resuming an earlier download; rename it once size and digest are correct."""
        part = path.with_suffix(".part")
        # The transfer may have corrupted the first copy: try once more from the start.
        for _ in range(2):
            # An interrupted download is not abandoned any more, and its bytes need no second place.
            with suppress(FileNotFoundError):
                os.utime(part)
            self.make_room(shard.bytes, size_or_none(part) or 0)
            with open(part, "a+b", opener=open_regular) as file:
                # Hash the part that already exists; this also leaves the file position at its end.
                file.seek(0)
                digest = file_digest(file, "sha256")
                while file.tell() < shard.bytes:
                    stop = min(file.tell() + PIECE, shard.bytes)
                    piece = self.read(url, file.tell(), stop, waiting=partial(self.keep_alive, part))
                    file.write(piece)
                    file.flush()
                    digest.update(piece)
                    self.progress()
                # Flush before the rename: after a power failure, the final name could otherwise have no content.
                os.fsync(file.fileno())
            if digest.hexdigest() == shard.sha256:
                os.replace(part, path)
                return
            part.unlink()
        raise DataError(f"{redacted(url)}: its sha256 differs from the index; index the shard again")

    def keep_alive(self, part: Path) -> None:
        """Tell the loader, and other processes waiting for this download, that its store has requested a pause."""
        with suppress(OSError):
            os.utime(part)
        self.progress()

    def read(self, url: str, start: int, stop: int, waiting: Callable[[], object] | None = None) -> bytes:
        """Return bytes start … stop−1 of a URL, or fewer if the response ends early."""
        return self.with_retries(url, partial(read_range, url, start, stop, self.cfg.timeout_s), waiting)

    def with_retries(self, url: str, ask: Callable[[], Answer], waiting: Callable[[], object] | None = None) -> Answer:
        """Return the result of `ask`, with the retries of `Retry`.

        `waiting` (default: `progress`) is called during the pauses that the store requests. Raises DataError for a
        missing file, a refused address or a missing client package, or StorageError if all attempts fail or `stopped()`
        is true.
        """
        retry = Retry(self.cfg.attempts, self.cfg.backoff_s, self.stopped, waiting or self.progress)
        try:
            return retry.with_retries(redacted(url), ask)
        except FileNotFoundError:
            raise DataError(f"{redacted(url)}: this shard or its bucket does not exist") from None

    # ------------------------------------------------------------------------------------------ eviction

    def make_room(self, size: int, present: int = 0) -> None:
        """Delete the least recently used shards until `size` bytes fit, of which `present` are already in the cache.

        Raises DataError if the shard is larger than the limit.
        """
        if size > self.cfg.limit_bytes:
            raise DataError(
                f"a shard of {size} bytes exceeds the cache's limit of {self.cfg.limit_bytes}; "
                f"set data.cache.limit_bytes={size} or more, or pack smaller shards"
            )
        with locked(self.directory / "eviction.lock"):
            # Downloads in progress count towards the limit, but only abandoned ones may be deleted.
            abandoned_since_ns = time.time_ns() - ABANDONED_S * 10**9
            total = size - present
            deletable = []  # (time of last use, bytes, path)
            for path in self.directory.iterdir():
                if path.suffix not in (".tar", ".part"):
                    continue
                # Another process may delete the file meanwhile.
                with suppress(FileNotFoundError):
                    status = path.stat()
                    total += status.st_size
                    if path.suffix == ".tar" or status.st_mtime_ns < abandoned_since_ns:
                        deletable.append((status.st_mtime_ns, status.st_size, path))
            for _, file_bytes, path in sorted(deletable):
                if total <= self.cfg.limit_bytes:
                    break
                path.unlink(missing_ok=True)
                total -= file_bytes


def size_or_none(path: Path) -> int | None:
    """Return the size of a file in bytes; None if it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


# ------------------------------------------------------------------------------------------ prefetching


class Prefetcher:
    """Downloads the shards of upcoming steps in the background; `reached(step)` moves the window forward."""

    def __init__(self, index: Index, order: Order | Mixture, slots: range, step: int, cfg: CacheConfig):
        self.index = index
        self.order = order
        self.slots = slots
        self.cfg = cfg
        self.step = step  # step that training has reached
        self.changed = threading.Condition()  # guards `step` and `stopped`
        self.stopped = False
        self.failure: StorageError | None = None  # the latest storage error
        # Let `stop` end downloads: otherwise the process would wait for them at exit.
        self.cache = Cache(cfg, lambda: self.stopped)
        self.thread = threading.Thread(target=self.run, args=(step,), daemon=True)
        self.thread.start()

    def reached(self, step: int) -> None:
        """Report the step that training has reached."""
        with self.changed:
            self.step = step
            self.changed.notify()

    def stop(self) -> None:
        """Stop downloading; pieces already requested still arrive."""
        with self.changed:
            self.stopped = True
            self.changed.notify()

    def run(self, first_step: int) -> None:
        """Prefetch shards step by step, at most `ahead` steps ahead of training."""
        step = first_step
        with ThreadPoolExecutor(self.cfg.fetchers) as pool:
            while True:
                # One lock for step and stop: otherwise a change between check and wait would be missed.
                with self.changed:
                    while not self.stopped and step > self.step + self.cfg.ahead:
                        self.changed.wait()
                    if self.stopped:
                        return
                # Finish the shards of one step before requesting the next step's: they are needed first.
                list(pool.map(self.fetch, shards_of(self.order, self.slots, step)))
                # Training may overtake this thread, because it reads samples of missing shards by range.
                step = max(step + 1, self.step)

    def fetch(self, shard: int) -> None:
        """Fetch one shard; store a StorageError in `failure`, because it may be temporary."""
        url = self.index.location(shard)
        is_local = "://" not in url  # a mixture may have both local and remote sets
        if self.stopped or is_local:
            return
        try:
            self.cache.path(url, self.index.shards[shard])
            self.failure = None
        except StorageError as error:
            self.failure = error
        except (DataError, OSError):
            return  # the reader raises this error when it needs the shard
