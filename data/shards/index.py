"""What Patchline knows about a list of shards: one small JSON for the set, one table of offsets a shard.

`data.shards.indexing` makes both for any WebDataset tars, unchanged; packing makes them as it writes. The JSON of a
small set is all that is ever wholly in memory; of a large one its columns are mapped instead (`data.shards.columns`).
A table is mapped while its shard is open.

    train.index.json         {"schema": 2, "directory": ".", "digest": "9f3c…", "class_counts": [600, 650],
                              "shards": [["train-000000.tar", 1250, 6543360, "d41d…", "77ab…"]], …, "seal": "e5f0…"}
    train-000000.npy         one row a sample: image, image_size, label, label_size, digest, key (`data.shards.tar`)

What holds a set together, from the sample up:
1. each row of a table has a digest of its sample's bytes, which every read is compared with (`data.shards.reader`);
2. each shard in the JSON has the sha256 of the tar, and that of its table, which is compared when it is opened;
3. the seal is the sha256 of everything else in the JSON.
The digest stands for the samples and the class names alone: see `digest_of`. Schema 1 had neither digests of samples
and tables nor a seal; it is still read, and `Index.sees_rot` is then False. An index with class names ("names", in the
order of the ids) is of schema 3, so that older versions refuse it by its schema; one without is of schema 2 as before.

An index of some of another one's samples (`data.shards.subset`) names the same tars and has tables of its own, of fewer
rows. It is of schema 4, says in "origin" what it was made of, and its digest also stands for which rows were chosen.
"""

from __future__ import annotations

import json
import mmap
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np

from data.errors import DataError
from data.files import write_whole
from data.shards.columns import MappedShards, Shard, mapped_shards
from data.shards.names import Names, agreed, ids_of
from data.shards.refusals import Refusals
from data.shards.tar import Row

SCHEMA = 4  # the newest that is read, which subsets have
NAMED_SCHEMA = 3  # of an index with class names
NAMELESS_SCHEMA = 2  # of an index without class names
OLDEST_SCHEMA = 1  # that is still read
SUFFIX = ".index.json"
PIECE = 16 << 20  # bytes of a tar that are hashed at once
LARGE = 1 << 20  # bytes of a JSON, about 5,000 shards, from which on it is mapped as columns


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

    @property
    def sees_rot(self) -> bool:
        """Whether every sample that is read is compared with a digest of its own; not so in schema 1."""
        if isinstance(self.shards, MappedShards):
            return self.shards.all_have_tables
        return all(shard.table for shard in self.shards)

    @cached_property
    def ids(self) -> dict[str, int]:
        """The class id of every name that a label may hold instead."""
        return ids_of(self.names)

    def class_name(self, label: int) -> str:
        """What a class is called, or its id where nobody knows."""
        return self.names[label] if label < len(self.names) else f"class {label}"

    @property
    def lack(self) -> str:
        """What a run says of an index that does not see rot, with what to type."""
        return (
            f"{self.tables}: the index has no digests of samples (schema 1), so that a shard that rots after its first "
            f"reading would go unseen; to make them, type: {self.command}"
        )

    @property
    def command(self) -> str:
        """What makes this index again of the tars that it is of."""
        if self.origin is not None:
            parent = os.path.normpath(self.tables / self.origin.index)
            words = words_of(self.origin.rule)
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
            return self.shards.any_name_has("://")
        return any("://" in shard.name for shard in self.shards)

    def location(self, shard: int) -> str:
        """The path or URL of a shard."""
        return self.place_of(self.shards[shard])

    def place_of(self, shard: Shard) -> str:
        """The path or URL of a shard of this set."""
        name = shard.name
        is_complete = "://" in name or name.startswith("/")
        if is_complete:
            return name
        return f"{self.directory.rstrip('/')}/{name}"

    def alone(self, shard: int) -> Index:
        """An index of one shard: a job that is sent to another process would carry all shards otherwise."""
        return replace(self, shards=(self.shards[shard],), class_counts=())

    def keys(self, shard: int) -> np.ndarray:
        """The keys of a shard's samples as lists and reports have them: text, bytes that are no UTF-8 replaced."""
        return np.char.decode(self.table(shard)["key"], "utf-8", "replace")

    def table(self, shard: int) -> np.ndarray:
        """A shard's table of offsets and sizes (`data.shards.tar.FIELDS` and `key`), mapped from disk.

        Raises DataError where the table is missing, was altered, or belongs to another shard.
        """
        path = self.tables / table_name(self.shards[shard].name)
        expected = self.shards[shard].table
        try:
            digest = sha256(path.read_bytes()).hexdigest() if expected else ""
            if digest != expected:
                raise ValueError(f"its sha256 is {digest[:12]}…, the index says {expected[:12]}…: altered or replaced")
            table = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # over what is no table, numpy raises many kinds: ValueError, EOFError, TokenError
            raise DataError(
                f"{path}: no table of {self.shards[shard].name}: {error}\n"
                f"  expected the table that was made with this index\n"
                f"  type: {self.command}"
            ) from None
        has_all_columns = set(Row._fields) <= set(table.dtype.names or ())
        if not has_all_columns or len(table) != self.shards[shard].samples:
            raise DataError(
                f"{path}: {len(table)} rows of {table.dtype.names}, the index says {self.shards[shard].samples}\n"
                f"  expected the table that was made with this index\n"
                f"  type: {self.command}"
            )
        return table


# ----------------------------------------------------------------------------------------- several sets


class JoinedShards(Sequence[Shard]):
    """The shards of several sets, one set after the other, each named by where it is; made when they are asked for."""

    def __init__(self, sets: Sequence[Index]):
        self.sets = sets

    def __len__(self) -> int:
        return sum(len(index.shards) for index in self.sets)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return tuple(self[at] for at in range(*number.indices(len(self))))
        index, number_in_set = self.place(range(len(self))[number])
        return replace(index.shards[number_in_set], name=index.location(number_in_set))

    def __iter__(self) -> Iterator[Shard]:
        for index in self.sets:
            for shard in index.shards:
                yield replace(shard, name=index.place_of(shard))

    def place(self, number: int) -> tuple[Index, int]:
        """(the set that a shard comes from, its number in there)."""
        for index in self.sets:
            if number < len(index.shards):
                return index, number
            number -= len(index.shards)
        raise IndexError(number)


@dataclass(frozen=True)
class JoinedIndex(Index):
    """Several sets as one: their shards one set after the other, each named by where it is; labels are shared."""

    sets: tuple[Index, ...] = field(default=(), compare=False)

    @property
    def sees_rot(self) -> bool:
        return all(index.sees_rot for index in self.sets)

    @property
    def bytes(self) -> int:
        return sum(index.bytes for index in self.sets)

    @property
    def shard_samples(self) -> np.ndarray:
        return np.concatenate([index.shard_samples for index in self.sets])

    @property
    def remote(self) -> bool:
        return any(index.remote for index in self.sets)

    def table(self, shard: int) -> np.ndarray:
        """A shard's table, out of the set that the shard comes from."""
        index, number = JoinedShards(self.sets).place(shard)
        return index.table(number)


def join(sets: Sequence[Index], weights: Sequence[float]) -> JoinedIndex:
    """Sets that are trained on together; the digest is of theirs and of the weights, wherever the sets are."""
    samples_of_class: Counter[int] = Counter()
    digests = []
    for index in sets:
        for label, samples in enumerate(index.class_counts):
            samples_of_class[label] += samples
        digests.append(index.digest)
    classes = max((index.classes for index in sets), default=0)
    class_counts = tuple(samples_of_class[label] for label in range(classes))
    digest = sha256(json.dumps([digests, list(weights)]).encode()).hexdigest()
    names = agreed([(str(index.tables), index.names) for index in sets], "data.mixture")
    sets = tuple(sets)
    return JoinedIndex(JoinedShards(sets), classes, class_counts, digest, "", Path(), names=names, sets=sets)


def without(sets: Sequence[Index], names: Sequence[str]) -> list[Index]:
    """The sets with the shards of these names emptied, so that the others keep their numbers.

    A name may have folders in front, as far as it takes to tell shards apart. A shard that several sets have, subsets
    of one set, is emptied in each. Raises DataError unless each name is of one shard.
    """
    # As nearly always: there is nothing to look through, nor a digest to compute anew.
    if not names:
        return list(sets)
    dropped: list[set[int]] = [set() for _ in sets]  # numbers of shards, for each set
    for name in names:
        for set_number, shard_number in the_only_one_called(name, sets):
            dropped[set_number].add(shard_number)
    return list(map(emptied, sets, dropped))


def the_only_one_called(name: str, sets: Sequence[Index]) -> list[tuple[int, int]]:
    """(number of the set, number in it) of the shard with a name, in every set that has it.

    Raises DataError unless it is exactly one shard.
    """
    shards = called(name, sets)
    if len(shards) != 1:
        which = ", ".join(list(shards)[:3]) or f"as {sets[0].location(0)} is called"
        raise DataError(
            f"data.drop: {len(shards)} shards are called {name}, expected one: {which}; type more of its path"
        )
    (numbers,) = shards.values()
    return numbers


def emptied(index: Index, numbers: set[int]) -> Index:
    """An index whose shards of these numbers have no samples and no bytes."""
    # Emptied instead of removed: the order depends on the numbers of all shards, which must stay as they were.
    shards: Sequence[Shard]
    if isinstance(index.shards, MappedShards):
        shards = index.shards.without(numbers)
    else:
        shards = tuple(
            replace(shard, samples=0, bytes=0) if number in numbers else shard
            for number, shard in enumerate(index.shards)
        )
    digest = digest_of(shards, index.class_counts, index.names, rows_of(index.origin))
    return replace(index, shards=shards, digest=digest)


def shortest(sets: Sequence[Index], place: str) -> str:
    """The shortest end of a shard's path that no other shard's path ends with."""
    parts = place.split("/")
    for count in range(1, len(parts)):
        name = "/".join(parts[-count:])
        if len(called(name, sets)) == 1:
            return name
    return place


def called(name: str, sets: Sequence[Index]) -> dict[str, list[tuple[int, int]]]:
    """Every shard whose path ends with a name: where it is → (number of the set, number in it) in each set with it."""
    shards: dict[str, list[tuple[int, int]]] = {}
    for set_number, index in enumerate(sets):
        for number, shard in enumerate(index.shards):
            # With a slash before both, so that `1.tar` does not name `train-1.tar`.
            place = index.place_of(shard)
            if f"/{place}".endswith(f"/{name}"):
                shards.setdefault(place, []).append((set_number, number))
    return shards


# ----------------------------------------------------------------------------------------------- reading


def load_index(path: str | os.PathLike[str]) -> Index:
    """Read an index from its JSON, or from a directory that holds just one; raises DataError."""
    if "://" in str(path):
        raise DataError(f"{path}: an index is a folder here; `python -m jobs index URL --output FOLDER` makes one")
    path = Path(path)
    if path.is_dir():
        path = the_only_index_in(path)
    try:
        is_large = path.stat().st_size >= LARGE
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path}: there is no such index; `python -m jobs index` makes one") from None
    content, shards = mapped_shards(path, read_json) if is_large else read_json(path, path.read_bytes())
    directory = content["directory"]
    # A path is kept relative to the index, so that both can be moved together.
    if "://" not in directory:
        directory = str((path.parent / directory).resolve())
    return Index(
        shards=shards,
        classes=len(content["class_counts"]),
        class_counts=tuple(content["class_counts"]),
        digest=content["digest"],
        directory=directory,
        tables=path.parent.resolve(),
        refused=content.get("refused", {}),
        first_refused=content.get("first_refused", {}),
        names=tuple(content.get("names", ())),
        name=path.name.removesuffix(SUFFIX),
        origin=origin_of(content),
    )


def read_json(path: Path, text: bytes) -> tuple[dict[str, Any], Sequence[Shard]]:
    """(all that an index's JSON says but its shards, its shards), once its seal and digest are compared.

    Raises DataError.
    """
    try:
        content = json.loads(text)
        schema = content["schema"]
        if not OLDEST_SCHEMA <= schema <= SCHEMA:
            raise DataError(
                f"{path}: schema {schema}, this version reads {OLDEST_SCHEMA} to {SCHEMA}; run `jobs index` again"
            )
        shards = tuple(Shard(*row) for row in content["shards"])
        class_counts = tuple(content["class_counts"])
        digest = content["digest"]
        directory = content["directory"]
        if not isinstance(directory, str):
            raise TypeError(f"directory {directory!r}")
        names = tuple(content.get("names", ()))
        # An index of schema 1 has no seal; where there is one, it counts whatever the schema says.
        seal = content["seal"] if schema > 1 else content.get("seal", "")
        origin = origin_of(content)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: not a Patchline index ({repr(error)[:100]}); run `python -m jobs index` again, "
            "or `python -m jobs subset` if it is a subset"
        ) from None

    # A text that was edited by hand, or cut where it still parses, describes another set than its digest does.
    is_as_written = not seal or seal == seal_of(content)
    if not is_as_written or digest != digest_of(shards, class_counts, names, rows_of(origin)):
        maker = "index" if origin is None else "subset"
        raise DataError(f"{path}: its digest does not match its contents; run `python -m jobs {maker}` again")
    del content["shards"]
    return content, shards


def origin_of(content: Mapping[str, Any]) -> Origin | None:
    """What a subset's JSON says that it was made of; None of any other."""
    return Origin(**content["origin"]) if "origin" in content else None


def the_only_index_in(folder: Path) -> Path:
    """The one index of a folder; raises DataError where there are none or several."""
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if len(paths) == 1:
        return paths[0]
    names = ", ".join(path.name for path in paths) or "none"
    stopped = sorted(folder.glob(f"*{SUFFIX}.partial"))
    if stopped:
        way_out = f"{stopped[0].name} is of a packing or indexing that was stopped: run it again to its end"
    elif paths:
        way_out = "name the file"
    else:
        way_out = "run `python -m jobs index` first"
    raise DataError(f"{folder}: expected one *{SUFFIX}, found {names}; {way_out}")


def digest_of(shards: Iterable[Shard], class_counts: Iterable[int], names: Names = (), rows: str = "") -> str:
    """The sha256 that stands for a set: of its shards' names, samples, sizes and digests, and its class counts.

    The tables are not in it: they follow from the shards. A set that is indexed again by a newer version therefore
    keeps its digest, and with it the keys of finished stages, its order and its ledger. Class names are in it where
    there are any: a set without keeps the digest that it had before there were names.
    """
    rest: list[object] = [list(class_counts)]
    if names:
        rest.append(list(names))
    if rows:
        rest.append({"rows": rows})
    # The text of [1, [[name, samples, bytes, sha256], …], class counts, …], as schema 1 began it; a piece at a time,
    # because that of a large set is as large as its JSON.
    digest = sha256(f"[{OLDEST_SCHEMA}, [".encode())
    separator = ""
    for shard in shards:
        tar = json.dumps([shard.name, shard.samples, shard.bytes, shard.sha256])
        digest.update(f"{separator}{tar}".encode())
        separator = ", "
    digest.update(f"], {json.dumps(rest)[1:]}".encode())
    return digest.hexdigest()


def rows_of(origin: Origin | None) -> str:
    """What a subset's digest has of its origin; "" for whole tars."""
    return "" if origin is None else origin.rows


def words_of(rule: Mapping[str, Any]) -> list[str]:
    """The options of `patchline subset` that say a rule; a list of samples by the path that it was read from."""
    words = []
    for option, value in rule.items():
        if isinstance(value, Mapping):
            value = value["path"]
        values = value if isinstance(value, list) else [value]
        words += [f"--{option}={entry}" for entry in values]
    return words


def seal_of(content: Mapping[str, object]) -> str:
    """The sha256 of an index's JSON but for its seal, however it is laid out."""
    sealed = {name: value for name, value in content.items() if name != "seal"}
    return sha256(json.dumps(sealed, sort_keys=True).encode()).hexdigest()


def shard_row(shard: Shard) -> list[str | int]:
    """A shard as the JSON and the journal hold it."""
    return [shard.name, shard.samples, shard.bytes, shard.sha256, shard.table]


def write_index(
    path: Path,
    directory: Path | str,
    shards: Sequence[Shard],
    class_counts: Sequence[int],
    names: Names = (),
    refused: Refusals | None = None,
    origin: Origin | None = None,
) -> Index:
    """Write an index's JSON, of shards that lie in `directory`, whose tables lie beside it already; read it back."""
    # A path is kept relative to the index, so that both can be moved or mounted elsewhere together.
    place = str(directory)
    if "://" not in place:
        place = os.path.relpath(place, path.parent)
    refused = refused or Refusals()
    content: dict[str, object] = {
        "schema": NAMED_SCHEMA if names else NAMELESS_SCHEMA,
        "directory": place,
        "samples": sum(shard.samples for shard in shards),
        "digest": digest_of(shards, class_counts, names, rows_of(origin)),
        "refused": dict(refused.counts),
        "first_refused": refused.first,
        "class_counts": list(class_counts),
        "shards": list(map(shard_row, shards)),
    }
    if names:
        content["names"] = list(names)
    if origin is not None:
        content["schema"] = SCHEMA
        content["origin"] = asdict(origin)
    content["seal"] = seal_of(content)
    write_whole(path, json.dumps(content, indent=1))
    return load_index(path)


# ------------------------------------------------------------------------------------ tables and bytes


def table_name(shard: str) -> str:
    """The file name of a shard's table: flat, so that shards of one name in two folders do not meet."""
    flat = shard.removesuffix(".tar").replace("://", "/").strip("/").replace("/", "--")
    return f"{flat}.npy"


def digest_of_tar(tar: memoryview) -> str:
    """The sha256 of a whole tar, in pieces: Python hears a signal between two of them, and not in the midst of one."""
    digest = sha256()
    for start in range(0, len(tar), PIECE):
        digest.update(tar[start : start + PIECE])
    return digest.hexdigest()


def write_table(output: Path, shard: str, table: np.ndarray) -> str:
    """Save a shard's table in the folder of its index; returns the sha256 of the file."""
    content = BytesIO()
    np.save(content, table, allow_pickle=False)
    write_whole(output / table_name(shard), content.getvalue())
    return sha256(content.getvalue()).hexdigest()


@contextmanager
def mapped(file: IO[bytes]) -> Iterator[memoryview]:
    """The bytes of an open file without reading them first."""
    # mmap refuses an empty file.
    if os.fstat(file.fileno()).st_size == 0:
        yield memoryview(b"")
        return
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view = memoryview(mapping)
    try:
        yield view
    finally:
        # Where an error is on its way, its frames still hold parts of the view, and the mapping cannot be closed yet.
        with suppress(BufferError):
            view.release()
            mapping.close()
