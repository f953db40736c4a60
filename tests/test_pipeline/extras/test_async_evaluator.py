"""The training worker repeats, skips and logs asynchronous evaluations of its commits."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from data.bucket import Bucket
from data.storage import Folder
from pipeline.artifacts import requested_steps
from pipeline.evaluation.evaluator import EvaluationStopped
from pipeline.extras import async_evaluation
from pipeline.extras.async_evaluator import AsyncEvaluator
from tests.support.configs import FullConfig


@pytest.fixture
def alone(tmp_path, monkeypatch) -> Any:
    """Return rank 0 of a single-worker group at step 10 of 100; its log and records are collected."""
    monkeypatch.setattr(dist, "broadcast_object_list", lambda values, src: None)
    lines: list[str] = []

    def report(kind: str, values: Any, line: str) -> bool:
        lines.append(line)
        return True

    paths = {"directory": str(tmp_path), "attempt_folder": tmp_path, "evaluate": "/shards/test", "probe_train": None}
    job = SimpleNamespace(**paths, storage=Folder(tmp_path))
    telemetry = SimpleNamespace(log=lines.append, report=report)
    group = SimpleNamespace(rank=0, telemetry=telemetry)
    return SimpleNamespace(job=job, group=group, data=SimpleNamespace(steps=100), lines=lines)


class Evaluating(AsyncEvaluator):
    """Records the requested evaluations; with `is_stopped` each is interrupted by a stop."""

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
        # An attempt that began before the step repeated and committed it.
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
    for step in (5, 10, 20, 100):  # 5 is no multiple of evaluate_every, 20 is later, 100 is evaluated at the end
        (tmp_path / "checkpoints" / f"step-{step:010d}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step:010d}" / "MANIFEST.json").touch()
    (tmp_path / "metrics.jsonl").write_text("".join(record(kind, step) for kind, step in records))
    assert evaluator.resume(alone, cast(Any, SimpleNamespace(step=10)))
    expected = [10] * is_due
    evaluated, requested = ([], expected) if where == "spare" else (expected, [])
    assert evaluator.evaluated == evaluated
    assert requested_steps(tmp_path) == requested


def test_evaluation_that_ends_several_attempts_is_skipped_and_logged(alone, tmp_path) -> None:
    """Step 10 is evaluated once by the attempt that committed it, and twice by attempts that started from it."""
    evaluator = Evaluating(alone.job)
    for attempt in range(5):
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write(record("start", 10 * min(attempt, 1)))
        if attempt:
            assert evaluator.resume(alone, cast(Any, SimpleNamespace(step=10)))
        if attempt == 3:  # in the form that rank 0 reports
            with open(tmp_path / "metrics.jsonl", "a") as file:
                file.write(record("evaluate_skipped", 10))
    assert evaluator.evaluated == [10, 10]
    assert alone.lines == ["evaluate step 10 SKIPPED: 3 attempts ended without a result"]


def test_evaluation_is_repeated_after_any_number_of_stops(alone, tmp_path) -> None:
    """It is skipped only after three attempts that it may have killed."""

    def write(kind: str, values: Any, line: str = "") -> bool:
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write(record(kind, values["step"]))
        return True

    alone.group.telemetry.report = write
    evaluator = Evaluating(alone.job, is_stopped=True)
    write("start", {"step": 0})
    assert not evaluator.evaluate_during_training(alone, cast(Any, SimpleNamespace(step=10)))
    for _ in range(4):
        write("start", {"step": 10})
        assert not evaluator.resume(alone, cast(Any, SimpleNamespace(step=10)))
    evaluator.is_stopped = False
    for _ in range(5):
        write("start", {"step": 10})
        assert evaluator.resume(alone, cast(Any, SimpleNamespace(step=10)))
    assert evaluator.evaluated == [10, 10, 10]


@pytest.mark.parametrize(("changes", "step"), [({"evaluate": None}, 10), ({}, 0), ({}, 15), ({}, 100)])
def test_no_other_evaluation_runs_at_the_start(changes, step, alone) -> None:
    vars(alone.job).update(changes)
    evaluator = Evaluating(alone.job, is_stopped=True)
    assert evaluator.resume(alone, cast(Any, SimpleNamespace(step=step)))


def test_next_attempt_repeats_stopped_evaluations_and_logs_skipped_ones(alone, tmp_path) -> None:
    """`evaluate_on` was `spare` before and is `training` now."""
    for step in (5, 8, 10, 20):
        async_evaluation.request(tmp_path, step)
    # Step 8 has an outcome: the driver was killed just before it deleted the request.
    (tmp_path / "metrics.jsonl").write_text(record("evaluate", 8))
    progress: Any = SimpleNamespace(step=10)
    assert not Evaluating(alone.job, is_stopped=True).resume(alone, progress)
    skipped = "evaluate step 5 SKIPPED: asynchronous evaluation has been turned off"
    assert alone.lines == [skipped, "evaluation of step 10 stopped; it will be repeated later"], "20 is taken again"
    evaluator = Evaluating(alone.job)
    assert evaluator.resume(alone, progress)
    assert evaluator.evaluated == [10]
    assert not requested_steps(tmp_path)


def test_repeated_step_is_evaluated_only_once(alone, tmp_path) -> None:
    evaluator = Evaluating(alone.job, "spare")
    async_evaluation.request(tmp_path, 10)
    assert not evaluator.request(alone, 10)
    assert requested_steps(tmp_path) == []
    (tmp_path / async_evaluation.SPARE_FILE).touch()
    assert evaluator.request(alone, 10)
    assert requested_steps(tmp_path) == [10]
