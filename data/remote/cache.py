"""Remote shards on local disk: fetched whole, once a node, checked, within a limit, ahead of the step.

How a shard gets here, in order (`Cache.path`):
1. a file named by the shard's sha256 and of its size is the shard: nothing is asked of the storage;
2. otherwise this process takes the lock of that shard; of all processes on a node, one fetches and the others wait;
3. `make_room` deletes the longest unused shards until the new one is within the limit;
4. `fetch` appends pieces of 16 MiB to `<sha256>.part`, and begins where an earlier try broke off;
5. a piece that does not come is asked for again, after a random part of a time that doubles (`patiently`);
6. when the sha256 is right, the file gets its final name; otherwise it is fetched once more from the start.

`Ahead` does this in the background for the steps to come, so that a step finds its shards here. The order says which
shards the slots of a step need (`shards_of`); a thread fetches those of one step after the other, `fetchers` at a time,
and never more than `CacheConfig.ahead` steps before training, which says where it is (`Ahead.reached`).

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
from io import BufferedRandom, BufferedReader
from pathlib import Path
from tempfile import TemporaryFile

from data.checks import redacted
from data.errors import DataError, StorageError
from data.files import locked, state_folder, take_lock
from data.index.index import Index
from data.index.shard import Shard
from data.order import Mixture, Order
from data.remote.config import PIECE, CacheConfig, shards_of
from data.remote.urls import Answer, Retry, never, read_range

ABANDONED_S = 3600  # a download that has not grown for so long is nobody's, and may go like an unused shard


def no_progress() -> None:
    """Ignore progress: the default of `Cache.progress`."""


class Cache:
    """Gives the local path of a remote shard, fetching it if no process of this node has yet.

    Files are named by their digest and evicted by last use; one that is mapped stays readable when it goes.
    `stopped` says that nobody waits any more for what is being fetched. `progress` is called whenever a piece has
    come, to this process or to the one that we wait for.
    """

    def __init__(self, cfg: CacheConfig, stopped: Callable[[], bool] = never):
        self.cfg = cfg
        self.stopped = stopped
        self.progress: Callable[[], object] = no_progress
        self.directory = state_folder() / "shards"
        if cfg.directory:
            self.directory = Path(cfg.directory).expanduser()

    def has(self, shard: Shard) -> bool:
        """Return whether a remote shard is here."""
        # A file of another size is what a power cut left of it.
        return size_or_none(self.directory / f"{shard.sha256}.tar") == shard.bytes

    def path(self, url: str, shard: Shard) -> Path:
        """Return the local file of a remote shard.

        Raises StorageError where the storage does not answer or the cache takes nothing, DataError where it is
        another shard that the storage has.
        """
        path = self.directory / f"{shard.sha256}.tar"
        if not self.has(shard):
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(
                    f"{self.directory}: cannot be made ({error.strerror}); name another cache.directory"
                ) from None
            with self.turn(path):
                # Another process may have fetched it while we waited for our turn.
                if not self.has(shard):
                    try:
                        self.fetch(url, shard, path)
                    # Of the local disk: errors of the storage are a StorageError by now.
                    except OSError as error:
                        raise StorageError(
                            f"{self.directory}: {error.strerror}; make room, lower cache.limit_bytes "
                            f"({self.cfg.limit_bytes}), name another cache.directory, or run again"
                        ) from None
        # The time of last use, by which shards are evicted: the mtime, because many mounts do not keep the atime.
        # Another process may have evicted it by now, which `opened` notices.
        with suppress(FileNotFoundError):
            os.utime(path)
        return path

    def opened(self, url: str, shard: Shard) -> BufferedReader:
        """Open a remote shard's local file; one that goes before it is open is fetched again. Raises as `path` does."""
        while True:
            path = self.path(url, shard)
            with suppress(FileNotFoundError):
                return open(path, "rb")

    def drop(self, shard: Shard, inode: int) -> None:
        """Delete the copy of a shard that has this inode; a newer one, which another process fetched, stays."""
        path = self.directory / f"{shard.sha256}.tar"
        with self.turn(path), suppress(FileNotFoundError):
            if path.stat().st_ino == inode:
                path.unlink()

    @contextmanager
    def turn(self, path: Path) -> Iterator[None]:
        """Hold the lock on one shard; while another process fetches it, pass on that its file grows."""
        # The lock is asked for again and again instead of waited for: a blocked call could neither be stopped nor
        # tell the loader that the shard is growing.
        part = path.with_suffix(".part")
        known_size = -1
        with open(path.with_suffix(".lock"), "w") as file:
            while not take_lock(file.fileno(), Path(file.name), wait=False):
                if self.stopped():
                    raise StorageError(f"{path.name}: another process fetches it")
                time.sleep(0.1)
                size = size_or_none(part)
                if size is not None and size != known_size:
                    known_size = size
                    self.progress()
            yield

    # ------------------------------------------------------------------------------------------ fetching

    def fetch(self, url: str, shard: Shard, path: Path) -> None:
        """Download to `.part`, going on where it broke off; rename when size and digest are right."""
        part = path.with_suffix(".part")
        # A digest can be wrong because of the transfer: it is tried once more from the start.
        for _ in range(2):
            self.make_room(shard.bytes)
            with open(part, "a+b") as file:
                # What an earlier try left is read once, for its digest; that leaves the position at its end.
                file.seek(0)
                digest = file_digest(file, "sha256")
                while file.tell() < shard.bytes:
                    piece = self.read(url, file.tell(), min(file.tell() + PIECE, shard.bytes))
                    file.write(piece)
                    file.flush()
                    digest.update(piece)
                    self.progress()
                # A power cut might otherwise leave the final name with nothing under it.
                os.fsync(file.fileno())
            if digest.hexdigest() == shard.sha256:
                os.replace(part, path)
                return
            part.unlink()
        raise DataError(f"{redacted(url)}: its sha256 is not the one in the index; index it again")

    @contextmanager
    def lent(self, url: str, size: int) -> Iterator[BufferedRandom]:
        """Give the block a local file with a remote shard that is in no index yet; the file goes when it ends."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.make_room(size)
        # A file without a name: the system removes it with this process, however that ends.
        with TemporaryFile(dir=self.directory) as file:
            while file.tell() < size:
                file.write(self.read(url, file.tell(), min(file.tell() + PIECE, size)))
            file.flush()
            yield file

    def read(self, url: str, start: int, stop: int) -> bytes:
        """Return bytes start … stop−1 of a URL, or the first of them."""
        return self.patiently(url, partial(read_range, url, start, stop, self.cfg.timeout_s))

    def patiently(self, url: str, ask: Callable[[], Answer]) -> Answer:
        """Return what the storage answers, asked again as `Retry` does.

        Raises DataError for a missing file, a refused address and a missing client; StorageError when `attempts` were
        in vain or nobody waits any more.
        """
        retry = Retry(self.cfg.attempts, self.cfg.backoff_s, self.stopped)
        try:
            return retry.patiently(redacted(url), ask)
        except FileNotFoundError:
            raise DataError(f"{redacted(url)}: there is no such shard, or no such bucket") from None

    # ------------------------------------------------------------------------------------------ eviction

    def make_room(self, size: int) -> None:
        """Delete the longest unused shards until `size` more bytes are within the limit.

        Raises DataError where a shard alone is larger than the limit.
        """
        if size > self.cfg.limit_bytes:
            raise DataError(
                f"a shard of {size} bytes does not fit the cache's {self.cfg.limit_bytes}; "
                f"type data.cache.limit_bytes={size} or more, or pack smaller shards"
            )
        with locked(self.directory / "eviction.lock"):
            # A download at work counts, but is left alone; one that stopped growing goes like a shard.
            abandoned_since_ns = time.time_ns() - ABANDONED_S * 10**9
            total = size
            deletable = []  # (time of last use, bytes, path)
            for path in self.directory.iterdir():
                if path.suffix not in (".tar", ".part"):
                    continue
                # Another process may delete it meanwhile.
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
    """Return bytes of a file, or None where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


# ------------------------------------------------------------------------------------------ ahead of the step


class Ahead:
    """Fetches, in the background, the shards that coming steps need; `reached(step)` moves the window."""

    def __init__(self, index: Index, order: Order | Mixture, slots: range, step: int, cfg: CacheConfig):
        self.index = index
        self.order = order
        self.slots = slots
        self.cfg = cfg
        self.step = step  # that training has reached
        self.changed = threading.Condition()  # of step or stopped
        self.stopped = False
        self.failure: StorageError | None = None  # why nothing arrives
        # The cache is told of our end, else the process would wait for its downloads to end.
        self.cache = Cache(cfg, lambda: self.stopped)
        self.thread = threading.Thread(target=self.run, args=(step,), daemon=True)
        self.thread.start()

    def reached(self, step: int) -> None:
        """Say which step training has reached."""
        with self.changed:
            self.step = step
            self.changed.notify()

    def stop(self) -> None:
        """Fetch nothing more; a piece that is on its way still arrives."""
        with self.changed:
            self.stopped = True
            self.changed.notify()

    def run(self, first_step: int) -> None:
        """Fetch the shards of one step after the other, never more than `ahead` steps before training."""
        step = first_step
        with ThreadPoolExecutor(self.cfg.fetchers) as pool:
            while True:
                # One lock for step and stop: a change between the check and the wait would otherwise be missed.
                with self.changed:
                    while not self.stopped and step > self.step + self.cfg.ahead:
                        self.changed.wait()
                    if self.stopped:
                        return
                # The shards of one step are waited for before the next step's are asked for: they are needed first.
                list(pool.map(self.fetch, shards_of(self.order, self.slots, step)))
                # Training does not wait for shards whose samples it reads by range: it may be ahead of us.
                step = max(step + 1, self.step)

    def fetch(self, shard: int) -> None:
        """Fetch one shard; a failure is kept for the loader to raise, as it may be over before the shard is needed."""
        url = self.index.location(shard)
        is_here = "://" not in url  # a mixture may have sets here and sets elsewhere
        if self.stopped or is_here:
            return
        try:
            self.cache.path(url, self.index.shards[shard])
            self.failure = None
        except StorageError as error:
            self.failure = error
        except (DataError, OSError):
            return  # the reader that needs the shard meets and reports it
