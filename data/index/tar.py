"""Walk a tar without extracting it: where each sample's image and label bytes lie.

How a tar becomes a table, in order:
1. `members` reads one 512-byte header after the other and yields the name, offset and size of every plain file;
2. `split_name` cuts a name at the first dot of its last part: before it stands the sample's key, after it the
   extension;
3. consecutive members with the same key are one sample; `Walk.add` keeps the offsets of its image and its label;
4. an image and a label of one key that lie apart in the tar are put together;
5. `Walk.table` turns these rows into one array, with a digest of each sample's bytes, which `data.index.shard` saves
   beside the shard.

    train-000000.tar                      rows (key, image, image_size, label, label_size)
      a/cat.jpg   4711 bytes at 512
      a/cat.cls      1 byte  at 5632  →   (b"a/cat", 512, 4711, 5632, 1)
      a/dog.jpg    900 bytes at 6656  →   (b"a/dog", 6656, 900, 0, 0)

Nothing is written, decoded or run. Only plain files with allowed extensions are looked at; links, devices,
sparse files and anything that would unpickle are counted (`Refusals`) and stepped over. A tar ends with zeros: more of
them than any writer puts there, or anything after them, is an error, since nobody who reads tars would look for it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

import numpy as np

from data.errors import DataError
from data.index.index import Refusals
from data.index.names import preview
from data.index.shard import COMPRESSED, FIELDS, IMAGES, SampleRow, label_digest, sample_digest

Part = TypeVar("Part")  # what is known of a member of a sample
LABELS = ("cls", "json")  # the first that a sample has, in this order
IGNORED = ("txt", "id", "idx", "index", "url", "width", "height")
BLOCK = 512  # bytes; headers and contents begin at multiples of it (POSIX ustar)
MAX_EXTENSION = 1 << 16  # bytes of one PAX or long-name header: real ones are under 1 kB, bombs are not
MAX_KEY = 512  # bytes; the tables hold keys at the width of the longest
MAX_LABEL = 1 << 20  # bytes; JFT images carry a few labels, not a million
MAX_IMAGE = 1 << 32  # bytes; a table holds a size in 32 bits
USUAL_PADDING = (2 + 20) * BLOCK  # bytes of zeros after the last member: two blocks, and up to a record of 20 (POSIX)
LARGEST_RECORD = 2048  # blocks; GNU tar's --blocking-factor goes further for tapes alone
ABSENT = (0, 0)  # offset and size of a member that a sample does not have


@dataclass
class Walk:
    """What one pass over a tar found."""

    rows: list[SampleRow] = field(default_factory=list)
    refused: Refusals = field(default_factory=Refusals)  # members that were passed over, by reason
    broken: str = ""  # why the walk stopped before the tar's end

    def add(self, key: bytes, parts: dict[str, tuple[int, int]]) -> None:
        """Add the row of a sample, given (offset, size) of its members by extension."""
        image, image_size = first_part(IMAGES, parts, ABSENT)
        label, label_size = first_part(LABELS, parts, ABSENT)
        # The sample stays without a label, so that it is counted as bad and not lost in silence.
        if label_size > MAX_LABEL:
            self.refused.add("label too large", key)
            label, label_size = ABSENT
        if image_size >= MAX_IMAGE:
            self.refused.add("image too large", key)
        elif image_size > 0 or label_size > 0:
            self.rows.append(SampleRow(key, image, image_size, label, label_size))
        elif not parts.keys().isdisjoint(IMAGES + LABELS):
            self.refused.add("empty sample", key)

    def table(self, tar: memoryview) -> np.ndarray:
        """Return the rows as a structured array of the fields of `data.index.shard.FIELDS` and `key`.

        `tar` is what was walked: the digests are of its bytes.
        """
        longest_key = max((len(row.key) for row in self.rows), default=0)
        # numpy has no strings of width 0, so that a table without rows gets keys of width 1.
        table = np.empty(len(self.rows), [*FIELDS, ("key", f"S{max(longest_key, 1)}")])
        for column, name in enumerate(SampleRow._fields):
            table[name] = [row[column] for row in self.rows]
        for number, row in enumerate(self.rows):
            table["digest"][number] = sample_digest(row.image_in(tar), row.label_in(tar))
            table["label_digest"][number] = label_digest(row.label_in(tar))
        return table


@contextmanager
def mapped(file: IO[bytes]) -> Iterator[memoryview]:
    """Return the bytes of an open file without reading them first."""
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


def walk(tar: memoryview | bytes, name: str, *, lenient: bool = False) -> Walk:
    """Find the samples of a WebDataset tar: consecutive members that share the name up to the first dot.

    Raises DataError where the tar is cut short or is no tar; if `lenient`, returns what stands before that.
    """
    result = Walk()
    key = b""
    parts: dict[str, tuple[int, int]] = {}  # extension → (offset, size) of the sample that is being read
    try:
        for member, offset, size in members(tar, name, result.refused):
            member_key, extension = split_name(member)
            if len(member_key) > MAX_KEY:
                result.refused.add("name too long", member)
                continue
            # Another key begins another sample: the one before is complete.
            if member_key != key:
                result.add(key, parts)
                key = member_key
                parts = {}
            if extension not in IMAGES + LABELS + IGNORED:
                result.refused.add_type(extension, member)
            elif extension in parts:
                result.refused.add("repeated member", member)
            else:
                parts[extension] = (offset, size)
    except DataError as error:
        if not lenient:
            raise
        result.broken = str(error)
    # The last sample has no successor that would complete it; neither has the one before a cut.
    result.add(key, parts)

    # An image and a label of one key that lie apart are put together, where the image stands. As nearly always, there
    # is nothing to join: a tar in which each sample lies together costs one look.
    rows = result.rows
    if all(row.image_size and row.label_size for row in rows):
        return result
    labels: dict[bytes, list[int]] = {}  # key → numbers of its rows that are a label alone
    for number, row in enumerate(rows):
        if not row.image_size:
            labels.setdefault(row.key, []).append(number)
    taken: set[int] = set()
    whole = list(rows)
    for number, row in enumerate(rows):
        # A key that comes twice has two images and two labels: the first belongs to the first.
        if not row.label_size and labels.get(row.key):
            label = labels[row.key].pop(0)
            whole[number] = row._replace(label=rows[label].label, label_size=rows[label].label_size)
            taken.add(label)
    result.rows = [row for number, row in enumerate(whole) if number not in taken]
    return result


def first_part(extensions: Iterable[str], parts: Mapping[str, Part], absent: Part) -> Part:
    """Return the first of these extensions' parts that there is; `absent` where there is none."""
    for extension in extensions:
        if extension in parts:
            return parts[extension]
    return absent


def split_name(member: bytes) -> tuple[bytes, str]:
    """Return `a/b.seg.PNG` → (`a/b`, `seg.png`), as webdataset splits names."""
    folder, slash, base = member.rpartition(b"/")
    stem, _, extension = base.partition(b".")
    return folder + slash + stem, extension.decode("ascii", "replace").lower()


# --------------------------------------------------------------------------------------------- the format


def members(tar: memoryview | bytes, name: str, refused: Refusals) -> Iterator[tuple[bytes, int, int]]:
    """Yield (name, offset, size) of every plain file; reads ustar, GNU long names, PAX paths and sizes.

    Raises DataError where the tar is cut short, a header is none, or anything may lie behind its end; `name` is the
    tar's, for the message.
    """
    position = 0
    long_name: bytes | None = None  # told by an extension header, for the member that follows it
    long_size: int | None = None
    while True:
        header = bytes(tar[position : position + BLOCK])
        if len(header) < BLOCK:
            raise DataError(f"{name}: cut short at byte {position}; copy or pack it again")
        # A block of zeros ends a tar.
        if header == bytes(BLOCK):
            check_end(tar, name, position)
            return
        try:
            size = read_number(header[124:136]) if long_size is None else long_size
            # The checksum counts its own 8 bytes as spaces.
            checksum = sum(header) - sum(header[148:156]) + 8 * ord(" ")
            is_header = checksum == read_number(header[148:156])
        except ValueError:
            is_header = False
        if not is_header:
            raise DataError(f"{name}: no valid tar header at byte {position}; a shard must be an uncompressed tar")
        start = position + BLOCK
        # A slice past the end would be short without a word, and an image cut in half.
        if start + size > len(tar):
            raise DataError(
                f"{name}: member at byte {position} wants {size} bytes, the file ends before; copy it again"
            )
        position = start + (size + BLOCK - 1) // BLOCK * BLOCK  # whole blocks

        # ustar keeps the first folders of a long name in a field of their own, where GNU tar keeps other things.
        member = header[:100].rstrip(b"\0")
        prefix = header[345:500].rstrip(b"\0")
        is_ustar = header[257:263] == b"ustar\0"
        if prefix and is_ustar:
            member = prefix + b"/" + member

        # An extension header says more about the next member: its full name, or a size beyond 8 GiB.
        kind = header[156:157]
        if kind in (b"L", b"x", b"g"):
            if size > MAX_EXTENSION:
                refused.add("oversize extension header", member)
            elif kind == b"L":
                long_name = bytes(tar[start : start + size]).rstrip(b"\0")
            elif kind == b"x":
                long_name, long_size = read_pax(bytes(tar[start : start + size]), long_name)
            continue

        if kind in (b"0", b"\0"):
            yield long_name or member, start, size
        # Folders are nothing to look at, and nothing to report.
        elif kind != b"5":
            refused.add("link, device or sparse member", long_name or member)
        # What an extension header told was about this one member.
        long_name = None
        long_size = None


def check_end(tar: memoryview | bytes, name: str, position: int) -> None:
    """Raise DataError where something follows a tar's end, or more zeros than its writer would have put there."""
    # Every reader stops at the first block of zeros: whatever lies behind it would be lost without a word.
    for start in range(position, len(tar), BLOCK):
        if bytes(tar[start : start + BLOCK]).strip(b"\0"):
            raise DataError(
                f"{name}: the tar ends at byte {position}, and {len(tar) - start:,} bytes more follow at byte {start}\n"
                "  expected one tar: these may be several, one appended to the other, which no reader looks into\n"
                "  cut it there, or extract it with `tar --ignore-zeros -xf` and pack the files again"
            )
    padding = len(tar) - position
    if padding <= USUAL_PADDING:
        return
    # A writer that was told to use larger records fills the last one, so that the size is a multiple of it.
    record = 32
    while record <= LARGEST_RECORD:
        if len(tar) % (record * BLOCK) == 0 and padding <= (2 + record) * BLOCK:
            return
        record *= 2
    raise DataError(
        f"{name}: nothing but zeros from byte {position} to its end, {padding:,} of {len(tar):,} bytes\n"
        f"  expected {USUAL_PADDING:,} at most after the last member: a copy that broke off may have left these\n"
        "  copy or pack it again; or, if no member is missing, extract it and pack the files again"
    )


def read_number(digits: bytes) -> int:
    """Return a number of a header: octal digits, or base 256 where the first byte says so; raises ValueError."""
    # Eleven octal digits end below 8 GiB; larger sizes are in base 256.
    if digits[0] == 0x80:
        return int.from_bytes(digits[1:], "big")
    stripped = digits.strip(b"\0 ") or b"0"
    # int() would take a sign or an underscore, and a negative size would lead back to the same header for ever.
    if not stripped.isdigit():
        raise ValueError(f"{stripped!r} is no number")
    return int(stripped, 8)


def read_pax(body: bytes, long_name: bytes | None) -> tuple[bytes | None, int | None]:
    """Return the `path` and `size` records of a PAX header, `path` in place of `long_name`; all else in it is ignored.

    A record is `<length of the whole record> <name>=<value>\\n`.
    """
    size = None
    while body:
        digits, _, _ = body.partition(b" ")
        # Without a length that fits, the rest cannot be told apart; nine digits are more than any header holds.
        if not digits.isdigit() or len(digits) > 9:
            break
        length = int(digits)
        if not 0 < length <= len(body):
            break
        record, _, value = body[len(digits) + 1 : length - 1].partition(b"=")
        if record == b"path":
            long_name = value
        elif record == b"size" and value.isdigit() and len(value) < 20:
            size = int(value)
        body = body[length:]
    return long_name, size


# --------------------------------------------------------------------------------------------- the tars of a folder


def check_nothing_excluded(folder: str | os.PathLike[str]) -> None:
    """Raise DataError where a folder of tars has compressed ones too, or folders with tars in them."""
    if not Path(folder).is_dir():
        return
    compressed = [path.name for path in compressed_in(folder)]
    below = []
    for path in sorted(Path(folder).glob("[!.]*")):
        if path.is_dir():
            for tar in sorted(path.glob("[!.]*.tar")):
                below.append(f"{path.name}/{tar.name}")
    if compressed:
        raise DataError(
            f"{folder}: {preview(compressed)} would be left out: compressed tars\n"
            "  expected tars that samples can be read from the middle of: uncompress them (gzip -d, zstd -d), "
            f"or name those that you mean: {folder}/*.tar"
        )
    if below:
        raise DataError(
            f"{folder}: {preview(below)} would be left out: they lie in folders of their own\n"
            f"  expected tars in the folder itself; name them all: {folder}/*.tar {folder}/*/*.tar"
        )


def compressed_in(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the compressed tars of a folder, sorted; none where it is no folder."""
    compressed = []
    for path in sorted(Path(folder).glob("[!.]*")):
        if path.name.endswith(COMPRESSED) and path.is_file():
            compressed.append(path)
    return compressed
