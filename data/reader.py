"""Read samples from memory-mapped shards, and verify them against the index.

How a sample is read, in order:
1. When a node first reads a shard, the shard's sha256 is compared with the index. Until a remote shard has arrived,
   its samples are read by byte range, if the loader requests it (`data.remote.ranges`).
2. The shard's table is opened and compared with its own sha256 in the index (`Index.table`).
3. The sample's bytes are copied out of the mapping, and the digest of the copy is compared with the table: after step
   1, a file can decay or be overwritten without a change of size or mtime. A label read without its image has a
   separate digest.
4. If the digest differs, the cached copy of a remote shard is dropped and downloaded once more. A local shard, or a
   second difference, ends the run. The sample is not replaced, because its whole shard cannot be trusted.
"""

from __future__ import annotations

import mmap
import os
import resource
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from data.checks import redacted
from data.errors import DataError, PatchlineError
from data.files import state_folder
from data.images.decode import MAX_BYTES, BadImage
from data.index.index import Index, shards_called
from data.index.names import parse_labels
from data.index.shard import SampleRow, label_digest, sample_digest
from data.remote.config import SMALLEST, CacheConfig

if TYPE_CHECKING:
    from data.remote.cache import Cache
    from data.remote.ranges import Ranges

MAX_OPEN = 4096  # shards that a process keeps mapped; a lane uses two or three, or more if they are small
MAX_LINES = 10  # unusable shards that an error lists individually
MAX_DROPPED = 100  # shards that an error offers to exclude; if more are missing, something else is wrong


# --------------------------------------------------------------------------------------- checks before a run


def unusable_shards(index: Index) -> dict[str, str]:
    """Return {path: problem} for local shards that are missing or of the wrong size; remote shards are not checked."""
    problems: dict[str, str] = {}
    for shard in index.shards:
        place = index.location(shard)
        is_excluded = shard.samples == 0 and shard.bytes == 0  # see `data.index.index.exclude`
        if is_excluded or "://" in place:
            continue
        try:
            size = os.stat(place).st_size
        except OSError as error:
            problems[place] = error.strerror or "unreadable"
            continue
        if size != shard.bytes:
            problems[place] = f"found {size} bytes, but the index lists {shard.bytes}"
    return problems


def check_sizes(sets: Sequence[Index], dropped: Sequence[str] = (), option: str = "") -> None:
    """Raise DataError listing the local shards that do not exist with the size in the index.

    `option` is the config key that excludes shards, or ""; `dropped` are the shards that it already excludes.
    """
    problems: dict[str, str] = {}  # path → problem
    for index in sets:
        problems |= unusable_shards(index)
    if not problems:
        return

    places: set[str] = set()  # paths of all shards; subsets of a set share them
    for index in sets:
        places.update(map(index.location, index.shards))
    # A failed disk may affect thousands of shards: list a few and count the rest. The first one goes into the first
    # line, because `status` shows only that.
    named = [f"{place}: {problem}" for place, problem in problems.items()]
    lines = [f"{len(problems)} of {len(places)} shards cannot be used: {named[0]}"]
    for problem in named[1:MAX_LINES]:
        lines.append(f"  {problem}")
    if len(problems) > MAX_LINES:
        lines.append(f"  … and {len(problems) - MAX_LINES} more")
    remedy = "  restore them, or run `python -m jobs index` on the remaining tars, which makes a different set"
    if any(index.origin is not None for index in sets):
        remedy += ", and `python -m jobs subset` of it; if you moved folders, move a subset and its parent together"
    if len(problems) == len(places):
        remedy += "\n  a pack stage can pack its shards again: delete its done.json, and run its recipe again"
    # Print the complete option, including already excluded shards, so that the user can copy it.
    elif option and len(problems) <= MAX_DROPPED:
        names = list(dropped)
        for place in problems:
            # The shortest end of its path that identifies it.
            name = place
            parts = place.split("/")
            for count in range(1, len(parts)):
                end = "/".join(parts[-count:])
                if len(shards_called(end, sets)) == 1:
                    name = end
                    break
            names.append(name)
        remedy += f"\n  or train without them: '{option}=[{','.join(names)}]'"
    raise DataError("\n".join([*lines, remedy]))


# --------------------------------------------------------------------------------------- reading during a run


def read_labels(raw: bytes, index: Index, most: int) -> tuple[int, ...]:
    """Parse the label bytes of a sample into at most `most` class ids that exist in the index.

    A repeated id is returned once. Raises BadImage with a short reason, as for a broken image. Training, evaluation and
    the doctor all use this function, so they accept the same labels.
    """
    try:
        labels = parse_labels(raw, index.ids)
    except ValueError:
        raise BadImage("no label") from None
    if max(labels) >= index.classes:
        raise BadImage(f"label not below {index.classes}")
    if len(labels) > most:
        raise BadImage(f"more labels than data.max_labels={most}")
    # Otherwise the accuracy of a class would count the sample twice.
    return tuple(dict.fromkeys(labels))


class OpenShard(NamedTuple):
    """A memory-mapped shard."""

    tar: mmap.mmap
    inode: int  # used to recognise a newer copy in the cache


class ShardReader:
    """Reads any sample as (key, image bytes, label bytes), and keeps recently used shards mapped.

    With `by_range`, samples of missing remote shards are read individually; otherwise reading waits for the shard.
    """

    def __init__(self, index: Index, *, verify: bool = True, cache: CacheConfig | None = None, by_range: bool = False):
        self.index = index
        self.verify = verify
        self.cache_config = cache or CacheConfig()
        # By shard number, least recently used first.
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._tables: OrderedDict[int, np.ndarray] = OrderedDict()
        self.ranges: Ranges | None = self.new_ranges() if by_range and index.remote else None

    def __getstate__(self) -> dict[str, object]:
        """Return the state to pickle, without the open shards, because memory mappings cannot be pickled."""
        return self.__dict__ | {"_open": OrderedDict(), "_tables": OrderedDict()}

    @cached_property
    def cache(self) -> Cache:
        """The cache of remote shards; created on first use, because local shards need no object-store client."""
        from data.remote.cache import Cache

        return Cache(self.cache_config)

    def new_ranges(self) -> Ranges:
        """Return a reader of byte ranges."""
        from data.remote.ranges import Ranges

        return Ranges(self.cache)

    @property
    def given_up(self) -> str:
        """The reason why byte-range reads have stopped; "" if they have not stopped, or were never used."""
        return "" if self.ranges is None else self.ranges.given_up

    def stop(self) -> None:
        """Stop reading by range, so that this process can exit."""
        if self.ranges is not None:
            self.ranges.stop()

    def resume(self) -> None:
        """Resume reading by range after `stop`, unless an error has stopped range reads."""
        if self.ranges is not None:
            given_up = self.ranges.given_up
            # A new object, because threads of the stopped one still check its `stopped`.
            self.ranges = self.new_ranges()
            self.ranges.given_up = given_up

    def expect(self, places: np.ndarray) -> None:
        """Start range reads of the samples (b, 2: shard, sample) whose shards are missing, for later `read` calls."""
        if self.ranges is None:
            return
        for shard, sample in places.tolist():
            if self._comes_by_range(shard):
                _, row = self._row(shard, sample)
                self.ranges.request((shard, sample), self.index.location(shard), row)

    def read(self, shard: int, sample: int) -> tuple[str, bytes, bytes]:
        """Return the key, encoded image and label of a sample; empty bytes if it lacks an image or label.

        Raises DataError if the shard is missing, truncated or replaced, or the sample differs from the index.
        """
        content = self._by_range(shard, sample) or self._copied(shard, sample)
        entry, row = self._row(shard, sample)
        key = row.key.decode("utf-8", "replace")
        if is_intact(entry, *content):
            return key, *content
        place = self.index.location(shard)
        indexed = self.index.shards[shard]
        is_remote = "://" in place
        if is_remote:
            # The cached copy has decayed or was overwritten; the storage may still have the correct shard.
            dropped = self._open.pop(shard)
            self.cache.drop(indexed, dropped.inode)
            # Close the file last: while it is open, no new file can get its inode, which `drop` compares.
            dropped.tar.close()
            content = self._copied(shard, sample)
        if is_intact(entry, *content):
            return key, *content

        remedy = "upload a correct copy to the store"
        if not is_remote:
            remedy = "restore it or pack it again"
            # Delete the mark, so that the next process verifies the shard. The shard or the mark may be gone.
            with suppress(OSError):
                mark_of(os.stat(place), indexed.sha256).unlink()
        raise DataError(
            f"{redacted(place)}: sample {key!r} differs from the index: digest {sample_digest(*content):016x}\n"
            f"  expected {int(entry['digest']):016x}: the shard was damaged or overwritten after it was first read\n"
            f"  {remedy}, or train without it: data.drop=[{'/'.join(place.split('/')[-2:])}]"
        )

    def labels(self, shard: int, samples: Iterable[int] | None = None) -> Iterator[bytes]:
        """Yield the labels of some or all samples in a shard, without the images; raises DataError as `read` does."""
        table = self._table(shard)
        for sample in range(len(table)) if samples is None else samples:
            row = table[sample]
            tar = self._shard(shard).tar
            start = int(row["label"])
            label = tar[start : start + int(row["label_size"])]
            if label_digest(label) != int(row["label_digest"]):
                # `read` downloads a remote shard once more, and raises an error for a local one.
                _, _, label = self.read(shard, sample)
            yield label

    def _table(self, number: int) -> np.ndarray:
        """Return the table of a shard; the shard itself need not be on this node."""
        if number in self._tables:
            self._tables.move_to_end(number)
            return self._tables[number]
        self._tables[number] = self.index.table(number)
        if len(self._tables) > most_open():
            self._tables.popitem(last=False)
        return self._tables[number]

    def _row(self, shard: int, sample: int) -> tuple[np.void, SampleRow]:
        """Return a sample's table row, and the byte ranges to read.

        At most one byte more of the image is read than the decoder accepts, because larger images are rejected anyway.
        """
        entry = self._table(shard)[sample]
        image_size = min(int(entry["image_size"]), MAX_BYTES + 1)
        return entry, SampleRow(
            entry["key"], int(entry["image"]), image_size, int(entry["label"]), int(entry["label_size"])
        )

    def _copied(self, shard: int, sample: int) -> tuple[bytes, bytes]:
        """Copy a sample's image and label from its shard; wait for the shard if needed."""
        tar = self._shard(shard).tar  # verify the shard before its table
        _, row = self._row(shard, sample)
        image = tar[row.image : row.image + row.image_size]
        return image, tar[row.label : row.label + row.label_size]

    def _comes_by_range(self, number: int) -> bool:
        """Return whether samples of this shard are read by range; false once the whole shard is on this node."""
        if self.ranges is None or self.ranges.given_up or self.ranges.stopped or number in self._open:
            return False
        shard = self.index.shards[number]
        is_worth_it = "://" in self.index.location(shard) and shard.bytes > SMALLEST
        return is_worth_it and not self.cache.has(shard)

    def _by_range(self, shard: int, sample: int) -> tuple[bytes, bytes] | None:
        """Return a sample read by range; None if it must be read from the whole shard."""
        if self.ranges is None:
            return None
        is_asked_for = (shard, sample) in self.ranges.requested
        if not is_asked_for and not self._comes_by_range(shard):
            return None
        entry, row = self._row(shard, sample)
        url = self.index.location(shard)
        try:
            content = self.ranges.take((shard, sample), url, row, self.cache.progress)
        except PatchlineError as error:
            if self.ranges.stopped:  # do not wait for the whole shard either
                raise
            self.ranges.give_up(url, str(error).splitlines()[0])
            return None
        self.cache.progress()
        if is_intact(entry, *content):
            return content
        key = row.key.decode("utf-8", "replace")
        self.ranges.give_up(url, f"sample {key!r} differs from the index")
        return None

    def _shard(self, number: int) -> OpenShard:
        """Return a mapped shard; open and verify it if needed. Raises DataError if it differs from the index."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        shard = self.index.shards[number]
        place = self.index.location(shard)
        is_remote = "://" in place
        if is_remote:
            opened = self.cache.opened(place, shard)
        else:
            try:
                opened = open(place, "rb")  # noqa: SIM115 (closed by the `with` below)
            except OSError as error:
                raise DataError(f"{place}: cannot open the shard ({error.strerror}); restore it") from None
        with opened as file:
            # Check the open file: its path may refer to another file by now.
            status = os.fstat(file.fileno())
            if status.st_size != shard.bytes:
                raise DataError(
                    f"{place}: found {status.st_size} bytes, but the index lists {shard.bytes}; restore it, or index "
                    "it again"
                )
            tar = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

        # The cache verifies downloads. Other shards are verified once per node, and a mark file records that.
        mark = mark_of(status, shard.sha256)
        if self.verify and not is_remote and not mark.exists():
            if sha256(tar).hexdigest() != shard.sha256:
                # The end of the path identifies a shard for `data.drop`, except in rare cases.
                short_name = "/".join(place.split("/")[-2:])
                raise DataError(
                    f"{place}: its sha256 differs from the index, so it was altered or replaced; "
                    f"restore it, index it again, or train without it: data.drop=[{short_name}]"
                )
            # If the mark cannot be written, for example on a full disk, the next process verifies again.
            with suppress(OSError):
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()

        self._open[number] = OpenShard(tar, status.st_ino)
        if len(self._open) > most_open():
            _, least_recently_used = self._open.popitem(last=False)
            least_recently_used.tar.close()
        return self._open[number]


def is_intact(row: np.void, image: bytes, label: bytes) -> bool:
    """Return whether the image and label match the digests in a table row."""
    # An oversize image is rejected in any case, and was not read completely.
    if len(image) > MAX_BYTES:
        return label_digest(label) == int(row["label_digest"])
    return sample_digest(image, label) == int(row["digest"])


def most_open() -> int:
    """Return the number of shards to keep open; each needs two open files, the tar and its table."""
    # With two files per shard, a quarter of the limit leaves half of the files for everything else.
    files_allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(MAX_OPEN, max(8, files_allowed // 4))


def mark_of(status: os.stat_result, expected: str) -> Path:
    """Return the path of the marker file that records that this node has verified a shard.

    The marker identifies the shard by device, inode and mtime, so a replaced or rewritten shard is verified again.
    """
    return state_folder() / "verified" / f"{expected}-{status.st_dev}-{status.st_ino}-{status.st_mtime_ns}"
