"""How the wall time of a stage was spent: a kill costs recovery and repeated steps, and the parts sum to the whole."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from data.errors import DataError
from jobs.stage_folders import last_metrics
from pipeline.monitoring.telemetry import Account, account, read_metrics

pytestmark = pytest.mark.quick


def start(attempt: int, step: int, claimed: float, time: float) -> dict:
    return {"kind": "start", "attempt": attempt, "step": step, "claimed": claimed, "time": time}


def window(attempt: int, step: int, time: float, **changes: float) -> dict:
    values = {"seconds": 10.0, "wait": 0.1, "stalled_s": 0.5, "evaluated_s": 0.0, **changes}
    return {"kind": "train", "attempt": attempt, "step": step, "time": time, "losses": [1.0] * 10, **values}


def test_uninterrupted_stage_spends_its_time_on_start_data_checkpoints_and_compute() -> None:
    records = [start(1, 0, 100.0, 105.0), window(1, 10, 120.0), window(1, 20, 130.0, evaluated_s=2.0)]
    spent = account(records)
    assert (spent.start, spent.data, spent.checkpoint, spent.compute, spent.other) == (10.0, 2.0, 1.0, 15.0, 2.0)
    assert spent.wall == 30.0
    assert spent.ratio == pytest.approx(0.5)
    assert spent.lost == spent.recovery == 0
    assert spent.line() == (
        "training steps: 50.0% of 30s; "
        "overhead: start-up 33.3%, evaluation and shutdown 6.7%, data loading 6.7%, checkpoints 3.3%"
    )
    # The stage's own account comes last and changes nothing: the terminal and the report show the same shares.
    assert account([*records, {"kind": "effective", "attempt": 1, "time": 132.0}]) == spent


def test_repeated_steps_are_lost_and_the_restart_is_recovery() -> None:
    """Kill at step 20 with a checkpoint of step 15: half a window is lost, and the next first step comes 15 s later."""
    records = [
        start(1, 0, 100.0, 105.0),
        window(1, 10, 120.0),
        window(1, 20, 130.0),
        start(2, 15, 140.0, 143.0),
        window(2, 25, 155.0),
    ]
    spent = account(records)
    assert spent.lost == 5.0
    assert spent.recovery == 15.0
    assert spent.compute == pytest.approx(2.5 * 8.5)
    assert spent.wall == pytest.approx(55.0)


def test_pause_after_a_stop_is_not_counted_but_a_restart_after_a_failure_is_recovery() -> None:
    """Stop at 130 s, resume an hour later at 3730 s, then get killed."""
    resumed = {**start(2, 20, 3732.0, 3735.0), "began": 3730.0}
    failed = {**start(3, 30, 3761.0, 3764.0), "began": 3730.0}
    records = [start(1, 0, 100.0, 105.0), window(1, 20, 130.0), resumed, window(2, 30, 3750.0)]
    spent = account([*records, failed, window(3, 40, 3780.0)])
    assert (spent.start, spent.stopped, spent.recovery, spent.lost) == (20.0, 3600.0, 10.0 + 20.0, 0.0)
    assert spent.wall == pytest.approx(80.0)
    assert spent.ratio == pytest.approx(25.5 / 80.0)
    assert spent.line().endswith("; no command was running for another 1h00m")


def test_third_attempt_may_fall_back_further_than_the_second() -> None:
    records = [start(1, 0, 0.0, 5.0), window(1, 10, 20.0), start(2, 10, 22.0, 25.0), window(2, 20, 40.0)]
    spent = account([*records, start(3, 0, 42.0, 45.0), window(3, 10, 60.0)])
    assert spent.lost == 20.0


def test_clock_jumping_back_subtracts_no_time() -> None:
    records = [start(1, 0, 4100.0, 105.0), window(1, 20, 130.0), start(2, 20, 140.0, 143.0)]
    back = [{**record, "time": record["time"] - 3600} for record in [records[2], window(2, 30, 155.0)]]
    spent = account([*records[:2], *back])
    assert spent.start == spent.recovery == 0.0
    assert spent.compute > 0
    assert spent.ratio < 1


def test_stage_without_steps_has_ratio_zero() -> None:
    assert account([]).ratio == 0.0
    assert account([start(1, 0, 100.0, 105.0)]).wall == 5.0


# ------------------------------ compared with plain loops, on files with faults


def run_of(seed: int, attempts: int = 4) -> list[dict[str, Any]]:
    """Return the records of a stage whose attempts fell back to random steps, in the order written."""
    rng = random.Random(seed)
    clock = 1.0e9
    step = 0
    records: list[dict[str, Any]] = []
    for attempt in range(1, attempts + 1):
        step = rng.randrange(step + 1)
        clock += rng.random() * 40
        head = {"attempt": attempt, "time": clock}
        records.append({"kind": "start", **head, "step": step, "claimed": clock - 9, "drop": ["é" * attempt]})
        records[-1]["began"] = clock - rng.choice([9.5, 30, 200])
        for _ in range(rng.randrange(6)):
            count = rng.randrange(1, 5)
            step += count
            seconds = count * rng.random()
            clock += seconds
            losses = [rng.choice([rng.random(), None]) for _ in range(count)]
            waits = {"wait": rng.random() / 2, "stalled_s": seconds / 9, "evaluated_s": seconds / 7, "seconds": seconds}
            head = {"attempt": attempt, "time": clock}
            records.append({"kind": "train", **head, "step": step, "loss": losses[-1], "losses": losses, **waits})
            if rng.random() < 0.3:
                records.append({"kind": rng.choice(["spike", "evaluate"]), **head, "step": step, "accuracy": 0.5})
    return records


def plain_account(records: list[dict[str, Any]]) -> Account:
    """Compute the account with plain loops over all records, one attempt after another."""
    total = Account()
    starts = [record for record in records if record["kind"] == "start"]
    previous_end = 0.0
    for number, start in enumerate(starts):
        attempt = [record for record in records if record["attempt"] == start["attempt"]]
        windows = [record for record in attempt if record["kind"] == "train"]
        end = attempt[-1]["time"]
        first = windows[0]["time"] - windows[0]["seconds"] if windows else end
        if number == 0:
            total.start += max(0.0, first - start["claimed"])
        else:
            typed = max(previous_end, start["began"])
            total.stopped += typed - previous_end
            total.recovery += max(0.0, first - typed)
        for window in windows:
            steps = range(window["step"] - len(window["losses"]) + 1, window["step"] + 1)
            for step in steps:
                seconds = window["seconds"] / len(steps)
                waited, stalled, evaluated = (
                    window["wait"] * seconds,
                    window["stalled_s"] / len(steps),
                    window["evaluated_s"] / len(steps),
                )
                if any(later["step"] < step for later in starts[number + 1 :]):
                    total.lost += seconds
                else:
                    total.data += waited
                    total.checkpoint += stalled
                    total.other += evaluated
                    total.compute += seconds - waited - stalled - evaluated
        total.other += max(0.0, end - first - sum(window["seconds"] for window in windows))
        previous_end = end
    return total


def plain_reading(path: Path) -> list[dict[str, Any]]:
    """Return the record of every complete line."""
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


ODD_LINES = [
    b"\n",
    b"12\n",
    b"null\n",
    b"(3 lines lost: the disk refused them)\n",
    b'{"kind": "train", "attempt": 1, "step\n',
    b"\xff\xfe\x00\n",
    b"\xef\xbb\xbf" + b'{"kind": "spike", "attempt": 1, "time": 1.0, "step": 2}\n',
    b'{"kind": "spike", "attempt": 1, "time": 1.0, "step": 2}\r\n',
    b'{"kind": "spike", "attempt": 1, "time": 1.0}\r{"kind": "spike", "attempt": 1, "time": 2.0}\n',
]


@pytest.mark.parametrize("seed", range(25))
def test_account_of_file_with_torn_lines_equals_a_loop_over_single_steps(seed, tmp_path: Path) -> None:
    """Let attempts fall back to random steps, and write null losses and torn lines."""
    rng = random.Random(seed)
    written = run_of(seed)
    content = bytearray()
    for record in written:
        if rng.random() < 0.3:
            content += rng.choice(ODD_LINES)
        content += json.dumps(record, ensure_ascii=False).encode() + b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(content)
    read = read_metrics(tmp_path, None)
    plain = plain_reading(tmp_path / "metrics.jsonl")
    assert json.loads(json.dumps(read).replace("NaN", "null")) == plain
    reports = [record for record in written if record["kind"] == "train"]
    assert [record["time"] for record in read_metrics(tmp_path)] == [record["time"] for record in reports]
    last = last_metrics(tmp_path)
    assert (last["time"] if last else None) == (reports[-1]["time"] if reports else None)
    assert vars(account(read)) == pytest.approx(vars(plain_account(plain)), abs=1e-6)


@pytest.mark.parametrize(
    "changes", [{"kind": None}, {"attempt": None}, {"seconds": None}, {"seconds": "1"}, {"losses": []}, {"wait": None}]
)
def test_altered_record_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    altered = {**window(1, 10, 120.0), **changes}
    if changes in ({"kind": None}, {"attempt": None}, {"wait": None}):
        del altered[next(iter(changes))]
    lines = [json.dumps(record) + "\n" for record in (start(1, 0, 100.0, 105.0), window(1, 9, 110.0), altered)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    with pytest.raises(DataError, match=r"metrics\.jsonl has changed"):
        account(read_metrics(tmp_path, None))
