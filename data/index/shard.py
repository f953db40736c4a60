"""The tars of a set as its index knows them: one, its table of samples, and those of a large set as mapped columns.

    Shard("train-000000.tar", 1250, 6543360, "d41d…", "77ab…")
    train-000000.npy      a row a sample: image, image_size, label, label_size, digest, label_digest, key
    5d41….columns         a row a shard: samples, bytes, sha256, table, name

A table lies beside the index's JSON, which has its sha256. It is mapped, and stays so while its shard is open.

As Python objects, 300,000 shards are 139 MiB in every worker and in each of its decoding processes. The columns are
arrays, as np.save writes them, one after the other in one file, and at its end the sha256 of all before:
1. `write_columns` makes the file of what the JSON says, once a node (`data.index.document` says where and when);
2. `open_columns` compares the digest and maps the file; `MappedShards` makes a `Shard` when it is asked for it;
3. another process is sent the path and the digest of the file, and maps it too.
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

# n shards

# Extensions of images that are read.
IMAGES = ("jpg", "jpeg", "png", "webp")
# What tars are called when they have been compressed; they are read from the middle, which no compression allows.
COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2", ".tar.lz4")

# The columns of a table but for the key: where the bytes of a sample lie in its tar, their digest, and that of the
# label, which may be read without its image. A size of 0 says that the sample has no such member.
FIELDS = [
    ("image", "<u8"),
    ("image_size", "<u4"),
    ("label", "<u8"),
    ("label_size", "<u4"),
    ("digest", "<u8"),
    ("label_digest", "<u8"),
]

COLUMNS = ("samples", "bytes", "sha256", "table", "name", "index")  # numbers first, so that they are aligned
AT_ONCE = 4096  # shards that are made while all are gone through
PIECE = 1 << 20  # bytes that are hashed at once


@dataclass(frozen=True)
class Shard:
    """One tar as it was when indexed; `name` is its path or URL, relative to the index's directory."""

    name: str
    samples: int
    bytes: int
    sha256: str
    table: str = ""  # the sha256 of its table


def is_image(path: Path) -> bool:
    """Return whether a file is called as an image is."""
    return path.suffix[1:].lower() in IMAGES


# ----------------------------------------------------------------------------------------------- the table


class SampleRow(NamedTuple):
    """Where the bytes of one sample lie in its tar: offsets and sizes in bytes, 0 and 0 where there is no member."""

    key: bytes
    image: int
    image_size: int
    label: int
    label_size: int

    def image_in(self, tar: memoryview) -> memoryview:
        """Return the bytes of the image in the tar that was walked; they are not copied."""
        return tar[self.image : self.image + self.image_size]

    def label_in(self, tar: memoryview) -> memoryview:
        """Return the bytes of the label in the tar that was walked; they are not copied."""
        return tar[self.label : self.label + self.label_size]


def sample_digest(image: memoryview | bytes, label: memoryview | bytes) -> int:
    """Return the 64 bits that every read of a sample is compared with; of its encoded image and its label file.

    xxh3, because it is the cheapest of those that were measured (benchmarks/README.md). It finds what rots and what
    is overwritten; whoever forges a shard is found by the shard's sha256.
    """
    # The label is the seed, so that bytes cannot move from one member to the other unseen.
    return xxh3_64_intdigest(image, seed=label_digest(label))


def label_digest(label: memoryview | bytes) -> int:
    """Return the 64 bits that every read of a label alone is compared with."""
    return xxh3_64_intdigest(label)


def table_path(folder: Path, shard: str) -> Path:
    """Return where a shard's table lies: its name is flat, so that shards of one name in two folders do not meet."""
    flat = shard.removesuffix(".tar").replace("://", "/").strip("/").replace("/", "--")
    return folder / f"{flat}.npy"


def write_table(folder: Path, table: np.ndarray, name: str, size: int, digest: str) -> Shard:
    """Save a table in the folder of its index; returns its shard, of this name, size in bytes and sha256."""
    content = BytesIO()
    np.save(content, table, allow_pickle=False)
    write_atomically(table_path(folder, name), content.getvalue())
    return Shard(name, len(table), size, digest, sha256(content.getvalue()).hexdigest())


# ---------------------------------------------------------------------------------- all of a large set


class MappedShards(Sequence[Shard]):
    """The shards of a file of columns; those whose numbers are in `excluded` have no samples and no bytes."""

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
        self.digest = memory[-DIGEST_BYTES:]  # the sha256 that the file ends with
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
        at = range(len(self))[number]  # raises IndexError, as a tuple does
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
        # The path alone is sent to another process. In a run of weeks, somebody may have cleaned the folder meanwhile.
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, self.memory[:])
        return (reopened, (self.path, self.digest, self.excluded))


def reopened(path: Path, digest: bytes, excluded: frozenset[int]) -> MappedShards:
    """Map the shards that another process has mapped; raises DataError where the file is gone or is another by now."""
    shards = open_columns(path)
    if shards is None or shards.digest != digest:
        raise DataError(
            f"{path}: gone, or not what the worker has read\n"
            "  expected the columns of an index, which stay as they were written\n  run again: they are made anew"
        )
    return MappedShards(path, shards.memory, shards.columns, excluded)


def write_columns(path: Path, content: Mapping[str, Any], shards: Sequence[Shard]) -> None:
    """Write the columns of shards; `content` is all else that the index's JSON says."""
    file = BytesIO()
    for column in ("samples", "bytes"):
        np.save(file, np.array([getattr(shard, column) for shard in shards], "<i8"))
    for column in ("sha256", "table", "name"):
        np.save(file, np.array([getattr(shard, column).encode() for shard in shards]))
    np.save(file, np.frombuffer(json.dumps(content).encode(), np.uint8))
    file.write(sha256(file.getbuffer()).digest())
    write_atomically(path, file.getvalue())


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
    return MappedShards(path, memory, columns)
