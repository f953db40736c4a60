"""The index of metrics.jsonl finds what a plain reading of the whole file finds, whatever has become of the file."""

import fcntl
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from data.errors import DataError
from pipeline.monitoring import metrics_index
from pipeline.monitoring.accounting import Account, account, account_rows
from pipeline.monitoring.metrics_index import MAGIC, ROW, MetricsIndex, keep_up
from pipeline.monitoring.telemetry import last_metrics


def run_of(seed: int, attempts: int = 4) -> list[dict[str, Any]]:
    """The records of a stage whose attempts fell back to random steps, in the order written."""
    rng = random.Random(seed)
    clock = 1.0e9
    step = 0
    records: list[dict[str, Any]] = []
    for attempt in range(1, attempts + 1):
        step = rng.randrange(step + 1)
        clock += rng.random() * 40
        head = {"attempt": attempt, "time": clock}
        records.append({"kind": "start", **head, "step": step, "claimed": clock - 9, "drop": ["é" * attempt]})
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
    """The account by loops over all records, an attempt after the other."""
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
            total.recovery += max(0.0, first - previous_end)
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
    """Every record that a line holds whole; null is NaN where a loss is meant."""
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def compare(directory: Path) -> None:
    """Compare all that the index can say with the plain reading."""
    records = plain_reading(directory / "metrics.jsonl")
    index = MetricsIndex(directory)
    for kind in ("start", "train", "spike", "evaluate", "nothing"):
        ours = json.loads(json.dumps(index.records(index.of_kind(kind))).replace("NaN", "null"))
        assert ours == [record for record in records if record["kind"] == kind]
    reports = [record for record in records if record["kind"] == "train"]
    for step in range(max([0, *(record["step"] for record in reports)]) + 2):
        covering = [r for r in reports if r["step"] - len(r["losses"]) < step <= r["step"]]
        assert [record["time"] for record in index.records(index.covering(step))] == [r["time"] for r in covering]
    spent, expected = account_rows(index.rows), plain_account(records)
    for name, seconds in vars(expected).items():
        assert math.isclose(getattr(spent, name), seconds, rel_tol=1e-9, abs_tol=1e-6), name
    last = last_metrics(directory)
    assert (last["time"] if last else None) == (reports[-1]["time"] if reports else None)


def lines(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


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
def test_whatever_was_written_the_index_finds_what_a_plain_reading_finds(seed, tmp_path, monkeypatch) -> None:
    """The file grows by pieces that end anywhere, with odd lines in it; now and then it is rewritten or restored."""
    rng = random.Random(seed)
    monkeypatch.setattr(metrics_index, "KEPT_AFTER_BYTES", rng.choice([0, 300, 3000]))
    content = bytearray()
    for record in run_of(seed):
        if rng.random() < 0.3:
            content += rng.choice(ODD_LINES)
        content += lines([record])
    path = tmp_path / "metrics.jsonl"
    written = 0
    while written < len(content):
        written = min(len(content), written + rng.randrange(1, 900))
        path.write_bytes(content[:written])
        compare(tmp_path)
        if rng.random() < 0.2:
            # Brought back from an older copy, without its first line, or with another run's lines.
            other = rng.choice([bytes(content[: written // 2]), content.partition(b"\n")[2], lines(run_of(seed + 99))])
            path.write_bytes(other)
            compare(tmp_path)
    path.unlink()
    compare_nothing = MetricsIndex(tmp_path)
    assert len(compare_nothing.rows) == 0


def test_only_what_was_added_is_read_again(tmp_path, monkeypatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(run_of(1, attempts=3000)))
    assert path.stat().st_size > metrics_index.KEPT_AFTER_BYTES
    count = len(MetricsIndex(tmp_path).rows)
    read: list[bytes] = []
    parsed = metrics_index.parsed
    monkeypatch.setattr(metrics_index, "parsed", lambda line, path: (read.append(line), parsed(line, path))[1])
    with path.open("ab") as file:
        file.write(lines(run_of(2, attempts=1)[:1]))
    assert len(MetricsIndex(tmp_path).rows) == count + 1
    assert len([line for line in read if line]) == 1, "the line break of the line before is no record"


def test_the_driver_keeps_the_index_up_without_reading_it(tmp_path, monkeypatch) -> None:
    records = run_of(3, attempts=50)
    path = tmp_path / "metrics.jsonl"
    keep_up(tmp_path)
    monkeypatch.setattr(metrics_index, "KEPT_AFTER_BYTES", 2000)
    made = 0
    for record in records:
        with path.open("ab") as file:
            file.write(lines([record]))
        before = (tmp_path / "metrics.index").stat().st_size if (tmp_path / "metrics.index").exists() else 0
        keep_up(tmp_path)
        made += before != ((tmp_path / "metrics.index").stat().st_size if (tmp_path / "metrics.index").exists() else 0)
    assert path.stat().st_size / 4000 < made < path.stat().st_size / 2000
    compare(tmp_path)


@pytest.mark.parametrize("damage", ["torn", "garbage", "empty", "another version", "locked", "a folder"])
def test_a_damaged_index_is_made_anew_and_a_locked_one_is_left_alone(damage, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(metrics_index, "KEPT_AFTER_BYTES", 0)
    path, index = tmp_path / "metrics.jsonl", tmp_path / "metrics.index"
    content = lines(run_of(4, attempts=9))
    half = content.find(b"\n", len(content) // 2) + 1
    path.write_bytes(content[:half])
    compare(tmp_path)
    whole = index.read_bytes()
    assert (len(whole) - len(MAGIC)) % ROW.itemsize == 0
    index.unlink()
    if damage == "a folder":
        index.mkdir()
    else:
        damaged = {"torn": whole[:-7], "garbage": b"x" * 500, "empty": b"", "another version": b"y" + whole[1:]}
        index.write_bytes(damaged.get(damage, whole))
    path.write_bytes(content)
    if damage == "locked":
        with index.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            compare(tmp_path)
        assert index.read_bytes() == whole
    compare(tmp_path)
    if damage != "a folder":
        MetricsIndex(tmp_path)
        assert (index.stat().st_size - len(MAGIC)) // ROW.itemsize == len(plain_reading(path))


@pytest.mark.parametrize("record", [{"kind": "train"}, {"attempt": 1}, {"kind": "spike", "attempt": "x", "time": 1.0}])
def test_a_record_that_was_altered_is_named(record, tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(lines([record]))
    with pytest.raises(DataError, match=r"metrics\.jsonl has changed"):
        MetricsIndex(tmp_path)
    keep_up(tmp_path)


def test_the_account_of_records_is_that_of_the_index() -> None:
    for seed in range(20):
        records = [{**record, "losses": record.get("losses", [])} for record in run_of(seed)]
        spent, expected = account(records), plain_account(records)
        assert vars(spent) == pytest.approx(vars(expected), abs=1e-6)
