"""The processes that one has started, those of an embedded Ray cluster among them, and a wait for what they do."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

import psutil

Answer = TypeVar("Answer")


def family_of(pid: int | None = None) -> list[psutil.Process]:
    """The children of a process, or of this one, with theirs, and all in the sessions that these have begun.

    Ray's processes are no children of the guard that started them (jobs/cluster/embedded.py): they share its session.
    """
    family = psutil.Process(pid).children(recursive=True)
    known = {process.pid for process in family}
    sessions = set()
    for process in family:
        with suppress(OSError):
            if os.getsid(process.pid) == process.pid:
                sessions.add(process.pid)
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            if os.getsid(process.pid) in sessions and process.pid not in known and not is_zombie:
                family.append(process)
    # An agent's fork server leads a session of its own.
    for process in list(family):
        with suppress(psutil.Error):
            for child in process.children(recursive=True):
                if child not in family:
                    family.append(child)
    return family


def answers(family: list[psutil.Process], question: Callable[[psutil.Process], Iterable[Answer]]) -> Iterator[Answer]:
    """What each process answers; one that has ended meanwhile, as short-lived ones of Ray's do, answers nothing."""
    for process in family:
        with suppress(psutil.Error):
            yield from question(process)


def wait_until(claim: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Return when a claim has become true."""
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
