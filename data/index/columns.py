"""The shards of a large index, as columns of a file that all processes of a node map instead of reading the JSON.

As Python objects, 300,000 shards are 139 MiB in every worker and in each of its decoding processes. So:
1. the first process of a node that loads a large index checks its JSON, and writes what it says as columns
   (`write_columns`) into the node's state folder, under the sha256 of that JSON, which another JSON does not have;
2. whoever loads the index compares the file's last 32 bytes, the sha256 of all before them, and maps it
   (`open_columns`); a file that is torn or altered is made anew;
3. `MappedShards` gives a `Shard` when it is asked for one, and a whole column without a copy;
4. another process is sent the path and the digest of the file, and maps it too;
5. whoever makes a file deletes those that nobody has opened for a month (`delete_unused`).

    5d41….columns    {"format": 1, "index": {…}, "shards": 300000}      one line, padded to a multiple of 64 bytes
                     ends, samples, bytes: 8 bytes a shard each; sha256, table: 64 each; names, end to end; the digest

The JSON remains the set's document: the file beside it follows from it, and can be deleted at any time.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from hashlib import file_digest, sha256
from pathlib import Path
from typing import IO, Any, overload

import numpy as np

from data.errors import DataError, StorageError
from data.files import locked, refusal, state_folder, write_whole
from data.index.shard import Shard

# n shards

FORMAT = 1  # of the file
ALIGNMENT = 64  # bytes: the columns begin at multiples of it
DIGEST_BYTES = 32  # of the sha256 at the end
HEX = "S64"  # a sha256 in hexadecimal, or nothing
COLUMNS = {"ends": "<i8", "samples": "<i8", "bytes": "<i8", "sha256": HEX, "table": HEX}  # of n each, in this order
AT_ONCE = 4096  # shards that are made while all are gone through
PIECE = 1 << 20  # bytes that are hashed at once
UNUSED_S = 30 * 24 * 3600  # without being opened, after which a file may go
HELD_PER_BYTE = 3.6  # bytes of Python objects for each byte of a JSON: 139 MiB of 38 MB


# Reads a JSON of this path and this text: all that it says but its shards, and its shards. Raises DataError.
ReadJson = Callable[[Path, bytes], tuple[dict[str, Any], Sequence[Shard]]]


class MappedShards(Sequence[Shard]):
    """The shards of a file of columns; those whose numbers are in `left_out` have no samples and no bytes."""

    def __init__(self, path: Path, memory: mmap.mmap, header: Mapping[str, Any], start: int, left_out: frozenset[int]):
        self.path = path
        self.memory = memory
        self.header = header
        self.start = start  # of the first column
        self.left_out = left_out
        count = header["shards"]
        columns = {}
        for name, kind in COLUMNS.items():
            columns[name] = np.frombuffer(memory, kind, count, start)
            start += columns[name].nbytes
        self._ends = columns["ends"]  # (n,) where each name ends among the names
        self._samples = columns["samples"]
        self._bytes = columns["bytes"]
        self._sha256 = columns["sha256"]
        self._table = columns["table"]
        self._names_start = start

    @property
    def digest(self) -> str:
        """The sha256 of the file, which it ends with."""
        return self.memory[-DIGEST_BYTES:].hex()

    @cached_property
    def samples(self) -> np.ndarray:
        """(n,) int64, the samples of each shard: the file's own memory, unless shards are left out."""
        return self._without(self._samples)

    @property
    def bytes(self) -> np.ndarray:
        """(n,) int64, the bytes of each shard."""
        return self._without(self._bytes)

    @property
    def all_have_tables(self) -> bool:
        """Whether the sha256 of every table is known."""
        return bool((self._table != b"").all())

    def any_name_has(self, text: str) -> bool:
        """Whether a text stands in any shard's name."""
        return self.memory.find(text.encode(), self._names_start, len(self.memory) - DIGEST_BYTES) >= 0

    def without(self, numbers: Iterable[int]) -> MappedShards:
        """The same shards, of which these have no samples and no bytes."""
        return MappedShards(self.path, self.memory, self.header, self.start, self.left_out.union(numbers))

    def _without(self, column: np.ndarray) -> np.ndarray:
        if not self.left_out:
            return column
        column = column.copy()
        column[sorted(self.left_out)] = 0
        return column

    # ---------------------------------------------------------------------------------------- as a sequence

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, number: int) -> Shard: ...

    @overload
    def __getitem__(self, number: slice) -> tuple[Shard, ...]: ...

    def __getitem__(self, number: int | slice) -> Shard | tuple[Shard, ...]:
        if isinstance(number, slice):
            return tuple(self[at] for at in range(*number.indices(len(self))))
        at = range(len(self))[number]  # raises IndexError, as a tuple does
        (shard,) = self._made(at, at + 1)
        return shard

    def __iter__(self) -> Iterator[Shard]:
        for first in range(0, len(self), AT_ONCE):
            yield from self._made(first, min(first + AT_ONCE, len(self)))

    def _made(self, first: int, stop: int) -> Iterator[Shard]:
        """The shards from number `first` to `stop` − 1."""
        ends = self._ends[max(first - 1, 0) : stop].tolist()
        if first == 0:
            ends.insert(0, 0)
        columns = (self._samples, self._bytes, self._sha256, self._table)
        rows = zip(*(column[first:stop].tolist() for column in columns), strict=True)
        for number, (samples, size, digest, table) in enumerate(rows):
            name = self.memory[self._names_start + ends[number] : self._names_start + ends[number + 1]].decode()
            shard = Shard(name, samples, size, digest.decode(), table.decode())
            yield replace(shard, samples=0, bytes=0) if first + number in self.left_out else shard

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        if isinstance(other, MappedShards) and (other.digest, other.left_out) == (self.digest, self.left_out):
            return True
        return len(self) == len(other) and all(map(Shard.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    # ---------------------------------------------------------------------------------- to another process

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # The path alone is sent. In a run of weeks, somebody may have cleaned the folder meanwhile.
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, self.memory[:])
        return (reopened, (self.path, self.digest, self.left_out))


def reopened(path: Path, digest: str, left_out: frozenset[int]) -> MappedShards:
    """The shards that another process has mapped; raises DataError where the file is gone or is another one by now."""
    shards = open_columns(path)
    if shards is None or shards.digest != digest:
        raise DataError(
            f"{path}: gone, or not what the worker has read\n"
            "  expected the columns of an index, which stay as they were written\n  run again: they are made anew"
        )
    return shards.without(left_out)


# --------------------------------------------------------------------------------------------- the file


def mapped_shards(path: Path, read: ReadJson) -> tuple[Mapping[str, Any], Sequence[Shard]]:
    """(all that a large index's JSON says but its shards, its shards); `read` reads and checks it.

    The first process of a node that asks makes the columns. Where they cannot be kept, every process holds the shards
    itself, which is said. Raises what `read` raises.
    """
    with open(path, "rb") as file:
        columns = columns_path(file_digest(file, "sha256").hexdigest())
    try:
        shards = open_columns(columns)
        if shards is None:
            shards = make_columns(path, columns, read)
    except (OSError, StorageError) as error:
        reason = refusal(error) if isinstance(error, OSError) else str(error).splitlines()[0]
        held_mb = HELD_PER_BYTE * path.stat().st_size / 1e6
        logging.getLogger(__name__).warning(
            f"{path}: its columns cannot be kept in {columns.parent} ({reason}): every process holds all of it, "
            f"about {held_mb:.0f} MB; give PATCHLINE_CACHE a folder that can be written"
        )
        return read(path, path.read_bytes())
    # The time of last use, as of a shard in the cache; the file may be another user's.
    with suppress(OSError):
        os.utime(shards.path)
    return shards.header["index"], shards


def make_columns(path: Path, columns: Path, read: ReadJson) -> MappedShards:
    """Write the columns of an index, while the other processes of the node wait for them.

    Raises what `read` raises, and OSError and StorageError where the folder takes nothing.
    """
    columns.parent.mkdir(parents=True, exist_ok=True)
    with locked(columns.with_suffix(".lock")):
        # Another process may have made them while we waited.
        shards = open_columns(columns)
        if shards is not None:
            return shards
        if columns.exists():
            logging.getLogger(__name__).warning(f"{columns}: torn or altered; it is made anew from {path}")
        text = path.read_bytes()
        content, held = read(path, text)
        # The JSON may have been replaced since its digest was taken: the columns go by what was read.
        columns = columns_path(sha256(text).hexdigest())
        write_columns(columns, content, held)
        delete_unused(columns.parent)
    shards = open_columns(columns)
    if shards is None:
        raise StorageError(f"{columns}: is not what was written a moment ago")
    return shards


def delete_unused(folder: Path) -> None:
    """Delete the columns of a folder that nobody has opened for a month; who has them mapped keeps them."""
    for path in folder.glob("*.columns"):
        # Another process may delete it meanwhile; it may be another user's.
        with suppress(OSError):
            status = path.stat()
            # Whoever does not own the file cannot set its time of last use; reading it has renewed the other.
            if time.time() - max(status.st_mtime, status.st_atime) > UNUSED_S:
                path.unlink()
                path.with_suffix(".lock").unlink()


def columns_path(json_digest: str) -> Path:
    """Where a node keeps the columns of an index whose JSON has this sha256."""
    return state_folder() / "indexes" / f"{json_digest}.columns"


def write_columns(path: Path, content: Mapping[str, Any], shards: Sequence[Shard]) -> None:
    """Write the columns of shards; `content` is all else that the index's JSON says.

    Raises StorageError where a digest is longer than one, which the columns have no room for.
    """
    names = [shard.name.encode() for shard in shards]
    values: dict[str, list[Any]] = {
        "ends": np.cumsum([len(name) for name in names], dtype=np.int64).tolist(),
        "samples": [shard.samples for shard in shards],
        "bytes": [shard.bytes for shard in shards],
        "sha256": [shard.sha256.encode() for shard in shards],
        "table": [shard.table.encode() for shard in shards],
    }
    longest = max((len(digest) for digest in values["sha256"] + values["table"]), default=0)
    if longest > np.dtype(HEX).itemsize:
        raise StorageError(f"a digest of {longest} characters, expected 64")
    header = {"format": FORMAT, "index": content, "shards": len(shards)}
    line = json.dumps(header).encode()
    # The line end is part of the padding, so that the header is found whatever its length is.
    padding = -(len(line) + 1) % ALIGNMENT
    parts = [line + b" " * padding + b"\n"]
    for name, kind in COLUMNS.items():
        parts.append(np.array(values[name], kind).tobytes())
    everything = b"".join([*parts, *names])
    write_whole(path, everything + sha256(everything).digest())


def open_columns(path: Path) -> MappedShards | None:
    """The shards of a file of columns; None where it is not there, or not what was written."""
    try:
        with open(path, "rb") as file:
            if not ends_with_its_digest(file):
                return None
            file.seek(0)
            header = json.loads(file.readline())
            start = file.tell()
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        return None
    if header["format"] != FORMAT:
        return None
    return MappedShards(path, memory, header, start, frozenset())


def ends_with_its_digest(file: IO[bytes]) -> bool:
    """Whether the last bytes of an open file are the sha256 of all before them."""
    # Read, not mapped: what is mapped counts as this process's memory as long as no other has mapped it.
    left = os.fstat(file.fileno()).st_size - DIGEST_BYTES
    digest = sha256()
    while left > 0:
        piece = file.read(min(left, PIECE))
        digest.update(piece)
        left -= len(piece)
    return left == 0 and file.read() == digest.digest()
