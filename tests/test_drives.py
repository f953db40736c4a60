"""Processes started by `tests/support/drives.py` end with the process that started them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from data.files import import_path

START = """
import sys, time
from pathlib import Path
from tests.support import drives

if __name__ == "__main__":
    process = drives.start(Path(sys.argv[1]), "pretrain.steps=100000")
    print(process.pid, flush=True)
    time.sleep(600)
"""


def test_a_killed_test_process_leaves_no_driver_no_worker_and_no_fork_server(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(START)
    run = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": import_path()}
    with subprocess.Popen([sys.executable, script, run], env=environment, stdout=subprocess.PIPE) as process:
        started = psutil.Process(process.pid)
        wait_until(lambda: bool(list(run.glob("pretrain-*/metrics.jsonl"))), "the first step")
        processes = started.children(recursive=True)
        process.send_signal(signal.SIGKILL)
    # The resource tracker, the forkserver, the driver, its fork server and two workers.
    assert len(processes) >= 6
    _, alive = psutil.wait_procs(processes, timeout=30)
    for other in alive:
        other.kill()
    assert not alive


def wait_until(is_true: Callable[[], bool], name: str) -> None:
    deadline = time.monotonic() + 120
    while not is_true():
        assert time.monotonic() < deadline, f"waited in vain for {name}"
        time.sleep(0.1)
