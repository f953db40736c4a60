"""Raw bytes of samples out of shards: memory-mapped, checked against their digest at first read."""

from __future__ import annotations

import mmap
import os
import resource
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from typing import BinaryIO

import numpy as np

from data.errors import DataError
from data.files import state_folder
from data.images.decode import MAX_BYTES
from data.shards.cache import Cache, CacheConfig
from data.shards.index import Index, Shard, shortest

MOST_OPEN = 4096  # shards that a process keeps mapped; a lane has two or three in use, or more if they are small


def check_sizes(sets: Sequence[Index], dropped: Sequence[str] = (), option: str = "") -> None:
    """Raise DataError naming every local shard that is missing or not of the size it was indexed with.

    `option` is what leaves shards out, `dropped` those that it leaves out already; "" where none can be.
    """
    wrong: dict[str, str] = {}
    for index, (number, shard) in ((one, found) for one in sets for found in enumerate(one.shards)):
        place = index.location(number)
        if not shard.samples + shard.bytes:  # left out, see `index.without`
            continue
        try:
            size = shard.bytes if "://" in place else os.stat(place).st_size
        except OSError as error:
            wrong[place] = error.strerror or "unreadable"
            continue
        if size != shard.bytes:
            wrong[place] = f"{size} bytes, the index says {shard.bytes}"
    if wrong:
        shards = sum(len(one.shards) for one in sets)
        lines = [f"{place}: {problem}" for place, problem in list(wrong.items())[:10]]
        more = [f"… and {len(wrong) - 10} more"] if len(wrong) > 10 else []
        way_out = "restore them, or run `python -m jobs index` on what is there, which makes it another set"
        if option and len(wrong) <= 100:
            names = ",".join([*dropped, *(shortest(sets, place) for place in wrong)])
            way_out += f"; or train without them: '{option}=[{names}]'"
        raise DataError("\n".join([f"{len(wrong)} of {shards} shards cannot be used:", *lines, *more, way_out]))


class Reader:
    """Gives (key, image bytes, label bytes) of any sample; keeps the last shards mapped."""

    def __init__(self, index: Index, *, verify: bool = True, cache: CacheConfig | None = None):
        self.index, self.verify, self.cache = index, verify, Cache(cache or CacheConfig())
        self._open: OrderedDict[int, tuple[mmap.mmap, np.ndarray]] = OrderedDict()

    def __getstate__(self) -> dict:
        """Open shards stay where they are when a reader goes to another process."""
        return self.__dict__ | {"_open": OrderedDict()}

    def read(self, shard: int, sample: int) -> tuple[str, bytes, bytes]:
        """The key, encoded image and label of a sample; empty bytes where the shard has none.

        Raises DataError where the shard is missing, short, or not the one that was indexed.
        """
        tar, table = self._shard(shard)
        row = table[sample]
        image, label = int(row["image"]), int(row["label"])
        return (
            row["key"].decode("utf-8", "replace"),
            tar[image : image + min(int(row["image_size"]), MAX_BYTES + 1)],  # the decoder refuses more
            tar[label : label + int(row["label_size"])],
        )

    def _shard(self, shard: int) -> tuple[mmap.mmap, np.ndarray]:
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        known, place = self.index.shards[shard], self.index.location(shard)
        remote = "://" in place
        with self._find(place, known) if remote else open_local(place) as file:
            tar = map_shard(file, place, known.bytes)
        if self.verify and not remote:  # the cache has verified what it fetched
            verify_once(tar, place, known.sha256)
        self._open[shard] = tar, self.index.table(shard)
        if len(self._open) > most_open():
            self._open.popitem(last=False)[1][0].close()
        return self._open[shard]

    def _find(self, url: str, known: Shard) -> BinaryIO:
        """Open a remote shard in the cache; one that goes before it is open is fetched again."""
        while True:
            path = self.cache.path(url, known)
            with suppress(FileNotFoundError):
                return open(path, "rb")


def most_open() -> int:
    """Shards to keep open: each holds two files, itself and its table."""
    return min(MOST_OPEN, max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


def open_local(place: str) -> BinaryIO:
    try:
        return open(place, "rb")
    except OSError as error:
        raise DataError(f"{place}: cannot open the shard ({error.strerror}); restore it") from None


def map_shard(file: BinaryIO, place: str, size: int) -> mmap.mmap:
    """Map a shard after comparing its size; raises DataError."""
    found = os.fstat(file.fileno()).st_size
    if found != size:
        raise DataError(f"{place}: {found} bytes, the index says {size}; restore it, or index it again")
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def verify_once(tar: mmap.mmap, place: str, expected: str) -> None:
    """Compare a shard's digest unless this node already did; raises DataError where it differs."""
    status = os.stat(place)
    mark = state_folder() / "verified" / f"{expected}-{status.st_dev}-{status.st_ino}-{status.st_mtime_ns}"
    if mark.exists():
        return
    if sha256(tar).hexdigest() != expected:
        raise DataError(
            f"{place}: its sha256 is not the one in the index: corrupt or replaced; "
            f"restore it, index it again, or train without it: data.drop=[{'/'.join(place.split('/')[-2:])}]"
        )
    with suppress(OSError):  # without a mark the next process looks for itself
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
