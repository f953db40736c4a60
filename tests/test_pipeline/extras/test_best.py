"""The best evaluation of a stage follows from its records; test_checkpoint_runs.py tests the export."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from data.errors import ConfigError, DataError
from pipeline import config
from pipeline.extras.best import KeepBest, evaluations_since_best
from pipeline.extras.needed import best_commit, best_of, evaluations_of, steps_of_best
from pipeline.monitoring.telemetry import Telemetry
from tests.support.configs import FullConfig


def start(step: int) -> dict[str, Any]:
    return {"kind": "start", "time": 1.0, "attempt": 1, "step": step, "world": 2}


def evaluate(step: int, accuracy: float, **more: Any) -> dict[str, Any]:
    about = {"time": 99.5, "attempt": 1, "judged": 360, "where": "training", "seconds": 7.5}
    return {"kind": "evaluate", "step": step, "accuracy": accuracy, **about, **more}


CASES = [
    # records                                                       the best (value, step)   evaluations since
    ([start(0)], None, None),
    ([start(0), evaluate(4, 0.5)], (0.5, 4), 0),
    ([start(0), evaluate(4, 0.5), evaluate(8, 0.7), evaluate(12, 0.6)], (0.7, 8), 1),
    # The first of equal values is the best; patience counts from it too.
    ([start(0), evaluate(4, 0.5), evaluate(8, 0.5), evaluate(12, 0.5)], (0.5, 4), 2),
    # Killed before the commit of step 8: only the next attempt's evaluation of that step counts.
    ([start(0), evaluate(4, 0.5), evaluate(8, 0.9), start(4), evaluate(8, 0.4)], (0.5, 4), 1),
    # The attempt that starts from step 4 evaluates it again: this counts as one evaluation.
    ([start(0), evaluate(4, 0.5), evaluate(8, 0.4), start(8), evaluate(8, 0.4)], (0.5, 4), 1),
    # Asynchronous evaluations may report an older step later; a failed evaluation does not count.
    ([start(0), evaluate(8, 0.6), evaluate(4, 0.7), {"kind": "evaluate_failed", "step": 12}], (0.7, 4), 1),
    ([start(0), evaluate(4, 1.0), {"kind": "train", "step": 8, "loss": 2.0}, evaluate(8, 0.0)], (1.0, 4), 1),
]


@pytest.mark.parametrize(("records", "expected", "since"), CASES)
def test_best_is_the_earliest_kept_step_with_the_highest_value(records, expected, since, tmp_path):
    best = best_of(evaluations_of(records))
    assert best == ({} if expected is None else {"accuracy": {"value": expected[0], "step": expected[1]}})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"kind": "ev')
    found = evaluations_since_best(tmp_path, "accuracy")
    assert found == (None if expected is None else (since, best["accuracy"]))
    assert evaluations_since_best(tmp_path, "5shot") is None


@pytest.mark.parametrize("damage", ["flipped bit", "zeroed end"])
def test_best_and_patience_refuse_damaged_records(tmp_path, damage):
    telemetry = Telemetry(tmp_path, rank=0, attempt=1)
    for step, accuracy in ((4, 0.566), (8, 0.7), (12, 0.6)):
        telemetry.report("evaluate", {"step": step, "accuracy": accuracy})
    telemetry.close()
    hook = KeepBest(SimpleNamespace(keep_best="accuracy"), SimpleNamespace(directory=tmp_path))  # type: ignore[arg-type]
    decisions = (
        lambda: best_commit(tmp_path, "accuracy", [4, 8, 12]),
        lambda: steps_of_best(tmp_path, "accuracy", lambda: [4, 8, 12]),
        lambda: evaluations_since_best(tmp_path, "accuracy"),
        lambda: hook.begin(None, None),  # type: ignore[arg-type]
    )
    assert decisions[0]() == {"value": 0.7, "step": 8}
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    line = 1
    altered = content.replace(b"0.566", b"0.766")  # one bit
    if damage == "zeroed end":
        line = 2
        altered = content[:150] + bytes(len(content) - 150)
    path.write_bytes(altered)
    for decide in decisions:
        with pytest.raises(
            DataError, match=rf"metrics\.jsonl is damaged: line {line}: .*\n.*\n.*run: sed -i '{line}d'"
        ):
            decide()


def test_each_metric_has_its_own_best_but_single_draws_have_none():
    probe = {"5shot": 0.2, "5shot-seed-0": 0.9}
    records = [evaluate(4, 0.5, **probe), evaluate(8, 0.7, **{**probe, "5shot": 0.1})]
    best = best_of(evaluations_of(records))
    assert best == {"accuracy": {"value": 0.7, "step": 8}, "5shot": {"value": 0.2, "step": 4}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patience": 2, "evaluate_every": 4}, "patience is 2, but keep_best does not name a metric"),
        ({"patience": -1}, "patience is -1"),
        ({"keep_best": "accuracy"}, "keep_best is accuracy, but evaluate_every is 0, so the stage"),
        ({"keep_best": "accuracy", "evaluate_every": 4, "evaluate_on": "spare"}, "and evaluate_on is spare: the stage"),
        (
            {"keep_best": "accuracy", "evaluate_every": 4, "polyak": 0.9},
            "and polyak is 0.9: evaluations during training",
        ),
    ],
)
def test_keep_best_rejects_incompatible_settings(values, message):
    with pytest.raises(ConfigError) as error:
        config.build(FullConfig, {"steps": 10, **values}, "pretrain")
    assert message in str(error.value)


def test_the_best_step_to_export_has_a_checkpoint(tmp_path):
    records = [start(0), evaluate(4, 0.5), evaluate(8, 0.9), evaluate(12, 0.7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    # The best evaluation is of step 8; without its checkpoint, the best remaining step is 12.
    for committed, step in (({4, 8, 12}, 8), ({4, 12}, 12), ({4}, 4)):
        best = best_commit(tmp_path, "accuracy", committed)
        assert best is not None
        assert best["step"] == step
        assert steps_of_best(tmp_path, "accuracy", lambda committed=committed: committed) == [step]
    assert best_commit(tmp_path, "accuracy", ()) is None
    assert steps_of_best(tmp_path, "accuracy", set) == [] == steps_of_best(tmp_path, None, lambda: {8})


@pytest.mark.parametrize(("accuracies", "is_over"), [((0.5,), False), ((0.5, 0.4), False), ((0.5, 0.4, 0.3), True)])
def test_stage_ends_at_the_evaluation_that_exhausts_its_patience(accuracies, is_over, tmp_path):
    """With patience 2, two evaluations after the best one end the stage, and one does not."""
    records = [start(0), *(evaluate(4 * number, value) for number, value in enumerate(accuracies, 1))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    hook = KeepBest.__new__(KeepBest)
    hook.cfg = SimpleNamespace(keep_best="accuracy", patience=2)
    hook.stage = tmp_path
    reason = hook.is_over(SimpleNamespace())
    assert bool(reason) is is_over
    if is_over:
        assert reason.endswith("has not improved in 2 evaluations (patience 2): the best is 0.5000 at step 4")
