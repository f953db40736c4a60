"""Find all descendants of a process, including those in an embedded Ray cluster, and wait for conditions."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

Answer = TypeVar("Answer")


def family_of(pid: int | None = None) -> list[psutil.Process]:
    """Return all descendants of a process (default: this one), and all processes in the sessions they created.

    Ray's processes are not children of the guard that starts them (jobs/cluster/embedded.py), but share its session.
    An agent's fork server leads a session of its own.
    """
    root = os.getpid() if pid is None else pid
    # Read the process table only once per call: tests poll this function.
    processes: dict[int, psutil.Process] = {}
    parents: dict[int, int] = {}
    sessions: dict[int, int] = {}
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            parents[process.pid] = process.ppid()
            sessions[process.pid] = os.getsid(process.pid)
            processes[process.pid] = process
    family: dict[int, psutil.Process] = {}
    has_grown = True
    while has_grown:
        has_grown = False
        for number, process in processes.items():
            if number in family or number == root:
                continue
            is_member = parents[number] == root or parents[number] in family
            # A session's number is the pid of the process that created it.
            if not is_member and sessions[number] in family:
                with suppress(psutil.Error):
                    is_member = process.status() != psutil.STATUS_ZOMBIE
            if is_member:
                family[number] = process
                has_grown = True
    return list(family.values())


def answers(family: list[psutil.Process], question: Callable[[psutil.Process], Iterable[Answer]]) -> Iterator[Answer]:
    """Yield the answers of all processes; skip those that have ended, such as Ray's short-lived processes."""
    for process in family:
        with suppress(psutil.Error):
            yield from question(process)


def wait_until(claim: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait until a claim is true."""
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def maps_of(process: psutil.Process) -> list[Path]:
    """Return the files mapped by a process. psutil is slower: it also reads the size of each map."""
    paths = []
    with suppress(OSError):
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                paths.append(Path(fields[5].removesuffix(" (deleted)")))
    return paths
