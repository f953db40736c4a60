"""A worker's environment and folder (workers in a group: test_worker_group.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data.errors import ClusterError
from jobs.cluster import worker

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [
        (0, "", {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}),
        (1, "", {}),  # the GPUs in the node's environment
        (1, "2,5", {"CUDA_VISIBLE_DEVICES": "2,5"}),
    ],
)
def test_worker_has_the_variables_of_its_rank_and_sees_only_its_gpus(gpus, visible, expected) -> None:
    info = worker.RankInfo(3, 8, 1, 2, 1, "10.0.0.2", 4, gpus, visible_gpus=visible)
    assert info.environment() == expected | {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "OMP_NUM_THREADS": "4",
    }


def test_missing_attempt_folder_is_reported_with_exit_code_69(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("data.files.SEEN_WITHIN_S", 0.1)
    info = worker.RankInfo(0, 1, 0, 1, 0, "127.0.0.1", 1, 0)
    spec = worker.WorkerSpec(info, b"", tmp_path / "elsewhere", tmp_path, {}, "", 0, is_shared=True)
    with pytest.raises(ClusterError, match=r"the driver's folder .* did not appear on") as caught:
        worker._prepare(spec)
    assert caught.value.exit_code == 69
    assert "set run=/shared/NAME" in str(caught.value)


# Forks no server: this process becomes the worker, until it has written its record.
BECOME_WORKER = """
import os, pickle, sys
from pathlib import Path
from jobs.cluster.worker import RankInfo, WorkerSpec, run_worker
folder, node_folder, function, task = sys.argv[1:]
payload = pickle.dumps((getattr(__import__("builtins"), function), task))
info = RankInfo(1, 2, 1, 2, 0, "127.0.0.1", 1, 0)
spec = WorkerSpec(info, payload, Path(folder), Path(node_folder), dict(os.environ), os.getcwd(), 0o22, False)
lifeline, _ = os.pipe()
run_worker(spec, None, lifeline, int(os.environ["NEWS"]))
"""


def record_of(attempt: Path, function: str, task: str) -> dict[str, Any]:
    """Run a built-in function in a worker, and return the worker's last record."""
    node = attempt.with_name("node")
    node.mkdir()
    news, writing = os.pipe()
    command = [sys.executable, "-c", BECOME_WORKER, str(attempt), str(node), function, task]
    process = subprocess.Popen(
        command, env=os.environ | {"NEWS": str(writing), "PYTHONUNBUFFERED": ""}, pass_fds=[writing]
    )
    os.close(writing)
    try:
        assert os.read(news, 1) == b"."
        assert os.read(news, 1) == b"."
    finally:
        process.kill()
        process.wait()
        os.close(news)
    record: dict[str, Any] = json.loads(worker.worker_file(node, 1, ".json").read_text())
    return record


@pytest.mark.parametrize(("function", "kind"), [("print", None), ("int", "ValueError"), ("exec", "SystemExit")])
def test_worker_whose_log_is_on_a_full_disk_records_how_it_ended(tmp_path, function, kind) -> None:
    attempt = tmp_path / "attempt"
    attempt.mkdir()
    worker.worker_file(attempt, 1, ".log").symlink_to("/dev/full")  # each write fails: no space left on device
    record = record_of(attempt, function, "raise SystemExit(75)")
    assert "ended" in record
    assert record.get("kind") == kind
    assert record.get("exit_code") == (75 if kind == "SystemExit" else None)
    assert ("Traceback" in record.get("traceback", "")) == (kind is not None)


@pytest.mark.parametrize(("code", "expected"), [(75, 75), (-1, -1), (0, None), (256, None), ("'text'", None)])
def test_exit_code_that_would_mean_success_is_not_a_requested_exit_code(tmp_path, code, expected) -> None:
    attempt = tmp_path / "attempt"
    attempt.mkdir()
    record = record_of(attempt, "exec", f"raise SystemExit({code})")
    assert (record["kind"], record["exit_code"]) == ("SystemExit", expected)


def test_error_with_a_file_name_that_is_not_utf8_can_be_logged(tmp_path) -> None:
    attempt = tmp_path / "attempt"
    attempt.mkdir()
    record = record_of(attempt, "exec", r"open(b'/missing/\xe9.tar'.decode('utf-8', 'surrogateescape'))")
    assert record["error"] == r"No such file or directory: /missing/\udce9.tar"
    assert json.dumps(record, ensure_ascii=False).encode()


def test_very_long_error_fits_into_the_space_reserved_for_it(tmp_path) -> None:
    attempt = tmp_path / "attempt"
    attempt.mkdir()
    record = record_of(attempt, "exec", "raise ValueError('no compiler: ' + 10**7 * 'x' + '; set CC')")
    assert len(json.dumps(record)) < worker.RECORD_RESERVE_BYTES
    assert record["error"].startswith("no compiler: x")
    assert record["error"].endswith("x; set CC")
