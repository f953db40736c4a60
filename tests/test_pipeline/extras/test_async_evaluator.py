"""Evaluations of commits by a worker of their own, one after another."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from data.bucket import Bucket
from data.shards.packing import pack
from data.sources.samples import digits
from data.storage import Folder
from jobs.cluster.worker_group import WorkerGroup
from jobs.cluster_config import ClusterConfig
from jobs.extras.async_evaluation.spare_worker import SEARCH
from pipeline.checkpoints.manifest import step_of
from pipeline.checkpoints.needed import requested_steps
from pipeline.evaluation.evaluator import EvaluationStopped
from pipeline.extras import async_evaluation
from pipeline.extras.async_evaluator import AsyncEvaluator
from pipeline.monitoring.telemetry import read_metrics
from tests.support.configs import FullConfig
from tests.support.drives import finish, said, stage

EVERY_16 = ("pretrain.evaluate_every=16", "pretrain.keep_every=16")  # where nothing is saved otherwise


def judged(run: Path) -> dict[int, dict[str, float]]:
    """What every evaluation has come to, by step; where and how long it was is left out."""
    values = {}
    for record in read_metrics(stage(run), "evaluate"):
        named = {"kind", "time", "attempt", "step", "where", "node", "seconds"}
        assert record["step"] not in values, "reported twice"
        values[record["step"]] = {name: value for name, value in record.items() if name not in named}
    return values


def where(run: Path) -> dict[int, str]:
    return {record["step"]: record["where"] for record in read_metrics(stage(run), "evaluate")}


@pytest.fixture(scope="module")
def sets(shards, tmp_path_factory) -> tuple[str, ...]:
    """Judge accuracy and few-shot features on the test set: 2 workers have 45 batches of 4 each."""
    path = shards / "test"
    # As many images to learn from; the very same set is refused.
    learned = tmp_path_factory.mktemp("learned")
    pack(digits(train=False, image_size=16), learned, name="learned", shard_samples=90)
    return (f"pretrain.data.evaluate={path}", f"pretrain.probe={{train: {learned}, test: {path}, shots: [1, 5]}}")


@pytest.fixture(scope="module")
def loop(tmp_path_factory, sets) -> Path:
    """A run whose own workers judge its steps 16, 32 and 40."""
    run = tmp_path_factory.mktemp("loop") / "run"
    assert finish(run, *EVERY_16, *sets) == 0, said(run)
    return run


@pytest.fixture
def run(loop, tmp_path) -> Path:
    """A run with its shards packed and its training still to do."""
    shutil.copytree(loop, tmp_path / "run", ignore=shutil.ignore_patterns("pretrain-*", "attempts", "status.json"))
    return tmp_path / "run"


class Scripted:
    """Places where evaluations go as they are told: a value to return, or an error to raise."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.judged: list[int] = []
        self.searched: list[tuple[int, Any]] = []  # the step of each, and what it does without
        self.has_room = True
        self.has_training_ended = False

    def is_free(self) -> bool:
        return self.has_room or self.has_training_ended

    def is_wanted(self) -> bool:
        return False

    def take(self) -> bool:
        return True

    def give_back(self) -> None:
        pass

    def close(self) -> None:
        pass

    def run(self, function: Any, task: dict[str, Any], folder: Path, on_tick: Callable[[], None]) -> Any:
        on_tick()
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if "search" in task:
            self.searched.append((task["search"]["step"], task["hooks"][SEARCH]["masked"]))
        else:
            self.judged.append(step_of(Path(task["checkpoint"])))
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is not None:
            return outcome
        return {"values": {"accuracy": 0.5, "judged": 4}, "node": "n1", "seconds": 1.5, "remarks": []}


class ScriptedGroup:
    """A worker group of one on a scripted place."""

    def __init__(self, place: Scripted, cluster: ClusterConfig, folder: Path) -> None:
        self.place = place

    def places(self) -> dict[int, Any]:
        return {}

    def is_frozen(self, rank: int) -> bool:
        return False

    def run(self, function: Any, task: dict[str, Any], on_tick: Callable[[], None]) -> Any:
        return self.place.run(function, task, Path(), on_tick)


@pytest.fixture(autouse=True)
def scripted_groups(monkeypatch) -> None:
    def group_on(place: Any, cluster: ClusterConfig, folder: Path) -> Any:
        kind = ScriptedGroup if isinstance(place, Scripted) else WorkerGroup
        return kind(place, cluster, folder)

    monkeypatch.setattr("jobs.extras.async_evaluation.spare_worker.WorkerGroup", group_on)


@pytest.fixture
def alone(tmp_path, monkeypatch) -> Any:
    """Rank 0 of a group of one, which has trained to step 10 of 100; what it says and reports is kept."""
    monkeypatch.setattr(dist, "broadcast_object_list", lambda values, src: None)
    said: list[str] = []

    def report(kind: str, values: Any, line: str) -> bool:
        said.append(line)
        return True

    paths = {"directory": str(tmp_path), "attempt_folder": tmp_path, "evaluate": "/shards/test", "probe_train": None}
    job = SimpleNamespace(**paths, storage=Folder(tmp_path))
    telemetry = SimpleNamespace(log=said.append, report=report)
    group = SimpleNamespace(rank=0, telemetry=telemetry)
    return SimpleNamespace(job=job, group=group, data=SimpleNamespace(steps=100), said=said)


class Evaluating(AsyncEvaluator):
    """Notes what it is to evaluate; with `is_stopped` it is stopped in that."""

    def __init__(self, job: Any, evaluate_on: str = "training", is_stopped: bool = False) -> None:
        super().__init__(FullConfig(steps=100, evaluate_every=10, evaluate_on=evaluate_on), job, 100)
        self.evaluated: list[int] = []
        self.is_stopped = is_stopped

    def evaluate(self, worker: Any, progress: Any, remark: str = "") -> None:
        if self.is_stopped:
            raise EvaluationStopped("stopped")
        self.evaluated.append(progress.step)


def record(kind: str, step: int) -> str:
    return json.dumps({"kind": kind, "time": 0.0, "attempt": 1, "step": step}) + "\n"


@pytest.mark.parametrize(
    ("records", "is_due"),
    [
        ([], True),  # killed between the commit of step 10 and its evaluation
        ([("start", 0), ("evaluate", 10)], False),
        ([("start", 0), ("evaluate_failed", 10)], False),
        ([("start", 0), ("evaluate_skipped", 10)], False),
        # An attempt that began before the step took it, and committed it, again.
        ([("start", 0), ("evaluate", 10), ("start", 5)], True),
        ([("start", 0), ("evaluate", 10), ("start", 5), ("evaluate", 10), ("start", 10)], False),
        ([("start", 0), ("evaluate", 10), ("start", 10)], False),
    ],
)
@pytest.mark.parametrize("where", ["training", "in a store", "spare"])
def test_attempt_evaluates_commits_without_a_record(where, records, is_due, alone, tmp_path) -> None:
    if where == "in a store":
        alone.job.storage = Bucket("s3://bucket/run", tmp_path)
    evaluator = Evaluating(alone.job, "spare" if where == "spare" else "training")
    for step in (5, 10, 20, 100):  # 5 is none of evaluate_every, 20 lies ahead, 100 is evaluated at the end
        (tmp_path / "checkpoints" / f"step-{step:010d}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step:010d}" / "MANIFEST.json").touch()
    (tmp_path / "metrics.jsonl").write_text("".join(record(kind, step) for kind, step in records))
    assert evaluator.resume(alone, cast(Any, SimpleNamespace(step=10)))
    expected = [10] * is_due
    evaluated, requested = ([], expected) if where == "spare" else (expected, [])
    assert evaluator.evaluated == evaluated
    assert requested_steps(tmp_path) == requested


def test_evaluation_that_ends_several_attempts_is_skipped_and_logged(alone, tmp_path) -> None:
    """Of step 10: once by the attempt that committed it, twice by those that started from it."""
    evaluator = Evaluating(alone.job)
    for attempt in range(5):
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write(record("start", 10 * min(attempt, 1)))
        if attempt:
            assert evaluator.resume(alone, cast(Any, SimpleNamespace(step=10)))
        if attempt == 3:  # as rank 0 reports it
            with open(tmp_path / "metrics.jsonl", "a") as file:
                file.write(record("evaluate_skipped", 10))
    assert evaluator.evaluated == [10, 10]
    assert alone.said == ["evaluate step 10 SKIPPED: 3 attempts ended before it had a result"]


@pytest.mark.parametrize(("changes", "step"), [({"evaluate": None}, 10), ({}, 0), ({}, 15), ({}, 100)])
def test_no_other_evaluation_runs_at_the_start(changes, step, alone) -> None:
    vars(alone.job).update(changes)
    evaluator = Evaluating(alone.job, is_stopped=True)
    assert evaluator.resume(alone, cast(Any, SimpleNamespace(step=step)))


def test_next_attempt_repeats_stopped_evaluations_and_logs_skipped_ones(alone, tmp_path) -> None:
    """evaluate_on was spare, and is training now."""
    for step in (5, 8, 10, 20):
        async_evaluation.request(tmp_path, step)
    # Of step 8 there is an outcome: its request was to go when the driver was killed.
    (tmp_path / "metrics.jsonl").write_text(record("evaluate", 8))
    progress: Any = SimpleNamespace(step=10)
    assert not Evaluating(alone.job, is_stopped=True).resume(alone, progress)
    skipped = "evaluate step 5 SKIPPED: asynchronous evaluation has been turned off"
    assert alone.said == [skipped, "evaluate step 10: stopped; it will be evaluated later"], "20 is taken again"
    evaluator = Evaluating(alone.job)
    assert evaluator.resume(alone, progress)
    assert evaluator.evaluated == [10] and not requested_steps(tmp_path)


def test_repeated_step_is_evaluated_only_once(alone, tmp_path) -> None:
    evaluator = Evaluating(alone.job, "spare")
    async_evaluation.request(tmp_path, 10)
    assert not evaluator.request(alone, 10) and requested_steps(tmp_path) == []
    (tmp_path / async_evaluation.SPARE_FILE).touch()
    assert evaluator.request(alone, 10) and requested_steps(tmp_path) == [10]
