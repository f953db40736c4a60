"""Read samples from WebDataset tars to repack them; compressed tars are read as a stream without unpacking to disk.

    train-000.tar.gz                     (key "a/cat", image b"\\xff\\xd8…", label b"1")
      a/cat.jpg  a/cat.cls          →    (key "a/dog", image b"\\xff\\xd8…", label b"0")
      a/dog.jpg  a/dog.cls

In a compressed tar, the members of a sample must be adjacent, because a stream cannot seek back. If they are not, they
are counted as one sample without a label and one sample without an image.
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
    DOTTED,
    IGNORED,
    LABELS,
    MAX_LABEL,
    check_nothing_excluded,
    compressed_in,
    first_part,
    is_dotted,
    mapped,
    refuse_dotted,
    split_name,
    walk,
)
from data.sources.folders import files_of
from data.sources.samples import RawSample, Sample, kind_of

TOO_LARGE = "image file too large"  # the same message as in `data.images.decode.read_header`


def tars(
    source: str | os.PathLike[str] | Sequence[str], ids: Mapping[str, int] = NO_NAMES, *, unlabelled: bool = False
) -> Iterator[Sample]:
    """Yield the samples of WebDataset tars, including those of img2dataset with a `label` in the .json.

    `ids` maps class names in labels to ids. Samples without an image or without a label are excluded, and a warning
    gives their number. With `unlabelled=True`, labels are ignored. Raises DataError if no sample has both an image and
    a label, or if a tar is damaged.
    """
    # `source` is a folder of tars, one tar, or a list of tars. Compressed tars of a folder are read only if it has no
    # uncompressed ones, because otherwise they may be copies of these.
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
        refused = Refusals()  # excluded members of this tar, with the same reasons as in an index
        for key, encoded, raw, _ in (compressed_samples if is_compressed(path) else plain_samples)(path, refused):
            labels: tuple[int, ...] | None = None
            try:
                if not unlabelled:
                    labels = parse_labels(raw, ids)
            except NoLabel as error:
                shown = f" ({error})" if raw else ""
                excluded.add(error.reason, f"{key} of {path.name}{shown}")
                continue
            if not encoded:
                excluded.add("no image", f"{key} of {path.name}")
                continue
            is_usable = True
            # Different tars may use the same keys: add the name of the tar.
            yield Sample(f"{stem}/{key}", encoded, labels, kind_of(encoded))
        excluded.add_all(refused, path.name)
    lines = excluded.lines()
    if not is_usable:
        remedy = (
            "  expected class ids in a .cls, or as `label` in a .json\n"
            "  if the labels are class names, list the names in a file: --names FILE, or names: FILE in a recipe"
        )
        if DOTTED in excluded.counts:
            remedy = (
                "  a key ends at the first dot of a name, as in webdataset\n"
                "  decompress the tars (gzip -d) and type the same command: dots in their names become underscores"
            )
        raise DataError(
            f"{source}: no sample has both a label and an image: {'; '.join(lines) or 'there are no samples'}\n{remedy}"
        )
    if lines:
        logging.getLogger(__name__).warning("%s: samples not packed: %s", source, "; ".join(lines))


def tars_classes(source: str | os.PathLike[str] | Sequence[str]) -> Names:
    """Return the class names from the index in a folder of tars; an empty tuple unless it has exactly one index."""
    if not isinstance(source, str | os.PathLike) or not Path(source).is_dir():
        return ()
    indexes = sorted(Path(source).glob(f"*{SUFFIX}"))
    return load_index(indexes[0]).names if len(indexes) == 1 else ()


def plain_samples(path: Path, refused: Refusals) -> Iterator[RawSample]:
    """Yield the samples of an uncompressed tar; raises DataError if it is not a tar, or is truncated."""
    with open(path, "rb") as file, mapped(file) as tar:
        result = walk(tar, str(path))
        # These tars are written anew, so their samples can get keys without dots.
        if DOTTED in result.refused.counts:
            result = walk(tar, str(path), rename=True)
        for reason, count in result.refused.counts.items():
            refused.add(reason, result.refused.first[reason], count)
        for row in result.rows:
            if row.image_size > MAX_BYTES:
                refused.add(TOO_LARGE, row.key)
                continue
            yield RawSample(row.key.decode("utf-8", "replace"), bytes(row.image_in(tar)), bytes(row.label_in(tar)))


def compressed_samples(path: Path, refused: Refusals) -> Iterator[RawSample]:
    """Yield the samples of a compressed tar: adjacent members with the same name up to the first dot."""
    for key, group in groupby(members(path), key=key_of):
        parts: dict[str, bytes] = {}  # extension → content
        dotted: list[tuple[str, str]] = []  # see `data.index.tar.refuse_dotted`
        is_too_large = False
        for member in group:
            _, extension = split_name(member.name.encode("utf-8", "surrogateescape"))
            if extension not in IMAGES + LABELS:
                if is_dotted(extension):
                    dotted.append((extension, member.name))
                elif extension not in IGNORED:
                    refused.add_type(extension, member.name)
                continue
            if extension in parts:
                refused.add("repeated member", member.name)
                continue
            # Limit the size, because a compressed member may expand to a thousand times the size of the archive.
            most = MAX_LABEL if extension in LABELS else MAX_BYTES
            parts[extension] = member.start(most + 1)
            if len(parts[extension]) > most:
                refused.add("label too large" if extension in LABELS else TOO_LARGE, key)
                parts[extension] = b""
                is_too_large = True
        refuse_dotted(dotted, parts, refused)
        image = first_part(IMAGES, parts, b"")
        label = first_part(LABELS, parts, b"")
        if image or label:
            if not is_too_large:
                yield RawSample(key.decode("utf-8", "replace"), image, label)
        elif parts and not is_too_large:
            refused.add("empty sample", key)


def key_of(member: Member) -> bytes:
    """Return the key of the sample that a member belongs to."""
    return split_name(member.name.encode("utf-8", "surrogateescape"))[0]
