"""One owner a run: a lock that dies with its process, and attempts numbered so that a late commit can be refused.

`owned` keeps two commands from working in one run directory. `claim_attempt` fences what a frozen or cut-off owner may
still try: its attempt has a number, a commit reads the newest number first, and refuses when it is not its own.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from data.errors import ConfigError, RunOwned
from data.files import make_folder, take_lock
from data.storage import Storage
from pipeline.checkpoints.manifest import ATTEMPTS, newest_attempt

OWNER_FILE = "owner.json"
LONGEST_NAME = 255  # bytes of a file's or folder's name (NAME_MAX of Linux)
NAME_TRIES = 20  # looks at the owner's file, 0.1 s apart: a new owner has the lock before it has written its name


@contextmanager
def owned(run: Path) -> Iterator[None]:
    """Own the run directory for the length of the block.

    Raises RunOwned, which names the process that does, and ConfigError where the directory cannot be one.
    The lock is the kernel's (flock): SIGKILL frees it at once, a frozen owner keeps it.
    """
    check_place(run)
    make_folder(run, run)
    path = run / OWNER_FILE
    # Opened to append: "w" would wipe out the owner's name before we know whether the lock is free.
    with open(path, "a+") as file:
        if not take_lock(file.fileno(), path, wait=False):
            named = "another process that has not said its name yet"
            for _ in range(NAME_TRIES):
                # An error means that the name is not there or half written: the next look has it.
                with suppress(OSError, ValueError, KeyError):
                    owner = json.loads(path.read_text())
                    # Until the new owner has written its name, a former one's stands here, which may live no more.
                    if owner["host"] != socket.gethostname() or psutil.pid_exists(owner["pid"]):
                        named = f"process {owner['pid']} on {owner['host']} since {owner['since']} ({owner['command']})"
                        break
                time.sleep(0.1)
            raise RunOwned(
                f"{run} is owned by {named}\n"
                f"  watch it: python -m jobs status {run}\n"
                "  or give this run another name: run=…"
            )
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": " ".join(sys.argv),
        }
        file.truncate(0)
        file.write(json.dumps(owner))
        file.flush()
        # The end of the block closes the file, which frees the lock. The name stays, so that `status` can say of a
        # killed owner that it is gone.
        yield


def owner_is_gone(run: Path) -> bool:
    """Tell whether the owner was a process of this machine that no longer lives."""
    try:
        owner = json.loads((run / OWNER_FILE).read_text())
        return owner["host"] == socket.gethostname() and not psutil.pid_exists(owner["pid"])
    except (OSError, ValueError, KeyError, TypeError):  # not there, torn or altered
        return False


def check_place(run: Path) -> None:
    """Raise ConfigError where no folder of this name can be a run directory, or one that it lies in is a file."""
    if run == run.parent:
        raise ConfigError(f"run is {run}, expected a folder of its own\n  type run={run}NAME")
    for name in run.parts:
        encoded_bytes = len(os.fsencode(name))
        if encoded_bytes > LONGEST_NAME:
            raise ConfigError(
                f"run has a name of {encoded_bytes} bytes: {name[:40]}…\n  expected {LONGEST_NAME} at most\n"
                "  give the run a shorter name: run=…"
            )
    for path in (run, *run.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(
                f"{path} is a file\n  expected the folder that a run writes into, or a new name\n"
                "  give the run another name: run=…"
            )


def claim_attempt(storage: Storage, stage: str = "") -> int:
    """Claim the next attempt number of a run, ours alone, by creating attempts/000007.json.

    `stage` is the name of the folder of the stage that the attempt is for. Raises StorageError, OSError.
    """
    claim = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), "stage": stage}
    # Another process may create the same number between our look and our creation; then we look again.
    while True:
        number = newest_attempt(storage) + 1
        if storage.create_once(f"{ATTEMPTS}/{number:06d}.json", json.dumps(claim).encode()):
            return number
