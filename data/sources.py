"""Where samples come from: class folders, tables of paths and labels, and scikit-learn's digits.

A source is a generator of `Sample`, lazy and always in the same order; lists are shuffled by the hash of
their names, so that a shard holds a mixture of classes whatever order the files were in.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from data.errors import DataError
from data.tar import IMAGES, parse_labels


@dataclass(frozen=True)
class Sample:
    """One image, still encoded, with its class ids; `key` names it inside its shard and has no dot."""

    key: str
    image: bytes
    labels: tuple[int, ...]
    extension: str = "jpg"


def class_folders(root: str | os.PathLike[str]) -> Iterator[Sample]:
    """Samples of a folder with one sub-folder a class; ids follow the sorted names (`folder_classes`)."""
    names = folder_classes(root)
    entries = []
    for label, name in enumerate(names):
        files = [path for path in sorted(Path(root, name).rglob("*")) if path.suffix[1:].lower() in IMAGES]
        if not files:
            raise DataError(f"{Path(root, name)}: class {label} has no images; remove the folder or fill it")
        entries += [(str(path.relative_to(root)), (label,)) for path in files]
    yield from read_files(root, entries)


def folder_classes(root: str | os.PathLike[str]) -> list[str]:
    """The class names of a folder of class folders, in the order of their ids."""
    names = (
        sorted(entry.name for entry in Path(root).iterdir() if entry.is_dir()) if Path(root).is_dir() else []
    )
    if not names:
        raise DataError(f"{root}: expected one sub-folder a class, found none")
    return names


def path_table(path: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> Iterator[Sample]:
    """Samples of a CSV or parquet file with columns `path` and `label` (or `labels`), relative to `root`.

    A label is a class id, or several of them with spaces or commas between, or a list.
    """
    path = Path(path)
    rows = read_rows(path)
    column = next((name for name in ("label", "labels", "cls") if name in (rows or [{}])[0]), None)
    if column is None or "path" not in rows[0]:
        raise DataError(
            f"{path}: expected columns path and label, found {', '.join((rows or [{}])[0]) or 'none'}"
        )
    entries = []
    for row in rows:
        try:
            entries.append((row["path"], parse_labels(str(row[column]).encode())))
        except ValueError as error:
            raise DataError(f"{path}: {row['path']}: {error}") from None
    yield from read_files(root if root is not None else path.parent, entries)


def read_rows(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.read_table(path).to_pylist()
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def read_files(
    root: str | os.PathLike[str], entries: Iterable[tuple[str, tuple[int, ...]]]
) -> Iterator[Sample]:
    """Read each file when its turn comes, in the order of the hash of its name."""
    for name, labels in sorted(entries, key=lambda entry: sha256(entry[0].encode()).digest()):
        path = Path(root, name)
        extension = path.suffix[1:].lower()
        if extension not in IMAGES:
            raise DataError(f"{path}: an image must be one of {', '.join(IMAGES)}")
        try:
            image = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot read it ({error.strerror})") from None
        stem = name[: -len(path.suffix)].lstrip("/")
        folder, slash, base = stem.rpartition("/")
        yield Sample(folder + slash + base.replace(".", "_"), image, labels, extension)


def digits(
    train: bool, classes: Sequence[int] | None = None, image_size: int = 32, quality: int = 95
) -> Iterator[Sample]:
    """scikit-learn's 1,797 handwritten digits as RGB JPEGs; every fifth of each class is for testing.

    `classes` keeps only some digits; their ids stay the digits themselves.
    """
    import cv2
    import numpy as np
    from sklearn.datasets import load_digits

    found = load_digits()
    seen = [0] * 10
    for number, (pixels, label) in enumerate(zip(found.images, found.target, strict=True)):
        label = int(label)
        seen[label] += 1
        if (seen[label] % 5 == 0) == train or (classes is not None and label not in classes):
            continue
        grey = np.round(pixels * (255 / 16)).astype(np.uint8)  # the originals are 8×8 with values 0 … 16
        large = cv2.resize(grey, (image_size, image_size), interpolation=cv2.INTER_CUBIC)
        image = cv2.imencode(
            ".jpg", cv2.cvtColor(large, cv2.COLOR_GRAY2BGR), [cv2.IMWRITE_JPEG_QUALITY, quality]
        )[1]
        yield Sample(f"digit{number:04d}", image.tobytes(), (label,))
