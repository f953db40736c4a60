"""Nodes that are told to go: who hears it, and the file through which the supervisor does.

1. Ray is told to drain a node, by hand, by its autoscaler, or by SIGTERM to the `ray start --block` there: the driver's
   `watch_nodes` asks Ray once a second. Or a worker's process itself gets SIGTERM: `take_sigterm` and `pass_on`.
2. Either leaves a line in the attempt's `notices.jsonl`:

       {"rank": 3, "node": "n1", "node_id": "4f1a…", "why": "its node is drained, gone in 25 s"}

3. The supervisor reads it twice a second, has the workers commit, and starts the next attempt elsewhere.

In the same way a worker group is told to make way for another campaign (scheduling/queue.py). It then waits for places
again.
"""

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NotRequired, TypedDict

from jobs.workers.worker_files import records
from jobs.workers.worker_group import RankInfo

FILE = "notices.jsonl"  # in an attempt's folder
POLL_S = 1.0  # between two questions which nodes are being drained

_told_to_leave = threading.Event()  # in a worker's process: SIGTERM has come


class Notice(TypedDict):
    """Tells that a node is about to leave, or that the whole worker group is to make way for another campaign."""

    rank: int | None  # of a worker there; None where it is the node of the driver, which cannot move
    node: str
    node_id: str
    why: str
    makes_way: NotRequired[bool]  # then it is of no node


def notices(folder: Path) -> list[Notice]:
    """Return what nodes of this attempt have been told, the first first."""
    whole_lines = []
    with suppress(OSError):
        for line in (folder / FILE).read_text().splitlines():
            # The last line may be half written; the next look has it.
            with suppress(ValueError):
                whole_lines.append(json.loads(line))
    return whole_lines


def give_notice(folder: Path, notice: Notice) -> None:
    """Tell the supervisor that a node is about to leave; workers of several nodes may do so at once."""
    # Whole lines, each by one write: who appends to a shared file at the same time does not tear them.
    with open(folder / FILE, "a") as file:
        file.write(json.dumps(notice) + "\n")


# ------------------------------------------------------------------------ in the driver


def watch_nodes(
    folder: Path,
    world: int,
    own_node: str,
    draining_nodes: Callable[[], Mapping[str, int]],
    has_ended: threading.Event,
) -> None:
    """Leave a notice for every worker whose node is drained, and for the driver's `own_node`, until `has_ended`.

    `draining_nodes` returns until when nodes stay, by id, in ms since 1970; 0 where nobody said.
    """
    noticed: set[int | None] = set()
    while not has_ended.wait(POLL_S):
        # The head may be away, and the run directory may stutter: the next look asks again.
        with suppress(Exception):
            draining = draining_nodes()
            # Nearly always none, and then nobody's record has to be read.
            if not draining:
                continue
            places: list[tuple[int | None, str, str]] = [(None, socket.gethostname(), own_node)]
            for worker, record in records(folder, world).items():
                places.append((worker, record["node"], record.get("node_id", "")))
            for rank, node, node_id in places:
                if node_id in draining and rank not in noticed:
                    why = f"its node is drained{_time_left(draining[node_id])}"
                    give_notice(folder, {"rank": rank, "node": node, "node_id": node_id, "why": why})
                    noticed.add(rank)


def _time_left(deadline_ms: int) -> str:
    """Say how long a node stays, from a time in ms since 1970; 0 is none."""
    if not deadline_ms:
        return ""
    return f", gone in {max(0.0, deadline_ms / 1000 - time.time()):.0f} s"


# ------------------------------------------------------------------------ in the worker


def take_sigterm() -> None:
    """Take SIGTERM for a notice from now on; only the main thread of a process can."""
    # Ray's own handler ends the process at once. Who stops a node signals all its processes, and kills them later.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _remember)


def _remember(number: int, frame: FrameType | None) -> None:
    _told_to_leave.set()


def pass_on(folder: Path, info: RankInfo) -> None:
    """Wait for SIGTERM, however long, and leave a notice."""
    _told_to_leave.wait()
    why = f"worker {info.rank} was sent SIGTERM"
    give_notice(folder, {"rank": info.rank, "node": socket.gethostname(), "node_id": info.node_id, "why": why})
