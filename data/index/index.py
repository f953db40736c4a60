"""The index of a set of shards, as objects: a small JSON for the set, and one table of byte offsets per shard.

`data.extras.shards.indexing` creates both for existing WebDataset tars; packing creates them while it writes.
`data.index.document` reads and writes the JSON, `data.index.shard` the tables.

Integrity is checked at three levels:
1. each table row has a digest of its sample's bytes, which is checked on every read (`data.reader`);
2. each shard in the JSON has the sha256 of its tar, and the sha256 of its table, which is checked on opening the table;
3. the seal is the sha256 of everything else in the JSON.
A data set's digest covers only its samples and class names: see `digest_of`.

The index of a subset (`data.extras.shards.subset`) refers to the same tars and has separate tables with fewer rows. Its
origin records the parent index and the rule; its digest also covers the chosen rows.

A run can train on several data sets as one, and exclude shards (`data.drop`):

    join([flowers, pets], [0.3, 0.7])           an index whose shard 12 may be shard 2 of pets
    exclude([flowers], ["train-000007.tar"])    the same data set, with shard 7 empty

A shard is identified by the end of its path, `train-000007.tar` or `other/train/train-000007.tar`; the end must be long
enough to be unique. Excluded shards are emptied, not removed, because the order depends on the numbers of all shards.
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

from data.errors import DataError
from data.index.names import Names, agreed_names, ids_of
from data.index.shard import FIELDS, MappedShards, Shard, table_path

DIGEST_VERSION = 1  # version of the digest's definition; part of the digest itself


@dataclass
class SkippedCounts:
    """Counts of the members and samples that indexing skipped, by reason, each with the name of the first one."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Origin:
    """The parent index of a subset, and the rule and rows that define the subset."""

    index: str  # path of the parent's JSON, relative to the folder of the subset's
    digest: str  # digest of the parent
    rule: dict[str, Any]  # see `data.extras.shards.subset.Rule.described`
    rows: str  # sha256 of the positions of the chosen samples in their tars; part of the subset's digest

    @property
    def words(self) -> str:
        """The rule in words: "part :80%, seed 0"."""
        words = []
        for option, value in self.rule.items():
            if isinstance(value, Mapping):
                value = f"{value['path']} ({value['sha256'][:12]})"
            words.append(f"{option} {value}")
        return ", ".join(words)


@dataclass(frozen=True)
class Index:
    """A data set stored in shards. `class_counts[c]` samples have the label c; `digest` identifies the data set."""

    shards: Sequence[Shard]  # a tuple; mapped columns for a large set; JoinedShards for several sets
    classes: int
    class_counts: tuple[int, ...]
    digest: str
    directory: str  # path or URL of the folder of the tars
    tables: Path = field(compare=False)  # folder of the tables
    refused: SkippedCounts = field(default_factory=SkippedCounts, compare=False)  # what indexing skipped
    names: Names = ()  # class names in the order of their ids; may exceed `classes`; () if unknown
    name: str = field(default="", compare=False)  # file name of the JSON, without its suffix
    origin: Origin | None = field(default=None, compare=False)  # set for a subset; None for whole tars

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each shard, by name."""
        return {shard.name: number for number, shard in enumerate(self.shards)}

    @cached_property
    def ids(self) -> dict[str, int]:
        """The class id of each name that labels may contain."""
        return ids_of(self.names)

    def class_name(self, label: int) -> str:
        """Return the name of a class, or its id if the name is unknown."""
        return self.names[label] if label < len(self.names) else f"class {label}"

    @property
    def command(self) -> str:
        """The command that recreates this index."""
        if self.origin is not None:
            parent = os.path.normpath(self.tables / self.origin.index)
            # A list of samples is given by its path.
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
        # A folder argument means the tars directly in it, not those in its sub-folders.
        if any("/" in shard.name for shard in self.shards) and not self.remote:
            tars = list(map(self.location, self.shards))
        # Class names need not be passed: indexing again takes them from the existing index.
        place = ["--output", str(self.tables), "--name", self.name]
        labels = ["--classes", str(self.classes)] if self.classes else ["--unlabelled"]
        return shlex.join(["python", "-m", "jobs", "index", *tars, *place, *labels])

    @property
    def samples(self) -> int:
        """The number of samples in all shards."""
        return int(self.shard_samples.sum())

    @property
    def shard_samples(self) -> np.ndarray:
        """(shards,) int64, the number of samples in each shard, for `Order`."""
        if isinstance(self.shards, MappedShards | JoinedShards):
            return self.shards.samples
        return np.array([shard.samples for shard in self.shards], np.int64)

    @cached_property
    def starts(self) -> np.ndarray:
        """(shards + 1,) int64, the number of each shard's first sample in the data set, and finally the total."""
        return np.append(0, np.cumsum(self.shard_samples))

    def rows(self, shard: int) -> slice:
        """Return the row numbers of a shard's samples within the data set."""
        return slice(self.starts[shard], self.starts[shard + 1])

    @property
    def bytes(self) -> int:
        """The size of all shards in bytes."""
        if isinstance(self.shards, MappedShards):
            return int(self.shards.bytes.sum())
        return sum(shard.bytes for shard in self.shards)

    @cached_property
    def remote(self) -> bool:
        """Whether any shard is remote."""
        if "://" in self.directory:
            return True
        if isinstance(self.shards, MappedShards):
            return bool((np.char.find(self.shards.columns["name"], b"://") >= 0).any())
        return any("://" in shard.name for shard in self.shards)

    def location(self, shard: int | Shard) -> str:
        """Return the path or URL of a shard, given as an object or by its number."""
        name = self.shards[shard].name if isinstance(shard, int) else shard.name
        is_complete = "://" in name or name.startswith("/")
        if is_complete:
            return name
        return f"{self.directory.rstrip('/')}/{name}"

    def single_shard(self, shard: int) -> Index:
        """Return an index of a single shard, so that a job's process need not receive all shards."""
        return replace(self, shards=(self.shards[shard],), class_counts=())

    def keys(self, shard: int) -> np.ndarray:
        """Return the keys of a shard's samples as strings; undecodable bytes are replaced."""
        return np.char.decode(self.table(shard)["key"], "utf-8", "replace")

    def table(self, shard: int) -> np.ndarray:
        """Return a shard's table, mapped from disk: (samples,) with `data.index.shard.FIELDS` and `key`.

        Raises DataError if the table is missing, altered, or belongs to another shard.
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
                    f"its sha256 is {digest[:12]}…, but the index lists {entry.table[:12]}…, so it was altered or "
                    "replaced"
                )
            table = np.load(path, mmap_mode="r", allow_pickle=False)
            columns = table.dtype.names or ()
            has_all_columns = {"key", *dict(FIELDS)} <= set(columns)
            if not has_all_columns or len(table) != entry.samples:
                problem = f"found {len(table)} rows of {table.dtype.names}, but the index lists {entry.samples}"
        except Exception as error:  # numpy raises many kinds for invalid tables: ValueError, EOFError, TokenError
            problem = f"not a valid table of {entry.name}: {error}"
        if problem:
            raise DataError(f"{path}: {problem}\n  expected the original table of this index\n  run {self.command}")
        return table


def digest_of(
    shards: Iterable[Shard], class_counts: Iterable[int], names: Names = (), origin: Origin | None = None
) -> str:
    """Return a data set's digest: the sha256 of its class counts and its shards' names, samples, sizes and digests.

    Tables are not included, because they follow from the shards. A data set indexed again by a newer version therefore
    keeps its digest, its order, its ledger, and the keys of finished stages. Class names and the rows of a subset are
    included if they exist.
    """
    rest: list[object] = [list(class_counts)]
    if names:
        rest.append(list(names))
    if origin is not None:
        rest.append({"rows": origin.rows})
    # Hash the JSON text of [1, [[name, samples, bytes, sha256], …], class counts, …] piece by piece, because for a
    # large set the whole text would be as large as its index.
    digest = sha256(f"[{DIGEST_VERSION}, [".encode())
    separator = ""
    for shard in shards:
        tar = json.dumps([shard.name, shard.samples, shard.bytes, shard.sha256])
        digest.update(f"{separator}{tar}".encode())
        separator = ", "
    digest.update(f"], {json.dumps(rest)[1:]}".encode())
    return digest.hexdigest()


# ----------------------------------------------------------------------------------- joined sets


class JoinedShards(Sequence[Shard]):
    """The shards of several data sets, one after the other; each shard has its full path and is created on access."""

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
        """Return (the data set of a shard, the shard's number in that data set)."""
        for index in self.sets:
            if number < len(index.shards):
                return index, number
            number -= len(index.shards)
        raise IndexError(number)


def join(sets: Sequence[Index], weights: Sequence[float]) -> Index:
    """Join data sets to train on all of them; the digest depends on their digests and weights, not on their folders."""
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
    # Tars and tables are in several folders: each shard has its full name, and each set finds its own tables.
    names = agreed_names(named_sets, "data.mixture")
    return Index(JoinedShards(tuple(sets)), classes, class_counts, digest, "", Path(), names=names)


# ------------------------------------------------------------------------------------- excluded shards


def exclude(sets: Sequence[Index], names: Sequence[str]) -> list[Index]:
    """Return the data sets with the named shards emptied; all other shards keep their numbers.

    A name may include parent folders, as needed to be unique. If several data sets, such as subsets of the same parent,
    contain a shard, it is emptied in each of them. Raises DataError unless each name matches exactly one shard.
    """
    # The usual case: skip the search and keep the digest.
    if not names:
        return list(sets)
    dropped: list[set[int]] = [set() for _ in sets]  # shard numbers per set
    for name in names:
        named = shards_called(name, sets)
        if len(named) != 1:
            which = ", ".join(list(named)[:3]) or f"a name such as {sets[0].location(0)}"
            raise DataError(
                f"data.drop: {len(named)} shards match {name}, expected exactly one: {which}; use a longer part of "
                "its path"
            )
        (numbers,) = named.values()
        for set_number, shard_number in numbers:
            dropped[set_number].add(shard_number)

    # Empty them instead of removing them: the order depends on the numbers of all shards.
    remaining = []
    for index, dropped_numbers in zip(sets, dropped, strict=True):
        shards = index.shards
        if isinstance(shards, MappedShards):
            shards = MappedShards(shards.path, shards.memory, shards.columns, shards.excluded.union(dropped_numbers))
        else:
            shard_list = list(shards)
            for number in dropped_numbers:
                shard_list[number] = replace(shard_list[number], samples=0, bytes=0)
            shards = tuple(shard_list)
        digest = digest_of(shards, index.class_counts, index.names, index.origin)
        remaining.append(replace(index, shards=shards, digest=digest))
    return remaining


def shards_called(name: str, sets: Sequence[Index]) -> dict[str, list[tuple[int, int]]]:
    """Find shards whose path ends with `name`; return {path: (set number, shard number) of each occurrence}."""
    shards: dict[str, list[tuple[int, int]]] = {}
    for set_number, index in enumerate(sets):
        for number, shard in enumerate(index.shards):
            # Compare with leading slashes, so that `1.tar` does not match `train-1.tar`.
            place = index.location(shard)
            if f"/{place}".endswith(f"/{name}"):
                shards.setdefault(place, []).append((set_number, number))
    return shards
