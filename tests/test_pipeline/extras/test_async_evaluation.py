"""Files and records of asynchronous evaluations: recorded steps, and their log lines."""

import json
from pathlib import Path

import pytest

from pipeline.artifacts import requested_steps
from pipeline.evaluation.document import evaluation_record
from pipeline.extras import async_evaluation
from pipeline.extras.async_evaluation import recorded, records, report_records

pytestmark = pytest.mark.quick


def test_step_counts_as_recorded_until_an_attempt_repeats_it(tmp_path: Path) -> None:
    lines = [
        ("start", 0),
        ("step", 8),
        ("evaluate", 8),
        ("evaluate_skipped", 12),
        ("evaluate_failed", 16),
        ("evaluate", 20),
        ("start", 12),  # 16 and 20 are repeated
        ("evaluate", 24),
        ("fewshot", 28),
    ]
    text = "".join(json.dumps({"kind": kind, "step": step}) + "\n" for kind, step in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert recorded(tmp_path) == {8, 12, 24}
    # An outcome that rank 0 has not read yet counts too.
    async_evaluation.skip(tmp_path, 16, "no room")
    assert recorded(tmp_path) == {8, 12, 16, 24}
    assert recorded(tmp_path / "other") == set()


def test_request_remains_until_it_is_answered_or_withdrawn(tmp_path: Path) -> None:
    for step in (20, 8, 12):
        async_evaluation.request(tmp_path, step)
    assert requested_steps(tmp_path) == [8, 12, 20]
    async_evaluation.withdraw(tmp_path, 12)
    async_evaluation.withdraw(tmp_path, 13)
    async_evaluation.skip(tmp_path, 8, "no room")
    assert requested_steps(tmp_path) == [20]


def test_records_are_reported_in_step_order_and_kept_after_a_failure(tmp_path: Path) -> None:
    for step in (12, 8, 100):
        async_evaluation.skip(tmp_path, step, f"reason {step}")
    reported = []

    def report(kind: str, values: object, line: str) -> bool:
        reported.append((kind, values, line))
        return len(reported) != 2

    report_records(tmp_path, report)
    assert reported == [
        ("evaluate_skipped", {"step": step, "reason": f"reason {step}"}, f"evaluate step {step} SKIPPED: reason {step}")
        for step in (8, 12, 100)
    ]
    assert [path.name for path in records(tmp_path)] == ["step-0000000012.json"]


@pytest.mark.parametrize("position", [20, 60, -20])
def test_evaluation_with_a_damaged_record_is_requested_again(position: int, tmp_path: Path) -> None:
    for step in (8, 12):
        async_evaluation.skip(tmp_path, step, "no room")
    content = bytearray(records(tmp_path)[0].read_bytes())
    content[position] ^= 4
    records(tmp_path)[0].write_bytes(content)
    reported = []

    def report(kind: str, values: object, line: str) -> bool:
        reported.append(values)
        return True

    report_records(tmp_path, report)
    assert reported == [{"step": 12, "reason": "no room"}]
    assert (records(tmp_path), requested_steps(tmp_path)) == ([], [8])


def test_log_shows_the_mean_over_draws_and_metrics_contain_each_draw() -> None:
    values = {"5shot-seed-3": 0.4, "5shot-seed-15": 0.6, "5shot": 0.5, "top-1": 0.81239, "samples": 300}
    record = evaluation_record(24, values, {"seconds": 1.5, "node": "n1"}, "  beside training")
    assert record == {
        "kind": "evaluate",
        "values": {"step": 24, **values, "seconds": 1.5, "node": "n1"},
        "line": "evaluate step 24  5shot 0.5000  top-1 0.8124  beside training",
    }
