"""Raw bytes of samples out of shards: memory-mapped, and checked twice.

How a sample is read, in order:
1. the first time that this node reads a shard, its sha256 is compared with the one in the index. A sample of a remote
   shard that is not here yet is read by range, where the loader wants that (`data.remote.ranges`);
2. its table is opened, and compared with its own sha256 in the index (`Index.table`);
3. the sample's bytes are copied out of the mapping, and the digest of this copy is compared with the one in the table:
   a file can rot or be overwritten later than 1. under an unchanged size and time. A label that is read without its
   image has a digest of its own;
4. where it differs, the copy of a remote shard is dropped from the cache and fetched once more; any other shard, and
   one that still differs, ends the run. Such a sample is not replaced: the shard that it is in cannot be trusted.
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

MOST_OPEN = 4096  # shards that a process keeps mapped; a lane has two or three in use, or more if they are small
MOST_LINES = 10  # unusable shards that an error names with their problems
MOST_DROPPED = 100  # shards that an error offers to leave out; with more missing, something else is wrong


# --------------------------------------------------------------------------------------- before a run


def unusable_shards(index: Index) -> dict[str, str]:
    """Return what is wrong with the shards of a set as far as their sizes tell, by path; of remote ones nothing."""
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
            problems[place] = f"{size} bytes, the index says {shard.bytes}"
    return problems


def check_sizes(sets: Sequence[Index], dropped: Sequence[str] = (), option: str = "") -> None:
    """Raise DataError naming every local shard that is missing or not of the size it was indexed with.

    `option` is the key of the config that leaves shards out, "" where there is none; `dropped` are those that it
    leaves out already.
    """
    problems: dict[str, str] = {}  # path → what is wrong with it
    for index in sets:
        problems |= unusable_shards(index)
    if not problems:
        return

    places: set[str] = set()  # of all shards; subsets of one set have the same
    for index in sets:
        places.update(map(index.location, index.shards))
    # A lost disk takes thousands of shards with it: the message names a few and counts the rest.
    # The first stands in the first line, which is all that `status` shows.
    named = [f"{place}: {problem}" for place, problem in problems.items()]
    lines = [f"{len(problems)} of {len(places)} shards cannot be used: {named[0]}"]
    for problem in named[1:MOST_LINES]:
        lines.append(f"  {problem}")
    if len(problems) > MOST_LINES:
        lines.append(f"  … and {len(problems) - MOST_LINES} more")
    way_out = "  restore them, or run `python -m jobs index` on what is there, which makes it another set"
    if any(index.origin is not None for index in sets):
        way_out += ", and `python -m jobs subset` of that; where folders were moved, move the subset's with its set's"
    if len(problems) == len(places):
        way_out += "\n  a pack stage packs its shards anew: delete its done.json, and run its recipe again"
    # The option is given whole, with what it leaves out already, so that it can be typed as it stands.
    elif option and len(problems) <= MOST_DROPPED:
        names = list(dropped)
        for place in problems:
            # As much of the end of its path as tells it from all other shards.
            name = place
            parts = place.split("/")
            for count in range(1, len(parts)):
                end = "/".join(parts[-count:])
                if len(shards_called(end, sets)) == 1:
                    name = end
                    break
            names.append(name)
        way_out += f"\n  or train without them: '{option}=[{','.join(names)}]'"
    raise DataError("\n".join([*lines, way_out]))


# --------------------------------------------------------------------------------------- during a run


def read_labels(raw: bytes, index: Index, most: int) -> tuple[int, ...]:
    """Parse the label bytes of a sample into class ids that its index has classes for, `most` of them at most.

    Raises BadImage, as a broken image would, with a reason that groups well. Training, evaluation and the doctor
    accept the same labels.
    """
    try:
        labels = parse_labels(raw, index.ids)
    except ValueError:
        raise BadImage("no label") from None
    if max(labels) >= index.classes:
        raise BadImage(f"label not below {index.classes}")
    if len(labels) > most:
        raise BadImage(f"more labels than data.max_labels={most}")
    return labels


class OpenShard(NamedTuple):
    """A shard in use."""

    tar: mmap.mmap
    inode: int  # tells whether the cache has another copy by now


class ShardReader:
    """Gives (key, image bytes, label bytes) of any sample; keeps the last shards mapped.

    With `by_range`, a sample of a remote shard that is not here yet is read alone; otherwise its shard is waited for.
    """

    def __init__(self, index: Index, *, verify: bool = True, cache: CacheConfig | None = None, by_range: bool = False):
        self.index = index
        self.verify = verify
        self.cache_config = cache or CacheConfig()
        # By the number of the shard, the longest unused first.
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._tables: OrderedDict[int, np.ndarray] = OrderedDict()
        self.ranges: Ranges | None = self.new_ranges() if by_range and index.remote else None

    def __getstate__(self) -> dict[str, object]:
        """Return the reader without its open shards, for another process: a mapping cannot be sent to it."""
        return self.__dict__ | {"_open": OrderedDict(), "_tables": OrderedDict()}

    @cached_property
    def cache(self) -> Cache:
        """What fetches remote shards; local ones are read without it and its clients."""
        from data.remote.cache import Cache

        return Cache(self.cache_config)

    def new_ranges(self) -> Ranges:
        """Return what reads samples of remote shards by range."""
        from data.remote.ranges import Ranges

        return Ranges(self.cache)

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
            self.ranges = self.new_ranges()
            self.ranges.given_up = given_up

    def expect(self, places: np.ndarray) -> None:
        """Begin to read those of the samples (b, 2: shard, sample) whose shards are not here, for `read` to take."""
        if self.ranges is None:
            return
        for shard, sample in places.tolist():
            if self._comes_by_range(shard):
                _, row = self._row(shard, sample)
                self.ranges.request((shard, sample), self.index.location(shard), row)

    def read(self, shard: int, sample: int) -> tuple[str, bytes, bytes]:
        """Return the key, encoded image and label of a sample; empty bytes where the shard has none.

        Raises DataError where the shard is missing, short, or not the one that was indexed, and where the sample is
        not what it was then.
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
            # The copy in the cache rotted or was overwritten; the storage may still have the shard as it was.
            dropped = self._open.pop(shard)
            self.cache.drop(indexed, dropped.inode)
            # Closed last: as long as it is open no other file can get its inode, by which `drop` knows it.
            dropped.tar.close()
            content = self._copied(shard, sample)
        if is_intact(entry, *content):
            return key, *content

        way_out = "fetch it into the store again"
        if not is_remote:
            way_out = "restore it or pack it again"
            # The next process must verify the shard anew. The shard may be gone by now, or the mark.
            with suppress(OSError):
                mark_of(os.stat(place), indexed.sha256).unlink()
        raise DataError(
            f"{redacted(place)}: sample {key!r} is not what was indexed: digest {sample_digest(*content):016x}\n"
            f"  expected {int(entry['digest']):016x}: the shard rotted or was overwritten after its first reading\n"
            f"  {way_out}, or train without it: data.drop=[{'/'.join(place.split('/')[-2:])}]"
        )

    def labels(self, shard: int, samples: Iterable[int] | None = None) -> Iterator[bytes]:
        """Give the labels of samples of a shard, or of all, without their images; raises DataError as `read` does."""
        table = self._table(shard)
        for sample in range(len(table)) if samples is None else samples:
            row = table[sample]
            tar = self._shard(shard).tar
            start = int(row["label"])
            label = tar[start : start + int(row["label_size"])]
            if label_digest(label) != int(row["label_digest"]):
                # Fetches a remote shard once more, and raises what is to be said of any other.
                _, _, label = self.read(shard, sample)
            yield label

    def _table(self, number: int) -> np.ndarray:
        """Return the table of a shard, which may be here or not."""
        if number in self._tables:
            self._tables.move_to_end(number)
            return self._tables[number]
        self._tables[number] = self.index.table(number)
        if len(self._tables) > most_open():
            self._tables.popitem(last=False)
        return self._tables[number]

    def _row(self, shard: int, sample: int) -> tuple[np.void, SampleRow]:
        """Return the entry of a table, and where its bytes lie: of an image as many as the decoder takes, and one more.

        An image that is larger is refused whatever it holds.
        """
        entry = self._table(shard)[sample]
        image_size = min(int(entry["image_size"]), MAX_BYTES + 1)
        return entry, SampleRow(
            entry["key"], int(entry["image"]), image_size, int(entry["label"]), int(entry["label_size"])
        )

    def _copied(self, shard: int, sample: int) -> tuple[bytes, bytes]:
        """Copy the image and the label of a sample out of its shard, which is waited for."""
        tar = self._shard(shard).tar  # compared with the index before its table is
        _, row = self._row(shard, sample)
        image = tar[row.image : row.image + row.image_size]
        return image, tar[row.label : row.label + row.label_size]

    def _comes_by_range(self, number: int) -> bool:
        """Return whether samples of this shard are read by range: until it is here."""
        if self.ranges is None or self.ranges.given_up or self.ranges.stopped or number in self._open:
            return False
        shard = self.index.shards[number]
        is_worth_it = "://" in self.index.location(shard) and shard.bytes > SMALLEST
        return is_worth_it and not self.cache.has(shard)

    def _by_range(self, shard: int, sample: int) -> tuple[bytes, bytes] | None:
        """Return a sample whose shard is not here; None where the shard is to be used, or to be waited for."""
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
            if self.ranges.stopped:  # nobody waits for the whole shard either
                raise
            self.ranges.give_up(url, str(error).splitlines()[0])
            return None
        self.cache.progress()
        if is_intact(entry, *content):
            return content
        key = row.key.decode("utf-8", "replace")
        self.ranges.give_up(url, f"sample {key!r} is not what was indexed")
        return None

    def _shard(self, number: int) -> OpenShard:
        """Return a shard that is mapped, opening it if need be; raises DataError where it is not the one indexed."""
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
            # Of the open file, not of its name, which may be another file's by now.
            status = os.fstat(file.fileno())
            if status.st_size != shard.bytes:
                raise DataError(
                    f"{place}: {status.st_size} bytes, the index says {shard.bytes}; restore it, or index it again"
                )
            tar = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

        # The cache has verified what it fetched. Any other shard is verified once a node: a mark says that it was.
        mark = mark_of(status, shard.sha256)
        if self.verify and not is_remote and not mark.exists():
            if sha256(tar).hexdigest() != shard.sha256:
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

        self._open[number] = OpenShard(tar, status.st_ino)
        if len(self._open) > most_open():
            _, longest_unused = self._open.popitem(last=False)
            longest_unused.tar.close()
        return self._open[number]


def is_intact(row: np.void, image: bytes, label: bytes) -> bool:
    """Return whether these are the bytes that were indexed, by the row of the table."""
    # An oversize image is refused whatever it holds, and was not read to its end.
    if len(image) > MAX_BYTES:
        return label_digest(label) == int(row["label_digest"])
    return sample_digest(image, label) == int(row["digest"])


def most_open() -> int:
    """Return how many shards to keep open: each holds two files, itself and its table, of those that we may have."""
    # With two files a shard, a quarter leaves half of the files for everything else.
    files_allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(MOST_OPEN, max(8, files_allowed // 4))


def mark_of(status: os.stat_result, expected: str) -> Path:
    """Return the file that says that this node has verified a shard.

    It names the very file: one that is replaced or written again is verified again.
    """
    return state_folder() / "verified" / f"{expected}-{status.st_dev}-{status.st_ino}-{status.st_mtime_ns}"
