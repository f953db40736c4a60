"""One worker's file of a checkpoint, opened for reading: no byte of it is handed out that was not compared first.

1. The head of the file is read and checked, which says where each fragment lies.
2. A range of a fragment is read chunk by chunk into the memory that wants it; each chunk is compared with its digest
   right after it was read. Of the two chunks at the ends of a range all is read and compared, and a part handed out.
3. A file from before there were chunks is read and compared whole when it is opened; the digests of its chunks are
   taken on the way, and hold for all that is read of it later.

In:  rank-00001.safetensors with "head.bias|master|5", five numbers, and its record in the manifest
Out: read("head.bias|master|5", 1, tensor of two) → elements 6 and 7 of head.bias
"""

import json
import os
from pathlib import Path

from torch import Tensor
from xxhash import xxh3_64_hexdigest

from pipeline.checkpoints.manifest import DIGEST_LENGTH, Damaged, FileRecord, check_size, unreadable, verify_file

FLOAT_BYTES = 4
LENGTH_BYTES = 8  # at the start of a safetensors file: how long its JSON is (https://huggingface.co/docs/safetensors)


class FragmentFile:
    """Gives access to the fragments of one file, by their keys "name|kind|start"."""

    def __init__(self, path: Path, record: FileRecord) -> None:
        """Open the file and read its head.

        Raises Damaged where it is not the file of the record, OSError where the storage fails.
        """
        self.path = path
        self.size = record["bytes"]
        self.hashed_bytes = 0
        self.handle: int | None = None
        check_size(path, record)
        if "chunks" not in record:
            record = verify_file(path, record)
            self.hashed_bytes += self.size
        self.chunk_bytes = record["chunk_bytes"]
        self.digests = record["chunks"]
        self.kept_number = -1  # of the chunk that was read last for a part of it
        self.kept = bytearray()
        self.places: dict[str, tuple[int, int]] = {}  # first byte in the file and number of elements, by key
        try:
            self.read_head()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Damaged(f"{path} holds no fragments: {error}") from None

    def read_head(self) -> None:
        """Note where the fragments lie. Raises ValueError and its like where this is no file of fragments."""
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

    def read(self, key: str, first: int, wanted: Tensor) -> None:
        """Fill a flat fp32 tensor in host memory with a fragment's elements from its element `first` on.

        Raises Damaged where what was read is not what was committed, OSError where the storage fails.
        """
        data_begins, count = self.places[key]
        assert first + wanted.numel() <= count, (key, first, wanted.numel(), count)
        self.fill(wanted.numpy().data.cast("B"), data_begins + FLOAT_BYTES * first)

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
                kept = self.keep_chunk(number, chunk_ends - chunk_begins)
                part[:] = kept[position - chunk_begins : stop - chunk_begins]
            position = stop

    def keep_chunk(self, number: int, length: int) -> memoryview:
        """Return a chunk of which a part is wanted; it is kept, because the next range begins where this one ends."""
        if number != self.kept_number:
            self.kept_number = -1
            self.kept = bytearray(length)
            self.read_chunk(number, memoryview(self.kept))
            self.kept_number = number
        return memoryview(self.kept)

    def read_chunk(self, number: int, target: memoryview) -> None:
        """Read one chunk and compare it with its digest. Raises Damaged where it differs."""
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
            raise Damaged(
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
