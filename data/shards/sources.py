"""Where samples come from: folders, tables, tars, parquet, ImageNet's and CIFAR's own files, digits.

A source is a generator of `Sample`, always in the same order; lists of files are shuffled by the hash of
their names, so that a shard mixes classes whatever order the files were in. Nothing is unpickled.
"""

from __future__ import annotations

import csv
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from data.errors import DataError
from data.shards.index import mapped
from data.shards.tar import IMAGES, members, parse_labels, walk


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


def class_folders(root: str | os.PathLike[str]) -> Iterator[Sample]:
    """Samples of a folder with one sub-folder a class; ids follow the sorted names (`folder_classes`)."""
    names, skipped = folder_classes(root), Counter[str]()
    entries = []
    for label, name in enumerate(names):
        visible = [path for path in sorted(Path(root, name).rglob("[!.]*")) if path.is_file()]
        files = [path for path in visible if path.suffix[1:].lower() in IMAGES]
        skipped.update(path.suffix or path.name for path in visible if path.suffix[1:].lower() not in IMAGES)
        if not files:
            raise DataError(f"{Path(root, name)}: class {label} has no images; remove the folder or fill it")
        entries += [(str(path.relative_to(root)), (label,)) for path in files]
    if skipped:
        kinds = ", ".join(f"{count} × {kind}" for kind, count in skipped.most_common(10))
        logging.getLogger(__name__).warning("%s: not packed, being no %s: %s", root, ", ".join(IMAGES), kinds)
    yield from read_files(root, entries)


def folder_classes(root: str | os.PathLike[str]) -> list[str]:
    """The class names of a folder of class folders, in the order of their ids."""
    names = sorted(entry.name for entry in Path(root).glob("[!.]*") if entry.is_dir()) if Path(root).is_dir() else []
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
        raise DataError(f"{path}: expected columns path and label, found {', '.join((rows or [{}])[0]) or 'none'}")
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
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # Excel begins with a byte order mark
            return list(csv.DictReader(file))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None


def read_files(root: str | os.PathLike[str], entries: Iterable[tuple[str, tuple[int, ...]]]) -> Iterator[Sample]:
    """Samples of listed files, in the order of the hash of their names."""
    for name, labels in sorted(entries, key=lambda entry: sha256(os.fsencode(entry[0])).digest()):
        path = Path(root, name)
        if os.fsencode(name).decode("utf-8", "replace") != name:
            raise DataError(f"{os.fsencode(path)!r}: its name is not UTF-8, and would be a sample's key; rename it")
        extension = path.suffix[1:].lower()
        if extension not in IMAGES or not path.is_file():
            raise DataError(f"{path}: expected an image file, one of {', '.join(IMAGES)}")
        folder, slash, base = name.removesuffix(path.suffix).lstrip("/").rpartition("/")
        yield Sample(folder + slash + base.replace(".", "_"), path, labels, extension)


def tars(source: str | os.PathLike[str] | Sequence[str]) -> Iterator[Sample]:
    """Samples of WebDataset tars (img2dataset's too, where the json has `label`), to pack them anew."""
    paths = files_of(source, "*.tar") if isinstance(source, str | os.PathLike) else map(Path, source)
    labelled = False
    for path in paths:
        with open(path, "rb") as file, mapped(file) as tar:
            for key, image, image_size, label, label_size in walk(tar, path.name).rows:
                with suppress(ValueError):  # the index and the doctor count what has no label
                    labels = parse_labels(bytes(tar[label : label + label_size]))
                    encoded = bytes(tar[image : image + image_size])
                    labelled = True
                    name = f"{path.name.removesuffix('.tar')}/{key.decode('utf-8', 'replace')}"  # keys may restart
                    yield Sample(name, encoded, labels, kind_of(encoded))
    if not labelled:
        raise DataError(f"{source}: no sample has a label: class ids in a .cls, or as `label` in a .json")


def files_of(source: str | os.PathLike[str], pattern: str) -> list[Path]:
    """The files of a folder, or the file itself; raises DataError where there are none."""
    path = Path(source)
    found = sorted(path.glob(f"[!.]{pattern}")) if path.is_dir() else [path]
    if not found:
        raise DataError(f"{path}: no {pattern} here")
    return found


def kind_of(encoded: bytes) -> str:
    """The extension that goes with an image's first bytes."""
    return "png" if encoded[1:4] == b"PNG" else "webp" if encoded[8:12] == b"WEBP" else "jpg"


def image_parquet(source: str | os.PathLike[str]) -> Iterator[Sample]:
    """Samples of Hugging Face image parquet (img2dataset's too): a column of {bytes, path} and one of class ids."""
    from pyarrow import parquet

    for file in files_of(source, "*.parquet"):
        row, names = 0, parquet.read_schema(file).names
        image = next((name for name in ("image", "img", "jpg", "png", "webp") if name in names), "")
        label = next((name for name in ("label", "labels", "fine_label", "cls") if name in names), "")
        if not (image and label):
            raise DataError(f"{file}: expected columns image and label, found {', '.join(names)}")
        for batch in parquet.ParquetFile(file).iter_batches(256, columns=[image, label]):
            for item in batch.to_pylist():
                encoded = item[image]["bytes"] if isinstance(item[image], dict) else item[image]
                if encoded is None:
                    raise DataError(f"{file}: row {row} holds a path instead of bytes; embed the images first")
                try:
                    labels = parse_labels(str(item[label]).encode())
                except ValueError as error:
                    raise DataError(f"{file}: row {row}: {error}") from None
                yield Sample(f"{file.stem.replace('.', '_')}-{row:08d}", encoded, labels, kind_of(encoded))
                row += 1


def imagenet_train(tar: str | os.PathLike[str]) -> Iterator[Sample]:
    """ILSVRC2012_img_train.tar as distributed, a tar of one tar a class; ids follow the sorted wnids."""
    with open(tar, "rb") as file, mapped(file) as outer:
        classes = sorted((name, at, size) for name, at, size in members(outer, str(tar), Counter()))
        entries = []
        for label, (name, at, size) in enumerate(classes):
            inner = members(outer[at : at + size], f"{tar}: {name.decode()}", Counter())
            entries += [(image.decode(), at + start, length, label) for image, start, length in inner]
        for image_name, start, length, label in sorted(entries, key=lambda entry: sha256(entry[0].encode()).digest()):
            yield Sample(image_name.partition(".")[0], bytes(outer[start : start + length]), (label,))


def imagenet_validation(tar: str | os.PathLike[str], wnids: str | os.PathLike[str]) -> Iterator[Sample]:
    """ILSVRC2012_img_val.tar with a text file of one wnid a line, in the order of the image names."""
    truth = Path(wnids).read_text().split()
    ids = {wnid: label for label, wnid in enumerate(sorted(set(truth)))}
    return labelled_images(tar, [(ids[wnid],) for wnid in truth], wnids)


def imagenet_real(tar: str | os.PathLike[str], real: str | os.PathLike[str]) -> Iterator[Sample]:
    """The images of ILSVRC2012_img_val.tar that have labels in real.json, which lists all of each (Beyer et al. 2020).

    Images with an empty list are not part of the protocol; a prediction is right when it is any of the labels.
    """
    truth = json.loads(Path(real).read_bytes())
    return (sample for sample in labelled_images(tar, truth, real) if sample.labels)


def labelled_images(
    tar: str | os.PathLike[str], labels: Sequence[Sequence[int]], source: str | os.PathLike[str]
) -> Iterator[Sample]:
    """Samples of a tar of images and the labels of each, in the order of the image names."""
    with open(tar, "rb") as file, mapped(file) as found:
        images = sorted(members(found, str(tar), Counter()))
        if len(images) != len(labels):
            raise DataError(f"{tar}: {len(images)} images, {source}: {len(labels)} labels; they must be as many")
        for (image, start, size), own in zip(images, labels, strict=True):
            yield Sample(image.decode().partition(".")[0], bytes(found[start : start + size]), tuple(own))


def cifar(files: Sequence[str | os.PathLike[str]]) -> Iterator[Sample]:
    """CIFAR-10 or -100 from the binary version's `.bin` files, as PNG; of CIFAR-100 the fine labels."""
    import cv2
    import numpy as np

    for path in map(Path, files):
        raw = np.fromfile(path, np.uint8)
        labels = 2 if path.stem in ("train", "test") else 1  # CIFAR-100: coarse, fine
        if len(raw) % (labels + 3072):
            raise DataError(f"{path}: {len(raw)} bytes are no whole number of records; take the binary version")
        for number, record in enumerate(raw.reshape(-1, labels + 3072)):
            pixels = record[labels:].reshape(3, 32, 32).transpose(1, 2, 0)[..., ::-1]
            image = cv2.imencode(".png", np.ascontiguousarray(pixels))[1].tobytes()
            yield Sample(f"{path.stem}-{number:05d}", image, (int(record[labels - 1]),), "png")


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
        image = cv2.imencode(".jpg", cv2.cvtColor(large, cv2.COLOR_GRAY2BGR), [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
        yield Sample(f"digit{number:04d}", image.tobytes(), (label,))
