"""What Patchline knows about a list of shards: one small JSON for the set, one table of offsets a shard.

`data.shards.indexing` makes both for any WebDataset tars, unchanged; packing makes them as it writes. The JSON is read
and written in `data.index.document`, the tables in `data.index.shard`; here is what they say, as objects.

What holds a set together, from the sample up:
1. each row of a table has a digest of its sample's bytes, which every read is compared with (`data.shards.reader`);
2. each shard in the JSON has the sha256 of the tar, and that of its table, which is compared when it is opened;
3. the seal is the sha256 of everything else in the JSON.
The digest stands for the samples and the class names alone: see `digest_of`.

An index of some of another one's samples (`data.shards.subset`) names the same tars and has tables of its own, of fewer
rows. It says in its origin what it was made of, and its digest also stands for which rows were chosen.

A run takes several sets as one, and does without the shards that it excludes (`data.drop`):

    join([flowers, pets], [0.3, 0.7])           an index whose shard 12 may be shard 2 of pets
    exclude([flowers], ["train-000007.tar"])    the same set, whose shard 7 is empty

A shard is named by the end of its path, `train-000007.tar` or `other/train/train-000007.tar`: as much of it as no other
shard's path ends with. It is emptied, not removed, because the order depends on the numbers of all shards.
"""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from data.checks import printable
from data.errors import DataError
from data.index.names import Names, agreed_names, ids_of
from data.index.shard import FIELDS, MappedShards, Shard, table_path

MOST_TYPES = 12  # types of members that are counted apart; what others have made may hold any number
OTHER_TYPES = "member of another type"
MEMBER_TYPE = "member type ."
MOST_EXTENSION = 16  # letters of an extension that are shown
MOST_NAME = 160  # letters of a member's name that are kept
DIGEST_VERSION = 1  # of what a digest stands for; it is in the digest itself


@dataclass
class Refusals:
    """What was passed over: reasons with how often each came, and the first member or sample that it came with.

    refusals.add_type("tiff", "a/b.tiff")     counts   {"member type .tiff": 1}
                                              first    {"member type .tiff": "a/b.tiff"}
    """

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, name: str | bytes, count: int = 1) -> None:
        """Count something that was passed over; its name is kept where it is the first of its reason."""
        if isinstance(name, bytes):
            name = name.decode("utf-8", "replace")
        # Each shard of a set may have types of its own: the set as a whole has no more lines than one shard.
        is_new_type = reason.startswith(MEMBER_TYPE) and reason not in self.counts
        if is_new_type and sum(known.startswith(MEMBER_TYPE) for known in self.counts) >= MOST_TYPES:
            reason = OTHER_TYPES
        self.counts[reason] += count
        self.first.setdefault(reason, name[:MOST_NAME])

    def add_type(self, extension: str, name: str | bytes) -> None:
        """Count a member whose extension is none of those that are read."""
        self.add(f"{MEMBER_TYPE}{extension[:MOST_EXTENSION]}", name)

    def add_all(self, other: Refusals, shard: str) -> None:
        """Count what was passed over in a shard."""
        for reason, count in other.counts.items():
            first = other.first.get(reason, "")
            self.add(reason, f"{first} of {shard}" if first else shard, count)

    def lines(self, label: str = "") -> list[str]:
        """Return a line a reason, the most frequent first; names are printed so that no terminal acts on them."""
        lines = []
        for reason, count in self.counts.most_common():
            line = f"{label}{count:,} × {reason}"
            if reason in self.first:
                line += f", first {self.first[reason]}"
            lines.append(printable(line))
        return lines


@dataclass(frozen=True)
class Origin:
    """What a subset was made of, and which of its samples are in it."""

    index: str  # path of the other index's JSON, relative to the folder of this one
    digest: str  # of the other index
    rule: dict[str, Any]  # how samples were chosen, as `data.shards.subset.Rule` describes itself
    rows: str  # the sha256 of where the chosen samples lie in their tars: a part of the subset's digest

    @property
    def words(self) -> str:
        """The rule as people read it: "part :80%, seed 0"."""
        words = []
        for option, value in self.rule.items():
            if isinstance(value, Mapping):
                value = f"{value['path']} ({value['sha256'][:12]})"
            words.append(f"{option} {value}")
        return ", ".join(words)


@dataclass(frozen=True)
class Index:
    """A set of shards. `class_counts[c]` samples are labelled c; `digest` stands for all of it."""

    shards: Sequence[Shard]  # a tuple; the columns of a large set; those of several sets
    classes: int
    class_counts: tuple[int, ...]
    digest: str
    directory: str  # where the tars are: a path, or a URL
    tables: Path = field(compare=False)  # where their tables are
    refused: Refusals = field(default_factory=Refusals, compare=False)  # what was passed over, the first with its shard
    names: Names = ()  # of the classes, in the order of their ids; may be more than `classes`; () where nobody knows
    name: str = field(default="", compare=False)  # of the JSON, without its suffix
    origin: Origin | None = field(default=None, compare=False)  # of a subset; None of whole tars

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of every shard, by its name."""
        return {shard.name: number for number, shard in enumerate(self.shards)}

    @cached_property
    def ids(self) -> dict[str, int]:
        """The class id of every name that a label may hold instead."""
        return ids_of(self.names)

    def class_name(self, label: int) -> str:
        """Return what a class is called, or its id where nobody knows."""
        return self.names[label] if label < len(self.names) else f"class {label}"

    @property
    def command(self) -> str:
        """What makes this index again of the tars that it is of."""
        if self.origin is not None:
            parent = os.path.normpath(self.tables / self.origin.index)
            # A list of samples is given by the path that it was read from.
            words = []
            for option, value in self.origin.rule.items():
                if isinstance(value, Mapping):
                    value = value["path"]
                values = value if isinstance(value, list) else [value]
                for entry in values:
                    words.append(f"--{option}={entry}")
            place = ["--output", str(self.tables), "--name", self.name]
            return shlex.join(["python", "-m", "jobs", "subset", parent, *words, *place])
        tars = [self.directory]
        # A folder stands for the tars that lie in it, and not for those in folders of their own below it.
        if any("/" in shard.name for shard in self.shards) and not self.remote:
            tars = list(map(self.location, self.shards))
        # The names need not be given: they are taken over from the index that is made again.
        place = ["--output", str(self.tables), "--name", self.name]
        labels = ["--classes", str(self.classes)] if self.classes else ["--unlabelled"]
        return shlex.join(["python", "-m", "jobs", "index", *tars, *place, *labels])

    @property
    def samples(self) -> int:
        """Samples of all shards."""
        return int(self.shard_samples.sum())

    @property
    def shard_samples(self) -> np.ndarray:
        """(shards,) int64, the samples of each shard: what an `Order` is built from."""
        if isinstance(self.shards, MappedShards | JoinedShards):
            return self.shards.samples
        return np.array([shard.samples for shard in self.shards], np.int64)

    @cached_property
    def starts(self) -> np.ndarray:
        """(shards + 1,) int64, the number of each shard's first sample in the set; the last is that of all samples."""
        return np.append(0, np.cumsum(self.shard_samples))

    def rows(self, shard: int) -> slice:
        """Return where the samples of a shard stand among all of the set."""
        return slice(self.starts[shard], self.starts[shard + 1])

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        if isinstance(self.shards, MappedShards):
            return int(self.shards.bytes.sum())
        return sum(shard.bytes for shard in self.shards)

    @cached_property
    def remote(self) -> bool:
        """Whether shards are fetched before they are read."""
        if "://" in self.directory:
            return True
        if isinstance(self.shards, MappedShards):
            return bool((np.char.find(self.shards.columns["name"], b"://") >= 0).any())
        return any("://" in shard.name for shard in self.shards)

    def location(self, shard: int | Shard) -> str:
        """Return the path or URL of a shard of this set, which is given itself or by its number."""
        name = self.shards[shard].name if isinstance(shard, int) else shard.name
        is_complete = "://" in name or name.startswith("/")
        if is_complete:
            return name
        return f"{self.directory.rstrip('/')}/{name}"

    def alone(self, shard: int) -> Index:
        """Return an index of one shard: a job that is sent to another process would carry all shards otherwise."""
        return replace(self, shards=(self.shards[shard],), class_counts=())

    def keys(self, shard: int) -> np.ndarray:
        """Return the keys of a shard's samples as lists and reports have them: text, with odd bytes replaced."""
        return np.char.decode(self.table(shard)["key"], "utf-8", "replace")

    def table(self, shard: int) -> np.ndarray:
        """Return a shard's table: (samples,) of `data.index.shard.FIELDS` and `key`, mapped from disk.

        Raises DataError where the table is missing, was altered, or belongs to another shard.
        """
        if isinstance(self.shards, JoinedShards):
            index, number = self.shards.place(shard)
            return index.table(number)
        entry = self.shards[shard]
        path = table_path(self.tables, entry.name)
        problem = ""
        try:
            digest = sha256(path.read_bytes()).hexdigest()
            if digest != entry.table:
                raise ValueError(
                    f"its sha256 is {digest[:12]}…, the index says {entry.table[:12]}…: altered or replaced"
                )
            table = np.load(path, mmap_mode="r", allow_pickle=False)
            columns = table.dtype.names or ()
            has_all_columns = {"key", *dict(FIELDS)} <= set(columns)
            if not has_all_columns or len(table) != entry.samples:
                problem = f"{len(table)} rows of {table.dtype.names}, the index says {entry.samples}"
        except Exception as error:  # over what is no table, numpy raises many kinds: ValueError, EOFError, TokenError
            problem = f"no table of {entry.name}: {error}"
        if problem:
            raise DataError(
                f"{path}: {problem}\n  expected the table that was made with this index\n  type: {self.command}"
            )
        return table


def digest_of(
    shards: Iterable[Shard], class_counts: Iterable[int], names: Names = (), origin: Origin | None = None
) -> str:
    """Return the sha256 that stands for a set: of its shards' names, samples, sizes and digests, and its class counts.

    The tables are not in it: they follow from the shards. A set that is indexed again by a newer version therefore
    keeps its digest, and with it the keys of finished stages, its order and its ledger. Class names are in it where
    there are any.
    """
    rest: list[object] = [list(class_counts)]
    if names:
        rest.append(list(names))
    if origin is not None:
        rest.append({"rows": origin.rows})
    # The text of [1, [[name, samples, bytes, sha256], …], class counts, …], a piece at a time, because that of a large
    # set is as large as its JSON.
    digest = sha256(f"[{DIGEST_VERSION}, [".encode())
    separator = ""
    for shard in shards:
        tar = json.dumps([shard.name, shard.samples, shard.bytes, shard.sha256])
        digest.update(f"{separator}{tar}".encode())
        separator = ", "
    digest.update(f"], {json.dumps(rest)[1:]}".encode())
    return digest.hexdigest()


# ----------------------------------------------------------------------------------- several sets as one


class JoinedShards(Sequence[Shard]):
    """The shards of several sets, one set after the other, each named by where it is; made when they are asked for."""

    def __init__(self, sets: Sequence[Index]):
        self.sets = sets
        self.samples = np.concatenate([index.shard_samples for index in sets])  # (shards,) int64

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: Any) -> Any:
        at = range(len(self))[number]
        if isinstance(at, range):
            return tuple(map(self.__getitem__, at))
        index, number_in_set = self.place(at)
        return replace(index.shards[number_in_set], name=index.location(number_in_set))

    def __iter__(self) -> Iterator[Shard]:
        for index in self.sets:
            for shard in index.shards:
                yield replace(shard, name=index.location(shard))

    def place(self, number: int) -> tuple[Index, int]:
        """Return (the set that a shard comes from, its number in there)."""
        for index in self.sets:
            if number < len(index.shards):
                return index, number
            number -= len(index.shards)
        raise IndexError(number)


def join(sets: Sequence[Index], weights: Sequence[float]) -> Index:
    """Join sets that are trained on together; the digest is of theirs and of the weights, wherever they lie."""
    samples_of_class: Counter[int] = Counter()
    digests = []
    named_sets = []
    classes = 0
    for index in sets:
        for label, samples in enumerate(index.class_counts):
            samples_of_class[label] += samples
        digests.append(index.digest)
        classes = max(classes, index.classes)
        named_sets.append((str(index.tables), index.names))
    class_counts = tuple(samples_of_class[label] for label in range(classes))
    digest = sha256(json.dumps([digests, list(weights)]).encode()).hexdigest()
    # Neither the tars nor the tables lie in one folder: each shard is named whole, each table found by its own set.
    names = agreed_names(named_sets, "data.mixture")
    return Index(JoinedShards(tuple(sets)), classes, class_counts, digest, "", Path(), names=names)


# ------------------------------------------------------------------------------------- shards that are excluded


def exclude(sets: Sequence[Index], names: Sequence[str]) -> list[Index]:
    """Return the sets with the shards of these names emptied, so that the others keep their numbers.

    A name may have folders in front, as far as it takes to tell shards apart. A shard that several sets have, subsets
    of one set, is emptied in each. Raises DataError unless each name is of one shard.
    """
    # As nearly always: there is nothing to look through, nor a digest to compute anew.
    if not names:
        return list(sets)
    dropped: list[set[int]] = [set() for _ in sets]  # numbers of shards, for each set
    for name in names:
        named = shards_called(name, sets)
        if len(named) != 1:
            which = ", ".join(list(named)[:3]) or f"as {sets[0].location(0)} is called"
            raise DataError(
                f"data.drop: {len(named)} shards are called {name}, expected one: {which}; type more of its path"
            )
        (numbers,) = named.values()
        for set_number, shard_number in numbers:
            dropped[set_number].add(shard_number)

    # Emptied instead of removed: the order depends on the numbers of all shards, which must stay as they were.
    remaining = []
    for index, dropped_numbers in zip(sets, dropped, strict=True):
        shards = index.shards
        if isinstance(shards, MappedShards):
            shards = MappedShards(shards.path, shards.memory, shards.columns, shards.excluded.union(dropped_numbers))
        else:
            kept = list(shards)
            for number in dropped_numbers:
                kept[number] = replace(kept[number], samples=0, bytes=0)
            shards = tuple(kept)
        digest = digest_of(shards, index.class_counts, index.names, index.origin)
        remaining.append(replace(index, shards=shards, digest=digest))
    return remaining


def shards_called(name: str, sets: Sequence[Index]) -> dict[str, list[tuple[int, int]]]:
    """Find the shards whose path ends with a name: path → (number of the set, number in it) in each set with it."""
    shards: dict[str, list[tuple[int, int]]] = {}
    for set_number, index in enumerate(sets):
        for number, shard in enumerate(index.shards):
            # With a slash before both, so that `1.tar` does not name `train-1.tar`.
            place = index.location(shard)
            if f"/{place}".endswith(f"/{name}"):
                shards.setdefault(place, []).append((set_number, number))
    return shards
