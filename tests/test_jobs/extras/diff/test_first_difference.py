"""Differences between two runs: 50 planted ones are listed, and the first different step and its cause are found."""

import shutil
from collections.abc import Callable
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from data.extras.shards.packing import pack
from data.extras.sources.samples import digits
from jobs.extras.diff.facts import Effect
from jobs.extras.diff.first_difference import find_first_difference
from jobs.extras.diff.recorded import recorded_differences
from jobs.extras.history import read_run
from jobs.extras.report.page import write_report
from pipeline import artifacts
from tests.support.paged_runs import add, change, change_metrics, make_run, start

NAMES = """
data.max_labels data.tail data.lanes data.shuffle_block data.decode data.max_bad_fraction data.processes
data.augment.min_area data.augment.flip data.augment.crop data.augment.randaug_layers data.preprocess
model.width model.depth model.heads model.patch model.pool model.dropout
optim.name optim.lr optim.weight_decay optim.clip optim.beta2 optim.schedule.warmup_steps optim.schedule.decay
loss label_smoothing mixup steps batch_size micro_batch precision zero polyak log_every
"""
CONFIG = NAMES.split()


def other(value: Any) -> Any:
    """Return a different value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return [1] if isinstance(value, list) else f"{value}-other"


def plant_config(name: str, folder: Path) -> None:
    record = artifacts.read_record(folder / "stage.json")
    path = ["config", *name.split(".")]
    inner = record
    for key in path[:-1]:
        inner = inner.get(key, {})
    # The model is compared as resolved, not as written in the recipe.
    if path[-1] not in inner or name.startswith("model."):
        path = name.split(".")
        inner = record["model"]
    change(folder / "stage.json", *path, value=other(inner[path[-1]]))


def plant_task(name: str, value: Any, folder: Path) -> None:
    change(folder / "task.json", "job", name, value=value)


def plant_start(name: str, value: Any, folder: Path) -> None:
    change_metrics(folder, "start", **{name: value})


def plant_environment(name: str, folder: Path) -> None:
    change(folder / "provenance.json", "environment", name, value="other")


def plant_set(role: str, kind: str, folder: Path) -> None:
    """Give the run a set that differs by one class name or by one sample."""
    samples = list(digits(train=False, image_size=16))
    names = [f"class {number}" for number in range(10)]
    if kind == "names":
        names[3] = "three"
    if kind == "fewer":
        samples = samples[:-1]
    target = folder.parent / f"{role}-{kind}"
    pack(samples, target, name="test", shard_samples=100, names=names)
    plant_task("train" if role == "train" else "evaluate", [str(target)] if role == "train" else str(target), folder)


def plant_excluded_steps(folder: Path) -> None:
    artifacts.write_record(folder / artifacts.EXCLUDED_STEPS, {"stretches": [[10, 17]]})


def plant_growth(folder: Path) -> None:
    add(folder, start(2, 24, world=4))


# (kind, name, function that plants the difference)
PLANTED: list[tuple[str, str, Callable[[Path], None]]] = [
    *[("config", name, partial(plant_config, name)) for name in CONFIG],
    ("seed", "seed", partial(plant_config, "seed")),
    ("data", "set train: digest", partial(plant_set, "train", "names")),
    ("data", "set evaluate: samples", partial(plant_set, "evaluate", "fewer")),
    ("data", "excluded shards", partial(plant_start, "drop", ["train-000003.tar"])),
    ("data", "excluded steps from 11 on", plant_excluded_steps),
    ("data", "set train", partial(plant_task, "train", ["/gone/train"])),
    ("code", "code", partial(plant_task, "code", "beef" * 16)),
    ("code", "code of an attempt", partial(plant_start, "code", "beef" * 16)),
    ("world size", "world size", plant_growth),
    ("hardware", "hardware", partial(plant_start, "hardware", "NVIDIA H100")),
    ("hardware", "threads of a worker", partial(plant_start, "threads", 2)),
    ("hardware", "machine", partial(plant_environment, "machine")),
    ("packages", "torch", partial(plant_start, "versions", {"torch": "2.14.0"})),
    ("packages", "deepspeed", partial(plant_start, "versions", {"deepspeed": "0.20.0"})),
    ("packages", "omegaconf", partial(plant_environment, "omegaconf")),
]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> tuple[Path, Path]:
    """Two equal runs."""
    folder = tmp_path_factory.mktemp("twins")
    return make_run(folder / "first", shards), make_run(folder / "second", shards)


def test_equal_runs_have_no_differences(twins):
    first, second = (read_run(folder).stages[0] for folder in twins)
    assert recorded_differences(first, second) == []
    difference = find_first_difference(first, second, [])
    assert (difference.step, difference.common_steps, difference.causes) == (None, 24, ())


def test_fifty_planted_differences_are_all_listed(twins, tmp_path):
    assert len(PLANTED) == 50
    first = read_run(twins[0]).stages[0]
    missed = []
    for number, (kind, name, plant) in enumerate(PLANTED):
        run = tmp_path / str(number)
        shutil.copytree(twins[1].parent, run)
        plant(run / twins[1].name)
        named = {
            (difference.known.kind, difference.name)
            for difference in recorded_differences(first, read_run(run).stages[0])
        }
        # Nothing else is listed, except that a set also changes its digest, tars and classes, and a version all others.
        brings_others = kind == "packages" or name.startswith("set ")
        if (kind, name) not in named or (len(named) > 1 and not brings_others):
            missed.append((kind, name, named))
    assert not missed


def test_the_page_lists_all_differences_at_once(twins, tmp_path):
    run = tmp_path / "all"
    shutil.copytree(twins[1].parent, run)
    planted = [entry for entry in PLANTED if entry[1] not in ("set train: digest", "torch", "omegaconf")]
    for _, _, plant in planted:
        plant(run / twins[1].name)
    text = unescape(write_report([twins[0].parent, run], tmp_path / "page.html").read_text())
    assert [name for kind, name, _ in planted if f"<td>{kind}<td>{name}<td" not in text] == []


LOSSES = [2.5 / (1 + 0.1 * step) for step in range(24)]
OTHER_DATA = {step: f"{step:063x}f" for step in range(4, 25, 4)}


@pytest.mark.parametrize(
    ("planted", "step", "by", "ledgers", "cause"),
    [
        (["seed", "optim.lr"], 1, 0.1, OTHER_DATA, "seed"),
        (["data.lanes", "model.width"], 2, 0.1, OTHER_DATA, "data.lanes"),
        (["optim.lr", "world size"], 3, 0.01, None, "optim.lr"),
        (["model.dropout", "optim.lr"], 1, 0.01, None, "model.dropout"),
        (["optim.lr", "world size"], 1, 1e-7, None, "world size"),  # a learning rate cannot act before the first update
        # Rounding is the last suspect, and after the first update a learning rate comes before a model.
        (["world size", "model.dropout"], 1, 0.1, None, "model.dropout"),
        (["world size", "model.dropout"], 3, 0.1, None, "model.dropout"),
        (["model.dropout", "optim.lr"], 3, 0.1, None, "optim.lr"),
        (["log_every", "code"], 2, 1e-3, None, "code"),
        (["hardware"], 5, 1e-7, None, "hardware"),
        (["torch"], 5, 1e-7, None, "torch"),
        (["log_every"], 5, 1e-7, None, None),
        (["seed", "optim.lr"], 3, 0.1, {24: "f" * 64}, "optim.lr"),  # the samples are equal far beyond step 3
    ],
)
def test_the_first_different_step_and_its_cause_are_found(tmp_path, shards, planted, step, by, ledgers, cause):
    losses = [loss * (1 + by) if number >= step else loss for number, loss in enumerate(LOSSES, 1)]
    first = make_run(tmp_path / "first", shards)
    second = make_run(tmp_path / "second", shards, losses=losses, ledgers=ledgers)
    plants = {name: plant for _, name, plant in PLANTED}
    for name in planted:
        plants[name](second)
    stages = [read_run(folder).stages[0] for folder in (first, second)]
    difference = find_first_difference(*stages, recorded_differences(*stages))
    assert difference.step == step
    assert difference.losses == (LOSSES[step - 1], losses[step - 1])
    assert next((cause.name for cause in difference.causes), None) == cause
    assert ("another order of summation can explain" in difference.reason) == (by < 1e-4)


def test_while_the_loss_is_constant_a_different_model_is_suspected_before_a_learning_rate(tmp_path, shards):
    flat = [2.3, 2.3, *LOSSES[2:]]
    first = make_run(tmp_path / "first", shards, losses=flat)
    second = make_run(tmp_path / "second", shards, losses=[*flat[:2], *[loss + 0.1 for loss in flat[2:]]])
    for name in ("optim.lr", "model.dropout"):
        plant_config(name, second)
    stages = [read_run(folder).stages[0] for folder in (first, second)]
    difference = find_first_difference(*stages, recorded_differences(*stages))
    assert (difference.step, [cause.name for cause in difference.causes]) == (3, ["model.dropout", "optim.lr"])


def test_a_difference_without_effect_is_listed_but_never_the_cause(twins, tmp_path, shards):
    second = make_run(tmp_path / "second", shards, losses=[loss + 1 for loss in LOSSES])
    plant_config("log_every", second)
    stages = [read_run(folder).stages[0] for folder in (twins[0], second)]
    (difference,) = recorded_differences(*stages)
    assert difference.known.effect is Effect.NONE
    assert not find_first_difference(*stages, [difference]).causes
