"""Read the images named by a command's arguments: image files, folders of images, tar shards, and data sets.

Samples of tars and data sets come with the names of their classes. A data set is read through its index, because a
subset's shards are in another folder.
"""

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from data.errors import UsageError
from data.extras.sources.walk import files_below
from data.index.document import SUFFIX
from data.index.shard import IMAGES
from jobs.extras.data_commands import near_path

MAX_LABELS = 1000  # classes read per sample


class GivenImage(NamedTuple):
    """An image and, if it is a labelled sample, the names of its classes."""

    name: str
    encoded: bytes
    classes: tuple[str, ...] = ()


def check_images(paths: Sequence[str]) -> None:
    """Raise UsageError if a path does not exist, or if the paths contain no images. Does not import torch."""
    missing = [path for path in paths if not Path(path).exists()]
    if missing:
        raise UsageError(
            f"no such file or folder: {', '.join(missing)}{near_path(missing[0])}\n"
            "  expected image files, folders of images, tar shards, or data sets (RUN/STAGE/SET or an index)"
        )
    images_or_tars = tuple(f".{suffix}" for suffix in (*IMAGES, "tar"))
    for path in map(Path, paths):
        if indexes_at(path):
            return
        files = files_below(path, Counter()) if path.is_dir() else [path]
        if any(file.name.lower().endswith(images_or_tars) for file in files):
            return
    raise UsageError(
        f"found no images in {', '.join(paths)}\n"
        f"  expected image files ({', '.join(IMAGES)}), folders of images or tar shards"
    )


def wait_without_spinning() -> None:
    """Let torch's threads sleep while they wait for each other; call this before torch is imported.

    By default, OpenMP's threads spin. On a busy machine, this multiplied the CPU time of small images by 20 (measured).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def encoded_images(paths: Sequence[str], limit: int | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the encoded bytes of each image, as `given_images` does."""
    for image in given_images(paths, limit):
        yield image.name, image.encoded


def given_images(
    paths: Sequence[str], limit: int | None = None, names: Sequence[str] = (), skipped: list[Path] | None = None
) -> Iterator[GivenImage]:
    """Yield the images in these image files, folders, tar shards and data sets.

    `names` are the class names of labels that are ids, if the data has no names. Other files in folders of images are
    appended to `skipped`. If there are more than `limit` files, select files at even intervals from the sorted names,
    because the first files may all belong to one class. `limit` also applies to the samples of each shard.
    """
    files: list[Path] = []
    shards: list[Path] = []
    sets: list[Path] = []
    others: list[Path] = []
    for path in map(Path, paths):
        indexes = indexes_at(path)
        if indexes:
            sets += indexes
            continue
        below = files_below(path, Counter()) if path.is_dir() else [path]
        for file in below:
            suffix = file.suffix[1:].lower()
            if suffix in IMAGES:
                files.append(file)
            elif suffix == "tar":
                shards.append(file)
            else:
                others.append(file)
    if skipped is not None:
        # The files next to tars belong to their index.
        folders_of_tars = {shard.parent for shard in shards}
        skipped += [file for file in others if file.parent not in folders_of_tars]
    count = len(files) if limit is None else min(limit, len(files))
    for number in range(count):
        file = files[number * len(files) // count]
        yield GivenImage(str(file), file.read_bytes())
    for shard in shards:
        yield from itertools.islice(samples_of_tar(shard, names), limit)
    for index in sets:
        yield from samples_of_set(index, names, limit)


def indexes_at(path: Path) -> list[Path]:
    """Return the index files at a path: the file itself, or those in the folder; [] for other images."""
    if path.is_dir():
        return sorted(path.glob(f"*{SUFFIX}"))
    return [path] if path.name.endswith(SUFFIX) else []


def samples_of_tar(path: Path, names: Sequence[str]) -> Iterator[GivenImage]:
    """Yield the samples of a tar without an index; a label is an id, or one of these class names."""
    from data.extras.sources.refusals import Refusals
    from data.extras.sources.tars import samples_in
    from data.index.names import NoLabel, ids_of, parse_labels

    ids = ids_of(tuple(names))
    for key, encoded, raw, _ in samples_in(path, Refusals()):
        if not encoded:
            continue
        classes: tuple[str, ...] = ()
        with suppress(NoLabel):
            classes = tuple(name_of_class(label, names) for label in parse_labels(raw, ids))
        yield GivenImage(f"{path.name}:{key}", encoded, classes)


def samples_of_set(path: Path, names: Sequence[str], limit: int | None) -> Iterator[GivenImage]:
    """Yield the samples of a data set with this index file, at most `limit` of each shard."""
    from data.images.decode import BadImage
    from data.index.document import load_index
    from data.reader import ShardReader, read_labels

    index = load_index(path)
    reader = ShardReader(index, verify=False)
    for number, shard in enumerate(index.shards):
        for sample in range(shard.samples if limit is None else min(limit, shard.samples)):
            key, encoded, raw = reader.read(number, sample)
            classes: tuple[str, ...] = ()
            with suppress(BadImage):
                labels = read_labels(raw, index, MAX_LABELS)
                classes = tuple(name_of_class(label, index.names or names) for label in labels)
            yield GivenImage(f"{shard.name}:{key}", encoded, classes)


def name_of_class(label: int, names: Sequence[str]) -> str:
    """Return the name of a class, or its id if the name is unknown."""
    return names[label] if label < len(names) else str(label)
