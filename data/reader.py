"""Raw bytes of samples out of shards: memory-mapped, checked against their digest at first read."""

from __future__ import annotations

import mmap
import os
import resource
from collections import OrderedDict
from dataclasses import replace
from hashlib import sha256

import numpy as np

from data.cache import Cache, CacheConfig, state_folder
from data.errors import DataError
from data.index import Index, digest_of
from data.tar import MAX_BYTES

MOST_OPEN = (
    4096  # shards that a process keeps mapped; a lane has two or three in use, or more if they are small
)


def unusable(index: Index) -> dict[int, str]:
    """Local shards that are missing or not of the size they were indexed with: what is wrong with each."""
    wrong = {}
    for number, shard in enumerate(index.shards):
        place = index.location(number)
        try:
            size = shard.bytes if "://" in place else os.stat(place).st_size
        except OSError as error:
            wrong[number] = f"{place}: {error.strerror}"
            continue
        if size != shard.bytes:
            wrong[number] = f"{place}: {size} bytes, the index says {shard.bytes}"
    return wrong


def without_unusable(index: Index) -> tuple[Index, list[str]]:
    """The index without its missing and short shards, under a digest of its own, and what is wrong with them."""
    wrong = unusable(index)
    kept = tuple(shard for number, shard in enumerate(index.shards) if number not in wrong)
    return replace(index, shards=kept, digest=digest_of(kept, index.class_counts)), list(wrong.values())


def check_sizes(index: Index) -> None:
    """Raise DataError naming every local shard that is missing or not of the size it was indexed with."""
    wrong = list(unusable(index).values())
    if wrong:
        more = [f"… and {len(wrong) - 10} more"] if len(wrong) > 10 else []
        raise DataError(
            "\n".join([f"{len(wrong)} of {len(index.shards)} shards cannot be used:", *wrong[:10], *more])
            + "\nrestore them, or run `python -m jobs index` on what is there"
        )


class Reader:
    """Gives (key, image bytes, label bytes) of any sample; keeps the last shards mapped."""

    def __init__(self, index: Index, *, verify: bool = True, cache: CacheConfig | None = None):
        self.index, self.verify, self.cache = index, verify, Cache(cache or CacheConfig())
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most_open = min(MOST_OPEN, max(8, files // 4))  # a mapped shard and its table hold a file each
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
        place, remote = self.index.location(shard), False
        if "://" in place:
            place, remote = str(self.cache.path(place, self.index.shards[shard])), True
        opened = map_shard(place, self.index.shards[shard].bytes), self.index.table(shard)
        if self.verify and not remote:  # the cache has verified what it fetched
            verify_once(opened[0], place, self.index.shards[shard].sha256)
        self._open[shard] = opened
        if len(self._open) > self.most_open:
            self._open.popitem(last=False)[1][0].close()
        return opened


def map_shard(place: str, size: int) -> mmap.mmap:
    """Map a local shard after comparing its size; raises DataError."""
    try:
        with open(place, "rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                raise DataError(f"{place}: {os.fstat(file.fileno()).st_size} bytes, the index says {size}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"{place}: cannot open the shard ({error.strerror}); restore it") from None


def verify_once(tar: mmap.mmap, place: str, expected: str) -> None:
    """Compare a shard's digest unless this node already did; raises DataError where it differs."""
    status = os.stat(place)
    mark = state_folder() / "verified" / f"{expected}-{status.st_dev}-{status.st_ino}-{status.st_mtime_ns}"
    if mark.exists():
        return
    if sha256(tar).hexdigest() != expected:
        raise DataError(
            f"{place}: its sha256 is not the one in the index: corrupt or replaced; restore or re-index it"
        )
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
