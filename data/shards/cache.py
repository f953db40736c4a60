"""Remote shards on local disk: fetched whole, once a node, checked, within a limit, ahead of the order."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TypeVar

import numpy as np

from data.errors import DataError, StorageError
from data.files import locked, state_folder, take_lock
from data.order import Mixture, Order
from data.shards.index import Index, Shard
from data.shards.remote import forget_credentials, read_range, redacted

Answer = TypeVar("Answer")
PIECE = 16 << 20  # bytes of one request: what a broken answer costs at most
ABANDONED_S = 3600  # a download that has not grown for so long is nobody's, and may go like an unused shard


@dataclass(frozen=True)
class CacheConfig:
    """Where remote shards are kept on a node, and how patient fetching is."""

    directory: str = ""  # absolute path; empty: in PATCHLINE_CACHE, or else in the user's cache folder
    limit_bytes: int = 200 << 30  # what a node keeps, besides what is being fetched
    attempts: int = 8  # to fetch one piece, without any progress between them
    backoff_s: float = 0.5  # before the next attempt; doubled each time, with full jitter (Brooker 2015), 30 s at most
    timeout_s: float = 30.0  # of silence, after which a request is given up
    ahead: int = 64  # steps whose shards are fetched before they are needed
    fetchers: int = 4  # downloads at once

    def __post_init__(self) -> None:
        if self.directory and not Path(self.directory).expanduser().is_absolute():  # workers live in other folders
            raise ValueError(f"cache.directory is {self.directory!r}, expected an absolute path")
        for name in ("limit_bytes", "attempts", "timeout_s", "fetchers", "backoff_s", "ahead"):
            low = 0 if name in ("backoff_s", "ahead") else 1e-9
            if getattr(self, name) < low:
                raise ValueError(
                    f"cache.{name} is {getattr(self, name)}, expected {'0 or more' if not low else 'more than 0'}"
                )


class Cache:
    """Gives the local path of a remote shard, fetching it if no process of this node has yet.

    Files are named by their digest and evicted by last use; one that is mapped stays readable when it goes.
    """

    def __init__(self, cfg: CacheConfig, stopped: Callable[[], bool] = bool):
        self.cfg, self.stopped = cfg, stopped  # nobody waits for what is being fetched any more
        self.progress: Callable[[], object] = bool  # called when a piece has come, here or to whom we wait for
        self.directory = Path(cfg.directory).expanduser() if cfg.directory else state_folder() / "shards"

    def path(self, url: str, shard: Shard) -> Path:
        """Raises StorageError where the storage does not answer or the cache takes nothing, DataError where it is
        another shard that the storage has."""
        path = self.directory / f"{shard.sha256}.tar"
        if not is_whole(path, shard):
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(
                    f"{self.directory}: cannot be made ({error.strerror}); name another cache.directory"
                ) from None
            with self.turn(path):
                if not is_whole(path, shard):
                    try:
                        self.fetch(url, shard, path)
                    except OSError as error:
                        raise StorageError(
                            f"{self.directory}: {error.strerror}; make room, lower cache.limit_bytes "
                            f"({self.cfg.limit_bytes}), name another cache.directory, or run again"
                        ) from None
        os.utime(path)  # last use
        return path

    @contextmanager
    def turn(self, path: Path) -> Iterator[None]:
        """Hold the lock on one shard; while another process fetches it, pass on that its file grows."""
        part, seen = path.with_suffix(".part"), -1
        with open(path.with_suffix(".lock"), "w") as file:
            while not take_lock(file.fileno(), Path(file.name), wait=False):
                if self.stopped():
                    raise StorageError(f"{path.name}: another process fetches it")
                time.sleep(0.1)
                with suppress(FileNotFoundError):
                    if (size := part.stat().st_size) != seen:
                        seen = size
                        self.progress()
            yield

    def fetch(self, url: str, shard: Shard, path: Path) -> None:
        """Download to `.part`, going on where it broke off; rename when size and digest are right."""
        part = path.with_suffix(".part")
        for _ in range(2):  # a digest can be wrong because of the transfer: try once more from the start
            self.make_room(shard.bytes)
            with open(part, "a+b") as file:
                file.seek(0)
                digest = file_digest(file, "sha256")
                while file.tell() < shard.bytes:
                    piece = self.read(url, file.tell(), min(file.tell() + PIECE, shard.bytes))
                    file.write(piece)
                    file.flush()
                    digest.update(piece)
                    self.progress()
                os.fsync(file.fileno())  # or a power cut may leave its name with nothing under it
            if digest.hexdigest() == shard.sha256:
                os.replace(part, path)
                return
            part.unlink()
        raise DataError(f"{redacted(url)}: its sha256 is not the one in the index; index it again")

    @contextmanager
    def lent(self, url: str, size: int) -> Iterator[IO[bytes]]:
        """A remote shard that no index knows yet, on local disk for as long as it is looked at, or we live."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.make_room(size)
        with TemporaryFile(dir=self.directory) as file:
            while file.tell() < size:
                file.write(self.read(url, file.tell(), min(file.tell() + PIECE, size)))
            file.flush()
            yield file

    def read(self, url: str, start: int, stop: int) -> bytes:
        """One piece, or its beginning."""
        return self.patiently(url, lambda: read_range(url, start, stop, self.cfg.timeout_s))[: stop - start]

    def patiently(self, url: str, ask: Callable[[], Answer]) -> Answer:
        """What the storage answers; patient with all but a missing file, a refused address and a missing client."""
        for attempt in range(self.cfg.attempts):
            if self.stopped():
                raise StorageError(f"{redacted(url)}: left where it was")
            try:
                return ask()
            except FileNotFoundError:
                raise DataError(f"{redacted(url)}: there is no such shard, or no such bucket") from None
            except DataError:
                raise
            except PermissionError as error:
                reason = type(error).__name__
                forget_credentials()
            except Exception as error:  # clients raise many kinds; none of their texts is safe to show
                reason = type(error).__name__
            if attempt == 2:  # by now somebody waits
                logging.getLogger(__name__).warning("%s: no answer (%s), asking again", redacted(url), reason)
            if attempt + 1 < self.cfg.attempts:
                time.sleep(random.uniform(0, min(30.0, self.cfg.backoff_s * 2**attempt)))
        denied = reason == "PermissionError" or "Credentials" in reason
        hint = "credentials come from the environment" if denied else "run again"
        raise StorageError(f"{redacted(url)}: no answer after {self.cfg.attempts} attempts, last {reason}; {hint}")

    def make_room(self, size: int) -> None:
        """Delete the longest unused shards until `size` more bytes are within the limit."""
        if size > self.cfg.limit_bytes:
            raise DataError(
                f"a shard of {size} bytes does not fit the cache's {self.cfg.limit_bytes}; "
                f"type data.cache.limit_bytes={size} or more, or pack smaller shards"
            )
        with locked(self.directory / "eviction.lock"):
            held = [*files(self.directory, "*.tar"), *files(self.directory, "*.part")]
            total = sum(status.st_size for status, _ in held) + size
            young = time.time() - ABANDONED_S
            held = [(status, path) for status, path in held if path.suffix == ".tar" or status.st_mtime < young]
            for status, path in sorted(held, key=lambda pair: pair[0].st_mtime_ns):
                if total <= self.cfg.limit_bytes:
                    break
                path.unlink(missing_ok=True)
                total -= status.st_size


def files(directory: Path, pattern: str) -> Iterator[tuple[os.stat_result, Path]]:
    """What is there now: others rename and delete meanwhile."""
    for path in directory.glob(pattern):
        with suppress(FileNotFoundError):
            yield path.stat(), path


def is_whole(path: Path, shard: Shard) -> bool:
    """Whether the cache has a shard; a file of another size is what a power cut left of it."""
    with suppress(FileNotFoundError):
        return path.stat().st_size == shard.bytes
    return False


def wanted(index: Index, order: Order | Mixture, slots: range, step: int, cfg: CacheConfig) -> tuple[int, int]:
    """(remote shards, their bytes) that some slots read from `step` to the last step that is fetched ahead."""
    steps = (order.batch(later)[1][slots.start : slots.stop] for later in range(step, step + cfg.ahead + 1))
    shards = set().union(*(np.unique(one).tolist() for one in steps))
    sizes = [index.shards[shard].bytes for shard in shards if "://" in index.location(shard)]
    return len(sizes), sum(sizes)


class Ahead:
    """Fetches, in the background, the shards that coming steps need; `reached(step)` moves the window."""

    def __init__(self, index: Index, order: Order | Mixture, slots: range, step: int, cfg: CacheConfig):
        self.index, self.order, self.slots, self.cfg = index, order, slots, cfg
        self.cache, self.step = Cache(cfg, lambda: self.stopped), step  # else the process waits for them to end
        self.changed = threading.Condition()
        self.stopped = False
        self.failure: StorageError | None = None  # why nothing arrives
        self.thread = threading.Thread(target=self.run, args=(step,), daemon=True)
        self.thread.start()

    def reached(self, step: int) -> None:
        with self.changed:
            self.step = step
            self.changed.notify()

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify()

    def run(self, step: int) -> None:
        with ThreadPoolExecutor(self.cfg.fetchers) as pool:
            while True:
                with self.changed:
                    while not self.stopped and step > self.step + self.cfg.ahead:
                        self.changed.wait()
                    if self.stopped:
                        return
                shards = self.order.batch(step)[1][self.slots.start : self.slots.stop]
                list(pool.map(self.fetch, np.unique(shards)))
                step += 1

    def fetch(self, shard: int) -> None:
        url = self.index.location(shard)
        if self.stopped or "://" not in url:  # a mixture may have sets here and sets elsewhere
            return
        try:
            self.cache.path(url, self.index.shards[shard])
            self.failure = None
        except StorageError as error:
            self.failure = error
        except (DataError, OSError):
            return  # whoever needs the shard meets and reports it
