"""VTAB-1k labels and preprocessing equal the original code, and the task table agrees with the papers."""

import itertools
import json
import re
import shlex
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from data.extras.known_sets import vtab_tasks
from data.extras.known_sets.vtab_tasks import TASKS, label_of
from data.images.preprocess import preprocess
from jobs.commands.campaigns import RECIPES
from jobs.resolved_recipe import Campaign
from tests.support import campaigns as support
from tests.support.golden import GOLDEN, needs_golden

# Examples of every split, as task_adaptation's own tests expect them (data/*_test.py: train, val, test).
SPLITS = {
    "caltech101": (2754, 306, 6084),
    "cifar100": (45000, 5000, 10000),
    "dtd": (1880, 1880, 1880),
    "flowers102": (1020, 1020, 6149),
    "pets": (2944, 736, 3669),
    "sun397": (76128, 10875, 21750),
    "svhn": (65931, 7326, 26032),
    "patch_camelyon": (262144, 32768, 32768),
    "eurosat": (16200, 5400, 5400),
    "resisc45": (18900, 6300, 6300),
    "diabetic_retinopathy": (35126, 10906, 42670),
    "clevr_count": (63000, 7000, 15000),
    "clevr_distance": (63000, 7000, 15000),
    "dmlab": (65550, 22628, 22735),
    "dsprites_x_position": (589824, 73728, 73728),
    "dsprites_orientation": (589824, 73728, 73728),
    "kitti_distance": (6347, 423, 711),
    "smallnorb_azimuth": (24300, 12150, 12150),
    "smallnorb_elevation": (24300, 12150, 12150),
}

# Number of classes of each task: that of its set, or VTAB's bins of a count, a distance or an angle.
CLASSES = dict(zip(SPLITS, (102, 100, 47, 102, 37, 397, 10, 2, 10, 45, 5, 8, 6, 6, 16, 16, 4, 18, 9), strict=True))


# ----------------------------------------------------------------------------- labels and pixels


@pytest.fixture(scope="module")
def golden() -> dict:
    return json.loads((GOLDEN / "vtab_labels.json").read_text())


def kitti(types: list[int], z: list[float]) -> dict[str, list]:
    """Return the features of an example with objects at these distances in metres."""
    return {"objects/type": types, "objects/location": list(itertools.chain(*((0.0, 0.0, metres) for metres in z)))}


def clevr(depths: list[float]) -> dict[str, list]:
    """Return the features of a scene with objects at these depths."""
    coordinates = list(itertools.chain(*((0.0, 0.0, depth) for depth in depths)))
    return {"objects/pixel_coords": coordinates, "objects/size": [0] * len(depths)}


@needs_golden
def test_kitti_labels_equal_the_original(golden: dict) -> None:
    cases = golden["kitti_closest_vehicle_distance"]
    assert {case["label"] for case in cases} == {0, 1, 2, 3}
    for case in cases:
        assert label_of("kitti_distance", kitti(case["types"], case["z"])) == case["label"]


@needs_golden
def test_clevr_labels_equal_the_original(golden: dict) -> None:
    for case in golden["clevr"]:
        assert label_of("clevr_count", {"objects/size": [0] * case["n_objects"]}) == case["count_label"]
        assert label_of("clevr_distance", clevr(case["depth"])) == case["distance_label"]


@needs_golden
def test_dsprites_labels_equal_the_original(golden: dict) -> None:
    for feature, values in (("x_position", 32), ("orientation", 40)):
        task = f"dsprites_{feature}"
        assert [label_of(task, {f"label_{feature}": [value]}) for value in range(values)] == golden[task]["map"]


@needs_golden
def test_preprocessing_equals_the_original() -> None:
    arrays = np.load(GOLDEN / "vtab_preprocess.npz")
    size = json.loads(str(arrays["meta_json"]))["size"]
    prepared = preprocess(arrays["image"], f"resize_tf1({size})|value_range(-1, 1)")
    np.testing.assert_allclose(prepared, arrays["out"], atol=1e-6, rtol=0)


def test_value_on_a_threshold_belongs_to_the_nearer_class() -> None:
    assert [label_of("kitti_distance", kitti([0], [z])) for z in (8.0, 8.001, 20.0, 20.001)] == [0, 1, 1, 2]
    assert [label_of("clevr_distance", clevr([depth])) for depth in (8.0, 8.5, 10.0, 10.001)] == [0, 1, 4, 5]
    assert label_of("kitti_distance", kitti([3, 7], [1.0, 2.0])) == 3


# ----------------------------------------------------------------------------- the table


def test_tasks_are_those_of_table_9() -> None:
    groups = [task.group for task in vtab_tasks.TASKS]
    assert [groups.count(group) for group in ("natural", "specialized", "structured")] == [7, 4, 8]


def test_number_of_classes_equals_the_number_of_possible_labels() -> None:
    assert {task.name: task.classes for task in vtab_tasks.TASKS} == CLASSES
    for name, names in vtab_tasks.NAMES.items():
        assert len(set(names)) == CLASSES[name], name
    assert label_of("kitti_distance", kitti([0], [-99.0])) == 0


def test_split_sizes_equal_the_original() -> None:
    assert {task.name for task in vtab_tasks.TASKS} == SPLITS.keys()
    for task in vtab_tasks.TASKS:
        assert tuple(task.samples(split) for split in ("train", "validation", "test")) == SPLITS[task.name]
        assert task.samples("train800val200") == 1000


def test_training_and_test_rows_are_disjoint() -> None:
    for task in vtab_tasks.TASKS:
        pieces = [task.rows("train")[0], task.rows("validation")[0], task.rows("test")[0]]
        for (split, rows), (other_split, other_rows) in itertools.combinations(pieces, 2):
            overlap = split == other_split and rows.start < other_rows.stop and other_rows.start < rows.stop
            assert not overlap, task


def test_the_1000_samples_are_the_first_rows_of_train_and_validation() -> None:
    by_name = {task.name: task for task in vtab_tasks.TASKS}
    assert by_name["cifar100"].rows("train800val200") == (("train", range(800)), ("train", range(45_000, 45_200)))
    assert by_name["smallnorb_azimuth"].rows("val200") == (("test", range(200)),)


def test_augmentations_that_change_labels_are_disabled() -> None:
    no_flip = {task.name for task in vtab_tasks.TASKS if not task.flip}
    assert no_flip == {"svhn", "dsprites_x_position", "dsprites_orientation", "smallnorb_azimuth"}
    no_crop = {task.name for task in vtab_tasks.TASKS if not task.crop}
    assert no_crop == {"clevr_count", "clevr_distance", "dmlab", "dsprites_x_position", "kitti_distance"}


DOCS = Path(__file__).parents[4] / "docs"


WITH_SPLITS = ("cifar10", "cifar100", "pets", "flowers102", "vtab")


# Table 4: steps, learning rates, and the held-out share of the training set.
TABLE_4 = {
    "imagenet": (20_000, [0.003, 0.01, 0.03, 0.06], "99%", 1000),
    "cifar10": (10_000, [0.001, 0.003, 0.01, 0.03], "98%", 10),
    "cifar100": (10_000, [0.001, 0.003, 0.01, 0.03], "98%", 100),
    "pets": (500, [0.001, 0.003, 0.01, 0.03], "90%", 37),
    "flowers102": (500, [0.001, 0.003, 0.01, 0.03], "90%", 102),
}


def load(name: str, overrides: list[str]) -> Campaign:
    return support.load(RECIPES / f"{name}.yaml", overrides)


def test_vtab_is_19_tasks_in_three_groups_by_the_table_of_tasks():
    loaded = load("transfer/vtab", [])
    table = loaded.stage("finetune").config
    assert len(table.runs) == 19 * 3
    groups: dict[str, list[str]] = {"mean": [task.name for task in TASKS]}
    for task in TASKS:
        groups.setdefault(task.group, []).append(task.name)
        cfg = loaded.stage(f"finetune.{task.name}.seed-0").config
        assert cfg.model["classes"] == task.classes
        # The table reckons with a crop that keeps 7/8 of each side, as BiT's does; an inception crop may keep 5 %.
        crop = "random" if task.crop else "none"
        assert (cfg.data.augment.crop, cfg.data.augment.flip) == (crop, task.flip), task.name
        assert cfg.data.train == f"shards/vtab/{task.name}/train800val200"
        assert cfg.data.evaluate == f"shards/vtab/{task.name}/test"
        assert (cfg.steps, cfg.optim.lr, cfg.batch_size) == (2_500, 0.01, 512)
    assert table.groups == groups


@cache
def documented() -> frozenset[str]:
    """Return the data sets written by documented commands; one VTAB task represents all of them."""
    places = set()
    for page in ("data-sets", "vtab", "subsets"):
        text = (DOCS / f"{page}.md").read_text()
        for command in re.findall(r"^python -m jobs ((?:pack|subset) .*)$", text, re.M):
            words = shlex.split(command, comments=True)
            options = dict(pairwise(words))
            output = options.get("--output") or words[3]
            if words[1] in WITH_SPLITS:
                assert output.endswith(f"/{options.get('--split', 'train')}"), command
            tasks = [task.name for task in TASKS] if "--task" in options else [""]
            places.update(output.replace(f"/{options.get('--task')}/", f"/{task}/") for task in tasks)
    return frozenset(places)


@pytest.mark.parametrize("name", [*(f"transfer/{name}" for name in (*TABLE_4, "vtab")), "vit_l16_i21k"])
def test_every_data_set_of_a_recipe_has_a_documented_command(name):
    read = set(re.findall(r"\bshards/[\w/-]+", (RECIPES / f"{name}.yaml").read_text()))
    assert read, sorted(read - documented())
    assert read <= documented(), sorted(read - documented())
