"""Trial results from handwritten records, and their file."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from data.errors import DataError
from pipeline.extras.plan.trial import Trial, measured, read_trials, write_trial

KEY = "d91ff90d" + "0" * 56


def report(step: int, steps: int, seconds: float, **changes: float) -> dict[str, Any]:
    values = {"stalled_s": 0.0, "evaluated_s": 0.0, "wait_storage": 0.1, "wait_decode": 0.2, "wait_transfer": 0.0}
    record = {"kind": "train", "step": step, "losses": [0.0] * steps, "seconds": seconds, "memory_gb": 2.0}
    return {**record, "time": 1000.0 + step, **values, **changes}


RECORDS = [
    {"kind": "start", "time": 990.0, "world": 4, "hardware": "Abacus", "claimed": 980.0},
    report(1, 1, 10.0, time=997.0, memory_gb=3.0),  # from 987 on: the start took 7 s
    report(5, 4, 9.0, time=1006.0),  # 19 s in total for steps that later take 10 s
    report(10, 5, 10.0),
    report(15, 5, 14.0, stalled_s=3.0, evaluated_s=1.0),
    {"kind": "checkpoint", "time": 1014.0, "step": 8, "stalled_s": 3.0, "took_s": 7.0},
    {"kind": "checkpoint", "time": 1020.0, "step": 15, "stalled_s": 9.0, "took_s": 9.0},
]


def test_step_time_is_the_mean_after_the_warm_up_without_saves():
    """By hand: steps 6 to 15 in 10 + 14 − 4 = 20 s; of the 24 s in all a tenth for storage, two to decode."""
    result = measured(RECORDS, "pretrain", 64)
    assert (result["world"], result["hardware"], result["steps"]) == (4, "Abacus", 10)
    assert result["step_s"] == pytest.approx(2.0)
    assert result["images_per_s"] == pytest.approx(32.0)
    assert result["storage_s"] == pytest.approx(0.24)
    assert result["decode_s"] == pytest.approx(0.48)
    assert result["compute_s"] == pytest.approx(2.0 - 0.24 - 0.48)
    assert (result["save_stall_s"], result["save_s"]) == (3.0, 7.0), "the last save is waited for, and does not count"
    assert result["until_steady_s"] == pytest.approx(16.0), "from 980 to 1006, less five steps"
    assert result["memory_gib"] == 3.0


@pytest.mark.parametrize("missing", ["start", "checkpoint", "train"])
def test_trial_with_missing_records_is_rejected(missing):
    kept = [record for record in RECORDS if record["kind"] != missing]
    with pytest.raises(DataError, match=r"pretrain: the trial recorded \d+ steps .* expected at least one of each"):
        measured(kept, "pretrain", 64)


def made(world: int) -> Trial:
    about = {"backend": "ray", "gpus_per_worker": 1, "cpus_per_worker": 8, "commit": "abc", "date": "2030-01-01"}
    values = {**measured(RECORDS, "pretrain", 64), "world": world}
    return Trial(stage="pretrain", key=KEY, **about, **values)


def test_trial_is_read_as_written_and_rejected_if_modified(tmp_path: Path):
    trials = [made(2), made(16)]
    for trial in reversed(trials):
        path = write_trial(tmp_path, trial)
    assert path == tmp_path / "trials" / "d91ff90d-2.json"
    assert read_trials(tmp_path, KEY) == trials
    assert read_trials(tmp_path, "d91ff90d" + "1" * 56) == [], "another key that begins alike"
    assert read_trials(tmp_path / "none", KEY) == []
    # A new trial replaces the previous one.
    write_trial(tmp_path, dataclasses.replace(trials[0], commit="def"))
    assert read_trials(tmp_path, KEY)[0].commit == "def"
    path.write_text(path.read_text().replace('"def"', '"abc"'))
    with pytest.raises(DataError, match=r"d91ff90d-2\.json"):
        read_trials(tmp_path, KEY)
