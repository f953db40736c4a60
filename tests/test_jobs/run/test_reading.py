"""Reading a run's folder: the last command, finished stages, incidents, and a running stage."""

import json
from pathlib import Path

import pytest

from data.storage import Folder
from jobs.run.log import write_status
from jobs.run.reading import (
    StageReader,
    outcome_of,
    read_command,
    read_incidents,
    read_outcome,
    records_since,
    stage_folders,
)
from pipeline import artifacts

pytestmark = pytest.mark.quick

REPORT = {
    "kind": "train",
    "time": 1000.0,
    "attempt": 2,
    "step": 120,
    "steps": 700,
    "loss": 2.8410,
    "grad_norm": 0.42,
    "images_per_s": 41234.0,
    "mfu": None,
    "eta_s": 275_000.0,
    "world": 8,
}
COMMIT = {"kind": "checkpoint", "time": 940.0, "attempt": 2, "step": 100}


def two_attempts(parent: Path) -> Path:
    """Make the folder of a stage in its second attempt, with one incident and an incomplete line; return it."""
    directory = parent / "digits" / "pre-train-1a2b3c4d"
    for number in (3, 7):
        (directory / "attempts" / f"attempt-{number:06d}").mkdir(parents=True)
    incident = '2026-11-22 08:00:00 attempt 7: worker 1 on n1: its process died\nTraceback\n  File "x.py", line 3\n'
    (directory / "incidents.txt").write_text(incident)
    lines = [json.dumps(record) for record in (REPORT, COMMIT)]
    (directory / "metrics.jsonl").write_text("\n".join(["torn}", *lines, '{"kind": "train", "st']))
    return directory


# ------------------------------------------------------------------------ the run


@pytest.mark.parametrize(
    ("code", "state", "has_ended"), [(0, "done", True), (75, "stopped", True), (None, "killed", True)]
)
def test_state_of_the_last_command_follows_from_its_exit_code(code, state, has_ended, tmp_path) -> None:
    write_status(tmp_path, code, "the message", "python -m jobs run digits")
    last = read_command(tmp_path, Folder(tmp_path), print)
    assert (last.state, last.has_ended, last.exit_code) == (state, has_ended, code)
    assert (last.message, last.command) == ("the message", "python -m jobs run digits")
    assert not last.has_lease, "there is no lease"


@pytest.mark.parametrize(("content", "problem"), [(None, "missing"), ("", "altered"), ('{"exit_code": 0}', "altered")])
def test_unreadable_status_is_unknown(content, problem, tmp_path) -> None:
    if content is not None:
        (tmp_path / "status.json").write_text(content)
    last = read_command(tmp_path, Folder(tmp_path), print)
    assert (last.state, last.problem, last.has_ended) == ("unknown", problem, False)


def test_stages_are_ordered_by_their_first_start(tmp_path) -> None:
    for name, started in (("b-00000001", 20.0), ("a-00000002", 30.0), ("c-00000003", 10.0)):
        (tmp_path / name).mkdir()
        artifacts.write_record(tmp_path / name / "stage.json", {"started": started})
    run, folders = stage_folders(tmp_path)
    assert [folder.name for folder in folders] == ["c-00000003", "b-00000001", "a-00000002"]
    assert run == tmp_path
    assert stage_folders(tmp_path / "a-00000002") == (tmp_path, [tmp_path / "a-00000002"])
    assert stage_folders(tmp_path / "nothing") == (tmp_path / "nothing", [])


# ------------------------------------------------------------------------ a stage


def test_an_outcome_has_the_mean_over_draws_and_not_the_draws(tmp_path) -> None:
    metrics = {"accuracy": 0.5, "5shot": 0.4, "5shot-seed-0": 0.3, "5shot-seed-1": 0.5}
    assert read_outcome(tmp_path) is None
    artifacts.write_record(tmp_path / "done.json", {"seconds": 3.5, "metrics": metrics})
    outcome = read_outcome(tmp_path)
    assert outcome is not None
    assert (outcome.seconds, outcome.metrics) == (3.5, {"accuracy": 0.5, "5shot": 0.4})


def test_outcome_contains_why_a_stage_has_no_result() -> None:
    assert outcome_of({"seconds": 1, "diverged": "loss is inf"}).diverged == "loss is inf"


def test_incidents_are_separated_by_their_clock_and_not_by_lines_of_a_traceback(tmp_path) -> None:
    (first,) = read_incidents(two_attempts(tmp_path))
    assert first.clock == "2026-11-22 08:00:00"
    assert first.cause == "attempt 7: worker 1 on n1: its process died"
    assert first.traceback == 'Traceback\n  File "x.py", line 3'
    assert read_incidents(tmp_path) == []


# ------------------------------------------------------------------------ a running stage


def test_first_call_reads_all_records_and_later_calls_only_new_ones(tmp_path) -> None:
    stage = two_attempts(tmp_path)
    reader = StageReader(stage)
    message = reader.read("working", 7, 125)
    assert (message.run, message.stage, message.key) == ("digits", "pre-train", "1a2b3c4d")
    assert (message.attempts, message.incidents, message.report, message.commit) == (2, 1, REPORT, COMMIT)
    assert (message.attempt, message.step, message.state) == (7, 125, "working")
    with (stage / "metrics.jsonl").open("a") as file:
        file.write('ep": 130}\n')
    with (stage / "incidents.txt").open("a") as file:
        file.write("2026-11-22 09:00:00 the worker group: no traceback\n\n")
    message = reader.read("working", 7, 125)
    assert (message.report, message.incidents) == ({"kind": "train", "step": 130}, 2)
    # The stage was started over: the new file is shorter.
    (stage / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    assert reader.read("working").report == {"kind": "train", "step": 1}


def test_records_are_read_in_pieces_and_each_once(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert records_since(path, 0) == ([], 0)
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(100)))
    steps: list[int] = []
    offset = 0
    while offset < path.stat().st_size:
        records, offset = records_since(path, offset, most_bytes=200)
        steps += [record["step"] for record in records]
    assert steps == list(range(100))


def test_folder_name_that_is_not_a_stages_has_no_key(tmp_path) -> None:
    (tmp_path / "pretrain-1").mkdir()
    message = StageReader(tmp_path / "pretrain-1").read("waiting")
    assert (message.stage, message.key, message.run) == ("pretrain-1", "", tmp_path.name)
