"""One checkpoint on this node's disk, read in any topology; no byte of it is handed out that was not compared first.

In a checkpoint's folder:
    rank-00000.safetensors   a worker's fragments, keys "name|kind|start"
    MANIFEST.json            schema, step, ledger, attempt, world, zero, files with their digests, …

1. The head of a worker's file is read and checked, which says where each fragment lies (`FragmentFile`).
2. A range of a fragment is read chunk by chunk into the memory that wants it; each chunk is compared with its digest
   right after it was read. Of the two chunks at the ends of a range all is read and compared, and a part handed out.
3. A `Reader` finds a range of a parameter in the fragments of all files. They know nothing of world size or ZeRO stage,
   so any topology loads what any other has saved.

In:  step-0000001200/rank-00000.safetensors with "head.bias|master|0", five numbers, and rank-00001 with
     "head.bias|master|5", five more
Out: reader("head.bias", "master", 3, 4) → elements 3, 4, 5 and 6 of that parameter's fp32 master
"""

import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

import models
from data.errors import CheckpointError
from data.storage import Folder
from models import ModelConfig
from pipeline.checkpoints.manifest import (
    DIGEST_LENGTH,
    ChunkedRecord,
    DamagedCheckpoint,
    Manifest,
    check_size,
    chunks_of,
    digest_chunks,
    inspect_checkpoint,
    read_manifest,
    unreadable,
)

MOST_OPEN = 256  # files of a Reader at a time; a process may open 1,024 of all kinds on most systems
FLOAT_BYTES = 4
LENGTH_BYTES = 8  # at the start of a safetensors file: how long its JSON is (https://huggingface.co/docs/safetensors)


def verify(checkpoint: Path) -> Manifest:
    """Read every byte of a checkpoint and compare it with the manifest.

    Raises CheckpointError naming the file and what differs, OSError where the storage fails.
    """
    manifest = inspect_checkpoint(Folder(checkpoint.parent), checkpoint.name)
    for name, record in manifest.files.items():
        path = checkpoint / name
        # The size first: a truncated file is found without reading gigabytes of it.
        check_size(path, record)
        try:
            actual = digest_chunks(chunks_of(path, record["chunk_bytes"]), record["chunk_bytes"])
        except OSError as error:
            raise unreadable(path, error) from None
        if actual["sha256"] != record["sha256"]:
            raise DamagedCheckpoint(f"{path}: its sha256 is not the manifest's; the file has changed")
        if actual["chunks"] != record["chunks"]:
            raise DamagedCheckpoint(f"{path}: its sha256 is the manifest's, and the digests of its chunks are not")
        # The head too: a digest may be right for a file that never was a checkpoint, such as a pickle.
        FragmentFile(path, record).close()
    return manifest


class FragmentFile:
    """Gives access to the fragments of one file, by their keys "name|kind|start"."""

    def __init__(self, path: Path, record: ChunkedRecord) -> None:
        """Open the file and read its head.

        Raises DamagedCheckpoint where it is not the file of the record, OSError where the storage fails.
        """
        self.path = path
        self.size = record["bytes"]
        self.hashed_bytes = 0
        self.handle: int | None = None
        check_size(path, record)
        self.chunk_bytes = record["chunk_bytes"]
        self.digests = record["chunks"]
        self.kept_number = -1  # of the chunk that was read last for a part of it
        self.kept = bytearray()
        self.places: dict[str, tuple[int, int]] = {}  # first byte in the file and number of elements, by key
        # The head says where the fragments lie. A file that never was one of fragments may fail at any of these steps.
        try:
            length_field = bytearray(LENGTH_BYTES)
            self.fill(memoryview(length_field)[: self.size], 0)
            data_begins = LENGTH_BYTES + int.from_bytes(length_field, "little")
            if data_begins > self.size:
                raise ValueError(f"its head would end at byte {data_begins} of {self.size}")
            text = bytearray(data_begins - LENGTH_BYTES)
            self.fill(memoryview(text), LENGTH_BYTES)
            for key, described in json.loads(text).items():
                if key == "__metadata__":
                    continue
                first_byte, end_byte = described["data_offsets"]
                (count,) = described["shape"]
                is_flat_fp32 = described["dtype"] == "F32" and end_byte - first_byte == FLOAT_BYTES * count
                if not is_flat_fp32 or not 0 <= first_byte <= end_byte <= self.size - data_begins:
                    raise ValueError(f"{key} is {described}")
                self.places[key] = (data_begins + first_byte, count)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path} holds no fragments: {error}") from None

    def read(self, key: str, first: int, out: Tensor) -> None:
        """Fill a flat fp32 tensor in host memory with a fragment's elements from its element `first` on.

        Raises DamagedCheckpoint where what was read is not what was committed, OSError where the storage fails.
        """
        data_begins, count = self.places[key]
        assert first + out.numel() <= count, (key, first, out.numel(), count)
        self.fill(out.numpy().data.cast("B"), data_begins + FLOAT_BYTES * first)

    def fill(self, target: memoryview, begin: int) -> None:
        """Fill memory with the bytes of the file from byte `begin` on, compared chunk by chunk."""
        position = begin
        end = begin + len(target)
        while position < end:
            number = position // self.chunk_bytes
            chunk_begins = number * self.chunk_bytes
            chunk_ends = min(chunk_begins + self.chunk_bytes, self.size)
            stop = min(end, chunk_ends)
            part = target[position - begin : stop - begin]
            # A whole chunk goes straight to where it is wanted: no copy, and the digest finds it in the cache.
            if position == chunk_begins and stop == chunk_ends:
                self.read_chunk(number, part)
            else:
                # A chunk of which a part is wanted is kept, because the next range begins where this one ends.
                if number != self.kept_number:
                    self.kept_number = -1
                    self.kept = bytearray(chunk_ends - chunk_begins)
                    self.read_chunk(number, memoryview(self.kept))
                    self.kept_number = number
                part[:] = memoryview(self.kept)[position - chunk_begins : stop - chunk_begins]
            position = stop

    def read_chunk(self, number: int, target: memoryview) -> None:
        """Read one chunk and compare it with its digest. Raises DamagedCheckpoint where it differs."""
        begin = number * self.chunk_bytes
        try:
            if self.handle is None:
                self.handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            length = 0
            while length < len(target) and (more := os.preadv(self.handle, [target[length:]], begin + length)):
                length += more
        except OSError as error:
            raise unreadable(self.path, error) from None
        self.hashed_bytes += len(target)
        place = DIGEST_LENGTH * number
        if xxh3_64_hexdigest(target) != self.digests[place : place + DIGEST_LENGTH]:
            raise DamagedCheckpoint(
                f"{self.path}: bytes {begin} to {begin + len(target)} are not those that the manifest gives a digest "
                "of; the file has changed"
            )

    def close(self) -> None:
        """Give back the file descriptor and the kept chunk; what is asked for later is opened and read again."""
        self.kept_number = -1
        self.kept = bytearray()
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None

    def __del__(self) -> None:
        self.close()


class Piece(NamedTuple):
    """Says where elements [start, start + length) of a parameter's master or moment lie: under `key` of a file."""

    start: int
    length: int
    file: str
    key: str


class Reader:
    """Gives random access to the fragments of one checkpoint, whatever world size and stage wrote it."""

    def __init__(self, checkpoint: Path, files: Mapping[str, ChunkedRecord], share: float | None = None) -> None:
        """Open all files of a manifest; or, with a `share`, each when something is not found in those before it.

        `share`, from 0 to 1, tells where among the files lies what will be asked for: near 0 for the first worker, near
        1 for the last. The files nearest to there are opened first: a worker of the world that saved them needs one
        file, of any other a few, and not those of all.

        Raises DamagedCheckpoint where a file that is opened is not that of its record, or none of fragments.
        """
        self.checkpoint = checkpoint
        self.records = files
        self.opened: dict[str, FragmentFile] = {}
        self.with_handle: list[FragmentFile] = []  # those of `opened` that hold a file descriptor, MOST_OPEN at most
        self.pieces: dict[tuple[str, str], list[Piece]] = {}  # by (parameter name, kind)
        by_rank = sorted(files)
        if share is None:
            self.unopened = deque(by_rank)
            while self.unopened:
                self.open_next()
        else:
            middle = share * len(files) - 0.5  # a rank, and perhaps a half
            rank_of = {file: rank for rank, file in enumerate(by_rank)}
            self.unopened = deque(sorted(by_rank, key=lambda file: abs(rank_of[file] - middle)))

    def open_next(self) -> None:
        """Open one more file, and note which pieces it holds; their data is read when it is asked for."""
        file = self.unopened.popleft()
        self.make_room()
        fragments = FragmentFile(self.checkpoint / file, self.records[file])
        self.with_handle.append(fragments)
        self.opened[file] = fragments
        for key, (_, count) in fragments.places.items():
            # From the right: a parameter's name may hold the separator, the other two cannot.
            name, kind, start = key.rsplit("|", 2)
            self.pieces.setdefault((name, kind), []).append(Piece(int(start), count, file, key))

    @property
    def hashed_bytes(self) -> int:
        """Count the bytes that were compared with digests."""
        return sum(fragments.hashed_bytes for fragments in self.opened.values())

    def __call__(self, name: str, kind: str, start: int, count: int) -> Tensor:
        """Return elements [start, start + count) of one parameter's master or moment, flat fp32.

        Raises CheckpointError where the checkpoint holds no such parameter or not all of the range, DamagedCheckpoint
        where it is not what was committed.
        """
        # The range may lie across files of several workers, wherever the world that saved it made its cuts.
        out = torch.empty(count)
        filled = 0
        looked_at = 0  # of the pieces that are known
        while True:
            pieces = self.pieces.get((name, kind), [])
            for piece in pieces[looked_at:]:
                first = max(start, piece.start)
                stop = min(start + count, piece.start + piece.length)
                if first < stop:
                    self.read(piece, first, out[first - start : stop - start])
                    filled += stop - first
            looked_at = len(pieces)
            if filled >= count or not self.unopened:
                break
            self.open_next()
        check_complete(filled, count, name, kind)
        return out

    def read(self, piece: Piece, first: int, out: Tensor) -> None:
        """Fill a flat tensor with the elements of a parameter from its element `first` on, which lie in one piece."""
        fragments = self.opened[piece.file]
        if fragments.handle is None:
            self.make_room()
            self.with_handle.append(fragments)
        fragments.read(piece.key, first - piece.start, out)

    def make_room(self) -> None:
        """Give back all file descriptors where one more file would be too many: a save has a file per worker."""
        if len(self.with_handle) >= MOST_OPEN:
            for fragments in self.with_handle:
                fragments.close()
            self.with_handle.clear()

    def weights(self, shapes: Mapping[str, torch.Size], kind: str = "master") -> dict[str, Tensor]:
        """Return whole fp32 parameters (or their "average"), of no world size: what the next stage starts from.

        Raises CheckpointError as a call does; all files must be open.
        """
        flats: dict[str, Tensor] = {}
        pieces_of_file: dict[str, list[tuple[str, Piece]]] = {}  # by file: the pieces in it, each with its parameter
        for name, shape in shapes.items():
            flats[name] = torch.empty(shape.numel())
            length = 0
            for piece in self.pieces.get((name, kind), []):
                length += piece.length
                pieces_of_file.setdefault(piece.file, []).append((name, piece))
            check_complete(length, shape.numel(), name, kind)
        # File by file: by parameter, the files of a thousand workers would be opened again for each.
        for file in self.opened:
            for name, piece in pieces_of_file.get(file, []):
                self.read(piece, piece.start, flats[name][piece.start : piece.start + piece.length])
        return {name: flats[name].view(shape) for name, shape in shapes.items()}


def check_complete(count: int, expected: int, name: str, kind: str) -> None:
    """Raise CheckpointError where a checkpoint holds fewer elements of a parameter than are asked for, or more."""
    # What is missing would be memory that was never set: weights of noise, and no error.
    if count != expected:
        raise CheckpointError(
            f"the checkpoint holds {count} of {expected} elements of {name} ({kind}); it belongs to another model"
        )


def export(folder: Path, model_config: ModelConfig) -> dict[str, Tensor]:
    """Return the whole fp32 weights of a committed checkpoint; the averaged ones where it holds them."""
    manifest = read_manifest(folder)
    # Only the shapes are wanted: on the meta device the model takes no memory.
    with torch.device("meta"):
        model = models.from_config(model_config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    kind = "average" if manifest.config.get("polyak") else "master"
    return Reader(folder, manifest.files).weights(shapes, kind)
