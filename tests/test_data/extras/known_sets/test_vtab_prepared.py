"""Every VTAB task is read from a prepared TensorFlow Datasets folder, with the right rows and labels."""

import io
import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from data.errors import DataError
from data.extras.known_sets import vtab_tasks
from data.extras.known_sets.vtab_prepared import VTAB
from data.extras.sources.samples import Published, Sample
from data.index.document import load_index
from jobs.__main__ import main
from tests.support.archives import picture

Features = dict[str, list[bytes] | list[int] | list[float]]

# For each task with derived labels: two examples' features as in TensorFlow Datasets, and labels derived by hand.
DERIVED: dict[str, list[tuple[Features, int]]] = {
    "clevr_count": [({"objects/size": [1, 0, 1, 1]}, 1), ({"objects/size": [0] * 10}, 7)],
    "clevr_distance": [
        ({"objects/pixel_coords": [1.0, 2.0, 9.2, 3.0, 4.0, 8.25]}, 1),
        ({"objects/pixel_coords": [1.0, 2.0, 10.5]}, 5),
    ],
    "kitti_distance": [
        ({"objects/type": [3, 1], "objects/location": [0.0, 0.0, 2.0, 0.0, 0.0, 20.5]}, 2),
        ({"objects/type": [7], "objects/location": [0.0, 0.0, 2.0]}, 3),
    ],
    "dsprites_x_position": [({"label_x_position": [31]}, 15), ({"label_x_position": [0]}, 0)],
    "dsprites_orientation": [({"label_orientation": [5]}, 2), ({"label_orientation": [39]}, 15)],
    "smallnorb_azimuth": [({"label_azimuth": [17], "label_elevation": [1]}, 17), ({"label_azimuth": [2]}, 2)],
    "smallnorb_elevation": [({"label_azimuth": [17], "label_elevation": [1]}, 1), ({"label_elevation": [8]}, 8)],
}
# Rows of a set as large as the miniature that a task reads, by hand: (split, first, stop) to train, validate and test.
ROWS: dict[str, list[tuple[str, int, int]]] = {
    "caltech101": [("train", 0, 4), ("train", 18, 20), ("test", 0, 20)],
    "cifar100": [("train", 0, 4), ("train", 18, 20), ("test", 0, 20)],
    "svhn": [("train", 0, 4), ("train", 18, 20), ("test", 0, 20)],
    "pets": [("train", 0, 4), ("train", 16, 18), ("test", 0, 20)],
    "clevr_count": [("train", 0, 4), ("train", 18, 20), ("validation", 0, 20)],
    "clevr_distance": [("train", 0, 4), ("train", 18, 20), ("validation", 0, 20)],
    "eurosat": [("train", 0, 4), ("train", 12, 14), ("train", 16, 20)],
    "resisc45": [("train", 0, 4), ("train", 12, 14), ("train", 16, 20)],
    "dsprites_x_position": [("train", 0, 4), ("train", 16, 18), ("train", 18, 20)],
    "dsprites_orientation": [("train", 0, 4), ("train", 16, 18), ("train", 18, 20)],
    "smallnorb_azimuth": [("train", 0, 4), ("test", 0, 2), ("test", 10, 20)],
    "smallnorb_elevation": [("train", 0, 4), ("test", 0, 2), ("test", 10, 20)],
}
THREE_SPLITS = [("train", 0, 4), ("validation", 0, 2), ("test", 0, 20)]
SPLIT_NUMBER = {"train": 0, "validation": 1, "test": 2}
CONFIGS = {"sun397": "tfds", "eurosat": "rgb", "diabetic_retinopathy": "btgraham-300"}


# ----------------------------------------------------------------------------- what TensorFlow Datasets writes


def varint(value: int) -> bytes:
    """Encode a number as a protobuf varint: seven bits per byte, lowest first."""
    encoded = b""
    while value > 127:
        encoded += bytes([value % 128 + 128])
        value //= 128
    return encoded + bytes([value])


def field(number: int, content: bytes) -> bytes:
    """Encode a message field with bytes or a nested message."""
    return varint(8 * number + 2) + varint(len(content)) + content


def example(features: Features) -> bytes:
    """Encode a `tf.train.Example` with these features by hand."""
    entries = b""
    for name, values in features.items():
        if isinstance(values[0], bytes):
            feature = field(1, b"".join(field(1, value) for value in values))
        elif isinstance(values[0], float):
            feature = field(2, field(1, struct.pack(f"<{len(values)}f", *values)))
        else:
            feature = field(3, field(1, b"".join(map(varint, values))))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def tfrecord(examples: Iterable[bytes]) -> bytes:
    """Write a TFRecord file with TensorBoard's writer."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for record in examples:
        writer.write(record)
    return buffer.getvalue()


def prepare(folder: Path, name: str, splits: dict[str, list[list[bytes]]], config: str | None = None) -> Path:
    """Write a folder as prepared by TensorFlow Datasets: splits with shards of examples."""
    folder.mkdir(parents=True)
    described = []
    for split, shards in splits.items():
        described.append({"name": split, "shardLengths": [str(len(shard)) for shard in shards], "numBytes": "1"})
        for number, shard in enumerate(shards):
            path = folder / f"{name}-{split}.tfrecord-{number:05d}-of-{len(shards):05d}"
            path.write_bytes(tfrecord(shard))
    info = {"name": name, "version": "1.0.0", "fileFormat": "tfrecord", "splits": described}
    (folder / "dataset_info.json").write_text(json.dumps(info | ({"configName": config} if config else {})))
    return folder


def features_of(task: str, row: int) -> Features:
    """Return a miniature's row of features without its image."""
    if task in DERIVED:
        return DERIVED[task][row % 2][0]
    return {"file_name": [b"x"], "label": [row % 3]}


def label_by_hand(task: str, row: int) -> int:
    return DERIVED[task][row % 2][1] if task in DERIVED else row % 3


def miniature(folder: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write 20 examples per split of a task's set, in files of 7 and 13; the grey of an image is 100 · split + row."""
    dataset = next(entry.dataset for entry in vtab_tasks.TASKS if entry.name == task)
    splits = {}
    for split in vtab_tasks.SIZES[dataset]:
        examples = []
        for row in range(20):
            image = picture(grey_by_hand(task, split, row, stored=True), ".png")
            examples.append(example({"image": [image], **features_of(task, row)}))
        splits[split] = [examples[:7], examples[7:]]
    monkeypatch.setitem(vtab_tasks.SIZES, dataset, dict.fromkeys(splits, 20))
    return prepare(folder / "1.0.0", dataset, splits, CONFIGS.get(task))


def grey_by_hand(task: str, split: str, row: int, *, stored: bool = False) -> int:
    """Return the grey of a row; in dSprites, whose images are black and white, the files have 0 or 1."""
    if task.startswith("dsprites"):
        return row % 2 if stored else 255 * (row % 2)
    return 100 * SPLIT_NUMBER[split] + row


def grey_of(sample: Sample) -> int:
    return round(float(cv2.imdecode(np.frombuffer(sample.read(), np.uint8), cv2.IMREAD_COLOR).mean()))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use four training images and two validation images instead of 800 and 200."""
    monkeypatch.setattr(vtab_tasks, "TRAIN_SAMPLES", 4)
    monkeypatch.setattr(vtab_tasks, "VALIDATION_SAMPLES", 2)


# ----------------------------------------------------------------------------- which rows


@pytest.mark.parametrize("task", [task.name for task in vtab_tasks.TASKS])
def test_each_of_the_19_tasks_has_the_expected_rows_and_labels(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = miniature(tmp_path / "set", task, monkeypatch)

    def by_hand(parts: Iterable[tuple[str, int, int]]) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        for split, first, stop in parts:
            for row in range(first, stop):
                yield f"{split}-{row:06d}", grey_by_hand(task, split, row), (label_by_hand(task, row),)

    train, validation, test = ROWS.get(task, THREE_SPLITS)
    for path in (folder, folder.parent):
        for split, parts in (("train800val200", [train, validation]), ("val200", [validation]), ("test", [test])):
            samples = list(VTAB[task].samples(path, split))
            assert [(sample.key, grey_of(sample), sample.labels) for sample in samples] == list(by_hand(parts))


def test_class_names_come_from_the_prepared_set_or_from_our_table(tmp_path: Path, monkeypatch) -> None:
    folder = miniature(tmp_path / "dtd", "dtd", monkeypatch)
    assert VTAB["dtd"].classes(folder) == ()
    (folder / "label.labels.txt").write_text("banded\nblotchy\nbraided\n")
    assert VTAB["dtd"].classes(folder.parent) == ("banded", "blotchy", "braided")
    assert VTAB["kitti_distance"].classes(tmp_path)[3] == "no vehicle"
    for task in vtab_tasks.TASKS:
        if task.name in DERIVED:
            assert len(VTAB[task.name].classes(tmp_path)) == task.classes


# ----------------------------------------------------------------------------- refusals


def refused(task: str, path: Path, message: str) -> None:
    """Assert that a folder is refused with this message."""
    with pytest.raises(DataError, match=message):
        list(VTAB[task].samples(path, "train800"))


def test_unprepared_folder_raises_an_error_with_the_command_to_type(tmp_path: Path) -> None:
    (tmp_path / "dtd-r1.0.1.tar.gz").write_bytes(b"\x1f\x8b")
    refused(
        "dtd", tmp_path, r"no dataset_info\.json in this folder.*\n.*folder of dtd prepared by.*\n.*builder\('dtd'\)"
    )
    with pytest.raises(DataError, match=r"builder\('sun397/tfds'\)\.download_and_prepare"):
        VTAB["sun397"].classes(tmp_path)


def test_wrong_prepared_set_and_damaged_file_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [example({"image": [picture(1, ".png")], "label": [0]})] * 5
    prepare(tmp_path / "sun", "sun397", {"train": [records]}, config="standard-part1-120k")
    refused("sun397", tmp_path / "sun", r"found the set sun397/standard-part1-120k, but task sun397 needs sun397/tfds")
    refused(
        "dtd", tmp_path / "sun", r"found the set sun397/standard-part1-120k, but task dtd needs dtd; pass its folder$"
    )
    prepare(tmp_path / "dtd", "dtd", {"train": [records]})
    refused("dtd", tmp_path / "dtd", r"dtd, train: found 5 images, expected 1,880\n.*selects images by their position")
    monkeypatch.setitem(vtab_tasks.SIZES, "dtd", {"train": 5})
    file = tmp_path / "dtd" / "dtd-train.tfrecord-00000-of-00001"
    whole = file.read_bytes()
    for cut in (5, len(whole) // 2, len(whole) - 2 * len(whole) // 5 - 1):
        file.write_bytes(whole[:cut])
        refused("dtd", tmp_path / "dtd", "truncated or damaged in record")
    file.write_bytes(whole[: 3 * len(whole) // 5])
    refused("dtd", tmp_path / "dtd", "ends before row 3, expected rows up to 4")


def test_example_without_label_or_image_is_rejected(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(vtab_tasks.SIZES, "dtd", {"train": 5})
    for features, message in (
        ({"image": [picture(1, ".png")]}, r"row 0: no label \('label'\); prepare the set again"),
        ({"label": [1]}, "row 0: no image"),
    ):
        folder = prepare(tmp_path / next(iter(features)), "dtd", {"train": [[example(features)] * 5]})
        refused("dtd", folder, message)


# ----------------------------------------------------------------------------- the command


def test_task_is_packed_with_class_names_and_unknown_task_is_rejected(tmp_path, monkeypatch, capsys) -> None:
    folder = miniature(tmp_path / "clevr", "clevr_count", monkeypatch)
    command = ["pack", "vtab", str(folder), str(tmp_path / "set"), "--split", "train800val200"]
    assert main([*command, "--task", "clevr_count"]) == 65
    assert "found 6 samples of" in capsys.readouterr().err
    # A task cannot be packed from part of a set, because its rows are selected by their positions in the full set.
    assert main([*command, "--task", "clevr_count", "--partial"]) == 64
    assert (
        "`partial` is not supported with source: vtab, whose tasks select images by their position"
        in capsys.readouterr().err
    )
    as_large = VTAB["clevr_count"]._replace(published={"train800val200": Published(6, 8, "by hand")})
    with monkeypatch.context() as patch:
        patch.setitem(VTAB, "clevr_count", as_large)
        assert main([*command, "--task", "clevr_count"]) == 0
    index = load_index(tmp_path / "set")
    assert index.samples == 6
    assert index.names[:2] == ("3 objects", "4 objects")
    assert len(index.names) == 8
    assert main([*command, "--task", "clevr"]) == 64
    assert (
        "task is clevr and source is vtab\n  expected source: vtab with one of its tasks: caltech101"
        in capsys.readouterr().err
    )
    assert main([*command[:-1], "train", "--task", "clevr_count"]) == 64
    assert (
        "split is train, but source vtab has only the splits train800, val200, train800val200, test"
        in capsys.readouterr().err
    )
