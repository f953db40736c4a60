"""Processes that hold the lease of a run until they are stopped or killed."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.storage import Folder
from jobs import ownership
from jobs.ownership import Lease
from tests.support.drives import fork_process

PERIOD_S = 0.25  # interval between renewals in these tests


def hold(run: Path, machine: str, held: Path) -> None:
    """Hold a run's lease until this process ends, pretending to run on `machine` ("": this one)."""
    ownership.PERIOD_S = PERIOD_S
    signal.signal(signal.SIGTERM, lambda number, frame: held.with_name("stop").touch())
    lease = Lease(Folder(run), print)
    if machine:
        lease.record["machine"] = machine
    with lease:
        held.touch()
        while not held.with_name("stop").exists():
            time.sleep(0.02)


@contextmanager
def holders(folder: Path) -> Iterator[Callable[[str], Any]]:
    """Yield a function that starts a process which holds the lease of folder / "run"; kill the processes at the end."""
    started = []

    def start(machine: str = "") -> Any:
        held = folder / f"held-{len(started)}"
        process = fork_process(hold, folder / "run", machine, held)
        process.start()
        started.append(process)
        while not held.exists():
            time.sleep(0.01)
        return process

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.join()
