"""Which steps are evaluated, and the log line about the time that it takes."""

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.evaluation import in_training
from pipeline.evaluation.evaluator import EvaluationFailed
from pipeline.evaluation.in_training import LoopEvaluator, report_failure
from pipeline.hooks import StageEvaluator
from pipeline.training_config import TrainConfig

pytestmark = pytest.mark.quick


def evaluator_of(every: int, last_step: int = 100) -> LoopEvaluator:
    job: Any = SimpleNamespace(evaluate="/shards/test", probe_train=None)
    return LoopEvaluator(TrainConfig(steps=100, evaluate_every=every), job, last_step)


def listening() -> Any:
    lines: list[str] = []
    records: list[tuple[str, dict[str, Any], str]] = []
    telemetry = SimpleNamespace(log=lines.append, report=lambda *record: records.append(record))
    return SimpleNamespace(
        data=SimpleNamespace(steps=100), group=SimpleNamespace(telemetry=telemetry), lines=lines, records=records
    )


@pytest.mark.parametrize(("every", "due"), [(0, []), (25, [25, 50, 75]), (40, [40, 80])])
def test_multiples_of_evaluate_every_are_due_except_the_last_step(every: int, due: list[int]) -> None:
    evaluator = evaluator_of(every)
    assert [step for step in range(1, 101) if evaluator.is_due(step)] == due


def test_only_steps_between_first_and_last_are_due_and_only_with_sets() -> None:
    evaluator = evaluator_of(25)
    worker = listening()
    assert [step for step in range(101) if evaluator.was_due(worker, step)] == [25, 50, 75]
    evaluator.job = SimpleNamespace(evaluate=None, probe_train=None)  # type: ignore[assignment]
    assert not evaluator.was_due(worker, 25)


def test_share_of_time_for_evaluations_is_logged_once_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(in_training.time, "monotonic", lambda: clock[0])
    evaluator = evaluator_of(25)
    worker = listening()
    evaluator.report_cost(worker, 0, 10.0)  # before the first step
    clock[0] = 60.0
    evaluator.evaluated_s = 10.0
    evaluator.report_cost(worker, 25, 10.0)  # 50 s of 25 steps: 2 s a step
    evaluator.report_cost(worker, 50, 10.0)
    assert worker.lines == [
        "evaluation during training: 10.00s every 25 steps, 16.7% of the time"
        "; with evaluate_on=spare a spare worker evaluates checkpoints during training, if the cluster has room"
    ]


def test_failed_evaluation_is_recorded_with_exit_code_and_consequence() -> None:
    worker = listening()
    error = EvaluationFailed("no\nroom", 74)
    report_failure(worker, SimpleNamespace(step=12), error, "training continues without it")  # type: ignore[arg-type]
    ((kind, values, line),) = worker.records
    assert kind == "evaluate_failed"
    assert values == {"step": 12, "error": "no\nroom", "exit_code": 74}
    assert line.startswith("evaluate step 12 FAILED (no")
    assert line.endswith("); training continues without it")


def test_stage_without_sets_evaluates_nothing() -> None:
    nothing: Any = None
    evaluator = StageEvaluator(TrainConfig(steps=100, evaluate_every=5), nothing, 100)
    assert not evaluator.is_due(5)
    assert not evaluator.request(nothing, 5)
    assert evaluator.resume(nothing, nothing)
    assert evaluator.evaluate_during_training(nothing, nothing)
