"""The tasks of VTAB are read from their owners' archives: the very images that the original chose, truly labelled."""

import sys
import zipfile
from collections.abc import Callable
from hashlib import md5
from pathlib import Path

import cv2
import numpy as np
import pytest

from data.archives.published import Published
from data.errors import DataError
from data.index.document import load_index
from data.shards.sources import Sample
from data.vtab import tasks, trees
from data.vtab.fundus import fundus
from data.vtab.order import Entry, in_order
from data.vtab.source import VTAB
from jobs.__main__ import main
from tests import vtab_archives as mini
from tests.vtab_archives import Image, Splits

# Miniatures whose task is one of several of a set, or whose files hold what a task does not need.
BUILDERS: dict[str, Callable[[Path], Splits]] = {
    "cifar100": mini.cifar100,
    "dtd": mini.dtd,
    "flowers102": mini.flowers102,
    "pets": mini.pets,
    "sun397": mini.sun397,
    "svhn": mini.svhn,
    "eurosat": mini.eurosat,
    "resisc45": mini.resisc45,
    "diabetic_retinopathy": mini.diabetic_retinopathy,
    "clevr_count": lambda folder: mini.clevr(folder, "clevr_count"),
    "clevr_distance": lambda folder: mini.clevr(folder, "clevr_distance"),
    "dmlab": mini.dmlab,
    "dsprites_x_position": lambda folder: mini.dsprites(folder, "dsprites_x_position"),
    "dsprites_orientation": lambda folder: mini.dsprites(folder, "dsprites_orientation"),
    "kitti_distance": mini.kitti,
    "smallnorb_azimuth": lambda folder: mini.smallnorb(folder, "smallnorb_azimuth"),
    "smallnorb_elevation": lambda folder: mini.smallnorb(folder, "smallnorb_elevation"),
}
# What a task reads of the orders of its set, by hand: (split, first, end) for a set as large as the miniature.
PARTS: dict[str, list[tuple[str, int, int]]] = {
    "cifar100": [("train", 0, 4), ("train", 18, 20)],
    "svhn": [("train", 0, 4), ("train", 18, 20)],
    "pets": [("train", 0, 4), ("train", 16, 18)],
    "clevr_count": [("train", 0, 4), ("train", 18, 20)],
    "clevr_distance": [("train", 0, 4), ("train", 18, 20)],
    "eurosat": [("train", 0, 4), ("train", 12, 14)],
    "resisc45": [("train", 0, 4), ("train", 12, 14)],
    "dsprites_x_position": [("train", 0, 4), ("train", 16, 18)],
    "dsprites_orientation": [("train", 0, 4), ("train", 16, 18)],
    "smallnorb_azimuth": [("train", 0, 4), ("test", 0, 2)],
    "smallnorb_elevation": [("train", 0, 4), ("test", 0, 2)],
}
THREE_SPLITS = [("train", 0, 4), ("validation", 0, 2)]
TEST_PARTS: dict[str, tuple[str, int, int]] = {
    "eurosat": ("train", 16, 20),
    "resisc45": ("train", 16, 20),
    "dsprites_x_position": ("train", 18, 20),
    "dsprites_orientation": ("train", 18, 20),
    "smallnorb_azimuth": ("test", 4, 8),
    "smallnorb_elevation": ("test", 4, 8),
    "clevr_count": ("validation", 0, 99),
    "clevr_distance": ("validation", 0, 99),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four images to train on and two to validate on, instead of 800 and 200."""
    monkeypatch.setattr(tasks, "TRAIN_SAMPLES", 4)
    monkeypatch.setattr(tasks, "VALIDATION_SAMPLES", 2)


def sized(monkeypatch: pytest.MonkeyPatch, task: str, splits: Splits) -> None:
    """The set of a task is known to be as large as its miniature."""
    monkeypatch.setitem(tasks.SIZES, tasks.task(task).dataset, {split: len(images) for split, images in splits.items()})


def rows(splits: Splits, part: tuple[str, int, int]) -> list[Image]:
    """These rows of a split of a set, in the order of TensorFlow Datasets, computed here once more."""
    split, start, end = part
    digests = {md5((split + image.key).encode()).hexdigest(): image for image in splits[split]}
    return [digests[digest] for digest in sorted(digests)][start:end]


def grey_of(sample: Sample) -> int:
    return round(float(cv2.imdecode(np.frombuffer(sample.read(), np.uint8), cv2.IMREAD_COLOR).mean()))


def check(task: str, samples: list[Sample], expected: list[Image]) -> None:
    """The samples are these images, whatever their order."""
    assert sorted(sample.key for sample in samples) == sorted(image.sample for image in expected)
    images = {image.sample: image for image in expected}
    for sample in samples:
        assert sample.labels == (images[sample.key].label,), sample.key
        if task != "diabetic_retinopathy":  # whose pixels are processed
            assert abs(grey_of(sample) - images[sample.key].grey) <= (1 if task == "sun397" else 0), sample.key


# ----------------------------------------------------------------------------- which images


def test_the_order_is_the_one_that_tensorflow_datasets_publishes() -> None:
    """CIFAR's first batch of 12 in its documentation and tutorials: ids train_16399, train_01680, train_47917, …"""
    entries = [Entry(str(row), "", 0) for row in range(50_000)]
    first = [int(entry.key) for entry in in_order("train", entries)[:12]]
    assert first == [16399, 1680, 47917, 17307, 27051, 48736, 26263, 1456, 19135, 31598, 12970, 4223]


@pytest.mark.parametrize("task", BUILDERS)
def test_a_task_is_read_from_its_archives(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = BUILDERS[task](tmp_path)
    sized(monkeypatch, task, splits)
    thousand = list(VTAB[task].samples(tmp_path, "train800val200"))
    expected = []
    for part in PARTS.get(task, THREE_SPLITS):
        expected += rows(splits, part)
    assert len(expected) == 6
    check(task, thousand, expected)
    check(task, list(VTAB[task].samples(tmp_path, "val200")), expected[4:])
    test = list(VTAB[task].samples(tmp_path, "test"))
    check(task, test, rows(splits, TEST_PARTS.get(task, ("test", 0, 99))))
    assert {sample.key for sample in test}.isdisjoint(sample.key for sample in thousand)


def test_patch_camelyon_is_read_where_h5py_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("h5py")
    splits = mini.patch_camelyon(tmp_path)
    sized(monkeypatch, "patch_camelyon", splits)
    expected = [*rows(splits, ("train", 0, 4)), *rows(splits, ("validation", 0, 2))]
    check("patch_camelyon", list(VTAB["patch_camelyon"].samples(tmp_path, "train800val200")), expected)
    check("patch_camelyon", list(VTAB["patch_camelyon"].samples(tmp_path, "test")), splits["test"])


def test_caltech_says_that_its_images_are_others_than_the_originals(tmp_path, monkeypatch, caplog) -> None:
    greys = mini.caltech101(tmp_path)
    monkeypatch.setattr(trees, "CALTECH_TRAINED", 10)
    monkeypatch.setitem(tasks.SIZES, "caltech101", {"train": 30, "test": 6})
    test = list(VTAB["caltech101"].samples(tmp_path, "test"))
    assert "caltech101, test: the original's 30 images of a class were drawn from their order in a file" in caplog.text
    # Two of every class, since ten of the twelve are trained on; numbered by their names in small letters.
    ids = {"accordion": 0, "BACKGROUND_Google": 1, "Faces": 2}
    assert sorted(sample.key.split("/")[0] for sample in test) == sorted(2 * list(ids))
    monkeypatch.setattr(tasks, "TRAIN_SAMPLES", 27)
    monkeypatch.setattr(tasks, "VALIDATION_SAMPLES", 3)
    trained = list(VTAB["caltech101"].samples(tmp_path, "train800val200"))
    assert len({sample.key for sample in [*trained, *test]}) == 36
    for sample in [*trained, *test]:
        name, _, image = sample.key.partition("/")
        assert sample.labels == (ids[name],) and grey_of(sample) == greys[name][image]
    assert VTAB["caltech101"].classes(tmp_path) == ("accordion", "background_google", "faces")


# ----------------------------------------------------------------------------- pixels that are made anew


def test_an_image_of_sun397_has_120_000_pixels_at_most() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (400, 600, 3), np.uint8)
    encoded, kind = trees.sun_image(cv2.imencode(".png", noise)[1].tobytes(), "x")
    assert kind == "jpg" and encoded[:2] == b"\xff\xd8"
    assert cv2.imdecode(np.frombuffer(encoded, np.uint8), 1).shape == (283, 424, 3)  # 600 × √(120000 / 240000) = 424.3


def test_an_eye_is_scaled_flattened_and_cropped() -> None:
    """An eye of radius 120 becomes one of 300, of which 270 are kept; flat parts become grey, a spot stands out."""
    photo = np.zeros((400, 600, 3), np.uint8)
    cv2.circle(photo, (300, 200), 120, (40, 60, 160), -1)
    cv2.circle(photo, (340, 200), 3, (60, 80, 190), -1)
    raw, kind = fundus(cv2.imencode(".png", photo)[1].tobytes(), "x")
    eye = cv2.imdecode(np.frombuffer(raw, np.uint8), 1).astype(int)
    assert kind == "jpg" and eye.shape == (540, 540, 3)
    for row, column in ((5, 5), (270, 200), (200, 270)):
        assert abs(eye[row, column] - 128).max() <= 4, (row, column)
    assert eye[270, 270 + 100, 2] > 128 + 60  # 4 × the 30 by which the spot is redder, less its own share of the mean
    blind = cv2.imencode(".png", np.zeros((400, 600, 3), np.uint8))[1].tobytes()
    assert cv2.imdecode(np.frombuffer(fundus(blind, "x")[0], np.uint8), 1).shape == (540, 540, 3)


# ----------------------------------------------------------------------------- what TensorFlow Datasets prepared


def test_a_prepared_folder_gives_its_rows_as_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shards(split: str, counts: list[int]) -> list[list[bytes]]:
        examples = [
            mini.example(image=[mini.png(number)], label=[number % 3], **{"file_name": [split.encode()]})
            for number in range(sum(counts))
        ]
        ends = np.cumsum(counts)
        return [examples[end - count : end] for end, count in zip(ends, counts, strict=True)]

    folder = tmp_path / "dtd" / "3.0.1"
    mini.prepare(folder, "dtd", {"train": shards("train", [3, 5]), "validation": shards("validation", [6])})
    (folder / "label.labels.txt").write_text("banded\nblotchy\nbraided\n")
    monkeypatch.setitem(tasks.SIZES, "dtd", {"train": 8, "validation": 6, "test": 0})
    for path in (folder, folder.parent):
        samples = list(VTAB["dtd"].samples(path, "train800val200"))
        assert [sample.key for sample in samples] == [
            *(f"train-{row:06d}" for row in range(4)),
            *(f"validation-{row:06d}" for row in range(2)),
        ]
        assert [(grey_of(sample), sample.labels) for sample in samples] == [
            *((row, (row % 3,)) for row in range(4)),
            *((row, (row % 3,)) for row in range(2)),
        ]
        assert VTAB["dtd"].classes(path) == ("banded", "blotchy", "braided")


CASES = {
    "clevr_distance": ({"objects__pixel_coords": [1.0, 2.0, 9.2, 3.0, 4.0, 8.25]}, 1),
    "clevr_count": ({"objects__size": [1, 0, 1, 1]}, 1),
    "kitti_distance": ({"objects__type": [3, 1], "objects__location": [0.0, 0.0, 2.0, 0.0, 0.0, 20.5]}, 2),
    "dsprites_x_position": ({"label_x_position": [31]}, 15),
    "dsprites_orientation": ({"label_orientation": [5]}, 2),
    "smallnorb_azimuth": ({"label_azimuth": [17]}, 17),
    "smallnorb_elevation": ({"label_elevation": [8]}, 8),
}


@pytest.mark.parametrize("task", CASES)
def test_labels_are_derived_from_prepared_examples(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features, label = CASES[task]
    dataset = tasks.task(task).dataset
    record = mini.example(image=[mini.picture(1, ".png")], **features)
    splits = {split: [[record] * 20] for split in tasks.SIZES[dataset]}
    mini.prepare(tmp_path / "set", dataset, splits)
    monkeypatch.setitem(tasks.SIZES, dataset, dict.fromkeys(splits, 20))
    samples = list(VTAB[task].samples(tmp_path / "set", "val200"))
    assert [sample.labels for sample in samples] == [(label,), (label,)]
    assert grey_of(samples[0]) == (255 if dataset == "dsprites" else 1)


def test_another_prepared_set_and_a_torn_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [mini.example(image=[mini.png(1)], label=[0])] * 5
    mini.prepare(tmp_path / "sun", "sun397", {"train": [records]}, config="standard-part1-120k")
    with pytest.raises(DataError, match=r"is sun397/standard-part1-120k, and sun397 is made of sun397/tfds"):
        list(VTAB["sun397"].samples(tmp_path / "sun", "train800"))
    with pytest.raises(DataError, match=r"is sun397/standard-part1-120k, and dtd is made of dtd$"):
        list(VTAB["dtd"].samples(tmp_path / "sun", "train800"))
    mini.prepare(tmp_path / "dtd", "dtd", {"train": [records]})
    with pytest.raises(DataError, match=r"dtd, train: found 5 images, expected 1,880"):
        list(VTAB["dtd"].samples(tmp_path / "dtd", "train800"))
    monkeypatch.setitem(tasks.SIZES, "dtd", {"train": 5})
    file = tmp_path / "dtd" / "dtd-train.tfrecord-00000-of-00001"
    whole = file.read_bytes()
    for cut in (5, len(whole) // 2, len(whole) - 2 * len(whole) // 5 - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"cut short or damaged in record"):
            list(VTAB["dtd"].samples(tmp_path / "dtd", "train800"))
    file.write_bytes(whole[: 3 * len(whole) // 5])
    with pytest.raises(DataError, match="ends before row 3, expected rows to 4"):
        list(VTAB["dtd"].samples(tmp_path / "dtd", "train800"))


# ----------------------------------------------------------------------------- refusals


def test_a_set_of_another_size_is_refused_since_its_rows_would_be_others(tmp_path: Path) -> None:
    mini.dtd(tmp_path)
    with pytest.raises(DataError, match=r"dtd, train: found 10 images, expected 1,880\n.*chosen by their place"):
        list(VTAB["dtd"].samples(tmp_path, "train800"))


def test_what_cannot_be_read_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "SUN397").mkdir()
    with pytest.raises(DataError, match=r"sun397_tfds_tr\.txt\n.*own, which the owners' partitions are not"):
        list(VTAB["sun397"].samples(tmp_path, "test"))
    (tmp_path / "NWPU-RESISC45.rar").write_bytes(b"Rar!\x1a\x07\x01\x00")
    with pytest.raises(DataError, match="unpack it and name the folder"):
        list(VTAB["resisc45"].samples(tmp_path, "test"))
    (tmp_path / "camelyonpatch_level_2_split_test_y.h5.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=r"type: gunzip -k .*split_test_y\.h5\.gz"):
        list(VTAB["patch_camelyon"].samples(tmp_path, "test"))
    (tmp_path / "camelyonpatch_level_2_split_test_y.h5").write_bytes(b"\x89HDF")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(DataError, match=r"type: pip install h5py"):
        list(VTAB["patch_camelyon"].samples(tmp_path, "test"))
    with pytest.raises(DataError, match=r"download it from https://cs\.nyu\.edu"):
        list(VTAB["smallnorb_azimuth"].samples(tmp_path, "test"))


def test_an_image_that_a_list_names_and_the_archive_lacks_is_named(tmp_path: Path, monkeypatch) -> None:
    scenes = mini.clevr(tmp_path, "clevr_count")
    sized(monkeypatch, "clevr_count", scenes)
    lacking = rows(scenes, ("train", 18, 20))[0].key
    whole = zipfile.ZipFile(tmp_path / "CLEVR_v1.0.zip")
    kept = {name: whole.read(name) for name in whole.namelist() if not name.endswith(lacking)}
    mini.write_zip(tmp_path / "CLEVR_v1.0.zip", kept)
    with pytest.raises(DataError, match=rf"lacks 1 images: '{lacking}'"):
        list(VTAB["clevr_count"].samples(tmp_path, "val200"))


def test_an_annotation_that_cannot_be_read_is_told_with_its_set(tmp_path: Path) -> None:
    mini.diabetic_retinopathy(tmp_path)
    table = tmp_path / "trainLabels.csv"
    table.write_text(table.read_text().replace("4_right,4", "4_right,four"))
    with pytest.raises(DataError, match=r"train part of diabetic_retinopathy_detection is not as its owners.*'four'"):
        list(VTAB["diabetic_retinopathy"].samples(tmp_path, "train800"))


# ----------------------------------------------------------------------------- the command


def test_a_task_is_packed_with_its_names_and_an_unknown_one_is_refused(tmp_path, monkeypatch, capsys) -> None:
    splits = mini.clevr(tmp_path, "clevr_count")
    sized(monkeypatch, "clevr_count", splits)
    command = ["pack", "vtab", str(tmp_path), str(tmp_path / "set"), "--split", "train800val200"]
    assert main([*command, "--task", "clevr_count"]) == 65
    assert "found 6 samples of" in capsys.readouterr().err
    # Part of a set is no part of a task: what is chosen depends on all that there is.
    assert main([*command, "--task", "clevr_count", "--partial"]) == 78
    assert "partial with source vtab: the images of a task are chosen by their place" in capsys.readouterr().err
    as_large = VTAB["clevr_count"]._replace(published={"train800val200": Published(6, 8, "by hand")})
    with monkeypatch.context() as patch:
        patch.setitem(VTAB, "clevr_count", as_large)
        assert main([*command, "--task", "clevr_count"]) == 0
    index = load_index(tmp_path / "set")
    assert index.samples == 6 and index.names[:2] == ("3 objects", "4 objects") and len(index.names) == 8
    assert main([*command, "--task", "clevr"]) == 78
    assert "task is clevr, expected with source vtab, and there alone, one of: caltech101" in capsys.readouterr().err
    assert main([*command[:-1], "train", "--task", "clevr_count"]) == 78
    assert "has the splits train800, val200, train800val200, test; split is train" in capsys.readouterr().err
