"""Read the VTAB-1k tasks from folders prepared by TensorFlow Datasets, the same files that the original code reads.

    caltech101/3.0.1/                     `path` of the set: this folder, or its parent folder
      dataset_info.json                   the name, and the number of examples in each file of each split
      label.labels.txt                    the class names, one per line
      caltech101-train.tfrecord-00000-of-00001

1. `prepared_set` reads the description, and checks that it is the set of the task;
2. `samples` reads the rows of the task's split, in order, from the files that contain them;
3. `label_of` derives the task's label from an example (`data.extras.known_sets.vtab_tasks`).

    VTAB["dtd"].samples(Path("dtd/3.0.1"), "train800val200")      1,000 samples of 47 classes
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from data.errors import DataError
from data.extras.known_sets.archive import as_image, encode, log_notes
from data.extras.known_sets.vtab_records import features, records
from data.extras.known_sets.vtab_tasks import NAMES, TASKS, Split, VtabTask, label_of
from data.extras.sources.refusals import Refusals
from data.extras.sources.samples import Archive, Published, Sample
from data.index.names import Names

INFO = "dataset_info.json"
CLASS_NAMES = "label.labels.txt"
CONFIGS = {"sun397": "tfds", "eurosat": "rgb", "diabetic_retinopathy_detection": "btgraham-300"}
SPLITS: tuple[Split, ...] = ("train800", "val200", "train800val200", "test")
SOURCE = "Zhai et al. 2019, table 2; task_adaptation's tests"


@dataclass(frozen=True)
class PreparedSet:
    """A data set that TensorFlow Datasets has prepared in a folder."""

    folder: Path
    name: str
    shards: Mapping[str, list[int]]  # split → number of examples in each file


def prepared_set(path: Path, task: VtabTask) -> PreparedSet:
    """Read the description of a prepared set.

    Raises DataError if the description is missing or does not match the task's data set, or if the files are not
    TFRecords.
    """
    config = CONFIGS.get(task.dataset)
    expected = f"{task.dataset}/{config}" if config else task.dataset
    # The folder of a set contains one folder per version; users may give either path.
    files = [file for file in (path / INFO, *sorted(path.glob(f"*/{INFO}"))) if file.is_file()]
    if not files:
        raise DataError(
            f"{path}: no {INFO} in this folder or its sub-folders\n"
            f"  expected the folder of {expected} prepared by TensorFlow Datasets (docs/vtab.md)\n"
            "  on a machine with tensorflow-datasets, run python -c "
            f"\"import tensorflow_datasets as tfds; tfds.builder('{expected}').download_and_prepare()\""
        )
    if len(files) > 1:
        raise DataError(
            f"{path}: found {len(files)} prepared sets: {', '.join(map(str, files))}\n  pass the folder of one of them"
        )
    try:
        content: dict[str, Any] = json.loads(files[0].read_bytes())
        name = content["name"]
        prepared_config = content.get("configName") or config
        file_format = content.get("fileFormat", "tfrecord")
        shards: dict[str, list[int]] = {}
        for split in content["splits"]:
            shards[split["name"]] = list(map(int, split["shardLengths"]))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{files[0]}: not a description of a prepared set ({error}); prepare the set again") from None
    is_expected = name == task.dataset and config in (None, prepared_config)
    if not is_expected:
        raise DataError(
            f"{files[0]}: found the set {name}/{prepared_config or ''}, but task {task.name} needs {expected}; pass "
            "its folder"
        )
    if file_format != "tfrecord":
        raise DataError(
            f"{files[0]}: file format is {file_format}, expected tfrecord; prepare the set with file_format='tfrecord'"
        )
    return PreparedSet(files[0].parent, name, shards)


def samples(task: VtabTask, path: Path, split: str) -> Iterator[Sample]:
    """Yield the samples of a task's split, in the order of the rows.

    Raises DataError if the folder contains a different data set, if its size differs from the published one, or if a
    file is damaged.
    """
    prepared = prepared_set(path, task)
    changed = Refusals()
    for set_split, rows in task.rows(cast(Split, split)):  # the recipe check has validated the split against VTAB
        counts = prepared.shards.get(set_split, [])
        if sum(counts) != task.sizes[set_split]:
            raise DataError(
                f"{task.dataset}, {set_split}: found {sum(counts):,} images, expected {task.sizes[set_split]:,}\n"
                f"  task {task.name} selects images by their position in the full set: prepare the full set again"
            )
        first_row = 0  # number of the file's first row
        for number, count in enumerate(counts):
            wanted = range(max(rows.start, first_row), min(rows.stop, first_row + count))
            file = prepared.folder / f"{prepared.name}-{set_split}.tfrecord-{number:05d}-of-{len(counts):05d}"
            if wanted:
                yield from rows_of(file, task, set_split, first_row, wanted, changed)
            first_row += count
    log_notes(prepared.folder, changed)


def rows_of(file: Path, task: VtabTask, split: str, start: int, wanted: range, changed: Refusals) -> Iterator[Sample]:
    """Yield the samples of the wanted rows in a file whose first row has the number `start`.

    Raises DataError if the file ends too early.
    """
    # Imported here to keep commands fast: all of them import the table of sets below.
    import cv2
    import numpy as np

    if not file.is_file():
        raise DataError(f"{file}: file not found; prepare the set again")
    next_row = wanted.start
    with open(file, "rb") as stream:
        for row, record in enumerate(records(stream, str(file)), start):
            if row >= wanted.stop:
                break
            if row not in wanted:
                continue
            example = features(record, str(file))
            try:
                label = label_of(task.name, example)
            except (KeyError, IndexError, ValueError) as error:
                raise DataError(f"{file}, row {row}: no label ({error}); prepare the set again") from None
            raw = example.get("image", [b""])[0]
            if not isinstance(raw, bytes) or not raw:
                raise DataError(f"{file}, row {row}: no image; prepare the set again")
            image, kind = as_image(raw, f"{file}, row {row}", changed)
            if task.dataset == "dsprites":
                # dSprites pixels are 0 and 1; VTAB multiplies them by 255.
                pixels = cv2.imdecode(np.frombuffer(raw, np.uint8), cv2.IMREAD_GRAYSCALE)
                if pixels is None:
                    raise DataError(f"{file}, row {row}: the image cannot be decoded; prepare the set again")
                image, kind = encode(pixels * np.uint8(255)), "png"
            yield Sample(f"{split}-{row:06d}", image, (label,), kind)
            next_row = row + 1
    if next_row < wanted.stop:
        raise DataError(
            f"{file}: ends before row {next_row:,}, expected rows up to {wanted.stop:,}; prepare the set again"
        )


def classes(task: VtabTask, path: Path) -> Names:
    """Return the class names of a task, in the order of their ids; an empty tuple if they are unknown."""
    if task.name in NAMES:
        return NAMES[task.name]
    file = prepared_set(path, task).folder / CLASS_NAMES
    return tuple(file.read_text().splitlines()) if file.is_file() else ()


# The tasks as sources of pack stages.
VTAB: dict[str, Archive] = {}
for _task in TASKS:
    _published: dict[str, Published] = {}
    for _split in SPLITS:
        _published[_split] = Published(_task.samples(_split), _task.classes, SOURCE)
    VTAB[_task.name] = Archive(partial(samples, _task), partial(classes, _task), _published)
