"""Ends an embedded Ray cluster with its driver, however that ends: python reaper.py PID DIRECTORY

The raylet and the GCS die with their driver, but after a SIGKILL Ray's agents linger (40 s and more) and its
directory for ever. This process waits for the end of its standard input, which the driver holds open, then
kills whoever else has a file open in the directory (every process of the cluster has its log) and removes it.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil


def start(directory: str) -> subprocess.Popen[bytes]:
    """A reaper that closing its stdin, or the end of this process, sets off."""
    command = [sys.executable, __file__, str(os.getpid()), directory]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def reap(directory: str, spared: set[int]) -> None:
    """Kill who uses the directory, until a look finds nobody, and remove it."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        users = [p for p in psutil.process_iter() if p.pid not in spared and _uses(p, directory)]
        for user in users:
            with suppress(psutil.NoSuchProcess):
                user.kill()
        if not users:
            break
        psutil.wait_procs(users, timeout=1)
    shutil.rmtree(directory, ignore_errors=True)


def _uses(process: psutil.Process, directory: str) -> bool:
    try:
        return any(file.path.startswith(directory + os.sep) for file in process.open_files())
    except (psutil.Error, OSError):  # gone meanwhile, or another user's
        return False


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # who stops a driver may signal its children as well
    pid, path = sys.argv[1:]
    sys.stdin.read()
    reap(path, {int(pid), os.getpid()})
