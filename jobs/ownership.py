"""One owner a run: a lock that dies with its process, and attempts numbered so that a late commit can be refused."""

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from data.errors import RunOwned
from data.files import create_exclusively, make_folder, take_lock
from pipeline.checkpoint import newest_attempt


@contextmanager
def owned(run: Path) -> Iterator[None]:
    """Own the run directory for the life of this process. Raises RunOwned naming who does.

    The lock is the kernel's (flock): SIGKILL frees it at once, a frozen owner keeps it.
    """
    make_folder(run, run)
    path = run / "owner.json"
    with open(path, "a+") as file:
        if not take_lock(file.fileno(), path, wait=False):
            raise RunOwned(_who(file.name, run))
        file.truncate(0)
        file.write(
            json.dumps(
                {
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "since": time.strftime("%Y-%m-%d %H:%M:%S"),
                    "command": " ".join(sys.argv),
                }
            )
        )
        file.flush()
        yield


def _who(path: str, run: Path) -> str:
    who = "another process that has not said its name yet"
    for _ in range(20):  # it has the lock and is about to write; what stands there may be a former owner's name
        try:
            owner = json.loads(Path(path).read_text())
            if owner["host"] != socket.gethostname() or psutil.pid_exists(owner["pid"]):
                who = f"process {owner['pid']} on {owner['host']} since {owner['since']} ({owner['command']})"
                break
        except (OSError, ValueError, KeyError):
            pass
        time.sleep(0.1)
    return f"{run} is owned by {who}\n  watch it: python -m jobs status {run}\n  or give this run another name: run=…"


def claim_attempt(run: Path) -> int:
    """The next attempt number, ours alone: whoever commits re-reads it and refuses when a newer one exists."""
    folder = run / "attempts"
    make_folder(folder, run)
    while True:
        number = newest_attempt(run) + 1
        claim = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
        if create_exclusively(folder / f"{number:06d}.json", json.dumps(claim)):
            return number
