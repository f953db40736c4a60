"""Raw bytes of samples out of shards: memory-mapped, checked against their digest at first read."""

from __future__ import annotations

import mmap
import os
import resource
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from typing import BinaryIO, NamedTuple

import numpy as np

from data.errors import DataError
from data.files import state_folder
from data.images.decode import MAX_BYTES
from data.shards.cache import Cache, CacheConfig
from data.shards.index import Index, Shard, shortest

MOST_OPEN = 4096  # shards that a process keeps mapped; a lane has two or three in use, or more if they are small
MOST_LINES = 10  # unusable shards that an error names with their problems
MOST_DROPPED = 100  # shards that an error offers to leave out; with more missing, something else is wrong


# --------------------------------------------------------------------------------------- before a run


def check_sizes(sets: Sequence[Index], dropped: Sequence[str] = (), option: str = "") -> None:
    """Raise DataError naming every local shard that is missing or not of the size it was indexed with.

    `option` is the key of the config that leaves shards out, "" where there is none; `dropped` are those that it
    leaves out already.
    """
    problems: dict[str, str] = {}  # path → what is wrong with it
    shards = 0
    for index in sets:
        shards += len(index.shards)
        for number, shard in enumerate(index.shards):
            place = index.location(number)
            problem = problem_of(place, shard)
            if problem:
                problems[place] = problem
    if not problems:
        return

    # A lost disk takes thousands of shards with it: the message names a few and counts the rest.
    lines = [f"{len(problems)} of {shards} shards cannot be used:"]
    for place in list(problems)[:MOST_LINES]:
        lines.append(f"{place}: {problems[place]}")
    if len(problems) > MOST_LINES:
        lines.append(f"… and {len(problems) - MOST_LINES} more")
    way_out = "restore them, or run `python -m jobs index` on what is there, which makes it another set"
    # The option is given whole, with what it leaves out already, so that it can be typed as it stands.
    if option and len(problems) <= MOST_DROPPED:
        names = list(dropped)
        for place in problems:
            names.append(shortest(sets, place))
        way_out += f"; or train without them: '{option}=[{','.join(names)}]'"
    raise DataError("\n".join([*lines, way_out]))


def problem_of(place: str, shard: Shard) -> str:
    """What is wrong with a shard as far as its size tells, or ""; of a remote shard nothing is known yet."""
    is_left_out = shard.samples == 0 and shard.bytes == 0  # see `index.without`
    if is_left_out or "://" in place:
        return ""
    try:
        size = os.stat(place).st_size
    except OSError as error:
        return error.strerror or "unreadable"
    if size != shard.bytes:
        return f"{size} bytes, the index says {shard.bytes}"
    return ""


# --------------------------------------------------------------------------------------- during a run


class OpenShard(NamedTuple):
    """A shard in use: its bytes and its table, both mapped."""

    tar: mmap.mmap
    table: np.ndarray


class Reader:
    """Gives (key, image bytes, label bytes) of any sample; keeps the last shards mapped."""

    def __init__(self, index: Index, *, verify: bool = True, cache: CacheConfig | None = None):
        self.index = index
        self.verify = verify
        self.cache = Cache(cache or CacheConfig())
        self._open: OrderedDict[int, OpenShard] = OrderedDict()  # by number, the longest unused first

    def __getstate__(self) -> dict[str, object]:
        """The reader without its open shards, for another process: a mapping cannot be sent to it."""
        return self.__dict__ | {"_open": OrderedDict()}

    def read(self, shard: int, sample: int) -> tuple[str, bytes, bytes]:
        """The key, encoded image and label of a sample; empty bytes where the shard has none.

        Raises DataError where the shard is missing, short, or not the one that was indexed.
        """
        tar, table = self._shard(shard)
        row = table[sample]
        image = int(row["image"])
        label = int(row["label"])
        # The decoder refuses more: what is too large is not even copied.
        image_size = min(int(row["image_size"]), MAX_BYTES + 1)
        label_size = int(row["label_size"])
        key = row["key"].decode("utf-8", "replace")
        return key, tar[image : image + image_size], tar[label : label + label_size]

    def _shard(self, number: int) -> OpenShard:
        """A shard that is mapped, opening it if need be."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        shard = self.index.shards[number]
        place = self.index.location(number)
        is_remote = "://" in place
        with self._fetched(place, shard) if is_remote else open_local(place) as file:
            tar = map_shard(file, place, shard.bytes)
        # The cache has verified what it fetched.
        if self.verify and not is_remote:
            verify_once(tar, place, shard.sha256)
        self._open[number] = OpenShard(tar, self.index.table(number))
        if len(self._open) > most_open():
            _, longest_unused = self._open.popitem(last=False)
            longest_unused.tar.close()
        return self._open[number]

    def _fetched(self, url: str, shard: Shard) -> BinaryIO:
        """Open a remote shard in the cache; one that goes before it is open is fetched again."""
        while True:
            path = self.cache.path(url, shard)
            with suppress(FileNotFoundError):
                return open(path, "rb")


def most_open() -> int:
    """Shards to keep open: each holds two files, itself and its table, of those that this process may have."""
    # With two files a shard, a quarter leaves half of the files for everything else.
    files_allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(MOST_OPEN, max(8, files_allowed // 4))


def open_local(place: str) -> BinaryIO:
    """Open a shard of this machine; raises DataError where it cannot be."""
    try:
        return open(place, "rb")
    except OSError as error:
        raise DataError(f"{place}: cannot open the shard ({error.strerror}); restore it") from None


def map_shard(file: BinaryIO, place: str, expected_size: int) -> mmap.mmap:
    """Map a shard after comparing its size in bytes; raises DataError."""
    # Of the open file, not of its name, which may be another file's by now.
    size = os.fstat(file.fileno()).st_size
    if size != expected_size:
        raise DataError(f"{place}: {size} bytes, the index says {expected_size}; restore it, or index it again")
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def verify_once(tar: mmap.mmap, place: str, expected: str) -> None:
    """Compare a shard's sha256 unless this node already did; raises DataError where it differs."""
    # The mark names the very file: one that is replaced or written again is verified again.
    status = os.stat(place)
    mark = state_folder() / "verified" / f"{expected}-{status.st_dev}-{status.st_ino}-{status.st_mtime_ns}"
    # A shard is hashed once a node, not once a process: the hash reads all of it.
    if mark.exists():
        return
    if sha256(tar).hexdigest() != expected:
        name = "/".join(place.split("/")[-2:])
        raise DataError(
            f"{place}: its sha256 is not the one in the index: corrupt or replaced; "
            f"restore it, index it again, or train without it: data.drop=[{name}]"
        )
    # Without a mark, say on a full disk, the next process looks for itself.
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
