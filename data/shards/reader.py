"""Raw bytes of samples out of shards: memory-mapped, and checked twice.

How a sample is read, in order:
1. the first time that this node reads a shard, its sha256 is compared with the one in the index (`verify_once`). A
   sample of a remote shard that is not here yet is read by range, where the loader wants that (`data.remote.ranges`);
2. its table is opened, and compared with its own sha256 in the index (`Index.table`);
3. the sample's bytes are copied out of the mapping, and the digest of this copy is compared with the one in the table:
   a file can rot or be overwritten later than 1. under an unchanged size and time;
4. where it differs, the copy of a remote shard is dropped from the cache and fetched once more; any other shard, and
   one that still differs, ends the run. Such a sample is not replaced: the shard that it is in cannot be trusted.
"""

from __future__ import annotations

import mmap
import os
import resource
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from data.errors import DataError, PatchlineError
from data.files import state_folder
from data.images.decode import MAX_BYTES
from data.index.index import Index
from data.index.joined import shortest
from data.index.shard import Shard
from data.index.tar import sample_digest
from data.remote.cache import Cache, CacheConfig
from data.remote.ranges import SMALLEST, Ranges, Span
from data.remote.urls import redacted

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
    for index in sets:
        for shard in index.shards:
            place = index.place_of(shard)
            problem = problem_of(place, shard)
            if problem:
                problems[place] = problem
    if not problems:
        return

    places: set[str] = set()  # of all shards; subsets of one set have the same
    for index in sets:
        places.update(map(index.place_of, index.shards))
    # A lost disk takes thousands of shards with it: the message names a few and counts the rest.
    lines = [f"{len(problems)} of {len(places)} shards cannot be used:"]
    for place in list(problems)[:MOST_LINES]:
        lines.append(f"{place}: {problems[place]}")
    if len(problems) > MOST_LINES:
        lines.append(f"… and {len(problems) - MOST_LINES} more")
    way_out = "restore them, or run `python -m jobs index` on what is there, which makes it another set"
    if any(index.origin is not None for index in sets):
        way_out += ", and `python -m jobs subset` of that; where folders were moved, move the subset's with its set's"
    # The option is given whole, with what it leaves out already, so that it can be typed as it stands.
    if option and len(problems) <= MOST_DROPPED:
        names = list(dropped)
        for place in problems:
            names.append(shortest(sets, place))
        way_out += f"; or train without them: '{option}=[{','.join(names)}]'"
    raise DataError("\n".join([*lines, way_out]))


def problem_of(place: str, shard: Shard) -> str:
    """Return what is wrong with a shard as far as its size tells, or ""; of a remote shard nothing is known yet."""
    is_left_out = shard.samples == 0 and shard.bytes == 0  # see `data.index.joined`
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


class Stored(NamedTuple):
    """The bytes of a sample, as they were read."""

    key: str
    image: bytes
    label: bytes
    expected: int  # digest in the table

    @property
    def is_intact(self) -> bool:
        """Whether these are the bytes that were indexed."""
        # An oversize image is refused whatever it holds, and was not read to its end.
        return len(self.image) > MAX_BYTES or sample_digest(self.image, self.label) == self.expected


class OpenShard(NamedTuple):
    """A shard in use: its bytes and its table, both mapped."""

    tar: mmap.mmap
    table: np.ndarray
    inode: int  # of the tar: tells whether the cache has another copy by now

    def stored(self, sample: int) -> Stored:
        """Copy a sample's bytes out of the mapping."""
        row = self.table[sample]
        span = span_of(row, "")
        image = self.tar[span.image : span.image + span.image_size]
        label = self.tar[span.label : span.label + span.label_size]
        return stored_of(row, image, label)


def span_of(row: np.void, url: str) -> Span:
    """Return where the bytes of a row of a table lie; of an image as many as the decoder takes, and one more."""
    image_size = min(int(row["image_size"]), MAX_BYTES + 1)
    return Span(url, int(row["image"]), image_size, int(row["label"]), int(row["label_size"]))


def stored_of(row: np.void, image: bytes, label: bytes) -> Stored:
    """Return the bytes of a row of a table, with what the table says of them."""
    return Stored(row["key"].decode("utf-8", "replace"), image, label, int(row["digest"]))


class ShardReader:
    """Gives (key, image bytes, label bytes) of any sample; keeps the last shards mapped.

    With `by_range`, a sample of a remote shard that is not here yet is read alone; otherwise its shard is waited for.
    """

    def __init__(self, index: Index, *, verify: bool = True, cache: CacheConfig | None = None, by_range: bool = False):
        self.index = index
        self.verify = verify
        self.cache = Cache(cache or CacheConfig())
        self._open: OrderedDict[int, OpenShard] = OrderedDict()  # by number, the longest unused first
        self.ranges = Ranges(self.cache) if by_range and index.remote else None
        self._tables: OrderedDict[int, np.ndarray] = OrderedDict()  # of shards that are read by range

    def __getstate__(self) -> dict[str, object]:
        """Return the reader without its open shards, for another process: a mapping cannot be sent to it."""
        return self.__dict__ | {"_open": OrderedDict(), "_tables": OrderedDict()}

    @property
    def given_up(self) -> str:
        """Why samples are no longer read by range; "" while they are, or never were."""
        return "" if self.ranges is None else self.ranges.given_up

    def stop(self) -> None:
        """Read nothing more by range, so that this process may end."""
        if self.ranges is not None:
            self.ranges.stop()

    def begin_again(self) -> None:
        """Read by range again, after a `stop`, what is read from now on; unless that was given up before."""
        if self.ranges is not None:
            given_up = self.ranges.given_up
            # A new object: the threads of the stopped one still read its `stopped`.
            self.ranges = Ranges(self.cache)
            self.ranges.given_up = given_up

    def expect(self, places: np.ndarray) -> None:
        """Begin to read those of the samples (b, 2: shard, sample) whose shards are not here, for `read` to take."""
        if self.ranges is None:
            return
        for shard, sample in places.tolist():
            if self._comes_by_range(shard):
                self.ranges.request((shard, sample), span_of(self._table(shard)[sample], self.index.location(shard)))

    def read(self, shard: int, sample: int) -> tuple[str, bytes, bytes]:
        """Return the key, encoded image and label of a sample; empty bytes where the shard has none.

        Raises DataError where the shard is missing, short, or not the one that was indexed, and where the sample is
        not what it was then.
        """
        stored = self._by_range(shard, sample) or self._shard(shard).stored(sample)
        if stored.is_intact:
            return stored.key, stored.image, stored.label
        place = self.index.location(shard)
        indexed = self.index.shards[shard]
        is_remote = "://" in place
        if is_remote:
            # The copy in the cache rotted or was overwritten; the storage may still have the shard as it was.
            dropped = self._open.pop(shard)
            self.cache.drop(indexed, dropped.inode)
            # Closed last: as long as it is open no other file can get its inode, by which `drop` knows it.
            dropped.tar.close()
            stored = self._shard(shard).stored(sample)
        if stored.is_intact:
            return stored.key, stored.image, stored.label

        way_out = "fetch it into the store again"
        if not is_remote:
            way_out = "restore it or pack it again"
            # The next process must verify the shard anew. The shard may be gone by now, or the mark.
            with suppress(OSError):
                mark_of(os.stat(place), indexed.sha256).unlink()
        digest = sample_digest(stored.image, stored.label)
        raise DataError(
            f"{redacted(place)}: sample {stored.key!r} is not what was indexed: digest {digest:016x}\n"
            f"  expected {stored.expected:016x}: the shard rotted or was overwritten after its first reading\n"
            f"  {way_out}, or train without it: data.drop=[{'/'.join(place.split('/')[-2:])}]"
        )

    def labels(self, shard: int) -> Iterator[bytes]:
        """Give the label of every sample of a shard, in order, without its image; raises DataError as `read` does.

        Only the shard as a whole is compared with the index, not each sample: its digest is of the image too.
        """
        opened = self._shard(shard)
        for row in opened.table:
            start = int(row["label"])
            yield opened.tar[start : start + int(row["label_size"])]

    def _comes_by_range(self, number: int) -> bool:
        """Return whether samples of this shard are read by range: until it is here."""
        if self.ranges is None or self.ranges.given_up or self.ranges.stopped or number in self._open:
            return False
        shard = self.index.shards[number]
        is_worth_it = "://" in self.index.location(number) and shard.bytes > SMALLEST
        return is_worth_it and not self.cache.has(shard)

    def _by_range(self, shard: int, sample: int) -> Stored | None:
        """Return a sample whose shard is not here; None where the shard is to be used, or to be waited for."""
        if self.ranges is None:
            return None
        is_asked_for = (shard, sample) in self.ranges.requested
        if not is_asked_for and not self._comes_by_range(shard):
            return None
        row = self._table(shard)[sample]
        place = self.index.location(shard)
        try:
            image, label = self.ranges.take((shard, sample), span_of(row, place), self.cache.progress)
        except PatchlineError as error:
            if self.ranges.stopped:  # nobody waits for the whole shard either
                raise
            self.ranges.give_up(place, str(error).splitlines()[0])
            return None
        self.cache.progress()
        stored = stored_of(row, image, label)
        if not stored.is_intact:
            self.ranges.give_up(place, f"sample {stored.key!r} is not what was indexed")
            return None
        return stored

    def _table(self, number: int) -> np.ndarray:
        """Return the table of a shard that is not here."""
        if number not in self._tables:
            self._tables[number] = self.index.table(number)
            if len(self._tables) > most_open():
                self._tables.popitem(last=False)
        return self._tables[number]

    def _shard(self, number: int) -> OpenShard:
        """Return a shard that is mapped, opening it if need be."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        shard = self.index.shards[number]
        place = self.index.location(number)
        is_remote = "://" in place
        if is_remote:
            opened = self.cache.opened(place, shard)
        else:
            try:
                opened = open(place, "rb")  # noqa: SIM115 (closed by the `with` below)
            except OSError as error:
                raise DataError(f"{place}: cannot open the shard ({error.strerror}); restore it") from None
        with opened as file:
            # Of the open file, not of its name, which may be another file's by now.
            status = os.fstat(file.fileno())
            tar = map_shard(file, status, place, shard.bytes)
        if self.verify and not is_remote:  # the cache has verified what it fetched
            verify_once(tar, status, place, shard.sha256)
        table = self._tables.pop(number, None)
        if table is None:
            table = self.index.table(number)
        self._open[number] = OpenShard(tar, table, status.st_ino)
        if len(self._open) > most_open():
            _, longest_unused = self._open.popitem(last=False)
            longest_unused.tar.close()
        return self._open[number]


def most_open() -> int:
    """Return how many shards to keep open: each holds two files, itself and its table, of those that we may have."""
    # With two files a shard, a quarter leaves half of the files for everything else.
    files_allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(MOST_OPEN, max(8, files_allowed // 4))


def map_shard(file: BinaryIO, status: os.stat_result, place: str, expected_size: int) -> mmap.mmap:
    """Map an open shard after comparing its size in bytes; raises DataError."""
    if status.st_size != expected_size:
        raise DataError(
            f"{place}: {status.st_size} bytes, the index says {expected_size}; restore it, or index it again"
        )
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def verify_once(tar: mmap.mmap, status: os.stat_result, place: str, expected: str) -> None:
    """Compare a shard's sha256 unless this node already did; raises DataError where it differs."""
    mark = mark_of(status, expected)
    if mark.exists():
        return
    if sha256(tar).hexdigest() != expected:
        # The end of its path, by which `data.drop` nearly always knows a shard.
        short_name = "/".join(place.split("/")[-2:])
        raise DataError(
            f"{place}: its sha256 is not the one in the index: corrupt or replaced; "
            f"restore it, index it again, or train without it: data.drop=[{short_name}]"
        )
    # Without a mark, say on a full disk, the next process looks for itself.
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def mark_of(status: os.stat_result, expected: str) -> Path:
    """Return the file that says that this node has verified a shard.

    It names the very file: one that is replaced or written again is verified again.
    """
    return state_folder() / "verified" / f"{expected}-{status.st_dev}-{status.st_ino}-{status.st_mtime_ns}"
