"""Data sets for tests of the core, written with Python's tarfile: tars, a table of each, and the index.

tests/test_data/extras/shards/test_packing.py compares them with the files that packing writes.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from io import BytesIO
from itertools import islice
from pathlib import Path
from tarfile import PAX_FORMAT, TarInfo
from tarfile import open as open_tar

import cv2
import numpy as np
from xxhash import xxh3_64_intdigest

from data.index.document import SUFFIX, write_index
from data.index.index import Index
from data.index.shard import FIELDS, Shard, write_table

DIGIT_NAMES = tuple("0123456789")


@dataclass(frozen=True)
class Picture:
    """A sample to write: an encoded image with its class ids, or None for an image without a label."""

    key: str
    image: bytes
    labels: tuple[int, ...] | None
    extension: str = "jpg"


def digits(train: bool, image_size: int = 32) -> Iterator[Picture]:
    """Yield scikit-learn's handwritten digits as JPEGs; every fifth image of each class is a test image."""
    library = find_spec("sklearn")  # importing it would take a second
    assert library is not None
    assert library.origin is not None
    path = Path(library.origin).parent / "datasets" / "data" / "digits.csv.gz"
    seen: Counter[int] = Counter()
    for number, row in enumerate(np.loadtxt(path, np.uint8, delimiter=",")):
        label = int(row[-1])
        seen[label] += 1
        if (seen[label] % 5 == 0) == train:
            continue
        grey = np.round(row[:-1].reshape(8, 8) * (255 / 16)).astype(np.uint8)
        uses_ipp = cv2.ipp.useIPP()
        cv2.ipp.setUseIPP(False)  # its result depends on the processor
        large = cv2.resize(grey, (image_size, image_size), interpolation=cv2.INTER_CUBIC)
        cv2.ipp.setUseIPP(uses_ipp)
        colour = np.stack([large] * 3, axis=-1)
        image = cv2.imencode(".jpg", colour, [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes()
        yield Picture(f"digit{number:04d}", image, (label,))


def write_set(
    pictures: Iterable[Picture],
    folder: Path,
    *,
    name: str = "train",
    shard_samples: int = 10_000,
    names: tuple[str, ...] = (),
    classes: int = 0,
) -> Index:
    """Write a data set of tars with at most `shard_samples` samples each; return its index.

    It has at least `classes` classes; those without a sample are the last ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remaining = iter(pictures)
    shards = []
    counts: Counter[int] = Counter()
    while group := list(islice(remaining, shard_samples)):
        shards.append(write_shard(group, folder, f"{name}-{len(shards):06d}.tar"))
        for picture in group:
            counts.update(picture.labels or ())
    class_counts = [counts[label] for label in range(max(classes, max(counts, default=-1) + 1))]
    return write_index(folder / f"{name}{SUFFIX}", folder, shards, class_counts, names)


def write_shard(pictures: list[Picture], folder: Path, name: str) -> Shard:
    """Write a tar and its table of offsets, which tarfile reports."""
    path = folder / name
    with open_tar(path, "w", format=PAX_FORMAT) as tar:
        for picture in pictures:
            members = {picture.extension: picture.image}
            if picture.labels is not None:
                members["cls"] = " ".join(map(str, picture.labels)).encode()
            for extension in sorted(members):
                info = TarInfo(f"{picture.key}.{extension}")
                info.size = len(members[extension])
                info.mode = 0o444
                info.uname = info.gname = "patchline"
                tar.addfile(info, BytesIO(members[extension]))
    content = path.read_bytes()
    with open_tar(path) as tar:
        placed = {member.name: member for member in tar}
    longest = max(len(picture.key.encode()) for picture in pictures)
    table = np.zeros(len(pictures), [*FIELDS, ("key", f"S{longest}")])
    for row, picture in zip(table, pictures, strict=True):
        row["key"] = picture.key.encode()
        image = placed[f"{picture.key}.{picture.extension}"]
        row["image"] = image.offset_data
        row["image_size"] = image.size
        label = b""
        if picture.labels is not None:
            member = placed[f"{picture.key}.cls"]
            row["label"] = member.offset_data
            row["label_size"] = member.size
            label = content[member.offset_data :][: member.size]
        row["label_digest"] = xxh3_64_intdigest(label)
        row["digest"] = xxh3_64_intdigest(picture.image, seed=xxh3_64_intdigest(label))
    return write_table(folder, table, name, len(content), sha256(content).hexdigest())


def index_at(index: Index, url: str, folder: Path) -> Index:
    """Write an index of the same shards at a URL, as it is written for shards that were copied to a store."""
    folder.mkdir(exist_ok=True)
    for number in range(len(index.shards)):
        write_table(folder, index.table(number), index.shards[number].name, 0, "")
    path = folder / f"{index.name}{SUFFIX}"
    return write_index(path, url, list(index.shards), index.class_counts, index.names)


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Flip a bit of a file in place, without changing its size and time."""
    times = path.stat()
    with open(path, "r+b") as file:
        file.seek(position)
        (value,) = file.read(1)
        file.seek(position)
        file.write(bytes([value ^ 1 << bit]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
