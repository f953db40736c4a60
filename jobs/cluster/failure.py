"""Find the worker that caused an attempt to fail, from the records of all workers.

When a worker dies, all its peers raise within 0.1 s, because their collectives have lost a member. Most reported errors
are therefore consequences; `first_failure` finds the cause.
"""

import errno
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data.errors import PatchlineError
from jobs.cluster.agent import WorkerState
from jobs.cluster.worker import WorkerRecord, worker_file

EXIT_GRACE_S = 1.5  # wait for other workers to end, after one has requested an exit code or lost a peer
DEATH_GRACE_S = 0.5  # wait for another worker's death after one has raised, because that death would be the cause
STACK_CHARACTERS = 10_000  # read from the end of a dead worker's log; enough for the stacks of all its threads
STACK_BYTES = 4 * STACK_CHARACTERS  # a character takes at most four bytes in UTF-8

# Exceptions that torch raises when a collective loses a member, and parts of their messages: gloo, NCCL, the store.
COLLECTIVE_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
COLLECTIVE_WORDS = re.compile(r"gloo/transport|ncclRemoteError|ncclSystemError|TCPStore")
OUT_OF_FILES = os.strerror(errno.EMFILE)  # this text also occurs in errors of gloo, NCCL and torch's store
PEER_ADDRESS = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+")  # "Read error [10.0.0.2]:34530: Connection reset by peer."


class WorkerGroupError(Exception):
    """An attempt failed because of a worker; all its workers have ended.

    `exit_code` is the code that the worker requested, by SystemExit or by an exception with an `exit_code`; it is None
    after a crash, a signal or the loss of a node. `kind` is the class name of the worker's exception; "" if there was
    none.
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
        node_id: str = "",
    ) -> None:
        super().__init__(cause)
        self.rank = rank  # None if no single worker caused the failure
        self.node = node
        self.node_id = node_id  # Ray's, because node names may repeat; "" if unknown
        self.cause = cause
        self.traceback = traceback
        self.exit_code = exit_code
        self.kind = kind
        self.phase = ""  # the worker's last known phase: "backward of step 12"

    def __str__(self) -> str:
        worker = "the worker group"
        if self.rank is not None:
            worker = f"worker {self.rank} on {self.node}"
        if self.phase:
            worker += f", in {self.phase}"
        return f"{worker}: {self.cause}"


class StageFailed(PatchlineError):
    """A stage failed for a reason that a restart cannot fix; stores the worker's exit code and exception class."""

    def __init__(self, message: str, exit_code: int, kind: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.kind = kind  # class name of the worker's exception; "" if it raised none


@dataclass(frozen=True)
class Evidence:
    """The last reported state of each worker in an attempt, by rank."""

    folder: Path  # the attempt's folder
    world: int
    states: Mapping[int, WorkerState]
    node_names: Mapping[int, str]
    addresses: Mapping[int, str]  # addresses of the workers' nodes
    losses: Mapping[int, str]  # ranks on lost nodes → how the node was lost

    def ends(self) -> dict[int, WorkerRecord]:
        """Return the records of ended workers."""
        ends = {}
        for rank, state in self.states.items():
            if state.record is not None and "ended" in state.record:
                ends[rank] = state.record
        return ends

    def deaths(self) -> dict[int, str]:
        """Return the cause of death of each worker that ended without a final record, by rank.

        The loss of a node is ignored if any worker has raised SystemExit or an error with an exit code, because a
        drained node disappears as soon as its workers have committed.
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
        """Return how many seconds to wait for further evidence after a failure; infinity if nothing has failed."""
        raised = [record for record in self.ends().values() if "error" in record]
        if any(record["exit_code"] is not None or has_lost_a_peer(record) for record in raised):
            return EXIT_GRACE_S
        if raised:
            return DEATH_GRACE_S
        # Workers may have requested an exit code before their node was lost; then the others do so too.
        return EXIT_GRACE_S if self.losses else math.inf

    def silent_failure(self, rank: int, cause: str) -> WorkerGroupError:
        """Return the error for a worker that recorded no exception, with the stack traces from its log."""
        log = worker_file(self.folder, rank, ".log")
        stacks = ""
        # A worker that died very early has no log yet, and a library may have filled it with gigabytes.
        with suppress(OSError), log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - STACK_BYTES))
            stacks = file.read(STACK_BYTES).decode(errors="replace")[-STACK_CHARACTERS:]
        return WorkerGroupError(rank, self.node_names.get(rank, "an unknown node"), cause, stacks)

    def first_failure(self) -> WorkerGroupError | None:
        """Return the error of the worker that made the attempt fail; None if the function has returned on all workers.

        The first match wins:
        1. a worker that died without writing a record, because a death makes all its peers raise;
        2. the earliest worker that requested an exit code: it ended on purpose, and the others crashed because of it;
        3. the earliest worker that raised. Times are from the clocks of the workers' nodes, so across nodes, the order
           is only as accurate as these clocks.
        """
        deaths = self.deaths()
        if deaths:
            rank = min(deaths)
            return self.silent_failure(rank, deaths[rank])
        ends = self.ends()
        raised = [record for record in ends.values() if "error" in record]
        if not raised:
            cause = "its workers ended without reporting a result"
            return None if len(ends) == self.world else WorkerGroupError(None, "", cause)

        # False sorts before True, so requested exit codes come before crashes. A worker at its limit of open files
        # comes first among crashes: its connections fail, so its peers crash too.
        first = min(
            raised,
            key=lambda record: (record["exit_code"] is None, OUT_OF_FILES not in record["error"], record["ended"]),
        )
        if has_lost_a_peer(first):
            # At best, the error contains the address of the peer's node, which may run several workers.
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
            cause = f"a collective failed: {peer} was lost or did not respond, but no worker is known to have died"
            # No kind: like a death, this may have happened by chance, so a second time does not end the stage.
            return WorkerGroupError(first["rank"], first["node"], cause, first["traceback"])
        cause = f"{first['kind']}: {first['error']}".rstrip(": ")
        if OUT_OF_FILES in cause:
            cause += (
                "\n  this worker has reached its limit of open files, which must exceed its shards and connections"
                "\n  run ulimit -n 65536 on that node before the command (in a systemd unit: LimitNOFILE=65536)"
            )
        return WorkerGroupError(
            first["rank"],
            first["node"],
            cause,
            first["traceback"],
            exit_code=first["exit_code"],
            kind=first["kind"],
            node_id=first.get("node_id", ""),
        )


def has_lost_a_peer(record: WorkerRecord) -> bool:
    """Return whether a worker failed only because another member of a collective was lost."""
    if "error" not in record or record["exit_code"] is not None or OUT_OF_FILES in record["error"]:
        return False
    return record["kind"] in COLLECTIVE_ERRORS and COLLECTIVE_WORDS.search(record["error"]) is not None
