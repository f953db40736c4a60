"""Checkpoints to keep: those of requested evaluations and of the best evaluation."""

import json
from pathlib import Path

import pytest

from pipeline.artifacts import requested_steps
from pipeline.extras.needed import needed_steps

pytestmark = pytest.mark.quick


def stage_of(folder: Path, *accuracies: float) -> Path:
    """Create a stage with an evaluation every ten steps."""
    lines = []
    for number, accuracy in enumerate(accuracies, 1):
        record = {"kind": "evaluate", "time": 1.0, "attempt": 1, "step": 10 * number, "accuracy": accuracy}
        lines.append(json.dumps(record) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def request(folder: Path, step: int) -> None:
    (folder / "evaluations").mkdir(exist_ok=True)
    (folder / "evaluations" / f"step-{step:010d}.requested").touch()


def test_requested_steps_are_kept_in_ascending_order(tmp_path) -> None:
    for step in (30, 20):
        request(tmp_path, step)
    assert requested_steps(tmp_path) == [20, 30]
    assert needed_steps(tmp_path, "accuracy", list) == [20, 30], "before the first evaluation"


def test_best_checkpoint_of_a_metric_is_kept(tmp_path) -> None:
    stage = stage_of(tmp_path, 0.5, 0.9, 0.7)
    assert needed_steps(stage, "accuracy", lambda: [10, 20, 30]) == [20]
    assert needed_steps(stage, "accuracy", lambda: [10, 30]) == [30], "the checkpoint of step 20 is gone"
    assert needed_steps(stage, "accuracy", list) == []


def test_without_keep_best_no_evaluation_keeps_a_checkpoint(tmp_path) -> None:
    assert needed_steps(stage_of(tmp_path, 0.5, 0.9), None, lambda: [10, 20]) == []


def test_requested_and_best_checkpoints_are_kept(tmp_path) -> None:
    stage = stage_of(tmp_path, 0.9, 0.5)
    request(stage, 30)
    assert sorted(needed_steps(stage, "accuracy", lambda: [10, 20, 30])) == [10, 30]
