"""Find the samples of a tar without extracting it: the byte offsets of each image and label.

How a tar becomes a table, in order:
1. `members` reads one 512-byte header after the other, and yields name, offset and size of every regular file;
2. `split_name` splits a name at the first dot of its last component: the key of the sample, and the extension;
3. consecutive members with equal keys form a sample; `Walk.add` records the offsets of its image and label;
4. an image and a label with equal keys are joined even if they are not consecutive;
5. `Walk.table` converts the rows to an array, with a digest of each sample's bytes, which `data.index.shard` saves.

    train-000000.tar                      rows (key, image, image_size, label, label_size)
      a/cat.jpg   4711 bytes at 512
      a/cat.cls      1 byte  at 5632  →   (b"a/cat", 512, 4711, 5632, 1)
      a/dog.jpg    900 bytes at 6656  →   (b"a/dog", 6656, 900, 0, 0)

Nothing is written, decoded or executed. Only regular files with allowed extensions are used; links, devices, sparse
files and pickles are counted (`Refusals`) and skipped. A tar ends with zeros. More zeros than any writer appends, or
data after them, is an error, because readers of tars would silently ignore such data.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TypeVar

import numpy as np

from data.error_pages import LONGEST, words_of
from data.errors import DataError
from data.extras.sources.refusals import Refusals
from data.index.names import preview
from data.index.shard import COMPRESSED, FIELDS, IMAGES, SampleRow, label_digest, sample_digest

Part = TypeVar("Part")  # the information recorded about a member
LABELS = ("cls", "json")  # extensions of labels, in order of preference
IGNORED = ("txt", "id", "idx", "index", "url", "width", "height")
KNOWN = frozenset(IMAGES + LABELS + IGNORED)
KNOWN_AS_BYTES = {extension.encode(): extension for extension in KNOWN}
BLOCK = 512  # bytes; headers and contents begin at multiples of it (POSIX ustar)
ZEROS = bytes(BLOCK)
MAX_EXTENSION = 1 << 16  # bytes of a PAX or long-name header; real ones are below 1 kB, malicious ones may be larger
MAX_KEY = 512  # bytes; a table stores all keys at the width of the longest
MAX_LABEL = 1 << 20  # bytes; JFT images have a few labels, not a million
MAX_IMAGE = 1 << 32  # bytes; a table stores sizes in 32 bits
USUAL_PADDING = (2 + 20) * BLOCK  # bytes of zeros after the last member: two blocks, and up to a record of 20 (POSIX)
LARGEST_RECORD = 2048  # blocks; larger --blocking-factor values of GNU tar are only for tapes
# Types of members (POSIX ustar, GNU tar). Type 7, for contiguous files, is an ordinary file on all current systems.
REGULAR = (b"0", b"\0", b"7")
EXTENSIONS = (b"L", b"K", b"x", b"X", b"g")  # GNU's long name and long link; PAX, Solaris' PAX, PAX for all members
GNU_SPARSE = b"S"
WITHOUT_CONTENT = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes
# First bytes of compressed files, and the program that decompresses them.
COMPRESSORS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bzip2",
    b"\x04\x22\x4d\x18": "lz4",
}
# Reason for skipping a member whose key would end at a dot inside its name (IMG.1.jpg).
DOTTED = "name with a dot before its extension"
HIDDEN = "hidden file"  # a file whose name begins with a dot
PARENT = "name with a folder .."
REPEATED = "key of an earlier sample"  # samples counted for this reason are kept
ABSENT = (0, 0)  # offset and size of a missing member


@dataclass
class Walk:
    """The samples, skipped members and problems found in one pass over a tar."""

    rows: list[SampleRow] = field(default_factory=list)
    refused: Refusals = field(default_factory=Refusals)  # skipped members, by reason
    broken: str = ""  # reason why the walk stopped before the tar's end

    def add(self, key: bytes, parts: dict[str, tuple[int, int]]) -> None:
        """Add the row of a sample, given {extension: (offset, size)} of its members."""
        # An empty member does not hide another one, such as a .json next to an empty .cls.
        filled = {extension: part for extension, part in parts.items() if part[1] > 0}
        image, image_size = first_part(IMAGES, filled, first_part(IMAGES, parts, ABSENT))
        label, label_size = first_part(LABELS, filled, first_part(LABELS, parts, ABSENT))
        # Keep the sample without its label, so that it is counted as bad instead of silently missing.
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
        """Return the rows as a structured array with `data.index.shard.FIELDS` and `key`.

        `tar` must be the tar that was walked, because the digests are computed from its bytes.
        """
        longest_key = max((len(row.key) for row in self.rows), default=0)
        # numpy has no strings of width 0, so a table without rows gets keys of width 1.
        table = np.empty(len(self.rows), [*FIELDS, ("key", f"S{max(longest_key, 1)}")])
        for column, name in enumerate(SampleRow._fields):
            table[name] = [row[column] for row in self.rows]
        for number, row in enumerate(self.rows):
            table["digest"][number] = sample_digest(row.image_in(tar), row.label_in(tar))
            table["label_digest"][number] = label_digest(row.label_in(tar))
        return table


@contextmanager
def mapped(file: IO[bytes]) -> Iterator[memoryview]:
    """Context manager that memory-maps an open file."""
    # mmap rejects empty files.
    if os.fstat(file.fileno()).st_size == 0:
        yield memoryview(b"")
        return
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view = memoryview(mapping)
    try:
        yield view
    finally:
        # While an error propagates, its frames still hold parts of the view, and closing the mapping would fail.
        with suppress(BufferError):
            view.release()
            mapping.close()


def walk(tar: memoryview | bytes, name: str, *, lenient: bool = False, rename: bool = False) -> Walk:
    """Find the samples of a WebDataset tar: consecutive members with equal names up to the first dot.

    With `rename`, the extension of an image or label starts at the last dot, and other dots become underscores. Raises
    DataError if the tar is truncated or invalid; with `lenient`, returns the samples before that point instead.
    """
    result = Walk()
    key = b""
    parts: dict[str, tuple[int, int]] = {}  # {extension: (offset, size)} of the current sample
    dotted: list[tuple[str, bytes]] = []  # (extension, name) of members like a.seg.png
    try:
        for stored_name, offset, size in members(tar, name, result.refused):
            member = normal_name(stored_name)
            if member is None:
                result.refused.add(PARENT, stored_name)
                continue
            member_key, extension = split_name(member)
            # macOS writes `._1.jpg` next to 1.jpg, which is not an image.
            if not member_key or member_key.endswith(b"/"):
                result.refused.add(HIDDEN, member)
                continue
            is_known = extension in KNOWN
            if not is_known and rename and is_dotted(extension):
                member_key, extension = split_at_last_dot(member)
                is_known = True
            if len(member_key) > MAX_KEY:
                result.refused.add("name too long", member)
                continue
            # A new key begins a new sample and completes the previous one.
            if member_key != key:
                result.add(key, parts)
                if dotted:
                    refuse_dotted(dotted, parts, result.refused)
                    dotted = []
                key = member_key
                parts = {}
            if not is_known and is_dotted(extension):
                dotted.append((extension, member))
            elif not is_known:
                result.refused.add_type(extension, member)
            elif extension in parts:
                result.refused.add("repeated member", member)
            else:
                parts[extension] = (offset, size)
    except DataError as error:
        if not lenient:
            raise
        result.broken = str(error)
    # Add the last sample, which no further key completes.
    result.add(key, parts)
    refuse_dotted(dotted, parts, result.refused)

    # Join images and labels with equal keys that are not consecutive, at the image's position. Usually every row has
    # both, and this costs one pass over the rows.
    rows = result.rows
    if all(row.image_size and row.label_size for row in rows):
        count_repeated(result)
        return result
    labels: dict[bytes, list[int]] = {}  # {key: numbers of its rows with only a label}
    for number, row in enumerate(rows):
        if not row.image_size:
            labels.setdefault(row.key, []).append(number)
    used_labels: set[int] = set()
    joined = list(rows)
    for number, row in enumerate(rows):
        # If a key occurs twice, its first image gets its first label.
        if not row.label_size and labels.get(row.key):
            label = labels[row.key].pop(0)
            joined[number] = row._replace(label=rows[label].label, label_size=rows[label].label_size)
            used_labels.add(label)
    result.rows = [row for number, row in enumerate(joined) if number not in used_labels]
    count_repeated(result)
    return result


def count_repeated(result: Walk) -> None:
    """Add to `result.refused` the number of samples that repeat the key of an earlier sample.

    `tar -r` creates such samples by appending a changed file.
    """
    keys = {row.key for row in result.rows}
    if len(keys) < len(result.rows):
        for key, count in Counter(row.key for row in result.rows).items():
            if count > 1:
                result.refused.add(REPEATED, key, count - 1)


def first_part(extensions: Iterable[str], parts: Mapping[str, Part], absent: Part) -> Part:
    """Return the part for the first extension found in `parts`, or `absent` if there is none."""
    for extension in extensions:
        if extension in parts:
            return parts[extension]
    return absent


def normal_name(name: bytes) -> bytes | None:
    """Normalise a member's name before it becomes a key: `./a//b.jpg` and `/a/b.jpg` → `a/b.jpg`.

    A file thus gets the same key, regardless of the program that wrote the tar. Returns None for a name with `..`.
    """
    if b"./" not in name and b"//" not in name and not name.startswith(b"/"):
        return name
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    return None if b".." in parts else b"/".join(parts)


def split_name(member: bytes) -> tuple[bytes, str]:
    """Split a member name as webdataset does: `a/b.seg.PNG` → (`a/b`, `seg.png`)."""
    folder, slash, base = member.rpartition(b"/")
    stem, _, extension = base.partition(b".")
    # Decoding takes time; most extensions are known.
    return folder + slash + stem, KNOWN_AS_BYTES.get(extension) or extension.decode("ascii", "replace").lower()


def refuse_dotted(dotted: Iterable[tuple[str, bytes | str]], parts: Mapping[str, object], refused: Refusals) -> None:
    """Count in `refused` the members (extension, name) whose dotted extension ends like that of an image or label.

    If the sample has an image (among its `parts`), a.seg.png is an additional member; otherwise the dot was probably
    meant to be part of the key.
    """
    has_image = not parts.keys().isdisjoint(IMAGES)
    for extension, member in dotted:
        if has_image:
            refused.add_type(extension, member)
        else:
            refused.add(DOTTED, member)


def is_dotted(extension: str) -> bool:
    """Return whether an extension consists of several parts and ends with an image or label extension."""
    return "." in extension and extension.rpartition(".")[2] in IMAGES + LABELS


def split_at_last_dot(member: bytes) -> tuple[bytes, str]:
    """Split a member name at its last dot, and replace the other dots: `a/b.1.PNG` → (`a/b_1`, `png`)."""
    folder, slash, base = member.rpartition(b"/")
    stem, _, extension = base.rpartition(b".")
    return folder + slash + stem.replace(b".", b"_"), extension.decode("ascii", "replace").lower()


# --------------------------------------------------------------------------------------------- the format


def members(tar: memoryview | bytes, name: str, refused: Refusals) -> Iterator[tuple[bytes, int, int]]:
    """Yield (name, offset, size) of every regular file; supports ustar, GNU long names, PAX paths and sizes.

    Sparse files cannot be read in place: they are skipped, and counted in `refused` under their real names. Raises
    DataError if the tar is truncated, a header is invalid, or data may follow its end. `name` is the name of the tar in
    messages.
    """
    position = 0
    records = NO_RECORDS  # records of extension headers, which apply to the next member
    while True:
        header = bytes(tar[position : position + BLOCK])
        if len(header) < BLOCK:
            check_uncompressed(tar, name)
            raise DataError(f"{name}: truncated at byte {position}; copy or pack it again")
        # A block of zeros ends a tar.
        if header == ZEROS:
            check_end(tar, name, position)
            return
        try:
            size = read_number(header[124:136]) if records.size is None else records.size
            # As `has_checksum`, without a call for every member.
            is_valid = sum(header) - sum(header[148:156]) + 256 == read_number(header[148:156])
        except ValueError:
            is_valid = False
        if not is_valid:
            check_uncompressed(tar, name)
            raise DataError(f"{name}: no valid tar header at byte {position}; a shard must be an uncompressed tar")
        start = position + BLOCK
        kind = header[156:157]
        is_regular = kind in REGULAR
        # Some programs give a link the size of its target, or a folder a size, and store no content.
        if not is_regular and kind in WITHOUT_CONTENT and size > 0 and is_header_or_end(tar, start):
            size = 0
        elif kind == GNU_SPARSE:
            start = after_sparse_map(tar, header, start)
        # Slicing past the end would silently return a truncated image.
        if start + size > len(tar):
            raise DataError(
                f"{name}: member at byte {position} has {size} bytes, but the file ends earlier; copy it again"
            )
        position = start + (size + BLOCK - 1) // BLOCK * BLOCK  # whole blocks

        # ustar stores the first folders of a long name in a separate field, which GNU tar uses for other data.
        member = header[:100].partition(b"\0")[0]
        prefix = header[345:500].partition(b"\0")[0]
        is_ustar = header[257:263] == b"ustar\0"
        if prefix and is_ustar:
            member = prefix + b"/" + member

        # An extension header describes the next member: its full name, or a size above 8 GiB.
        if not is_regular and kind in EXTENSIONS:
            if size > MAX_EXTENSION:
                refused.add("oversize extension header", member)
            elif kind == b"L":
                records = replace(records, name=bytes(tar[start : start + size]).partition(b"\0")[0])
            elif kind in (b"x", b"X"):
                records = read_pax(bytes(tar[start : start + size]), records)
            continue

        if records.is_sparse or kind == GNU_SPARSE:
            refused.add("sparse member", records.name or member)
        elif is_regular:
            yield records.name or member, start, size
        # Folders need no report.
        elif kind != b"5":
            refused.add("link or device", records.name or member)
        # An extension header applies to one member only.
        records = NO_RECORDS


def has_checksum(header: bytes) -> bool:
    """Return whether a header contains its correct checksum; raises ValueError if the checksum is not a number."""
    # The checksum counts its own 8 bytes as spaces.
    return sum(header) - sum(header[148:156]) + 8 * ord(" ") == read_number(header[148:156])


def is_header_or_end(tar: memoryview | bytes, position: int) -> bool:
    """Return whether the next header, or the end of the tar, is at this position."""
    block = bytes(tar[position : position + BLOCK])
    if not block.strip(b"\0"):
        return True
    try:
        return has_checksum(block)
    except ValueError:
        return False


def check_uncompressed(tar: memoryview | bytes, name: str) -> None:
    """Raise DataError if a file is empty, compressed or of another kind, or is an error page saved as a tar."""
    if not tar:
        raise DataError(f"{name}: empty, 0 bytes\n  expected a tar: copy, download or pack it again")
    if bytes(tar[:2]) == b"PK":
        raise DataError(
            f"{name}: a zip archive, expected a tar\n  unpack it, then run python -m jobs pack folder FOLDER OUT"
        )
    for start, program in COMPRESSORS.items():
        if bytes(tar[: len(start)]) == start:
            raise DataError(
                f"{name}: compressed with {program}\n"
                f"  expected an uncompressed tar, whose samples can be read one by one: run {program} -d {name}"
            )
    words = words_of(bytes(tar[: LONGEST + 1]))
    if words:
        raise DataError(f"{name}: an error page was saved as a tar: {words}\n  download the tar again")


def after_sparse_map(tar: memoryview | bytes, header: bytes, start: int) -> int:
    """Return the offset of a GNU sparse member's content, which follows the blocks that continue its map of holes.

    The header has room for four holes; a flag indicates whether a block with 21 more follows, and so on (GNU tar
    manual, "Storing Sparse Files").
    """
    is_continued = header[482] != 0
    while is_continued and start + BLOCK <= len(tar):
        is_continued = tar[start + 504] != 0
        start += BLOCK
    return start


def check_end(tar: memoryview | bytes, name: str, position: int) -> None:
    """Raise DataError if a tar's end is followed by data, or by more zeros than its writer would have appended."""
    # Readers stop at the first block of zeros and would silently ignore everything after it.
    for start in range(position, len(tar), BLOCK):
        if bytes(tar[start : start + BLOCK]).strip(b"\0"):
            raise DataError(
                f"{name}: the tar ends at byte {position}, but {len(tar) - start:,} more bytes follow at byte {start}\n"
                "  expected a single tar: these may be several concatenated tars, of which readers see only the first\n"
                "  split the file there, or extract it with `tar --ignore-zeros -xf` and pack the files again"
            )
    padding = len(tar) - position
    if padding <= USUAL_PADDING:
        return
    # Writers with larger records pad the last one, so the file size is a multiple of the record size.
    record = 32
    while record <= LARGEST_RECORD:
        if len(tar) % (record * BLOCK) == 0 and padding <= (2 + record) * BLOCK:
            return
        record *= 2
    raise DataError(
        f"{name}: the file contains only zeros after byte {position}, {padding:,} of {len(tar):,} bytes\n"
        f"  expected at most {USUAL_PADDING:,} after the last member; an interrupted copy may have left these zeros\n"
        "  copy or pack it again; or, if no member is missing, extract it and pack the files again"
    )


def read_number(digits: bytes) -> int:
    """Parse a number in a header: octal digits, or base 256 after the byte 0x80; raises ValueError for other text."""
    # Eleven octal digits are limited to 8 GiB; larger sizes use base 256.
    if digits[0] == 0x80:
        return int.from_bytes(digits[1:], "big")
    stripped = digits.strip(b"\0 ") or b"0"
    # int() would accept a sign or an underscore; a negative size would lead back to the same header in an endless loop.
    if not stripped.isdigit():
        raise ValueError(f"{stripped!r} is not a number")
    return int(stripped, 8)


@dataclass(frozen=True)
class PaxRecords:
    """The contents of extension headers, which apply to the following member."""

    name: bytes | None = None
    size: int | None = None  # bytes stored, for sizes beyond 8 GiB
    is_sparse: bool = False  # the content is a map of holes and the parts between them (formats 0.0, 0.1 and 1.0)


NO_RECORDS = PaxRecords()


def read_pax(body: bytes, before: PaxRecords = NO_RECORDS) -> PaxRecords:
    """Merge the records of a PAX header into those of an earlier extension header; unknown records are ignored.

    A record is `<length of the whole record> <name>=<value>\\n`. The `path` of a sparse member is a placeholder
    (`GNUSparseFile.0/cat.jpg`): its real name is in `GNU.sparse.name`.
    """
    name = before.name
    size = before.size
    sparse_name = None
    is_sparse = before.is_sparse
    while body:
        digits, _, _ = body.partition(b" ")
        # Without a valid length, the remaining records cannot be separated; real lengths have fewer than nine digits.
        if not digits.isdigit() or len(digits) > 9:
            break
        length = int(digits)
        if not 0 < length <= len(body):
            break
        record, _, value = body[len(digits) + 1 : length - 1].partition(b"=")
        if record == b"path":
            name = value
        elif record == b"size" and value.isdigit() and len(value) < 20:
            size = int(value)
        elif record == b"GNU.sparse.name":
            sparse_name = value
        is_sparse |= record.startswith(b"GNU.sparse.")
        body = body[length:]
    return PaxRecords(sparse_name or name, size, is_sparse)


# --------------------------------------------------------------------------------------------- folders of tars


def check_nothing_excluded(folder: str | os.PathLike[str]) -> None:
    """Raise DataError if a folder of tars also contains compressed tars, tars named *.TAR, or sub-folders with tars."""
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
            f"{folder}: {preview(compressed)} are compressed tars and would be ignored\n"
            "  expected uncompressed tars, in which samples can be read at any offset: decompress them (gzip -d or "
            f"zstd -d); or, to use only the uncompressed tars, pass {folder}/*.tar"
        )
    capital = [path.name for path in sorted(Path(folder).glob("[!.]*.[tT][aA][rR]")) if path.suffix != ".tar"]
    if capital:
        raise DataError(
            f"{folder}: {preview(capital)} would be ignored, because names of tars end in .tar\n"
            f"  rename them; or, to use only the other tars, pass {folder}/*.tar"
        )
    if below:
        raise DataError(
            f"{folder}: {preview(below)} would be ignored, because they are in sub-folders\n"
            f"  expected tars in the folder itself; to use all tars, pass {folder}/*.tar {folder}/*/*.tar"
        )


def compressed_in(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the sorted compressed tars in a folder; an empty list if the path is not a folder."""
    compressed = []
    for path in sorted(Path(folder).glob("[!.]*")):
        if path.name.endswith(COMPRESSED) and path.is_file():
            compressed.append(path)
    return compressed
