"""Repeat a save, a prune and a claim; in each repetition one file system call fails or kills the process.

Run it as `python -m tests.support.faulty FOLDER OUTCOMES`, with faults.c preloaded. It writes one line of JSON per
repetition: the affected call, what the process had acknowledged until then, and what a start would load afterwards.
FOLDER/trace is the trace of an undisturbed run.
"""

import ctypes
import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data.storage import Folder
from jobs.ownership import claim_attempt
from pipeline.checkpoints.manifest import newest_attempt
from tests.support.savers import WorkerGroup, start_from

OFF, KILL, TEAR, FAIL, FAIL_FROM = range(5)
NEVER = 1 << 30
HOWS = [
    (KILL, 0),
    (TEAR, 0),
    (FAIL, errno.EIO),  # one bad sector
    (FAIL, errno.ENOSPC),  # space becomes available immediately
    (FAIL_FROM, errno.ENOSPC),
    (FAIL_FROM, errno.EROFS),  # the kernel has remounted the disk
]


class Acknowledgements:
    """Telemetry of rank 0's saver: its reports are acknowledged to the user before old checkpoints are deleted."""

    def __init__(self, say: Callable[..., None]) -> None:
        self.tell = say

    def report(self, kind: str, values: dict[str, Any], line: str) -> None:
        if kind == "checkpoint":
            self.tell("saved", values["step"])
        else:
            self.tell("failed", values["error"])

    def sync(self) -> None:
        pass

    def log(self, text: str) -> None:
        self.tell("not-pruned", text)


def act(run: Path, say: Callable[..., None]) -> None:
    """Make a new attempt on a run with steps 10, 20 and 30: claim, save 40, prune, save 50, prune."""
    try:
        attempt = claim_attempt(Folder(run))
        say("attempt", attempt)
        group = WorkerGroup(run, attempt, telemetry=Acknowledgements(say), keep=2)
        say("ready", 0)
    except OSError as error:
        say("no-start", str(error))  # the command ends with 74
        return
    for step in (40, 50):
        group.save(step)


def child(shim: Any, run: Path, how: int, at: int, error: int, pipe: int) -> None:
    def say(kind: str, value: Any) -> None:
        os.write(pipe, (json.dumps([kind, value]) + "\n").encode())

    shim.arm(str(run).encode(), how, at, error, -1)
    try:
        act(run, say)
    except BaseException as unexpected:
        say("raised", repr(unexpected))
    say("calls", ctypes.c_int.in_dll(shim, "calls").value)
    os._exit(0)


def hit(shim: Any, run: Path, how: int, at: int, error: int) -> dict[str, Any]:
    """Run once in a separate process, and return what a later start finds."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        child(shim, run, how, at, error, write)
    os.close(write)
    with os.fdopen(read) as pipe:
        reports = [json.loads(line) for line in pipe]
    killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
    complaints: list[str] = []
    found = start_from(run / "stage" / "checkpoints", 99, complaints.append)
    return {
        "how": how,
        "error": error,
        "at": at,
        "reports": reports,
        "killed": killed,
        "loads": found and found.manifest.step,
        "complaints": complaints,
        "attempt": newest_attempt(Folder(run)),
    }


def runs(shim: Any, base: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield runs with every fault at every call, until a run ends before the fault's turn."""
    for how, error in HOWS:
        for at in range(1, NEVER):
            run = folder / f"run-{how}-{error}-{at}"
            shutil.copytree(base, run)
            outcome = hit(shim, run, how, at, error)
            shutil.rmtree(run)
            yield outcome
            if dict(outcome["reports"]).get("calls", at) < at:
                break


def trace(shim: Any, base: Path, folder: Path) -> None:
    """Return all calls of an undisturbed run in order, with its acknowledgements between them."""
    run = folder / "traced"
    shutil.copytree(base, run)
    with open(folder / "trace", "w") as file:
        if os.fork() == 0:
            shim.arm(str(run).encode(), FAIL, NEVER, 0, file.fileno())
            act(run, lambda kind, value: os.write(file.fileno(), f"{kind}\t{value}\t\t\n".encode()))
            os._exit(0)
        os.wait()


def main(folder: Path, outcomes: Path) -> None:
    shim, base = ctypes.CDLL(None), folder / "base"
    group = WorkerGroup(base)
    for step in (10, 20, 30):
        group.save(step)
    (base / "attempts").mkdir()
    (base / "attempts" / "000001.json").write_text("{}")
    trace(shim, base, folder)
    with open(outcomes, "w") as file:
        for outcome in runs(shim, base, folder):
            file.write(json.dumps(outcome) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
