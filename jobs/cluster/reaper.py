"""Starts an embedded Ray cluster for its driver and ends it, however the driver ends.

    python reaper.py PID DIRECTORY INNER_DIRECTORY CPUS

The raylet and the GCS die with who started them. After a SIGKILL, though, Ray's agents linger (40 s and more), and its
directory stays for ever. This process, whose arguments are the driver's pid, that directory, Ray's own in it and how
many CPUs to count:
1. does not end at the signals of whoever stops the driver and all its children;
2. starts the head (ray_head.py), which starts Ray's processes;
3. waits for the end of its standard input, which the driver holds open as long as it lives;
4. kills the head, with which Ray's processes die, and then whoever else has a file open in the directory (every process
   of the cluster has its log there);
5. removes the directory.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

# Elsewhere than on macOS, Ray replaces 127.0.0.1 by an outside address, and then most of its ports listen on all
# interfaces. With this variable at 0 it does as on macOS.
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
REAP_S = 30.0  # for the processes to die; then the directory goes without


def start(directory: Path, inner_directory: str, cpus: int) -> subprocess.Popen[str]:
    """Start a reaper, and with it the cluster; closing its stdin, or the end of this process, sets it off.

    Its stdout has one line, when the cluster has started or failed to (ray_head.py).
    """
    command = [sys.executable, __file__, str(os.getpid()), str(directory), inner_directory, str(cpus)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Whoever reads the driver's errors to their end must not have to wait for the reaper's.
        stderr=subprocess.DEVNULL,
        text=True,
        # A session of its own keeps Ctrl-C away from it: a terminal sends that to the driver's whole process group.
        start_new_session=True,
    )


def start_head(directory: str, cpus: str) -> subprocess.Popen[bytes]:
    """Start the process that starts Ray's."""
    # As a module of the checkout; -P leaves the driver's working directory out, whose files may have names of modules.
    command = [sys.executable, "-P", "-m", "jobs.cluster.ray_head", directory, cpus]
    return subprocess.Popen(command, env={**os.environ, LOOPBACK_ONLY: "0"})


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


def do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal without ending. Who ignores it has all programs ignore it that he starts, Ray's among them."""


def main() -> None:
    # Who stops a driver may signal its children as well, and this one must outlive it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, do_nothing)
    driver_pid, directory, inner_directory, cpus = sys.argv[1:]
    head = start_head(os.path.join(directory, inner_directory), cpus)
    # The head alone holds the pipe on which the driver waits: its death is seen there.
    os.dup2(2, 1)
    # The pipe closes with the driver, however it ends. Nothing has to be sent, so SIGKILL works as well.
    sys.stdin.read()
    # First, so that it starts nothing any more while the others are looked for.
    head.kill()
    head.wait()
    # A driver that has only left its cluster is alive, and may still have a file open there: it is spared.
    reap(directory, spared={int(driver_pid), os.getpid()})


if __name__ == "__main__":
    main()
