"""WebDataset tars that have been compressed, to pack them anew: read as a stream, and never unpacked to disk.

    train-000.tar.gz                     RawSample("a/cat", b"\\xff\\xd8…", b"1")
      a/cat.jpg  a/cat.cls          →    RawSample("a/dog", b"\\xff\\xd8…", b"0")
      a/dog.jpg  a/dog.cls

Members of one sample have to lie side by side: a stream does not go back. Halves that lie apart are counted by whoever
reads these as samples without a label and without an image.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from data.archives.members import is_compressed, members
from data.index.tar import IMAGES, LABELS, split_name
from data.shards.sources import RawSample, rows_of_tar


def rows(path: Path) -> Iterator[RawSample]:
    """The samples of a tar, compressed or not; raises DataError where it is none, is cut short or damaged."""
    return compressed_rows(path) if is_compressed(path) else rows_of_tar(path)


def compressed_rows(path: Path) -> Iterator[RawSample]:
    """The samples of a compressed tar: consecutive members that share the name up to the first dot."""
    key: bytes | None = None
    parts: dict[str, bytes] = {}  # extension → content, of the sample that is being read
    for member in members(path):
        member_key, extension = split_name(member.name.encode("utf-8", "surrogateescape"))
        if member_key != key:
            if key is not None and parts:
                yield sample_of(key, parts)
            key = member_key
            parts = {}
        if extension in IMAGES + LABELS and extension not in parts:
            parts[extension] = member.read()
    # The last sample has no successor that would complete it.
    if key is not None and parts:
        yield sample_of(key, parts)


def sample_of(key: bytes, parts: dict[str, bytes]) -> RawSample:
    """The sample of these members; an image or a label that it does not have is empty."""
    return RawSample(key.decode("utf-8", "replace"), first_of(IMAGES, parts), first_of(LABELS, parts))


def first_of(extensions: tuple[str, ...], parts: dict[str, bytes]) -> bytes:
    """The content of the member with the first of these extensions; nothing where there is none."""
    for extension in extensions:
        if extension in parts:
            return parts[extension]
    return b""
