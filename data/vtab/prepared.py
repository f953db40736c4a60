"""Any task of VTAB from the folder that TensorFlow Datasets has prepared: the very files that the original reads.

    caltech101/3.0.1/                     `path` of the set: this folder, or the one above it
      dataset_info.json                   its name, and how many examples each file of each split holds
      label.labels.txt                    the class names, a line each
      caltech101-train.tfrecord-00000-of-00001

1. `info_of` reads what was prepared, and compares it with what the task is made of;
2. `samples` opens the files that hold rows of the task's split, and takes these rows, in their order;
3. `derived_label` makes each task's label of an example.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.archives.images import as_image, encode, tell
from data.errors import DataError
from data.index.names import Names
from data.index.refusals import Refusals
from data.shards.sources import Sample
from data.vtab import labels
from data.vtab.order import check_size
from data.vtab.records import Values, features, records
from data.vtab.tasks import Split, Task

INFO = "dataset_info.json"
CLASS_NAMES = "label.labels.txt"
CONFIGS = {"sun397": "tfds", "eurosat": "rgb", "diabetic_retinopathy_detection": "btgraham-300"}

Example = Mapping[str, Values]


@dataclass(frozen=True)
class Info:
    """What a prepared folder holds."""

    folder: Path
    name: str
    shards: Mapping[str, list[int]]  # split → examples of each of its files

    def file(self, split: str, shard: int) -> Path:
        """The file of a shard."""
        return self.folder / f"{self.name}-{split}.tfrecord-{shard:05d}-of-{len(self.shards[split]):05d}"


def is_prepared(path: Path) -> bool:
    """Whether this is a folder that TensorFlow Datasets has prepared, or the one above it."""
    return path.is_dir() and bool(infos(path))


def infos(path: Path) -> list[Path]:
    """The descriptions in this folder and in those right below it, which are called by their version."""
    return [file for file in (path / INFO, *sorted(path.glob(f"*/{INFO}"))) if file.is_file()]


def info_of(path: Path, task: Task) -> Info:
    """What was prepared; raises DataError where it is another set, or in files that are no TFRecords."""
    files = infos(path)
    if len(files) > 1:
        raise DataError(
            f"{path}: holds {len(files)} prepared sets: {', '.join(map(str, files))}\n  name one of their folders"
        )
    try:
        content: dict[str, Any] = json.loads(files[0].read_bytes())
        name = content["name"]
        config = content.get("configName") or CONFIGS.get(task.dataset)
        file_format = content.get("fileFormat", "tfrecord")
        shards = {split["name"]: [int(count) for count in split["shardLengths"]] for split in content["splits"]}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{files[0]}: no description of a prepared set ({error}); prepare it again") from None
    if name != task.dataset or config != CONFIGS.get(task.dataset, config):
        expected = "/".join(filter(None, (task.dataset, CONFIGS.get(task.dataset))))
        raise DataError(f"{files[0]}: is {name}/{config or ''}, and {task.name} is made of {expected}")
    if file_format != "tfrecord":
        raise DataError(
            f"{files[0]}: its files are {file_format}, expected tfrecord: prepare it with file_format='tfrecord'"
        )
    return Info(files[0].parent, name, shards)


def samples(path: Path, task: Task, split: Split) -> Iterator[Sample]:
    """The samples of a task's split, in the order of the rows; raises DataError where the set has another size."""
    info = info_of(path, task)
    changed = Refusals()
    for set_split, rows in task.rows(split):
        counts = info.shards.get(set_split, [])
        check_size(task, set_split, sum(counts))
        start = 0  # row at which a shard begins
        for shard, count in enumerate(counts):
            wanted = range(max(rows.start, start), min(rows.stop, start + count))
            if wanted:
                yield from rows_of(info.file(set_split, shard), task, set_split, start, wanted, changed)
            start += count
    tell(info.folder, changed)


def rows_of(file: Path, task: Task, split: str, start: int, wanted: range, changed: Refusals) -> Iterator[Sample]:
    """The wanted rows of a file, whose first row is `start`; raises DataError where it ends before them."""
    if not file.is_file():
        raise DataError(f"there is nothing at {file}; prepare the set again")
    next_row = wanted.start
    with open(file, "rb") as stream:
        for row, record in enumerate(records(stream, str(file)), start):
            if row >= wanted.stop:
                break
            if row in wanted:
                example = features(record, str(file))
                image, kind = image_of(example, task, f"{file}, row {row}", changed)
                yield Sample(f"{split}-{row:06d}", image, (label_of(example, task, str(file)),), kind)
                next_row = row + 1
    if next_row < wanted.stop:
        raise DataError(
            f"{file}: ends before row {next_row:,}, expected rows to {wanted.stop:,}; prepare the set again"
        )


def image_of(example: Example, task: Task, name: str, changed: Refusals) -> tuple[bytes, str]:
    """The encoded image of an example and its extension; raises DataError where it has none."""
    raw = example.get("image", [b""])[0]
    if not isinstance(raw, bytes) or not raw:
        raise DataError(f"{name}: has no image; prepare the set again")
    if task.dataset != "dsprites":
        return as_image(raw, name, changed)
    import cv2
    import numpy as np

    # Its pixels are 0 and 1, which VTAB multiplies by 255.
    pixels = cv2.imdecode(np.frombuffer(raw, np.uint8), cv2.IMREAD_GRAYSCALE)
    if pixels is None:
        raise DataError(f"{name}: its image cannot be decoded; prepare the set again")
    return encode(pixels * np.uint8(255)), "png"


def label_of(example: Example, task: Task, name: str) -> int:
    """The class id of an example; raises DataError where it lacks what that is made of."""
    try:
        return derived_label(example, task)
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(f"{name}: an example without {error}; prepare the set again") from None


def derived_label(example: Example, task: Task) -> int:
    """The class id in the terms of a task's examples; raises KeyError or IndexError where an example lacks them."""
    if task.name == "clevr_count":
        return labels.clevr_count(len(example["objects/size"]))
    if task.name == "clevr_distance":
        return labels.clevr_distance(third_of_three(example["objects/pixel_coords"]))
    if task.name == "kitti_distance":
        types = [int(entry) for entry in example["objects/type"]]
        return labels.kitti_distance(types, third_of_three(example["objects/location"]))
    if task.name == "dsprites_x_position":
        return labels.dsprites_x_position(int(example["label_x_position"][0]))
    if task.name == "dsprites_orientation":
        return labels.dsprites_orientation(int(example["label_orientation"][0]))
    # TensorFlow Datasets has halved the azimuth already.
    if task.name == "smallnorb_azimuth":
        return int(example["label_azimuth"][0])
    if task.name == "smallnorb_elevation":
        return int(example["label_elevation"][0])
    return int(example["label"][0])


def third_of_three(values: Values) -> list[float]:
    """The z of points that lie one after the other: x, y, z, x, y, z, …"""
    return [float(value) for value in values[2::3]]


def names_of(path: Path, task: Task) -> Names:
    """The class names that were prepared with the set; none where there are none."""
    file = info_of(path, task).folder / CLASS_NAMES
    return tuple(file.read_text().splitlines()) if file.is_file() else ()
