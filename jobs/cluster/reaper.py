"""Ends an embedded Ray cluster with its driver, however the driver ends: python reaper.py PID DIRECTORY

The raylet and the GCS die with their driver. After a SIGKILL, though, Ray's agents linger (40 s and more), and its
directory stays for ever. This process, whose arguments are the driver's pid and that directory:
1. ignores the signals of whoever stops the driver and all its children;
2. waits for the end of its standard input, which the driver holds open as long as it lives;
3. kills whoever else has a file open in the directory (every process of the cluster has its log there);
4. removes the directory.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

REAP_S = 30.0  # for the processes to die; then the directory goes without


def start(directory: str) -> subprocess.Popen[bytes]:
    """Start a reaper that closing its stdin, or the end of this process, sets off."""
    # A session of its own keeps Ctrl-C away from it: a terminal sends that to the driver's whole process group.
    command = [sys.executable, __file__, str(os.getpid()), directory]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def reap(directory: str, spared: set[int]) -> None:
    """Kill who uses the directory, but for the pids that are spared, until nobody is left, and remove it."""
    deadline = time.monotonic() + REAP_S
    while time.monotonic() < deadline:
        # Look again after each round, until nobody is left: a process may just have been starting.
        users = []
        for process in psutil.process_iter():
            if process.pid not in spared and _uses(process, directory):
                users.append(process)
        if not users:
            break
        for user in users:
            with suppress(psutil.NoSuchProcess):
                user.kill()
        psutil.wait_procs(users, timeout=1)
    shutil.rmtree(directory, ignore_errors=True)


def _uses(process: psutil.Process, directory: str) -> bool:
    try:
        return any(file.path.startswith(directory + os.sep) for file in process.open_files())
    except (psutil.Error, OSError):  # gone meanwhile, or another user's
        return False


if __name__ == "__main__":
    # Who stops a driver may signal its children as well, and this one must outlive it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    driver_pid, cluster_directory = sys.argv[1:]
    # The pipe closes with the driver, however it ends. Nothing has to be sent, so SIGKILL works as well.
    sys.stdin.read()
    # A driver that has only left its cluster is alive, and may still have a file open there: it is spared.
    reap(cluster_directory, spared={int(driver_pid), os.getpid()})
