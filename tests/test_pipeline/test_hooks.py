"""Hooks attach to a real run by name; their keys stay flat, and unknown names are refused."""

from pathlib import Path
from typing import Any

import pytest

import models
from data.errors import ConfigError
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline.checkpoints.manifest import committed, read_manifest, step_of
from pipeline.checkpoints.reader import Reader
from pipeline.hooks import Hook, load_classes
from pipeline.monitoring.telemetry import read_metrics
from pipeline.train import train
from tests.support import reference_runs as runs
from tests.support.recorded_hooks import calls_of

RECORDER = "tests.support.recorded_hooks:Recorder"
NO_WEIGHT = "tests.support.recorded_hooks:NoWeight"
CASE = runs.CASES["mixup"]  # two workers, six steps of 16 images, in micro-batches of 4


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    runs.make_sets(folder / "sets")
    runs.given_weights(folder / "given")
    return folder


def run(sets: Path, folder: Path, hooks: dict[str, Any], **values: Any) -> tuple[dict[str, Any], Path]:
    """Train the case with hooks in its task; return rank 0's result and the stage's folder."""
    task = runs.task_of(CASE, "stage", sets / "sets", sets / "given", folder)
    task["config"] = {**task["config"], **values}
    task["hooks"] = hooks
    cluster = ClusterConfig(workers=CASE.world, backend="processes")
    result: Any = run_worker_group(train, task, cluster=cluster, name="group", directory=folder)
    return result, folder / "stage"


def test_hook_methods_are_called_once_in_order(sets: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    every_two = {"evaluate_every": 2, "save_every": 3, "log_every": 6, "notes": str(notes)}
    result, stage = run(sets, tmp_path, {RECORDER: {}}, **every_two)
    assert result["step"] == 6

    calls = [call for call in calls_of(notes, 0) if call[0] != "masked"]
    saves = [["before_record", 3], ["before_save", 3]]  # the record of a save's steps comes first
    last = [["before_record", 6], ["before_save", 6]]
    evaluated = [["is_over", 2], ["is_over", 4]]
    first = [["begin", 0], ["is_over", 0], ["before_record", 1]]  # the first step is logged
    assert calls == [*first, evaluated[0], *saves, evaluated[1], *last, ["choose"]]
    # Decisions are made only on rank 0.
    others = [call for call in calls_of(notes, 1) if call[0] != "masked"]
    assert others == [call for call in calls if call[0] not in ("is_over", "choose")]

    # Each step calls it once for the whole batch, then for each micro-batch of this worker.
    asked = [call[1:] for call in calls_of(notes, 0) if call[0] == "masked"]
    expected = []
    for step in range(6):
        expected += [[step, 16], [step, 4], [step, 4]]
    assert asked == expected
    assert {record["noted"] for record in read_metrics(stage, "train")} == {"train"}


def test_hook_ends_a_stage_and_chooses_the_exported_weights(sets: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    values = {"evaluate_every": 2, "save_every": 2, "notes": str(notes)}
    result, stage = run(sets, tmp_path, {RECORDER: {"over": 4, "best": 2}}, **values)
    assert result["step"] == 4
    assert result["kept"]["step"] == 2
    assert "enough: the stage ends at step 4 of 6" in (stage / "log.txt").read_text()

    (chosen,) = [folder for folder in committed(stage / "checkpoints") if step_of(folder) == 2]
    assert result["kept"]["ledger"] == read_manifest(chosen).ledger
    exported, _ = models.load_weights(stage)
    shapes = {name: weight.shape for name, weight in exported.items()}
    of_checkpoint = Reader(chosen, read_manifest(chosen).files).weights(shapes)
    for name, weight in exported.items():
        assert weight.equal(of_checkpoint[name]), name


def test_passive_hook_changes_no_bit(sets: Path, tmp_path: Path) -> None:
    weights = []
    for hooks in ({}, {RECORDER: {}}):
        folder = tmp_path / str(len(hooks))
        folder.mkdir()
        more = {"notes": str(folder / "notes")} if hooks else {}
        _, stage = run(sets, folder, hooks, **more)
        weights.append((stage / "weights.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_masked_samples_are_marked_in_the_ledger_and_change_the_weights(sets: Path, tmp_path: Path) -> None:
    ledgers = []
    weights = []
    for hooks in ({}, {NO_WEIGHT: {"shard": 1}}):
        folder = tmp_path / str(len(hooks))
        folder.mkdir()
        result, stage = run(sets, folder, hooks)
        ledgers.append(result["ledger"])
        weights.append((stage / "weights.safetensors").read_bytes())
    assert ledgers[0] != ledgers[1]
    assert weights[0] != weights[1]


# ------------------------------------------------------------------------------------------------ names and keys


@pytest.mark.quick
@pytest.mark.parametrize(
    "name", ["pipeline.extras.best:Nothing", "pipeline.extras.nothing:Best", "pipeline.extras.best:best_of", "best"]
)
def test_unknown_hook_name_is_refused_with_an_example(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_classes([name])


@pytest.mark.quick
def test_hook_has_at_most_six_methods_that_do_nothing_by_default() -> None:
    methods = [name for name in vars(Hook) if not name.startswith("_") and callable(vars(Hook)[name])]
    assert len([name for name in methods if name != "Config"]) <= 6
