"""`jobs status` of a run and of a stage's folder."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from data.errors import UsageError
from data.files import ROOT
from data.storage import Folder
from jobs.commands.status import run_or_stage, status_lines, status_of
from jobs.ownership import Lease
from jobs.run.log import write_status
from pipeline import artifacts
from pipeline.monitoring.telemetry import Telemetry
from tests.support.permissions import without_privileges
from tests.test_pipeline.monitoring.test_telemetry import REPORT

pytestmark = pytest.mark.quick


def test_status_of_a_stages_folder_shows_only_that_stage(tmp_path: Path):
    for name in ("pretrain-1", "finetune-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stage.json").write_text("{}")
    assert list(status_lines(status_of(tmp_path / "finetune-2"))) == [
        f"run  {tmp_path}",
        "end  unknown: no command has ended yet",
        f"{'finetune-2':24} started, no step yet",
    ]


def test_status_without_a_run_lists_nearby_runs(tmp_path: Path):
    (tmp_path / "digits" / "pretrain-1").mkdir(parents=True)
    (tmp_path / "digits" / "pretrain-1" / "stage.json").write_text("{}")
    with pytest.raises(UsageError, match=r"runs nearby: .*digits"):
        status_of(tmp_path / "digit")


def test_status_distinguishes_killed_and_running_commands(tmp_path: Path):
    def shown() -> tuple[str, str]:
        _run, end, stage = status_lines(status_of(tmp_path))
        return end, stage

    (tmp_path / "pretrain-1").mkdir()
    (tmp_path / "pretrain-1" / "stage.json").write_text("{}")
    write_status(tmp_path, None, "running", "python -m jobs run x.yaml")
    lease = Lease(Folder(tmp_path), print)
    lease.take()
    end, stage = shown()
    assert f" on {socket.gethostname()} (process {os.getpid()}): python -m jobs run x.yaml" in end
    assert end.startswith("now  running, started 20")
    assert "started, no step yet" in stage
    lease.record["pid"] = 2**22 + 1  # above Linux's largest pid
    lease.renew()
    end, stage = shown()
    seen = (
        f"last reported at {lease.record['renewed']} (that machine's clock); to resume, run python -m jobs run x.yaml"
    )
    assert end.startswith("end  ended unexpectedly: process 4194305 on ")
    assert end.endswith(seen)
    assert "ended before its first report" in stage
    Telemetry(tmp_path / "pretrain-1", rank=0, attempt=1).report("train", REPORT)
    _end, stage = shown()
    assert "not running, " in stage
    assert "eta" not in stage
    write_status(tmp_path, 65, "too many bad samples", "python -m jobs run x.yaml")
    assert "not running, " in shown()[1]


def test_only_a_command_that_can_be_repeated_is_suggested(tmp_path: Path):
    run = tmp_path / "my run"
    (run / "pretrain-1").mkdir(parents=True)
    (run / "pretrain-1" / "stage.json").write_text("{}")
    submitted = f"python -m jobs run env:PATCHLINE_RECIPE 'run={run}'"
    of_job = {"do": "read", "text": f"to resume, run python -m jobs submit RECIPE run='{run}'"}
    for code, command, step in (
        (75, "python -m jobs run x.yaml", {"do": "instead", "command": "python -m jobs run x.yaml"}),
        (75, submitted, of_job),
        (78, submitted, of_job),
        (78, "python -m jobs run x.yaml lr=1", {"do": "read", "text": "to resume, run python -m jobs run ITS_RECIPE"}),
    ):
        write_status(run, code, "stopped", command)
        (suggested,) = status_of(run)["next"]
        assert step.items() <= suggested.items()


def test_of_several_unfinished_stages_only_the_last_one_is_running(tmp_path: Path):
    for name, resumed in (("pretrain-00000001", 30.0), ("pretrain-00000002", 20.0), ("finetune-00000003", 40.0)):
        (tmp_path / name).mkdir()
        artifacts.write_record(tmp_path / name / "stage.json", {"started": resumed - 15, "resumed": resumed})
    artifacts.write_record(tmp_path / "finetune-00000003" / "done.json", {"seconds": 1.0})
    write_status(tmp_path, None, "running", "python -m jobs run x.yaml --fresh")
    Lease(Folder(tmp_path), print).take()

    def states(path: Path) -> dict[str, str]:
        return {stage["folder"].rpartition("/")[2]: stage["state"] for stage in status_of(path)["stages"]}

    expected = {"pretrain-00000001": "running", "pretrain-00000002": "unfinished", "finetune-00000003": "done"}
    assert states(tmp_path) == expected
    assert states(tmp_path / "pretrain-00000002") == {"pretrain-00000002": "unfinished"}


def test_notices_of_the_last_attempt_are_shown_until_they_end(tmp_path: Path):
    (tmp_path / "pretrain-1").mkdir()
    (tmp_path / "pretrain-1" / "stage.json").write_text("{}")

    def report(attempt: int, kind: str, about: str = "", text: str = "", *, is_over: bool = False) -> list[str]:
        values = {"about": about, "notice": text, "is_over": is_over} if text else {}
        Telemetry(tmp_path / "pretrain-1", rank=0, attempt=attempt).report(kind, {"step": 1, **values})
        document = status_of(tmp_path)
        (stage,) = document["stages"]
        assert [line.strip() for line in list(status_lines(document))[2].splitlines()[1:]] == stage["notices"]
        return stage["notices"]

    assert report(1, "start") == []
    assert report(1, "slow", "worker 3", "3 is slow") == ["3 is slow"]
    assert report(1, "slow", "worker 1", "1 is slow") == ["3 is slow", "1 is slow"]
    assert report(1, "slow", "worker 3", "3 is slower") == ["3 is slower", "1 is slow"]
    assert report(1, "slow", "worker 1", "1 is fast", is_over=True) == ["3 is slower"]
    assert report(2, "start") == []


def test_a_stage_name_selects_its_newest_folder(tmp_path):
    for key in ("1" * 8, "2" * 8):
        folder = tmp_path / "run" / f"pretrain-{key}"
        folder.mkdir(parents=True)
        (folder / "stage.json").write_text('{"resumed": ' + key[0] + "}")
    assert run_or_stage(str(tmp_path / "run")) == tmp_path / "run"
    assert run_or_stage(str(tmp_path / "run" / "pretrain")).parent == tmp_path / "run"


@pytest.mark.parametrize(
    ("closed", "bits", "code", "text"),
    [
        (".", 0, 74, "expected: a folder that this user may read"),
        (".", 0o311, 74, "expected: a folder that this user may read"),
        ("train-1a2b3c4d", 0, 0, "train-1a2b3c4d           UNREADABLE: Permission denied"),
        ("train-1a2b3c4d/done.json", 0, 0, "train-1a2b3c4d           UNREADABLE: Permission denied"),
    ],
)
def test_what_may_not_be_read_is_reported_and_not_omitted(tmp_path, closed, bits, code, text):
    stage = tmp_path / "run" / "train-1a2b3c4d"
    stage.mkdir(parents=True)
    artifacts.write_record(stage / "stage.json", {"started": 1.0})
    artifacts.write_record(stage / "done.json", {"seconds": 1.0, "files": {}})
    (tmp_path / "run" / closed).chmod(bits)
    command = [sys.executable, "-m", "jobs", "status", str(tmp_path / "run")]
    done = subprocess.run(without_privileges(command), capture_output=True, text=True, cwd=ROOT)
    (tmp_path / "run" / closed).chmod(0o755)
    assert done.returncode == code, done.stderr
    assert text in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
