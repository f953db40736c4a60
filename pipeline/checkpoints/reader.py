"""Reads a checkpoint from this node's disk at any world size, and verifies every byte before returning it.

In a checkpoint's folder:
    rank-00000.safetensors   a worker's fragments, with keys "name|kind|start"
    MANIFEST.json            schema, step, ledger, attempt, world, zero, files with their digests, …

1. `FragmentFile` reads and checks the header of a worker's file, which lists the position of each fragment.
2. A range of a fragment is read chunk by chunk into its destination, and each chunk is verified right after it is read.
   The two chunks at the ends of a range are read and verified completely, although only a part of them is returned.
3. `Reader` finds a range of a parameter in the fragments of all files. Fragments are independent of the world size and
   the ZeRO stage, so any topology can load a checkpoint saved by any other.

In:  step-0000001200/rank-00000.safetensors with "head.bias|master|0", five numbers, and rank-00001 with
     "head.bias|master|5", five more
Out: reader("head.bias", "master", 3, 4) → elements 3, 4, 5 and 6 of that parameter's fp32 master weight
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

MAX_OPEN = 256  # open files of a Reader; on most systems a process may open 1,024 files
FLOAT_BYTES = 4
LENGTH_BYTES = 8  # at the start of a safetensors file: length of its JSON (https://huggingface.co/docs/safetensors)


def verify(checkpoint: Path) -> Manifest:
    """Verify every byte of a checkpoint against its manifest, and return the manifest.

    Raises CheckpointError, which names the file and the difference, if a file does not match the manifest, or OSError
    if the storage fails.
    """
    manifest = inspect_checkpoint(Folder(checkpoint.parent), checkpoint.name)
    for name, record in manifest.files.items():
        path = checkpoint / name
        # Check the size first, to detect a truncated file without reading gigabytes.
        check_size(path, record)
        try:
            actual = digest_chunks(chunks_of(path, record["chunk_bytes"]), record["chunk_bytes"])
        except OSError as error:
            raise unreadable(path, error) from None
        if actual["sha256"] != record["sha256"]:
            raise DamagedCheckpoint(f"{path}: its sha256 differs from the manifest; the file has changed")
        if actual["chunks"] != record["chunks"]:
            raise DamagedCheckpoint(
                f"{path}: its sha256 matches the manifest, but the digests of its chunks do not, so the manifest is "
                "damaged"
            )
        # Check the header too: the digests would also match if the committed file was not a checkpoint file.
        FragmentFile(path, record).close()
    return manifest


class FragmentFile:
    """One worker's file in a checkpoint; fragments are read by their keys, "name|kind|start"."""

    def __init__(self, path: Path, record: ChunkedRecord) -> None:
        """Open the file and read its header.

        Raises DamagedCheckpoint if the file does not match its record, or OSError if the storage fails.
        """
        self.path = path
        self.size = record["bytes"]
        self.hashed_bytes = 0
        self.handle: int | None = None
        check_size(path, record)
        self.chunk_bytes = record["chunk_bytes"]
        self.digests = record["chunks"]
        self.cached_number = -1  # number of the last partly used chunk
        self.cached_chunk = bytearray()
        self.places: dict[str, tuple[int, int]] = {}  # key → (first byte in the file, number of elements)
        # The header lists the positions of the fragments. If the file is something else, any of these steps may fail.
        try:
            length_field = bytearray(LENGTH_BYTES)
            self.fill(memoryview(length_field)[: self.size], 0)
            data_begins = LENGTH_BYTES + int.from_bytes(length_field, "little")
            if data_begins > self.size:
                raise ValueError(f"its header would end at byte {data_begins}, but the file has {self.size} bytes")
            text = bytearray(data_begins - LENGTH_BYTES)
            self.fill(memoryview(text), LENGTH_BYTES)
            for key, described in json.loads(text).items():
                if key == "__metadata__":
                    continue
                first_byte, end_byte = described["data_offsets"]
                (count,) = described["shape"]
                is_flat_fp32 = described["dtype"] == "F32" and end_byte - first_byte == FLOAT_BYTES * count
                if not is_flat_fp32 or not 0 <= first_byte <= end_byte <= self.size - data_begins:
                    raise ValueError(f"the entry {key} is invalid: {described}")
                self.places[key] = (data_begins + first_byte, count)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path} has no valid fragments: {error}") from None

    def read(self, key: str, first: int, out: Tensor) -> None:
        """Fill a flat fp32 tensor in host memory from a fragment, starting at the fragment's element `first`.

        Raises DamagedCheckpoint if the bytes differ from the committed bytes, or OSError if the storage fails.
        """
        data_begins, count = self.places[key]
        assert first + out.numel() <= count, (key, first, out.numel(), count)
        self.fill(out.numpy().data.cast("B"), data_begins + FLOAT_BYTES * first)

    def fill(self, target: memoryview, begin: int) -> None:
        """Fill `target` with bytes from the file, starting at byte `begin`; verify them chunk by chunk."""
        position = begin
        end = begin + len(target)
        while position < end:
            number = position // self.chunk_bytes
            chunk_begins = number * self.chunk_bytes
            chunk_ends = min(chunk_begins + self.chunk_bytes, self.size)
            stop = min(end, chunk_ends)
            part = target[position - begin : stop - begin]
            # Read a whole chunk directly into its destination: this avoids a copy, and the digest reads the CPU cache.
            if position == chunk_begins and stop == chunk_ends:
                self.read_chunk(number, part)
            else:
                # Cache a partly used chunk, because the next range usually begins where this one ends.
                if number != self.cached_number:
                    self.cached_number = -1
                    self.cached_chunk = bytearray(chunk_ends - chunk_begins)
                    self.read_chunk(number, memoryview(self.cached_chunk))
                    self.cached_number = number
                part[:] = memoryview(self.cached_chunk)[position - chunk_begins : stop - chunk_begins]
            position = stop

    def read_chunk(self, number: int, target: memoryview) -> None:
        """Read one chunk and verify its digest. Raises DamagedCheckpoint if the digest differs."""
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
                f"{self.path}: bytes {begin} to {begin + len(target)} do not match their digest in the manifest; "
                "the file has changed"
            )

    def close(self) -> None:
        """Close the file descriptor and free the cached chunk; later reads open the file again."""
        self.cached_number = -1
        self.cached_chunk = bytearray()
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None

    def __del__(self) -> None:
        self.close()


class Piece(NamedTuple):
    """The file and key that store elements [start, start + length) of a parameter's master weight or moment."""

    start: int
    length: int
    file: str
    key: str


class Reader:
    """Random access to the parameters in a checkpoint, independent of the world size and ZeRO stage that wrote it."""

    def __init__(self, checkpoint: Path, files: Mapping[str, ChunkedRecord], share: float | None = None) -> None:
        """Open all files in a manifest or, if `share` is given, open files only when they are needed.

        `share`, from 0 to 1, is the expected position of the wanted fragments among the files: near 0 for the first
        worker, near 1 for the last. The nearest files are opened first, so a worker opens a single file if the world
        size has not changed, and otherwise a few files instead of all.

        Raises DamagedCheckpoint if an opened file does not match its record or has no valid fragments.
        """
        self.checkpoint = checkpoint
        self.records = files
        self.opened: dict[str, FragmentFile] = {}
        self.with_handle: list[FragmentFile] = []  # files with an open descriptor, at most MAX_OPEN
        self.pieces: dict[tuple[str, str], list[Piece]] = {}  # (parameter name, kind) → its pieces
        by_rank = sorted(files)
        if share is None:
            self.unopened = deque(by_rank)
            while self.unopened:
                self.open_next()
        else:
            middle = share * len(files) - 0.5  # a rank, possibly with a fraction
            rank_of = {file: rank for rank, file in enumerate(by_rank)}
            self.unopened = deque(sorted(by_rank, key=lambda file: abs(rank_of[file] - middle)))

    def open_next(self) -> None:
        """Open one more file and list its fragments; their data is read only when it is needed."""
        file = self.unopened.popleft()
        self.make_room()
        fragments = FragmentFile(self.checkpoint / file, self.records[file])
        self.with_handle.append(fragments)
        self.opened[file] = fragments
        for key, (_, count) in fragments.places.items():
            # Split from the right: a parameter's name may contain the separator, the other two parts cannot.
            name, kind, start = key.rsplit("|", 2)
            self.pieces.setdefault((name, kind), []).append(Piece(int(start), count, file, key))

    @property
    def hashed_bytes(self) -> int:
        """Return the number of bytes verified so far."""
        return sum(fragments.hashed_bytes for fragments in self.opened.values())

    def __call__(self, name: str, kind: str, start: int, count: int) -> Tensor:
        """Return elements [start, start + count) of one parameter's master weight or moment, as flat fp32.

        Raises CheckpointError if the checkpoint lacks the parameter or a part of the range, or DamagedCheckpoint if the
        bytes differ from the committed bytes.
        """
        # The range may span files of several workers, depending on the world size that saved it.
        out = torch.empty(count)
        filled = 0
        checked = 0  # number of known pieces already checked for this range
        while True:
            pieces = self.pieces.get((name, kind), [])
            for piece in pieces[checked:]:
                first = max(start, piece.start)
                stop = min(start + count, piece.start + piece.length)
                if first < stop:
                    self.read(piece, first, out[first - start : stop - start])
                    filled += stop - first
            checked = len(pieces)
            if filled >= count or not self.unopened:
                break
            self.open_next()
        check_complete(filled, count, name, kind)
        return out

    def read(self, piece: Piece, first: int, out: Tensor) -> None:
        """Fill a flat tensor from a single piece, starting at the parameter's element `first`."""
        fragments = self.opened[piece.file]
        if fragments.handle is None:
            self.make_room()
            self.with_handle.append(fragments)
        fragments.read(piece.key, first - piece.start, out)

    def make_room(self) -> None:
        """Close all open files if another would exceed the limit on open files: a checkpoint has a file per worker."""
        if len(self.with_handle) >= MAX_OPEN:
            for fragments in self.with_handle:
                fragments.close()
            self.with_handle.clear()

    def weights(self, shapes: Mapping[str, torch.Size], kind: str = "master") -> dict[str, Tensor]:
        """Return {name: complete fp32 parameter}: the master weights, or the averaged weights if `kind` is "average".

        The next stage starts from these weights. All files must be open. Raises the same errors as `__call__`.
        """
        flats: dict[str, Tensor] = {}
        pieces_of_file: dict[str, list[tuple[str, Piece]]] = {}  # file → [(parameter, piece)]
        for name, shape in shapes.items():
            flats[name] = torch.empty(shape.numel())
            length = 0
            for piece in self.pieces.get((name, kind), []):
                length += piece.length
                pieces_of_file.setdefault(piece.file, []).append((name, piece))
            check_complete(length, shape.numel(), name, kind)
        # Read file by file: otherwise the files of a thousand workers would be reopened for each parameter.
        for file in self.opened:
            for name, piece in pieces_of_file.get(file, []):
                self.read(piece, piece.start, flats[name][piece.start : piece.start + piece.length])
        return {name: flats[name].view(shape) for name, shape in shapes.items()}


def check_complete(count: int, expected: int, name: str, kind: str) -> None:
    """Raise CheckpointError unless the checkpoint has exactly the requested number of elements of a parameter."""
    # Missing elements would leave uninitialised memory in the weights, without an error.
    if count != expected:
        raise CheckpointError(
            f"the checkpoint contains {count} of {expected} elements of {name} ({kind}); it belongs to another model"
        )


def export(folder: Path, model_config: ModelConfig) -> dict[str, Tensor]:
    """Return a committed checkpoint's complete fp32 weights, or its averaged weights if it has any."""
    manifest = read_manifest(folder)
    # Only the shapes are needed; on the meta device the model takes no memory.
    with torch.device("meta"):
        model = models.from_config(model_config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    kind = "average" if manifest.config.get("polyak") else "master"
    return Reader(folder, manifest.files).weights(shapes, kind)
