"""WebDataset tars as a source, to pack them anew: plain, or compressed and read as a stream, never unpacked to disk.

    train-000.tar.gz                     (key "a/cat", image b"\\xff\\xd8…", label b"1")
      a/cat.jpg  a/cat.cls          →    (key "a/dog", image b"\\xff\\xd8…", label b"0")
      a/dog.jpg  a/dog.cls

Members of one sample in a compressed tar have to lie side by side: a stream does not go back. Halves that lie apart are
counted as samples without a label and without an image.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from data.errors import DataError
from data.extras.sources.members import Member, is_compressed, members
from data.images.decode import MAX_BYTES
from data.index.document import SUFFIX, load_index
from data.index.index import Refusals
from data.index.names import NO_NAMES, Names, NoLabel, parse_labels
from data.index.shard import COMPRESSED, IMAGES
from data.index.tar import (
    IGNORED,
    LABELS,
    MAX_LABEL,
    check_nothing_excluded,
    compressed_in,
    first_part,
    mapped,
    split_name,
    walk,
)
from data.sources.folders import files_of
from data.sources.samples import RawSample, Sample, kind_of

TOO_LARGE = "image file too large"  # as `data.images.decode.read_header` says it


def tars(
    source: str | os.PathLike[str] | Sequence[str], ids: Mapping[str, int] = NO_NAMES, *, unlabelled: bool = False
) -> Iterator[Sample]:
    """Give samples of WebDataset tars (img2dataset's too, where the json has `label`), to pack them anew.

    `ids` are those of names that a label may hold instead of class ids. Samples without an image or a label are
    excluded and counted in a warning; raises DataError where no sample has both, and where a tar is damaged. Of
    `unlabelled` tars no label is looked at.
    """
    # The tars of a folder, the tar itself, or those that are listed. Compressed tars are taken where a folder has no
    # others: beside others they may be the same ones again.
    paths: list[Path] = []
    if not isinstance(source, str | os.PathLike):
        paths = list(map(Path, source))
    elif not any(Path(source).glob("[!.]*.tar")):
        paths = compressed_in(source)
    if not paths and isinstance(source, str | os.PathLike):
        check_nothing_excluded(source)
        paths = files_of(source, "*.tar")

    excluded = Refusals()
    is_usable = False
    for path in paths:
        # `train-000.tar.gz` → `train-000`
        stem = path.name
        for suffix in (".tar", *COMPRESSED):
            stem = path.name.removesuffix(suffix)
            if stem != path.name:
                break
        refused = Refusals()  # of this tar, by the reasons of an index
        for key, encoded, raw, _ in (compressed_samples if is_compressed(path) else plain_samples)(path, refused):
            labels: tuple[int, ...] | None = None
            try:
                if not unlabelled:
                    labels = parse_labels(raw, ids)
            except NoLabel as error:
                excluded.add(error.reason, f"{key} of {path.name}")
                continue
            if not encoded:
                excluded.add("no image", f"{key} of {path.name}")
                continue
            is_usable = True
            # Keys may begin anew in every tar: the tar's name tells them apart.
            yield Sample(f"{stem}/{key}", encoded, labels, kind_of(encoded))
        excluded.add_all(refused, path.name)
    lines = excluded.lines()
    if not is_usable:
        raise DataError(
            f"{source}: no sample has a label and an image: {'; '.join(lines) or 'there are no samples'}\n"
            "  expected class ids in a .cls, or as `label` in a .json\n"
            "  labels that are names are read by a list of them: --names FILE, in a recipe names: FILE"
        )
    if lines:
        logging.getLogger(__name__).warning("%s: samples not packed: %s", source, "; ".join(lines))


def tars_classes(source: str | os.PathLike[str] | Sequence[str]) -> Names:
    """Return the class names in the one index beside the tars of a folder; none without such an index."""
    if not isinstance(source, str | os.PathLike) or not Path(source).is_dir():
        return ()
    indexes = sorted(Path(source).glob(f"*{SUFFIX}"))
    return load_index(indexes[0]).names if len(indexes) == 1 else ()


def plain_samples(path: Path, refused: Refusals) -> Iterator[RawSample]:
    """Give the samples of a tar that is not compressed; raises DataError where it is none, or is cut short."""
    with open(path, "rb") as file, mapped(file) as tar:
        result = walk(tar, str(path))
        for reason, count in result.refused.counts.items():
            refused.add(reason, result.refused.first[reason], count)
        for row in result.rows:
            if row.image_size > MAX_BYTES:
                refused.add(TOO_LARGE, row.key)
                continue
            yield RawSample(row.key.decode("utf-8", "replace"), bytes(row.image_in(tar)), bytes(row.label_in(tar)))


def compressed_samples(path: Path, refused: Refusals) -> Iterator[RawSample]:
    """Give the samples of a compressed tar: consecutive members that share the name up to the first dot."""
    for key, group in groupby(members(path), key=key_of):
        parts: dict[str, bytes] = {}  # extension → content
        is_too_large = False
        for member in group:
            _, extension = split_name(member.name.encode("utf-8", "surrogateescape"))
            if extension not in IMAGES + LABELS:
                if extension not in IGNORED:
                    refused.add_type(extension, member.name)
                continue
            if extension in parts:
                refused.add("repeated member", member.name)
                continue
            # No more than what is taken: a member of zeros may be a thousand times the archive.
            most = MAX_LABEL if extension in LABELS else MAX_BYTES
            parts[extension] = member.start(most + 1)
            if len(parts[extension]) > most:
                refused.add("label too large" if extension in LABELS else TOO_LARGE, key)
                parts[extension] = b""
                is_too_large = True
        image = first_part(IMAGES, parts, b"")
        label = first_part(LABELS, parts, b"")
        if image or label:
            if not is_too_large:
                yield RawSample(key.decode("utf-8", "replace"), image, label)
        elif parts and not is_too_large:
            refused.add("empty sample", key)


def key_of(member: Member) -> bytes:
    """Return the key of the sample that a member is of."""
    return split_name(member.name.encode("utf-8", "surrogateescape"))[0]
