"""The shards of a large index, as arrays in a file that all processes of a node map instead of reading the JSON.

As Python objects, 300,000 shards are 139 MiB in every worker and in each of its decoding processes. So:
1. the first process of a node that loads a large index checks its JSON, and writes what it says as columns
   (`write_columns`) into the node's state folder, under the sha256 of that JSON, which another JSON does not have;
2. every process that loads the index compares the file's last 32 bytes, the sha256 of all before them, and maps it
   (`open_columns`); a file that is torn or altered is made anew;
3. `MappedShards` gives a `Shard` when it is asked for one, and a whole column without a copy;
4. another process is sent the path and the digest of the file, and maps it too;
5. the process that makes a file deletes those that have not been opened for a month.

    5d41….columns    arrays as np.save writes them, one after the other, and the digest:
                     samples, bytes (n,) int64; sha256, table, name (n,) bytes; index: the JSON but for its shards

The JSON remains the set's document: the file follows from it, and can be deleted at any time.
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
from io import BytesIO
from pathlib import Path
from typing import Any, overload

import numpy as np

from data.errors import DataError, StorageError
from data.files import locked, refusal, state_folder, write_whole
from data.index.shard import Shard

# n shards

COLUMNS = ("samples", "bytes", "sha256", "table", "name", "index")  # numbers first, so that they are aligned
AT_ONCE = 4096  # shards that are made while all are gone through
PIECE = 1 << 20  # bytes that are hashed at once
DIGEST_BYTES = 32  # of the sha256 at the end
UNUSED_S = 30 * 24 * 3600  # without being opened, after which a file may go
HELD_PER_BYTE = 3.6  # bytes of Python objects for each byte of a JSON: 139 MiB of 38 MB

# Reads a JSON of this path and this text: all that it says but its shards, and its shards. Raises DataError.
ReadJson = Callable[[Path, bytes], tuple[dict[str, Any], Sequence[Shard]]]


class MappedShards(Sequence[Shard]):
    """The shards of a file of columns; those whose numbers are in `excluded` have no samples and no bytes."""

    def __init__(self, path: Path, memory: mmap.mmap, columns: Mapping[str, np.ndarray], excluded: frozenset[int]):
        self.path = path
        self.memory = memory
        self.columns = columns
        self.excluded = excluded

    @property
    def digest(self) -> str:
        """The sha256 of the file, which it ends with."""
        return self.memory[-DIGEST_BYTES:].hex()

    @cached_property
    def samples(self) -> np.ndarray:
        """(n,) int64, the samples of each shard: the file's own memory, unless shards are excluded."""
        return self._without_excluded(self.columns["samples"])

    @property
    def bytes(self) -> np.ndarray:
        """(n,) int64, the bytes of each shard."""
        return self._without_excluded(self.columns["bytes"])

    @cached_property
    def any_is_url(self) -> bool:
        """Whether any shard is named by a URL."""
        return bool((np.char.find(self.columns["name"], b"://") >= 0).any())

    def without(self, numbers: Iterable[int]) -> MappedShards:
        """Return the same shards, of which these have no samples and no bytes."""
        return MappedShards(self.path, self.memory, self.columns, self.excluded.union(numbers))

    def _without_excluded(self, column: np.ndarray) -> np.ndarray:
        if not self.excluded:
            return column
        column = column.copy()
        column[sorted(self.excluded)] = 0
        return column

    # ---------------------------------------------------------------------------------------- as a sequence

    def __len__(self) -> int:
        return len(self.columns["samples"])

    @overload
    def __getitem__(self, number: int) -> Shard: ...

    @overload
    def __getitem__(self, number: slice) -> tuple[Shard, ...]: ...

    def __getitem__(self, number: int | slice) -> Shard | tuple[Shard, ...]:
        if isinstance(number, slice):
            return tuple(self[at] for at in range(*number.indices(len(self))))
        at = range(len(self))[number]  # raises IndexError, as a tuple does
        (shard,) = self._shards(at, at + 1)
        return shard

    def __iter__(self) -> Iterator[Shard]:
        for first in range(0, len(self), AT_ONCE):
            yield from self._shards(first, first + AT_ONCE)

    def _shards(self, first: int, stop: int) -> Iterator[Shard]:
        """Give the shards from number `first` to `stop` − 1."""
        rows = zip(*(self.columns[name][first:stop].tolist() for name in COLUMNS[:-1]), strict=True)
        for number, (samples, size, digest, table, name) in enumerate(rows, first):
            shard = Shard(name.decode(), samples, size, digest.decode(), table.decode())
            yield replace(shard, samples=0, bytes=0) if number in self.excluded else shard

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        if isinstance(other, MappedShards) and (other.digest, other.excluded) == (self.digest, self.excluded):
            return True
        return len(self) == len(other) and all(map(Shard.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    # ---------------------------------------------------------------------------------- to another process

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # The path alone is sent. In a run of weeks, somebody may have cleaned the folder meanwhile.
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, self.memory[:])
        return (reopened, (self.path, self.digest, self.excluded))


def reopened(path: Path, digest: str, excluded: frozenset[int]) -> MappedShards:
    """Map the shards that another process has mapped; raises DataError where the file is gone or is another by now."""
    shards = open_columns(path)
    if shards is None or shards.digest != digest:
        raise DataError(
            f"{path}: gone, or not what the worker has read\n"
            "  expected the columns of an index, which stay as they were written\n  run again: they are made anew"
        )
    return shards.without(excluded)


# --------------------------------------------------------------------------------------------- the file


def mapped_shards(path: Path, read: ReadJson) -> tuple[Mapping[str, Any], Sequence[Shard]]:
    """Return (all that a large index's JSON says but its shards, its shards); `read` reads and checks it.

    The first process of a node that asks makes the columns. Where they cannot be kept, every process holds the shards
    itself, which is logged. Raises what `read` raises.
    """
    with open(path, "rb") as file:
        columns = columns_path(file_digest(file, "sha256").hexdigest())
    try:
        shards = open_columns(columns) or make_columns(path, columns, read)
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
    return json.loads(shards.columns["index"].tobytes()), shards


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
    """Delete the columns of a folder that have not been opened for a month; who has them mapped keeps them."""
    for path in folder.glob("*.columns"):
        # Another process may delete it meanwhile; it may be another user's.
        with suppress(OSError):
            status = path.stat()
            # A process that does not own the file cannot set its time of last use; reading it has renewed the other.
            if time.time() - max(status.st_mtime, status.st_atime) > UNUSED_S:
                path.unlink()
                path.with_suffix(".lock").unlink()


def columns_path(json_digest: str) -> Path:
    """Return where a node keeps the columns of an index whose JSON has this sha256."""
    return state_folder() / "indexes" / f"{json_digest}.columns"


def write_columns(path: Path, content: Mapping[str, Any], shards: Sequence[Shard]) -> None:
    """Write the columns of shards; `content` is all else that the index's JSON says."""
    file = BytesIO()
    np.save(file, np.array([shard.samples for shard in shards], "<i8"))
    np.save(file, np.array([shard.bytes for shard in shards], "<i8"))
    np.save(file, np.array([shard.sha256.encode() for shard in shards]))
    np.save(file, np.array([shard.table.encode() for shard in shards]))
    np.save(file, np.array([shard.name.encode() for shard in shards]))
    np.save(file, np.frombuffer(json.dumps(content).encode(), np.uint8))
    file.write(sha256(file.getbuffer()).digest())
    write_whole(path, file.getvalue())


def open_columns(path: Path) -> MappedShards | None:
    """Map the shards of a file of columns; None where it is not there, or does not end with its own sha256."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        # Read, not mapped: what is mapped counts as this process's memory as long as no other has mapped it.
        bytes_left = os.fstat(file.fileno()).st_size - DIGEST_BYTES
        digest = sha256()
        while bytes_left > 0:
            piece = file.read(min(bytes_left, PIECE))
            digest.update(piece)
            bytes_left -= len(piece)
        if bytes_left < 0 or file.read() != digest.digest():
            return None
        file.seek(0)
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        columns = {}
        for name in COLUMNS:
            np.lib.format.read_magic(file)
            (count,), _, kind = np.lib.format.read_array_header_1_0(file)
            columns[name] = np.frombuffer(memory, kind, count, file.tell())
            file.seek(columns[name].nbytes, os.SEEK_CUR)
    return MappedShards(path, memory, columns, frozenset())
