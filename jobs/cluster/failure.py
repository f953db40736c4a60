"""Which worker ended an attempt, judged by what is known of all of them.

When one worker dies, all its peers raise within 0.1 s, because their collectives lose a member. Most of what is then
reported is an echo; `first_failure` says in which order it looks for the first cause.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from data.errors import PatchlineError
from jobs.cluster.agent import WorkerState
from jobs.cluster.worker import WorkerRecord, worker_file

ASKED_TO_END_S = 1.5  # for the other workers to end as well, where one has asked for an exit code or lost a peer
RAISED_S = 0.5  # for another worker to die, where one has raised: then that death was first
STACK_CHARACTERS = 10_000  # of the end of a dead worker's log, enough for the stacks of all its threads

# What torch raises when a collective loses a member, and what its text holds: gloo's files, NCCL's codes, the store.
COLLECTIVE_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
COLLECTIVE_WORDS = re.compile(r"gloo/transport|ncclRemoteError|ncclSystemError|TCPStore")
PEER_ADDRESS = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+")  # "Read error [10.0.0.2]:34530: Connection reset by peer."


class WorkerGroupError(Exception):
    """A worker has ended an attempt, and no worker is alive.

    `exit_code` is what the worker asked for, by SystemExit or by an exception that has an `exit_code`; None
    for a crash, a signal, a lost node. `kind` is the exception's class name, "" where none was raised.
    """

    def __init__(
        self,
        rank: int | None,
        node: str,
        cause: str,
        traceback: str = "",
        *,
        exit_code: int | None = None,
        kind: str = "",
    ) -> None:
        super().__init__(cause)
        self.rank = rank  # None where no single worker is to blame
        self.node = node
        self.cause = cause
        self.traceback = traceback
        self.exit_code = exit_code
        self.kind = kind
        self.place = ""  # where the worker was, as far as the driver knows: "backward of step 12"

    def __str__(self) -> str:
        worker = "the worker group"
        if self.rank is not None:
            worker = f"worker {self.rank} on {self.node}"
        if self.place:
            worker += f", in {self.place}"
        return f"{worker}: {self.cause}"


class StageFailed(PatchlineError):
    """A stage ended for a reason that a restart does not cure; carries the worker's exit code and exception."""

    def __init__(self, message: str, exit_code: int, kind: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.kind = kind  # name of the worker's exception; "" where it raised none


@dataclass(frozen=True)
class Evidence:
    """What the driver knows of an attempt's workers, as their agents reported it last; all by rank."""

    folder: Path  # of the attempt
    world: int
    states: Mapping[int, WorkerState]
    node_names: Mapping[int, str]
    addresses: Mapping[int, str]  # of the workers' nodes
    losses: Mapping[int, str]  # how a worker's node was lost

    def ends(self) -> dict[int, WorkerRecord]:
        """Return the records of workers that have written their end."""
        ends = {}
        for rank, state in self.states.items():
            if state.record is not None and "ended" in state.record:
                ends[rank] = state.record
        return ends

    def deaths(self) -> dict[int, str]:
        """Return how those workers died that did not write their end.

        A lost node is no death where a worker has asked for an exit code: a node that is drained is gone as soon as its
        workers have committed.
        """
        deaths = {}
        ends = self.ends()
        if all(record.get("exit_code") is None for record in ends.values()):
            for rank, loss in self.losses.items():
                if rank not in ends:
                    deaths[rank] = loss
        for rank, state in self.states.items():
            if state.death:
                deaths[rank] = state.death
        return deaths

    def grace_s(self) -> float:
        """Return how long to wait for a better explanation of a failure; infinite where there is no sign of one."""
        raised = [record for record in self.ends().values() if "error" in record]
        if any(record["exit_code"] is not None or has_lost_a_peer(record) for record in raised):
            return ASKED_TO_END_S
        if raised:
            return RAISED_S
        # A node that is lost after its workers have asked to end: the others will do so as well.
        return ASKED_TO_END_S if self.losses else math.inf

    def silent_failure(self, rank: int, cause: str) -> WorkerGroupError:
        """Return the error of a worker that cannot speak for itself, with the stacks that its log holds."""
        log = worker_file(self.folder, rank, ".log")
        stacks = ""
        # A worker that died very early has not opened its log.
        if log.exists():
            stacks = log.read_text(errors="replace")[-STACK_CHARACTERS:]
        return WorkerGroupError(rank, self.node_names.get(rank, "an unknown node"), cause, stacks)

    def first_failure(self) -> WorkerGroupError | None:
        """Name the worker that ended the attempt; None where all have returned. First match wins:

        1. a worker that died without writing its end, because its death makes all its peers raise;
        2. of those that asked for an exit code, the earliest: it knew what it wanted, the others crashed because of it;
        3. of those that raised, the earliest. Each wrote the time of its own node's clock: between nodes, "earliest" is
           as good as the clocks agree.
        """
        deaths = self.deaths()
        if deaths:
            rank = min(deaths)
            return self.silent_failure(rank, deaths[rank])
        ends = self.ends()
        raised = [record for record in ends.values() if "error" in record]
        if not raised:
            return None if len(ends) == self.world else WorkerGroupError(None, "", "ended without a word")

        # False sorts before True, so an exit code that was asked for comes before every crash.
        first = min(raised, key=lambda record: (record["exit_code"] is None, record["ended"]))
        if has_lost_a_peer(first):
            # The error names the peer by its node's address, if at all; where several workers are there, not which.
            peer = "the other workers"
            address = PEER_ADDRESS.search(first["error"])
            if address is not None:
                peer = address[1]
                others = []
                for rank, address_of_rank in sorted(self.addresses.items()):
                    if address_of_rank == peer and rank != first["rank"]:
                        others.append(rank)
                if others:
                    workers = "worker" if len(others) == 1 else "one of workers"
                    peer = f"{workers} {', '.join(map(str, others))} on {self.node_names[others[0]]}"
            cause = f"a collective failed: {peer} was lost or did not answer, and no death was seen"
            # Like a death it may have been chance. So it has no kind: a second time it is not "the same exception".
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
    """Tell whether a worker has ended because a collective lost a member, which says little about that worker."""
    if "error" not in record or record["exit_code"] is not None:
        return False
    return record["kind"] in COLLECTIVE_ERRORS and COLLECTIVE_WORDS.search(record["error"]) is not None
