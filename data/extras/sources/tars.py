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
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from data.errors import DataError
from data.extras.sources.folders import files_of
from data.extras.sources.members import Member, is_compressed, members
from data.extras.sources.numbering import are_captions
from data.extras.sources.refusals import Refusals, refusal_lines
from data.extras.sources.samples import RawSample, Sample, kind_of
from data.extras.sources.tar_offsets import (
    DOTTED,
    IGNORED,
    LABELS,
    MAX_LABEL,
    PARENT,
    REPEATED,
    check_nothing_excluded,
    compressed_in,
    first_part,
    is_dotted,
    mapped,
    normal_name,
    refuse_dotted,
    split_name,
    walk,
)
from data.images.decode import MAX_BYTES
from data.index.document import SUFFIX, load_index
from data.index.names import NO_NAMES, Names, NoLabel, parse_labels
from data.index.shard import COMPRESSED, IMAGES

TOO_LARGE = "image file too large"  # the same message as in `data.images.decode.read_header`


def tars(
    source: str | os.PathLike[str] | Sequence[str], ids: Mapping[str, int] = NO_NAMES, *, unlabelled: bool = False
) -> Iterator[Sample]:
    """Yield the samples of WebDataset tars, including tars from img2dataset with a `label` in the .json.

    `ids` maps class names in labels to ids. Samples without an image or without a label are excluded, and a warning
    gives their number. With `unlabelled=True`, labels are ignored. Raises DataError if no sample has both an image and
    a label, or if a tar is damaged.
    """
    excluded = Refusals()
    renamed = Refusals()
    is_usable = False
    used: Counter[str] = Counter()  # how often each tar name occurs
    for path in paths_of(source):
        # `train-000.tar.gz` → `train-000`
        stem = path.name
        for suffix in (".tar", *COMPRESSED):
            stem = path.name.removesuffix(suffix)
            if stem != path.name:
                break
        used[stem] += 1
        if used[stem] > 1:
            stem += f"_{used[stem]}"
        keys: set[str] = set()
        refused = Refusals()  # excluded members of this tar, with the same reasons as in an index
        for key, encoded, raw, _ in samples_in(path, refused):
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
            if key in keys:
                renamed.add(REPEATED, f"{key} of {path.name}")
                key = unused(key, keys)
            keys.add(key)
            # Different tars may use the same keys: add the name of the tar.
            yield Sample(f"{stem}/{key}", encoded, labels, kind_of(encoded))
        excluded.add_all(refused, path.name)
    lines = refusal_lines(excluded)
    if not is_usable:
        remedy = (
            "  expected class ids in a .cls, or as `label` in a .json\n"
            "  if the labels are class names, list the names in a file: --names FILE, or names: FILE in a recipe"
        )
        if DOTTED in excluded.counts:
            remedy = (
                "  a key ends at the first dot of a name, as in webdataset\n"
                "  decompress the tars (gzip -d) and run the same command: dots in their names become underscores"
            )
        raise DataError(
            f"{source}: no sample has both a label and an image: {'; '.join(lines) or 'there are no samples'}\n{remedy}"
        )
    if renamed.counts:
        logging.getLogger(__name__).warning(
            "%s: some samples were packed under another key: %s", source, refusal_lines(renamed)[0]
        )
    if lines:
        logging.getLogger(__name__).warning("%s: some samples were not packed: %s", source, "; ".join(lines))


def paths_of(source: str | os.PathLike[str] | Sequence[str]) -> list[Path]:
    """Return the tars in a folder or list, or matching a pattern; compressed ones only if a folder has no others.

    Raises DataError if there are no tars, or if some tars in a folder would be ignored.
    """
    if not isinstance(source, str | os.PathLike):
        return list(map(Path, source))
    # Next to uncompressed tars, compressed ones may be their copies.
    paths: list[Path] = []
    if not any(Path(source).glob("[!.]*.tar")):
        paths = compressed_in(source)
    if not paths:
        check_nothing_excluded(source)
        paths = files_of(source, "*.tar")
    return paths


def samples_in(path: Path, refused: Refusals) -> Iterator[RawSample]:
    """Yield the samples of a tar, compressed or not; raises DataError if it is damaged."""
    return (compressed_samples if is_compressed(path) else plain_samples)(path, refused)


def unused(key: str, keys: Container[str]) -> str:
    """Make a key unique among `keys` by appending the first free number from 2: a_2."""
    number = 2
    while f"{key}_{number}" in keys:
        number += 1
    return f"{key}_{number}"


def tars_classes(source: str | os.PathLike[str] | Sequence[str], *, with_labels: bool = True) -> Names:
    """Return the class names in tars, from their index or otherwise from text labels; () if the labels are ids.

    An index is used only if it is the only one in the folder. Collecting names reads all tars once, but ends at the
    first label that is an id.
    """
    if isinstance(source, str | os.PathLike) and Path(source).is_dir():
        indexes = sorted(Path(source).glob(f"*{SUFFIX}"))
        if len(indexes) == 1:
            return load_index(indexes[0]).names
    if not with_labels:
        return ()
    states = []
    for path in paths_of(source):
        status = path.stat()
        states.append((path, status.st_size, status.st_mtime_ns))
    return names_in_labels(tuple(states))


# The names are requested twice, to number the classes and to read the samples.
@lru_cache(maxsize=8)
def names_in_labels(states: tuple[tuple[Path, int, int], ...]) -> Names:
    """Return the sorted class names in the labels of tars; () if any label is an id, or if the labels are captions.

    `states` contains (path, size in bytes, mtime in ns) of each tar, so that cached names of changed tars are not used.
    """
    texts: Refusals = Refusals()
    samples = 0
    for path, _, _ in states:
        for _, image, raw, _ in samples_in(path, Refusals()):
            samples += bool(image)
            try:
                parse_labels(raw)
            except NoLabel as error:
                if image and error.are_names:
                    for text in set(error.texts):
                        texts.add(text, "")
            else:
                return ()
    return () if are_captions(len(texts.counts), samples) else tuple(sorted(texts.counts))


def plain_samples(path: Path, refused: Refusals) -> Iterator[RawSample]:
    """Yield the samples of an uncompressed tar; raises DataError if it is not a tar, or is truncated."""
    with open(path, "rb") as file, mapped(file) as tar:
        result = walk(tar, str(path))
        # These tars are written anew, so their samples can get keys without dots.
        if DOTTED in result.refused.counts:
            result = walk(tar, str(path), rename=True)
        del result.refused.counts[REPEATED]  # such samples get another key
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
        if key is None:
            for member in group:
                refused.add(PARENT, member.name)
            continue
        parts: dict[str, bytes] = {}  # extension → content
        dotted: list[tuple[str, str]] = []  # see `data.extras.sources.tar_offsets.refuse_dotted`
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
        filled = {extension: content for extension, content in parts.items() if content}
        image = first_part(IMAGES, filled, b"")
        label = first_part(LABELS, filled, b"")
        if image or label:
            if not is_too_large:
                yield RawSample(key.decode("utf-8", "replace"), image, label)
        elif parts and not is_too_large:
            refused.add("empty sample", key)


def key_of(member: Member) -> bytes | None:
    """Return the key of the sample to which a member belongs; None if the member's path contains `..`."""
    name = normal_name(member.name.encode("utf-8", "surrogateescape"))
    return None if name is None else split_name(name)[0]
