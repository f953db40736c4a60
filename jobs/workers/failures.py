"""Which worker ended an attempt, and how: read from what the workers have left behind and from their processes.

The backend adds only how the workers ended that could not write it down themselves, so the answer is the same for both:

    group_failure(folder, world=3, deaths={1: "killed by SIGKILL"})
    → WorkerGroupError: worker 1 on n1: killed by SIGKILL

When one worker dies, all its peers raise within 0.1 s, because their collectives lose a member. Most of what lies in
the folder is therefore an echo; `group_failure` says in which order it looks for the first cause.
"""

import re
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from jobs.workers.worker_files import WorkerRecord, records, worker_file
from jobs.workers.worker_group import WorkerGroupError

# What torch raises when a collective loses a member, and what its text holds: gloo's files, NCCL's codes, the store.
COLLECTIVE_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
COLLECTIVE_WORDS = re.compile(r"gloo/transport|ncclRemoteError|ncclSystemError|TCPStore")
PEER_ADDRESS = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+")  # "Read error [10.0.0.2]:34530: Connection reset by peer."
STACK_CHARACTERS = 10_000  # of the end of a dead worker's log, enough for the stacks of all its threads


def group_failure(folder: Path, world: int, deaths: Mapping[int, str]) -> WorkerGroupError:
    """Name the worker that ended the attempt. `deaths` says how those ended that the backend saw end badly, by rank.

    First match wins:
    1. a worker that died without writing its end, because its death makes all its peers raise;
    2. of those that asked for an exit code, the earliest: it knew what it wanted, the others crashed because of it;
    3. of those that raised, the earliest;
    4. the lowest rank that the backend names, where nobody wrote an error.
    """
    written = records(folder, world)
    # 1. Who wrote no end died by itself, and its peers raised because of that. What the others wrote is read below.
    for rank in sorted(deaths):
        wrote_its_end = rank in written and "ended" in written[rank]
        if not wrote_its_end:
            return worker_failure(folder, rank, written, deaths[rank])

    raised = [record for record in written.values() if "error" in record]
    # 4. Nobody wrote an error: all that is known is how the processes ended.
    if not raised:
        rank = min(deaths, default=0)
        return worker_failure(folder, rank, written, deaths.get(rank, "ended without a word"))

    # 2 and 3. Each worker wrote the time of its own node's clock: between nodes, "earliest" is as good as the clocks
    # agree.
    first = min(raised, key=_order_of_blame)
    if has_lost_a_peer(first):
        # Like a death it may have been chance, so it has no kind: a second time it is not "the same exception again".
        peer = _lost_peer(first, written)
        cause = f"a collective failed: {peer} was lost or did not answer, and no death was seen"
        return WorkerGroupError(first["rank"], first["node"], cause, first["traceback"])
    return WorkerGroupError(
        first["rank"],
        first["node"],
        f"{first['kind']}: {first['error']}".rstrip(": "),
        first["traceback"],
        exit_code=first["exit_code"],
        kind=first["kind"],
    )


def has_lost_a_peer(record: WorkerRecord) -> bool:
    """Tell whether a worker has ended because a collective lost a member."""
    if "error" not in record or record["exit_code"] is not None:
        return False
    return is_lost_connection(record["kind"], record["error"])


def is_lost_connection(kind: str, error: str) -> bool:
    """Tell whether a worker raised because a collective lost a member, which says little about that worker."""
    return kind in COLLECTIVE_ERRORS and COLLECTIVE_WORDS.search(error) is not None


def _lost_peer(record: WorkerRecord, written: Mapping[int, WorkerRecord]) -> str:
    """Say which worker or node the error of a collective names by its address, as far as it names any."""
    address = PEER_ADDRESS.search(record["error"])
    if address is None:
        return "the other workers"
    ranks = [peer["rank"] for peer in written.values() if peer.get("address") == address[1]]
    # On a node with several workers the address does not tell which of them it was.
    others = [rank for rank in sorted(ranks) if rank != record["rank"]]
    if not others:
        return address[1]
    workers = "worker" if len(others) == 1 else "one of workers"
    return f"{workers} {', '.join(map(str, others))} on {written[others[0]]['node']}"


def _order_of_blame(record: WorkerRecord) -> tuple[bool, float]:
    # False sorts before True, so an exit code that was asked for comes before every crash.
    crashed = record["exit_code"] is None
    return crashed, record["ended"]


def worker_failure(folder: Path, rank: int, written: Mapping[int, WorkerRecord], cause: str) -> WorkerGroupError:
    """Return the error of a worker that cannot speak for itself, with the stacks that its log holds."""
    log = worker_file(folder, rank, ".log")
    stacks = ""
    # A worker that died very early has not opened its log.
    if log.exists():
        stacks = log.read_text(errors="replace")[-STACK_CHARACTERS:]
    return WorkerGroupError(rank, node_of(written, rank), cause, stacks)


def node_of(written: Mapping[int, WorkerRecord], rank: int) -> str:
    """Return where a worker runs, as far as its record says."""
    if rank not in written:
        return "an unknown node"
    return written[rank]["node"]


def describe_exit_code(exit_code: int, oom_killer_struck: bool) -> str:
    """Say an exit code of a process in words; a negative one is a signal.

    `oom_killer_struck`: the kernel has killed some process of this machine for want of memory in the last seconds.
    """
    # A worker that raised has written so, and then this text is not shown. Here the process ended without one.
    if exit_code >= 0:
        return f"exited with code {exit_code} without a word"
    # The kernel kills with SIGKILL as well, and tells nobody whom: its counter is all that we can read everywhere.
    if oom_killer_struck and exit_code == -signal.SIGKILL:
        return "killed by the out-of-memory killer"
    return f"killed by {signal.Signals(-exit_code).name}"


# ------------------------------------------------------------------------ the workers' processes


def is_stopped_by_signal(record: WorkerRecord | None) -> bool:
    """Tell whether the worker that wrote the record is stopped by a signal; False where this host cannot know."""
    # A pid means something on its own host only.
    if record is None or record["node"] != socket.gethostname():
        return False
    process = _process_of(record)
    if process is None:
        return False
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def terminate_workers(folder: Path, world: int, timeout_s: float = 10.0) -> None:
    """Return when no worker of the worker group lives on this host, killing after `timeout_s` what still does."""
    host = socket.gethostname()
    workers = []
    for record in records(folder, world).values():
        # On this host the pid of another node's worker may be anybody's: never kill that.
        if record["node"] != host:
            continue
        process = _process_of(record)
        if process is not None:
            workers.append(process)

    # Those that have been told to end get the time to do so.
    _, alive = psutil.wait_procs(workers, timeout=timeout_s)
    for worker in alive:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    psutil.wait_procs(alive, timeout=timeout_s)


def _process_of(record: WorkerRecord) -> psutil.Process | None:
    """Return the process that wrote the record; None where it is gone."""
    try:
        process = psutil.Process(record["pid"])
        created = process.create_time()
    except psutil.NoSuchProcess:
        return None
    # A younger process has the pid of a worker that is gone.
    if created > record["started"]:
        return None
    return process
