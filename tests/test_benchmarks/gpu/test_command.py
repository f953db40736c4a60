"""`make gpu`: the command line, and a rehearsal of all parts from end to end on a CPU."""

import json
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.parts import parts_of
from benchmarks.gpu.steps import CONTENDERS


@pytest.mark.quick
def test_machine_without_gpu_gets_the_rehearsal_command(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command.main(["--device", "cuda"]) == command.NO_GPU
    assert "make gpu DEVICE=cpu" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_parts_can_be_rehearsed_on_a_cpu(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("signal.signal", lambda number, handler: None)  # this process keeps its handlers
    out = tmp_path / "out"
    words = ["--device", "cpu", "--out", str(out), "--work", str(tmp_path / "work"), "--budget", "1500"]
    code = command.main(words)
    outcomes = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {outcome["part"]: outcome["state"] for outcome in outcomes} == dict.fromkeys(
        [part.name for part in parts_of("cpu")], "done"
    )
    assert code == 0
    rows = {outcome["part"]: outcome["rows"] for outcome in outcomes}

    for name, reported in rows.items():
        if name.startswith("campaign"):
            (row,) = reported
            assert row["is_equal"], name
            assert row["repeated"] > 0, name
            assert row["killed_after"] > 0, name
    assert {row["code"] for row in rows["steps mu/16"] if "step_s" in row} == set(CONTENDERS)
    assert sorted(row["zero"] for row in rows["stock mu/16"] if "step_s" in row) == [1, 2, 3]
    assert [row["zero"] for row in rows["engine mu/16"] if "step_s" in row] == [2, 2, 1, 3, 3]
    assert all(row["outcome"] in ("passed", "skipped") for row in rows["tests"])

    with tarfile.open(out / "logs.tar.gz") as archive:
        logs = archive.getnames()
    assert "steps-mu16.log" in logs
    assert any(name.endswith("metrics.jsonl") for name in logs)

    (page,) = out.glob("gpu-*.md")
    text = page.read_text()
    for row in (*CONTENDERS, "stock DeepSpeed", "ours", "processes", "ray"):
        assert f"| {row} |" in text
