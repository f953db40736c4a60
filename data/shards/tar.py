"""Walk a tar without extracting it: where each sample's image and label bytes lie.

Nothing is written, decoded or run. Only plain files with allowed extensions are looked at; links, devices,
sparse files and anything that would unpickle are counted as refused and stepped over.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from data.errors import DataError

IMAGES = ("jpg", "jpeg", "png", "webp")
LABELS = ("cls", "json")  # the first that a sample has, in this order
IGNORED = ("txt", "id", "idx", "index", "url", "width", "height")
BLOCK = 512
MAX_EXTENSION = 1 << 16  # bytes of one PAX or long-name header: real ones are under 1 kB, bombs are not
MAX_KEY = 512  # bytes; the tables hold keys at the width of the longest
MAX_LABEL = 1 << 20  # bytes; JFT images carry a few labels, not a million

# One row of a shard's table: where the bytes are. A size of 0 says that the sample has no such member.
FIELDS = [("image", "<u8"), ("image_size", "<u4"), ("label", "<u8"), ("label_size", "<u4")]


@dataclass
class Walk:
    """What one pass over a tar found; `rows` are (key, image, image_size, label, label_size)."""

    rows: list[tuple[bytes, int, int, int, int]] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    broken: str = ""  # why the walk stopped before the tar's end

    def table(self) -> np.ndarray:
        """The rows as a structured array with fields `image image_size label label_size key`."""
        width = max((len(row[0]) for row in self.rows), default=1)
        table = np.empty(len(self.rows), [*FIELDS, ("key", f"S{max(width, 1)}")])
        for column, name in enumerate(("key", "image", "image_size", "label", "label_size")):
            table[name] = [row[column] for row in self.rows]
        return table


def walk(tar: memoryview | bytes, name: str, *, lenient: bool = False) -> Walk:
    """Find the samples of a WebDataset tar: consecutive members that share the name up to the first dot.

    Raises DataError where the tar is cut short or is no tar; if `lenient`, returns what stands before that.
    """
    found = Walk()
    try:
        collect(tar, name, found)
    except DataError as error:
        if not lenient:
            raise
        found.broken = str(error)
    return found


def collect(tar: memoryview | bytes, name: str, found: Walk) -> None:
    key = None
    parts: dict[str, tuple[int, int]] = {}
    try:
        for member, offset, size in members(tar, name, found.refused):
            stem, extension = split_name(member)
            if len(stem) > MAX_KEY:
                found.refused["name too long"] += 1
                continue
            if stem != key:
                add_row(found, key, parts)
                key, parts = stem, {}
            if extension not in IMAGES + LABELS + IGNORED:
                found.refused[f"member type .{extension[:16]}"] += 1
            elif extension in parts:
                found.refused["repeated member"] += 1
            else:
                parts[extension] = (offset, size)
    finally:
        add_row(found, key, parts)


def add_row(found: Walk, key: bytes | None, parts: dict[str, tuple[int, int]]) -> None:
    image = next((parts[name] for name in IMAGES if name in parts), (0, 0))
    label = next((parts[name] for name in LABELS if name in parts), (0, 0))
    if label[1] > MAX_LABEL:
        found.refused["label too large"] += 1
        label = (0, 0)
    if key is not None and (image[1] or label[1]) and image[1] < 1 << 32:
        found.rows.append((key, *image, *label))


def split_name(member: bytes) -> tuple[bytes, str]:
    """`a/b.seg.PNG` → (`a/b`, `seg.png`), as webdataset splits names."""
    folder, slash, base = member.rpartition(b"/")
    stem, _, extension = base.partition(b".")
    return folder + slash + stem, extension.decode("ascii", "replace").lower()


def members(tar: memoryview | bytes, name: str, refused: Counter[str]) -> Iterator[tuple[bytes, int, int]]:
    """Yield (name, offset, size) of every plain file; reads ustar, GNU long names, PAX paths and sizes."""
    at, long_name, long_size = 0, None, None
    while True:
        header = bytes(tar[at : at + BLOCK])
        if len(header) < BLOCK:
            raise DataError(f"{name}: cut short at byte {at}; copy or pack it again")
        if header == bytes(BLOCK):
            return
        size = read_number(header[124:136], name, at) if long_size is None else long_size
        check_header(header, name, at)
        kind, start = header[156:157], at + BLOCK
        if start + size > len(tar):
            raise DataError(f"{name}: member at byte {at} wants {size} bytes, the file ends before; copy it again")
        at = start + (size + BLOCK - 1) // BLOCK * BLOCK
        if kind in (b"L", b"x", b"g"):
            if size > MAX_EXTENSION:
                refused["oversize extension header"] += 1
            elif kind == b"L":
                long_name = bytes(tar[start : start + size]).rstrip(b"\0")
            elif kind == b"x":
                long_name, long_size = read_pax(bytes(tar[start : start + size]), long_name)
            continue
        if kind in (b"0", b"\0"):
            yield long_name or member_name(header), start, size
        elif kind != b"5":
            refused["link, device or sparse member"] += 1
        long_name = long_size = None


def check_header(header: bytes, name: str, at: int) -> None:
    unsigned = sum(header) - sum(header[148:156]) + 8 * 32
    if unsigned != read_number(header[148:156], name, at):
        raise DataError(f"{name}: no valid tar header at byte {at}; a shard must be an uncompressed tar")


def read_number(field: bytes, name: str, at: int) -> int:
    try:
        if field[0] == 0x80:  # base 256, for sizes of 8 GiB and more
            return int.from_bytes(field[1:], "big")
        digits = field.strip(b"\0 ") or b"0"
        if not digits.isdigit():  # int() would take a sign
            raise ValueError(digits)
        return int(digits, 8)
    except ValueError:
        raise DataError(f"{name}: no valid tar header at byte {at}; a shard must be an uncompressed tar") from None


def member_name(header: bytes) -> bytes:
    base, prefix = header[:100].rstrip(b"\0"), header[345:500].rstrip(b"\0")
    return prefix + b"/" + base if prefix and header[257:263] == b"ustar\0" else base


def read_pax(body: bytes, long_name: bytes | None) -> tuple[bytes | None, int | None]:
    """The `path` and `size` records of a PAX header; everything else in it is ignored."""
    size = None
    while body:
        length, _, _ = body.partition(b" ")
        if not length.isdigit() or len(length) > 9 or not 0 < int(length) <= len(body):
            break
        name, _, value = body[len(length) + 1 : int(length) - 1].partition(b"=")
        long_name = value if name == b"path" else long_name
        size = int(value) if name == b"size" and value.isdigit() and len(value) < 20 else size
        body = body[int(length) :]
    return long_name, size


def parse_labels(raw: bytes) -> tuple[int, ...]:
    """Class ids of a `.cls` (`7`, `3 17`, `3,17`, `[3, 17]`) or `.json` (`{"labels": [3]}`, `{"label": 3}`).

    Raises ValueError where there is none, or where one is no whole number ≥ 0.
    """
    text = raw.decode("utf-8", "replace").strip()
    if text[:1] in ("[", "{"):
        try:
            found = json.loads(text)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if isinstance(found, dict):
            found = found.get("labels", found.get("label", found.get("cls", [])))
        found = found if isinstance(found, list) else [found]
    else:
        found = text.replace(",", " ").split()
    labels = tuple(int(label) for label in found if type(label) in (int, str))
    if not labels or len(labels) < len(found) or min(labels) < 0:
        raise ValueError(f"{text[:40]!r} holds no class ids")
    return labels
