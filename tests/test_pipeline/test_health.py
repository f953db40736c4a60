"""Spikes, excluded steps, and the end of a run that cannot recover."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from data.decoder import BadSample
from data.errors import Diverged, RolledBack
from pipeline import health
from pipeline.artifacts import EXCLUDED_STEPS, read_record, write_record
from pipeline.health import Health
from pipeline.training_config import TrainConfig
from tests.support import savers

pytestmark = pytest.mark.quick


class Listening(savers.Quiet):
    """Telemetry that collects lines and records."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.records: list[tuple[str, dict[str, Any]]] = []

    def log(self, text: str) -> None:
        self.lines.append(text)

    def report(self, kind: str, values: dict[str, Any], line: str = "") -> bool:
        self.records.append((kind, values))
        self.lines.append(line)
        return True


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that creates the Health of a single worker whose run has committed steps 10 and 20."""
    group = savers.with_steps(tmp_path / "run")
    # A group of one worker needs no process group.
    monkeypatch.setattr(health, "dist", savers.ALONE)

    def make(stretches: list[list[int]] | None = None) -> Health:
        if stretches is not None:
            write_record(tmp_path / EXCLUDED_STEPS, {"stretches": stretches})
        return Health(TrainConfig(steps=100, batch_size=16), tmp_path, group.checkpoints, Listening())  # type: ignore[arg-type]

    return make


def test_excluded_steps_are_skipped_and_not_counted_as_seen(watch) -> None:
    health = watch([[30, 33], [20, 25], [25, 30]])
    assert [health.next_step(step) for step in (19, 20, 24, 32, 33)] == [19, 33, 33, 33, 33]
    assert health.samples_seen(20) == 20 * 16
    assert health.samples_seen(40) == (40 - 13) * 16
    assert health.samples_seen(22) == 20 * 16


def test_spike_is_ten_times_the_median_norm_and_reported_once(watch) -> None:
    health = watch()
    for step in range(1, 17):
        health.count_step(step, 2.0, 1.0, "a" * 64, [[0, 0, step]])
    for step, norm in ((17, 9.9), (18, 10.1), (19, 50.0), (20, 1.0), (21, 11.0)):
        health.count_step(step, 2.0, norm, "a" * 64, [[0, 0, step]])
    spikes = [values for kind, values in health.telemetry.records if kind == "spike"]
    assert [(values["step"], values["limit"], values["usual"]) for values in spikes] == [
        (18, 10.0, 1.0),
        (21, 10.0, 1.0),
    ]
    assert spikes[0]["ids"] == [[0, 0, 18]]
    assert [record["step"] for record in spikes[0]["recent"]] == list(range(1, 19))


def test_consecutive_non_finite_steps_are_counted_and_logged(watch) -> None:
    health = watch()
    counts = []
    for step, norm in enumerate((1.0, math.nan, math.inf, 1.0, math.nan), start=1):
        health.count_step(step, 2.0, norm, "a" * 64, [[0, 1, 2]])
        counts.append(health.skipped_in_a_row)
    assert counts == [0, 1, 2, 0, 1]
    assert (
        "step 2: non-finite gradient; the step was skipped, and the weights are unchanged; "
        in health.telemetry.lines[1]
    )


def test_run_rolls_back_once_and_diverges_if_that_did_not_help(watch, tmp_path: Path) -> None:
    health = watch()
    health.skipped_in_a_row = 5
    with pytest.raises(RolledBack, match=r"rolling back to step 20, excluding steps 21 … 27"):
        health.roll_back_or_fail(27)
    assert read_record(tmp_path / EXCLUDED_STEPS)["stretches"] == [[20, 27]]
    again = watch()
    assert again.next_step(20) == 27
    again.skipped_in_a_row = 5
    remedy = r"excluding steps 21 … 27 did not help\n  the last good checkpoint is that of step 20 in .*checkpoints"
    with pytest.raises(Diverged, match=remedy):
        again.roll_back_or_fail(32)


def test_divergence_before_the_first_commit_does_not_promise_weights(watch, tmp_path: Path) -> None:
    for committed in (tmp_path / "run").rglob("step-*"):
        shutil.rmtree(committed, ignore_errors=True)
    health = watch([[0, 7]])
    health.skipped_in_a_row = 5
    with pytest.raises(Diverged, match="\n  no checkpoint was committed before these steps") as error:
        health.roll_back_or_fail(12)
    assert "good checkpoint" not in str(error.value)


def test_commit_after_a_roll_back_allows_another_roll_back(watch, tmp_path: Path) -> None:
    health = watch([[3, 8]])
    with pytest.raises(RolledBack):
        health.roll_back_or_fail(27)
    assert read_record(tmp_path / EXCLUDED_STEPS)["stretches"] == [[3, 8], [20, 27]]


def test_first_and_every_thousandth_bad_sample_are_logged(watch) -> None:
    health = watch()
    bad = BadSample("train-000001.tar", "0007", "no JPEG")

    class Bad:
        def __init__(self, count: int) -> None:
            self.bad = (bad,) * count

    assert health.count_bad(Bad(999)) == 999
    assert health.count_bad(Bad(2)) == 2
    assert health.telemetry.lines == [
        "bad sample 1 replaced: train-000001.tar 0007: no JPEG",
        "bad sample 1000 replaced: train-000001.tar 0007: no JPEG",
    ]
