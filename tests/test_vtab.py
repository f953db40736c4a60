"""VTAB-1k: labels and preprocessing as the original derives them, and the table of its tasks."""

import json
from pathlib import Path

import numpy as np
import pytest

from data import vtab
from data.preprocess import preprocess

GOLDEN = Path(__file__).parents[1].parent / "shared" / "golden"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="shared/golden is not beside this checkout")


@pytest.fixture(scope="module")
def golden() -> dict:
    return json.loads((GOLDEN / "vtab_labels.json").read_text())


@needs_golden
def test_labels_of_kitti_are_the_originals(golden):
    cases = golden["kitti_closest_vehicle_distance"]
    assert [vtab.kitti_distance(case["types"], case["z"]) for case in cases] == [case["label"] for case in cases]
    assert {case["label"] for case in cases} == {0, 1, 2, 3}


@needs_golden
def test_labels_of_clevr_are_the_originals(golden):
    cases = golden["clevr"]
    assert [vtab.clevr_count(case["n_objects"]) for case in cases] == [case["count_label"] for case in cases]
    assert [vtab.clevr_distance(case["depth"]) for case in cases] == [case["distance_label"] for case in cases]


@needs_golden
def test_labels_of_dsprites_are_the_originals(golden):
    assert [vtab.dsprites_location(v) for v in range(32)] == golden["dsprites_x_position"]["map"]
    assert [vtab.dsprites_orientation(v) for v in range(40)] == golden["dsprites_orientation"]["map"]


@needs_golden
def test_preprocessing_is_the_originals():
    arrays = np.load(GOLDEN / "vtab_preprocess.npz")
    meta = json.loads(str(arrays["meta_json"]))
    found = preprocess(arrays["image"], f"{vtab.PREPROCESS.format(size=meta['size'])}|value_range(-1, 1)")
    np.testing.assert_allclose(found, arrays["out"], atol=1e-6, rtol=0)


def test_a_value_on_a_threshold_belongs_to_the_nearer_class():
    assert [vtab.kitti_distance([0], [z]) for z in (8.0, 8.001, 20.0, 20.001)] == [0, 1, 1, 2]
    assert [vtab.clevr_distance([depth]) for depth in (8.0, 8.5, 10.0, 10.001)] == [0, 1, 4, 5]
    assert vtab.kitti_distance([3, 7], [1.0, 2.0]) == 3


def test_every_angle_of_smallnorb_has_a_class():
    assert [vtab.smallnorb_azimuth(tens) for tens in range(0, 36, 2)] == list(range(18))


def test_the_tasks_are_those_of_the_papers_table_9():
    groups = [task.group for task in vtab.TASKS]
    assert [groups.count(group) for group in ("natural", "specialized", "structured")] == [7, 4, 8]
    assert len({task.name for task in vtab.TASKS}) == 19
    h14 = "95.3 85.5 75.2 99.7 97.2 65.0 88.9 83.3 96.7 91.4 76.6 91.7 63.8 53.1 79.4 63.3 84.5 33.2 51.2"
    scores = vtab.scores({task.name: float(v) for task, v in zip(vtab.TASKS, h14.split(), strict=True)})
    assert scores["all"] == pytest.approx(77.6, abs=0.05)
    assert scores["specialized"] == pytest.approx((83.3 + 96.7 + 91.4 + 76.6) / 4)
    with pytest.raises(ValueError, match=r"missing or unknown: caltech101, cifar10$"):
        vtab.scores({task.name.replace("caltech101", "cifar10"): 1.0 for task in vtab.TASKS})


def test_no_row_is_trained_on_and_judged():
    sizes = {"train": 1_001, "validation": 333, "test": 503}
    for task in vtab.TASKS:
        parts = [vtab.rows(split, sizes) for split in (task.train, task.validation, task.test)]
        seen = [(name, row) for name, part in parts for row in part]
        assert len(seen) == len(set(seen)) and all(len(part) for _, part in parts), task


def test_a_thousand_samples_are_the_first_of_train_and_validation():
    cifar = next(task for task in vtab.TASKS if task.name == "cifar100")
    sizes = {"train": 50_000}
    assert vtab.rows(cifar.train, sizes, vtab.TRAIN_SAMPLES) == ("train", range(800))
    assert vtab.rows(cifar.validation, sizes, vtab.VALIDATION_SAMPLES) == ("train", range(45_000, 45_200))
