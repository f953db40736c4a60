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
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError
from data.index.columns import MappedShards
from data.index.names import Names, ids_of
from data.index.shard import Shard, WrongTable, open_table, table_name

DIGEST_VERSION = 1  # of what a digest stands for; it is in the digest itself


@dataclass(frozen=True)
class Origin:
    """What a subset was made of, and which of its samples are in it."""

    index: str  # path of the other index's JSON, relative to the folder of this one
    digest: str  # of the other index
    rule: dict[str, Any]  # how samples were chosen, as `data.shards.subset.Rule` describes itself
    rows: str  # the sha256 of where the chosen samples lie in their tars: a part of the subset's digest


@dataclass(frozen=True)
class Index:
    """A set of shards. `class_counts[c]` samples are labelled c; `digest` stands for all of it."""

    shards: Sequence[Shard]  # a tuple, or the columns of a large set
    classes: int
    class_counts: tuple[int, ...]
    digest: str
    directory: str  # where the tars are: a path, or a URL
    tables: Path = field(compare=False)  # where their tables are
    refused: dict[str, int] = field(default_factory=dict, compare=False)  # what was passed over: reason → how often
    first_refused: dict[str, str] = field(default_factory=dict, compare=False)  # reason → the first, and its shard
    names: Names = ()  # of the classes, in the order of their ids; may be more than `classes`; () where nobody knows
    name: str = field(default="", compare=False)  # of the JSON, without its suffix
    origin: Origin | None = field(default=None, compare=False)  # of a subset; None of whole tars

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
            tars = [self.location(number) for number in range(len(self.shards))]
        # The names need not be given: they are taken over from the index that is made again.
        place = ["--output", str(self.tables), "--name", self.name]
        return shlex.join(["python", "-m", "jobs", "index", *tars, *place, "--classes", str(self.classes)])

    @property
    def samples(self) -> int:
        """Samples of all shards."""
        return int(self.shard_samples.sum())

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        if isinstance(self.shards, MappedShards):
            return int(self.shards.bytes.sum())
        return sum(shard.bytes for shard in self.shards)

    @property
    def shard_samples(self) -> np.ndarray:
        """(shards,) int64, the samples of each shard: what an `Order` is built from."""
        if isinstance(self.shards, MappedShards):
            return self.shards.samples
        return np.array([shard.samples for shard in self.shards], np.int64)

    @property
    def remote(self) -> bool:
        """Whether shards are fetched before they are read."""
        if "://" in self.directory:
            return True
        if isinstance(self.shards, MappedShards):
            return self.shards.any_is_url
        return any("://" in shard.name for shard in self.shards)

    def location(self, shard: int) -> str:
        """Return the path or URL of a shard."""
        return self.place_of(self.shards[shard])

    def place_of(self, shard: Shard) -> str:
        """Return the path or URL of a shard of this set."""
        name = shard.name
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
        """Return a shard's table of offsets and sizes (`data.index.tar.FIELDS` and `key`), mapped from disk.

        Raises DataError where the table is missing, was altered, or belongs to another shard.
        """
        entry = self.shards[shard]
        path = self.tables / table_name(entry.name)
        try:
            return open_table(path, entry)
        except WrongTable as error:
            raise DataError(
                f"{path}: {error}\n  expected the table that was made with this index\n  type: {self.command}"
            ) from None


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
