"""Where samples come from: folders, tars, digits (tables: `data.shards.tables`; known data sets: `data.archives`).

A source is a generator of `Sample`, always in the same order; lists of files are shuffled by the hash of their names,
so that a shard mixes classes whatever order the files were in. Nothing is unpickled. A function `…_classes` beside a
source gives the names of its classes, in the order of its ids.

    photos/train/cat/1.jpg                  Sample("cat/1", Path("photos/train/cat/1.jpg"), (0,), "jpg")
    photos/train/dog/7.png          →       Sample("dog/7", Path("photos/train/dog/7.png"), (1,), "png")
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from data.checks import printable
from data.errors import DataError
from data.index.document import SUFFIX, load_index
from data.index.folders import COMPRESSED, check_nothing_beside, compressed_in
from data.index.names import Names, Numbering
from data.index.refusals import Refusals
from data.index.tar import IMAGES, mapped, walk
from data.shards.labels import NO_NAMES, parse_labels, why_no_label

MOST_KINDS = 10  # of files that were passed over, that a warning names
DIGITS: Names = tuple("0123456789")  # what the digits' classes are called


@dataclass(frozen=True)
class Sample:
    """An encoded image, in memory or in a file, with its class ids; `key` names it, without a dot."""

    key: str
    image: bytes | Path
    labels: tuple[int, ...]
    extension: str = "jpg"

    @property
    def size(self) -> int:
        """Bytes of the encoded image."""
        return len(self.image) if isinstance(self.image, bytes) else self.image.stat().st_size

    def read(self) -> bytes:
        """The encoded image; raises DataError where its file cannot be read."""
        if isinstance(self.image, bytes):
            return self.image
        try:
            return self.image.read_bytes()
        except OSError as error:
            raise DataError(f"{self.image}: cannot read it ({error.strerror})") from None


class Entry(NamedTuple):
    """An image in a list of files: its path below some root, and its class ids."""

    name: str
    labels: tuple[int, ...]


def numbered(samples: Iterable[Sample], numbering: Numbering) -> Iterator[Sample]:
    """The samples with their classes numbered so; those of classes that are left out are left out."""
    for sample in samples:
        labels = numbering.labels(sample.labels, sample.key)
        # A sample without labels stays as it is: whoever writes it refuses it by name.
        if labels or not sample.labels:
            yield replace(sample, labels=labels) if labels != sample.labels else sample


# ----------------------------------------------------------------------------------------------- folders


def class_folders(root: str | os.PathLike[str]) -> Iterator[Sample]:
    """Samples of a folder with one sub-folder a class; ids follow the sorted names (`folder_classes`).

    Raises DataError where a class has no images; files that are no images are named in a warning.
    """
    entries: list[Entry] = []
    passed_over: Counter[str] = Counter()  # extension, or name → files
    for label, class_name in enumerate(folder_classes(root)):
        folder = Path(root, class_name)
        is_empty = True
        # Hidden files are passed over without a warning: macOS leaves a `._1.jpg` beside a 1.jpg, which is no image.
        for path in sorted(folder.rglob("[!.]*")):
            if not path.is_file():
                continue
            if extension_of(path) in IMAGES:
                entries.append(Entry(str(path.relative_to(root)), (label,)))
                is_empty = False
            else:
                passed_over[path.suffix or path.name] += 1
        if is_empty:
            raise DataError(f"{folder}: class {label} has no images; remove the folder or fill it")
    if passed_over:
        kinds = ", ".join(f"{count} × {printable(kind)}" for kind, count in passed_over.most_common(MOST_KINDS))
        logging.getLogger(__name__).warning("%s: not packed, being no %s: %s", root, ", ".join(IMAGES), kinds)
    yield from read_files(root, entries)


def folder_classes(root: str | os.PathLike[str]) -> Names:
    """The class names of a folder of class folders, in the order of their ids; raises DataError where it has none."""
    names = []
    if Path(root).is_dir():
        names = sorted(path.name for path in Path(root).glob("[!.]*") if path.is_dir())
    if not names:
        raise DataError(f"{root}: expected one sub-folder a class, found none")
    return tuple(names)


def read_files(root: str | os.PathLike[str], entries: Iterable[Entry]) -> Iterator[Sample]:
    """Samples of listed files, in the order of the hash of their names; raises DataError where one is no image."""
    for name, labels in sorted(entries, key=by_hash_of_name):
        path = Path(root, name)
        # A file name is bytes to Linux; a key has to be text.
        is_utf8 = os.fsencode(name).decode("utf-8", "replace") == name
        if not is_utf8:
            raise DataError(f"{os.fsencode(path)!r}: its name is not UTF-8, and would be a sample's key; rename it")
        extension = extension_of(path)
        if extension not in IMAGES or not path.is_file():
            raise DataError(f"{path}: expected an image file, one of {', '.join(IMAGES)}")
        # A dot in the key would be taken for the beginning of the extension, but only in its last part.
        folder, slash, base = name.removesuffix(path.suffix).lstrip("/").rpartition("/")
        yield Sample(folder + slash + base.replace(".", "_"), path, labels, extension)


def by_hash_of_name(entry: Entry) -> bytes:
    """The key by which lists of files are sorted: the order looks random and is always the same."""
    return sha256(os.fsencode(entry.name)).digest()


def extension_of(path: Path) -> str:
    """`photo.JPG` → `jpg`."""
    return path.suffix[1:].lower()


def first_of(names: Sequence[str], columns: Sequence[str]) -> str | None:
    """The first of these names that is a column of the table, or None."""
    for name in names:
        if name in columns:
            return name
    return None


# -------------------------------------------------------------------------------------------------- tars


class RawSample(NamedTuple):
    """A sample as it lies in a tar; an image or a label that it does not have is empty."""

    key: str
    image: bytes
    label: bytes


def rows_of_tar(path: Path) -> Iterator[RawSample]:
    """The samples of a tar that is not compressed; raises DataError where it is none, or is cut short."""
    with open(path, "rb") as file, mapped(file) as tar:
        for row in walk(tar, str(path)).rows:
            image = bytes(tar[row.image : row.image + row.image_size])
            label = bytes(tar[row.label : row.label + row.label_size])
            yield RawSample(row.key.decode("utf-8", "replace"), image, label)


def tars(
    source: str | os.PathLike[str] | Sequence[str],
    ids: Mapping[str, int] = NO_NAMES,
    rows: Callable[[Path], Iterator[RawSample]] = rows_of_tar,
) -> Iterator[Sample]:
    """Samples of WebDataset tars (img2dataset's too, where the json has `label`), to pack them anew.

    `ids` are those of names that a label may hold instead of class ids; `rows` opens a tar, which may be compressed
    (`data.archives.tars`). Samples without an image or a label are left out and counted in a warning; raises DataError
    where no sample has both.
    """
    left_out = Refusals()
    is_usable = False
    for path in tars_of(source):
        for key, encoded, raw in rows(path):
            try:
                labels = parse_labels(raw, ids)
            except ValueError:
                left_out.add(why_no_label(raw), f"{key} of {path.name}")
                continue
            if not encoded:
                left_out.add("no image", f"{key} of {path.name}")
                continue
            is_usable = True
            # Keys may begin anew in every tar: the tar's name tells them apart.
            yield Sample(f"{stem_of_tar(path)}/{key}", encoded, labels, kind_of(encoded))
    lines = [line.removeprefix("refused: ") for line in left_out.lines()]
    if not is_usable:
        raise DataError(
            f"{source}: no sample has a label and an image: {'; '.join(lines) or 'there are no samples'}\n"
            "  expected class ids in a .cls, or as `label` in a .json\n"
            "  labels that are names are read by a list of them: --names FILE, in a recipe names: FILE"
        )
    if lines:
        logging.getLogger(__name__).warning("%s: samples not packed: %s", source, "; ".join(lines))


def tars_classes(source: str | os.PathLike[str] | Sequence[str]) -> Names:
    """The class names in the one index beside the tars of a folder; none where there is none, or several."""
    if not isinstance(source, str | os.PathLike) or not Path(source).is_dir():
        return ()
    indexes = sorted(Path(source).glob(f"*{SUFFIX}"))
    return load_index(indexes[0]).names if len(indexes) == 1 else ()


def tars_of(source: str | os.PathLike[str] | Sequence[str]) -> list[Path]:
    """The tars of a folder, the tar itself, or those that are listed; raises DataError where there are none.

    Compressed tars are taken where a folder has no others: beside others they may be the same ones again.
    """
    if not isinstance(source, str | os.PathLike):
        return list(map(Path, source))
    if not any(Path(source).glob("[!.]*.tar")):
        compressed = compressed_in(source)
        if compressed:
            return compressed
    check_nothing_beside(source)
    return files_of(source, "*.tar")


def stem_of_tar(path: Path) -> str:
    """`train-000.tar.gz` → `train-000`."""
    for suffix in (".tar", *COMPRESSED):
        if path.name.endswith(suffix):
            return path.name.removesuffix(suffix)
    return path.name


def files_of(source: str | os.PathLike[str], pattern: str) -> list[Path]:
    """The files of a folder, those that a path like a/train-*.tar stands for, or the file itself.

    Raises DataError where there are none.
    """
    path = Path(source)
    if path.is_dir():
        paths = sorted(path.glob(f"[!.]{pattern}"))
    elif "*" in path.name and not path.exists():
        paths = sorted(path.parent.glob(path.name))
    else:
        paths = [path]
    if not paths:
        raise DataError(f"{path}: no {pattern} here")
    return paths


def kind_of(encoded: bytes) -> str:
    """The extension that goes with an image's first bytes."""
    if encoded[1:4] == b"PNG":
        return "png"
    if encoded[8:12] == b"WEBP":
        return "webp"
    return "jpg"


# ------------------------------------------------------------------------------------------------ digits


def digits(
    train: bool, classes: Sequence[int] | None = None, image_size: int = 32, quality: int = 95
) -> Iterator[Sample]:
    """scikit-learn's 1,797 handwritten digits as RGB JPEGs; every fifth of each class is for testing.

    `classes` keeps only some digits; their ids stay the digits themselves.
    """
    import cv2
    import numpy as np
    from sklearn.datasets import load_digits

    dataset = load_digits()
    seen = [0] * 10  # images of each digit so far
    for number, (pixels, target) in enumerate(zip(dataset.images, dataset.target, strict=True)):
        label = int(target)
        seen[label] += 1
        # Counted within each digit, so that both parts have about the same share of every digit.
        is_for_testing = seen[label] % 5 == 0
        is_kept = classes is None or label in classes
        if is_for_testing == train or not is_kept:
            continue
        # The originals are 8×8 with values 0 … 16.
        grey = np.round(pixels * (255 / 16)).astype(np.uint8)
        large = cv2.resize(grey, (image_size, image_size), interpolation=cv2.INTER_CUBIC)
        colour = cv2.cvtColor(large, cv2.COLOR_GRAY2BGR)
        encoded = cv2.imencode(".jpg", colour, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()
        yield Sample(f"digit{number:04d}", encoded, (label,))
