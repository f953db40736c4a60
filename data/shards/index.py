"""What Patchline knows about a list of shards: one small JSON for the set, one table of offsets a shard.

`data.indexing` makes both for any WebDataset tars, unchanged; packing makes them as it writes. The JSON is all
that is ever wholly in memory (30,000 shards: a few megabytes); a table is mapped while its shard is open.
"""

from __future__ import annotations

import json
import mmap
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import IO

import numpy as np
import psutil

from data.errors import DataError
from data.files import whole_file, write_whole

SCHEMA = 1
SUFFIX = ".index.json"


@dataclass(frozen=True)
class Shard:
    """One tar as it was when indexed; `name` is its path or URL, relative to the index's directory."""

    name: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """A set of shards. `class_counts[c]` samples are labelled c; `digest` stands for all of it."""

    shards: tuple[Shard, ...]
    classes: int
    class_counts: tuple[int, ...]
    digest: str
    directory: str  # where the tars are: a path, or a URL
    tables: Path = field(compare=False)  # where their tables are
    refused: dict[str, int] = field(default_factory=dict, compare=False)  # members of the tars that were passed over

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def shard_samples(self) -> tuple[int, ...]:
        """Samples of each shard: what an `Order` is built from."""
        return tuple(shard.samples for shard in self.shards)

    @property
    def remote(self) -> bool:
        """Whether shards are fetched before they are read."""
        return "://" in self.directory or any("://" in shard.name for shard in self.shards)

    def location(self, shard: int) -> str:
        """The path or URL of a shard."""
        name = self.shards[shard].name
        return name if "://" in name else f"{self.directory.rstrip('/')}/{name}" if name[:1] != "/" else name

    def table(self, shard: int) -> np.ndarray:
        """A shard's table of offsets and sizes (`data.tar.FIELDS` and `key`), mapped from disk."""
        path = self.tables / table_name(self.shards[shard].name)
        try:
            table = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: no table of shard {shard} ({error}); run `python -m jobs index` again") from None
        if len(table) != self.shards[shard].samples:
            raise DataError(
                f"{path}: {len(table)} rows, the index says {self.shards[shard].samples}; "
                "run `python -m jobs index` again"
            )
        return table


@dataclass(frozen=True)
class JoinedIndex(Index):
    """Several sets as one: their shards one set after the other, each named by where it is; labels are shared."""

    sets: tuple[Index, ...] = field(default=(), compare=False)

    def table(self, shard: int) -> np.ndarray:
        for one in self.sets:
            if shard < len(one.shards):
                return one.table(shard)
            shard -= len(one.shards)
        raise IndexError(shard)


def join(sets: Sequence[Index], weights: Sequence[float]) -> JoinedIndex:
    """Sets that are trained on together; the digest is of theirs and of the weights, wherever the sets are."""
    shards = tuple(replace(one.shards[n], name=one.location(n)) for one in sets for n in range(len(one.shards)))
    counts = tuple(map(sum, zip_longest(*(one.class_counts for one in sets), fillvalue=0)))
    digest = sha256(json.dumps([[one.digest for one in sets], list(weights)]).encode()).hexdigest()
    return JoinedIndex(shards, len(counts), counts, digest, "", Path(), sets=tuple(sets))


def without(sets: Sequence[Index], names: Sequence[str]) -> list[Index]:
    """The sets with the shards of these names emptied, so that the others keep their numbers.

    A name may have folders in front, as far as it takes to tell shards apart. Raises DataError unless each is of one
    shard.
    """
    if not names:  # as nearly always: nothing to look through, nor to digest anew
        return list(sets)
    emptied: list[set[int]] = [set() for _ in sets]
    for name in names:
        ends = [(at, n) for at, one in enumerate(sets) for n in range(len(one.shards)) if is_called(one, n, name)]
        if len(ends) != 1:
            which = ", ".join(sets[at].location(n) for at, n in ends[:3]) or f"as {sets[0].location(0)} is called"
            raise DataError(
                f"data.drop: {len(ends)} shards are called {name}, expected one: {which}; type more of its path"
            )
        emptied[ends[0][0]].add(ends[0][1])
    found = []
    for one, gone in zip(sets, emptied, strict=True):
        shards = tuple(replace(shard, samples=0, bytes=0) if n in gone else shard for n, shard in enumerate(one.shards))
        found.append(replace(one, shards=shards, digest=digest_of(shards, one.class_counts)))
    return found


def shortest(sets: Sequence[Index], place: str) -> str:
    """The least of a shard's path, its name and folders before it, that tells it from all others."""
    parts = place.split("/")
    for count in range(1, len(parts)):
        name = "/".join(parts[-count:])
        if sum(is_called(one, n, name) for one in sets for n in range(len(one.shards))) == 1:
            return name
    return place


def is_called(index: Index, shard: int, name: str) -> bool:
    return f"/{index.location(shard)}".endswith(f"/{name}")


def table_name(shard: str) -> str:
    """The file name of a shard's table: flat, so that shards of one name in two folders do not meet."""
    flat = shard.removesuffix(".tar").replace("://", "/").strip("/").replace("/", "--")
    return f"{flat}.npy"


def load_index(path: str | os.PathLike[str]) -> Index:
    """Read an index from its JSON, or from a directory that holds just one; raises DataError."""
    if "://" in str(path):
        raise DataError(f"{path}: an index is a folder here; `python -m jobs index URL --output FOLDER` makes one")
    path = Path(path)
    if path.is_dir():
        found = sorted(path.glob(f"*{SUFFIX}"))
        if len(found) != 1:
            names = ", ".join(one.name for one in found) or "none"
            way_out = "name the file" if found else "run `python -m jobs index` first"
            if stopped := sorted(path.glob(f"*{SUFFIX}.partial")):
                way_out = f"{stopped[0].name} is of a packing or indexing that was stopped: run it again to its end"
            raise DataError(f"{path}: expected one *{SUFFIX}, found {names}; {way_out}")
        path = found[0]
    try:
        raw = json.loads(path.read_text())
        if raw["schema"] != SCHEMA:
            raise DataError(f"{path}: schema {raw['schema']}, this version reads {SCHEMA}; run `jobs index` again")
        shards = tuple(Shard(*row) for row in raw["shards"])
        counts, digest, directory = tuple(raw["class_counts"]), raw["digest"], raw["directory"]
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such index; `python -m jobs index` makes one") from None
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: not a Patchline index ({repr(error)[:100]}); run `python -m jobs index` again"
        ) from None
    if digest != digest_of(shards, counts):
        raise DataError(f"{path}: its digest does not match its contents; run `python -m jobs index` again")
    if "://" not in directory:
        directory = str((path.parent / directory).resolve())
    return Index(shards, len(counts), counts, digest, directory, path.parent.resolve(), raw.get("refused", {}))


def digest_of(shards: Iterable[Shard], class_counts: Iterable[int]) -> str:
    rows = [[shard.name, shard.samples, shard.bytes, shard.sha256] for shard in shards]
    return sha256(json.dumps([SCHEMA, rows, list(class_counts)]).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------- writing


@contextmanager
def mapped(file: IO[bytes]) -> Iterator[memoryview]:
    """The bytes of an open file without reading them first."""
    if not os.fstat(file.fileno()).st_size:
        yield memoryview(b"")
        return
    held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view = memoryview(held)
    try:
        yield view
    finally:
        with suppress(BufferError):  # parts of it live on in an error's frames, and it with them
            view.release()
            held.close()


def write_table(output: Path, shard: str, table: np.ndarray) -> None:
    with whole_file(output / table_name(shard)) as temporary, open(temporary, "wb") as file:
        np.save(file, table, allow_pickle=False)


class Journal:
    """Shards finished so far, one line each: a killed packing or indexing goes on where it stopped."""

    def __init__(self, path: Path, classes: int | None, setting: str = ""):
        self.path, self.classes = path, classes
        self.partial = path.with_name(path.name + ".partial")
        self.setting = setting  # what must be equal for the old lines to be of use
        self.records: dict[str, tuple[Shard, dict[int, int], dict[str, int]]] = {}

    def __enter__(self) -> Journal:
        lines = self.partial.read_text().splitlines() if self.partial.exists() else []
        if not lines or lines[0] != json.dumps([SCHEMA, self.classes, self.setting]):
            lines = []
        for left in self.path.parent.glob(".tmp-*-*"):  # of processes that were killed, of this set alone:
            _, pid, *_, name = left.name.split("-", 3)  # another host may be at work on another one
            ours = name.startswith(self.path.name.removesuffix(SUFFIX))
            if ours and pid.isdigit() and not psutil.pid_exists(int(pid)):
                left.unlink(missing_ok=True)
        write_whole(self.partial, json.dumps([SCHEMA, self.classes, self.setting]) + "\n")
        self.file = open(self.partial, "a")
        for line in lines[1:]:
            try:
                shard, counts, refused = json.loads(line)
            except ValueError:
                break  # the line that the kill cut
            self.add(Shard(*shard), {int(c): n for c, n in counts.items()}, refused)
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def has(self, shard: str, size: int) -> bool:
        return shard in self.records and self.records[shard][0].bytes == size

    def add(self, shard: Shard, counts: dict[int, int], refused: dict[str, int]) -> None:
        self.records[shard.name] = shard, counts, refused
        row = [shard.name, shard.samples, shard.bytes, shard.sha256]
        print(json.dumps([row, counts, refused]), file=self.file, flush=True)

    def keep(self, shards: Iterable[str]) -> None:
        """Forget shards that an earlier try wrote but this one does not have."""
        self.records = {name: self.records[name] for name in shards}

    def finish(self, directory: Path | str) -> Index:
        """Write the JSON and forget the journal."""
        records = [self.records[name] for name in sorted(self.records)]
        totals, passed_over = Counter[int](), Counter[str]()
        for _, counts, refused in records:
            totals.update(counts)
            passed_over.update(refused)
        classes = self.classes or max(totals, default=-1) + 1
        class_counts = [totals[c] for c in range(classes)]
        shards = [shard for shard, *_ in records]
        content = {
            "schema": SCHEMA,
            "directory": str(directory) if "://" in str(directory) else os.path.relpath(directory, self.path.parent),
            "samples": sum(shard.samples for shard in shards),
            "digest": digest_of(shards, class_counts),
            "refused": dict(passed_over),
            "class_counts": class_counts,
            "shards": [[shard.name, shard.samples, shard.bytes, shard.sha256] for shard in shards],
        }
        write_whole(self.path, json.dumps(content, indent=1))
        self.partial.unlink()
        return load_index(self.path)
