"""Shards of an index: a shard, its table of samples, and the shards of a large data set as memory-mapped columns.

    Shard("train-000000.tar", 1250, 6543360, "d41d…", "77ab…")
    train-000000.npy      one row per sample: image, image_size, label, label_size, digest, label_digest, key
    5d41….columns         one row per shard: samples, bytes, sha256, table, name

A table is stored next to the index's JSON, which contains its sha256. It stays mapped while its shard is open.

As Python objects, 300,000 shards take 139 MiB in every worker and every decoding process. A file of columns consists of
arrays in the format of np.save, one after the other, followed by the sha256 of all of them:
1. `write_columns` converts the JSON to columns, once per node (see `data.index.document`);
2. `open_columns` checks the digest and maps the file; `MappedShards` creates `Shard` objects on access;
3. another process receives only the path and digest of the file, and maps it too.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from data.errors import DataError
from data.files import write_atomically
from data.seal import DIGEST_BYTES

# n: number of shards

# Extensions of supported images.
IMAGES = ("jpg", "jpeg", "png", "webp")
# Extensions of compressed tars; they are rejected, because samples could not be read at an offset.
COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2", ".tar.lz4")

# Columns of a table besides the key: offset and size of image and label in the tar, the sample's digest, and the
# label's digest, for labels read without images. A size of 0 means that the sample has no such member.
FIELDS = [
    ("image", "<u8"),
    ("image_size", "<u4"),
    ("label", "<u8"),
    ("label_size", "<u4"),
    ("digest", "<u8"),
    ("label_digest", "<u8"),
]

COLUMNS = ("samples", "bytes", "sha256", "table", "name", "index")  # numbers first, for their alignment
AT_ONCE = 4096  # shards created at a time during iteration
PIECE = 1 << 20  # bytes hashed at a time


@dataclass(frozen=True)
class Shard:
    """A tar in an index; `name` is its path or URL, relative to the index's directory."""

    name: str
    samples: int
    bytes: int
    sha256: str
    table: str = ""  # sha256 of the shard's table


def is_image(path: Path) -> bool:
    """Return whether a file has the extension of a supported image format."""
    return path.suffix[1:].lower() in IMAGES


# ----------------------------------------------------------------------------------------------- the table


class SampleRow(NamedTuple):
    """Position of a sample in its tar: offsets and sizes in bytes, both 0 for a missing member."""

    key: bytes
    image: int
    image_size: int
    label: int
    label_size: int

    def image_in(self, tar: memoryview) -> memoryview:
        """Return the image's bytes as a view of the tar."""
        return tar[self.image : self.image + self.image_size]

    def label_in(self, tar: memoryview) -> memoryview:
        """Return the label's bytes as a view of the tar."""
        return tar[self.label : self.label + self.label_size]


def sample_digest(image: memoryview | bytes, label: memoryview | bytes) -> int:
    """Return the 64-bit digest of a sample's encoded image and label file; every read is verified against it.

    xxh3 was the fastest hash measured (benchmarks/README.md). It detects bit rot and overwriting; the shard's sha256
    detects deliberate changes.
    """
    # The label's digest is the seed, so that moving bytes between the members changes the result.
    return xxh3_64_intdigest(image, seed=label_digest(label))


def label_digest(label: memoryview | bytes) -> int:
    """Return the 64-bit digest of a label, for verifying a label without reading its image."""
    return xxh3_64_intdigest(label)


def table_path(folder: Path, shard: str) -> Path:
    """Return the path of a shard's table; sub-folders become part of the file name, so that tables do not collide."""
    flat = shard.removesuffix(".tar").replace("://", "/").strip("/").replace("/", "--")
    return folder / f"{flat}.npy"


def write_table(folder: Path, table: np.ndarray, name: str, size: int, digest: str) -> Shard:
    """Save a table in the index's folder, and return its shard with the given name, size in bytes and sha256."""
    content = BytesIO()
    np.save(content, table, allow_pickle=False)
    write_atomically(table_path(folder, name), content.getvalue())
    return Shard(name, len(table), size, digest, sha256(content.getvalue()).hexdigest())


# ---------------------------------------------------------------------------------- all of a large set


class MappedShards(Sequence[Shard]):
    """The shards in a memory-mapped file of columns; shards in `excluded` have no samples and no bytes."""

    def __init__(
        self,
        path: Path,
        memory: mmap.mmap,
        columns: Mapping[str, np.ndarray],
        excluded: frozenset[int] = frozenset(),
    ):
        self.path = path
        self.memory = memory
        self.columns = columns
        self.excluded = excluded
        self.digest = memory[-DIGEST_BYTES:]  # the sha256 at the end of the file
        self.samples = columns["samples"]  # (n,) int64: the file's own memory, unless shards are excluded
        self.bytes = columns["bytes"]  # (n,) int64
        if excluded:
            numbers = sorted(excluded)
            self.samples = self.samples.copy()
            self.samples[numbers] = 0
            self.bytes = self.bytes.copy()
            self.bytes[numbers] = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: Any) -> Any:
        at = range(len(self))[number]  # raises IndexError like a tuple
        if isinstance(at, range):
            return tuple(map(self.__getitem__, at))
        name = self.columns["name"][at].decode()
        digest = self.columns["sha256"][at].decode()
        table = self.columns["table"][at].decode()
        return Shard(name, int(self.samples[at]), int(self.bytes[at]), digest, table)

    def __iter__(self) -> Iterator[Shard]:
        texts = [self.columns[column] for column in ("name", "sha256", "table")]
        for first in range(0, len(self), AT_ONCE):
            rows = slice(first, first + AT_ONCE)
            columns = [column[rows].tolist() for column in (self.samples, self.bytes, *texts)]
            for samples, size, name, digest, table in zip(*columns, strict=True):
                yield Shard(name.decode(), samples, size, digest.decode(), table.decode())

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # Send only the path to the other process. During a long run, somebody may have deleted the file: restore it.
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, self.memory[:])
        return (reopened, (self.path, self.digest, self.excluded))


def reopened(path: Path, digest: bytes, excluded: frozenset[int]) -> MappedShards:
    """Map the file of columns that another process has mapped; raises DataError if it is missing or has changed."""
    shards = open_columns(path)
    if shards is None or shards.digest != digest:
        raise DataError(
            f"{path}: missing, or changed since the worker read it\n"
            "  expected the unchanged column file of an index\n  run the same command again, which recreates it"
        )
    return MappedShards(path, shards.memory, shards.columns, excluded)


def write_columns(path: Path, content: Mapping[str, Any], shards: Sequence[Shard]) -> None:
    """Write the column file for an index's shards; `content` is the rest of the index's JSON."""
    file = BytesIO()
    for column in ("samples", "bytes"):
        np.save(file, np.array([getattr(shard, column) for shard in shards], "<i8"))
    for column in ("sha256", "table", "name"):
        np.save(file, np.array([getattr(shard, column).encode() for shard in shards]))
    np.save(file, np.frombuffer(json.dumps(content).encode(), np.uint8))
    file.write(sha256(file.getbuffer()).digest())
    write_atomically(path, file.getvalue())


def open_columns(path: Path) -> MappedShards | None:
    """Map a file of columns; return None if the file is missing or does not end with its sha256."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        # Hash by reading, not by mapping: mapped pages would count as memory of this process.
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
    return MappedShards(path, memory, columns)
