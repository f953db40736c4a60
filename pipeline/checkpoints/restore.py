"""Filling the engines of all workers with one checkpoint: one decision of all, and each reads what it needs alone.

1. Rank 0 sweeps what died, takes the newest checkpoint whose manifest is whole and whose files are all there in their
   sizes. On every node one worker makes its files readable there, which copies them where nodes share no folder. All
   hear which checkpoint it is (`choose_together`).
2. Every worker opens the files that hold its fragments and reads them; each chunk is compared as it is read.
3. All hear whether somebody has read bytes that were not committed, or could not read (`load`).
4. Where bytes were bad, rank 0 reads the whole checkpoint anew. What is bad for rank 0 too is refused, and all workers
   begin again with the one before it (`load_together`); what is whole for rank 0 is the fault of the other's node.

In:  step-0000001200 of two workers, with a flipped bit in rank-00001.safetensors; step-0000001100
Out: bad-0000001200-000007, and engines that hold step 1100, on whatever number of workers
"""

import os
import socket
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from data.errors import CheckpointError, DataError, StorageError
from pipeline.checkpoints.manifest import Damaged, NewerSchema
from pipeline.checkpoints.reader import Reader
from pipeline.checkpoints.stage_checkpoints import Chosen, Log, StageCheckpoints

Value = TypeVar("Value")
# Fills a worker's engine, collectively, with what a function (parameter, kind, first element, how many) → flat fp32
# tensor returns, and sets its number of updates.
Fill: TypeAlias = Callable[[Callable[[str, str, int, int], Tensor], int], None]


def choose_together(checkpoints: StageCheckpoints, attempt: int, log: Log) -> Chosen | None:
    """Collective: return the newest checkpoint that is whole as far as its sizes tell; None where there is none.

    Where its files had to be copied to the nodes, every byte was compared. Raises CheckpointError on every worker
    alike, for the reasons of `StageCheckpoints.choose`, where the storage fails, and where one node alone cannot read.
    """
    # One decision before anything is built on it: no worker may start anew while the others resume.
    while True:
        candidate = on_rank_0(lambda: checkpoints.choose(attempt, log))
        if candidate is None:
            return None
        name, manifest = candidate
        problem = fetch_together(checkpoints, name)
        if not problem:
            return Chosen(name, checkpoints.local / name, manifest)
        on_rank_0(lambda: checkpoints.refuse(name, attempt, problem, log))  # noqa: B023 (called in this round)


def fetch_together(checkpoints: StageCheckpoints, name: str) -> str:
    """Collective: make a checkpoint readable on every node; returns why it is bad on all of them, "" where it is whole.

    Raises CheckpointError, on every worker alike, where a node could not fetch it, or it is bad on some alone.
    """
    outcome: str | CheckpointError | None = None  # of a worker that does not fetch; "" where it is whole
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            checkpoints.fetch(name)
            outcome = ""
        except NewerSchema as error:
            outcome = error
        except CheckpointError as error:
            outcome = str(error)
        except (StorageError, DataError, OSError) as error:
            outcome = cannot_read(error)
    outcomes = [(outcome, socket.gethostname())] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcomes[0])
    problem = ""  # of the first node that has one
    node_with_problem = ""
    is_whole_somewhere = False
    for of_worker, node in outcomes:
        if isinstance(of_worker, CheckpointError):
            raise of_worker
        if of_worker == "":
            is_whole_somewhere = True
        elif of_worker is not None and not problem:
            problem = of_worker
            node_with_problem = node
    # One node with a bad disk must not condemn checkpoint after checkpoint for all.
    if problem and is_whole_somewhere:
        raise CheckpointError(
            f"{node_with_problem} cannot keep a good copy of {name}, and another node can: {problem}\n"
            "  take the node out, or look at its disk; then run the same command again"
        )
    return problem


def load_together(fill: Fill, checkpoints: StageCheckpoints, chosen: Chosen, attempt: int, log: Log) -> Chosen:
    """Collective: fill the engine with the checkpoint, or with the newest before it that is whole; returns which.

    Raises CheckpointError on every worker alike: for the reasons of `choose_together`, where a worker reads other bytes
    than rank 0 does, and where the checkpoint is of another model.
    """
    while True:
        problem = load(fill, chosen)
        if not problem:
            return chosen
        condemn(checkpoints, chosen, problem, attempt, log)
        next_chosen = choose_together(checkpoints, attempt, log)
        assert next_chosen is not None, "choose raises where the last one was refused"
        chosen = next_chosen


def load(fill: Fill, chosen: Chosen) -> str:
    """Collective: fill the engine with what every worker reads of the checkpoint.

    Returns in which file somebody has read other bytes than were committed, and who; "" where nobody has. After a
    problem the engine is of no use until it is filled from another checkpoint. Raises CheckpointError, on every worker
    alike, where one cannot read.
    """
    reading = Reading(chosen)
    # Adam's bias correction counts updates, not steps: steps that were skipped are not among them.
    fill(reading, chosen.manifest.updates)

    outcomes: list[tuple[CheckpointError | None, str]] = [(None, "")] * dist.get_world_size()
    dist.all_gather_object(outcomes, (reading.failure, socket.gethostname()))
    problem = ""  # the first
    for rank, (failure, node) in enumerate(outcomes):
        if failure is None:
            continue
        if not isinstance(failure, Damaged):
            raise failure
        if not problem:
            problem = f"{failure} (read by worker {rank} on {node})"
    return problem


class Reading:
    """Reads for one worker and raises nothing: what went wrong first is kept, and zeros are returned from then on.

    To fill an engine ends with a collective, in which the others would wait for a worker that has raised.
    """

    def __init__(self, chosen: Chosen) -> None:
        self.chosen = chosen
        self.reader: Reader | None = None
        self.failure: CheckpointError | None = None

    def __call__(self, name: str, kind: str, start: int, count: int) -> Tensor:
        """Return elements [start, start + count) of one parameter's master or moment, flat fp32."""
        if self.failure is None:
            try:
                if self.reader is None:
                    share = (dist.get_rank() + 0.5) / dist.get_world_size()
                    self.reader = Reader(self.chosen.folder, self.chosen.manifest.files, share)
                return self.reader(name, kind, start, count)
            except CheckpointError as error:
                self.failure = error
            except OSError as error:
                self.failure = cannot_read(error)
        return torch.zeros(count)


def condemn(checkpoints: StageCheckpoints, chosen: Chosen, problem: str, attempt: int, log: Log) -> None:
    """Collective: rank 0 reads every byte of a checkpoint that a worker has found bad, and refuses it.

    Raises CheckpointError on every worker alike where it is whole for rank 0: one node with a bad disk or mount must
    not condemn checkpoint after checkpoint for all. The same where the storage fails rank 0 while it reads or renames.
    """

    def read_all_and_refuse() -> None:
        try:
            checkpoints.verify(chosen.name)
        except CheckpointError:
            checkpoints.refuse(chosen.name, attempt, problem, log)
            return
        raise CheckpointError(
            f"{problem}; rank 0 on {socket.gethostname()} has read all of it, and finds it whole\n"
            "  nothing was changed; look at the disk, the mount and the memory of that node, or take it\n"
            "  out, then run the same command again"
        )

    on_rank_0(read_all_and_refuse, f"{problem}; ")


def on_rank_0(work: Callable[[], Value], what_happened: str = "") -> Value:
    """Collective: let rank 0 work; every worker gets the value, or the same CheckpointError.

    `what_happened` comes first in the error of a storage that fails.
    """
    outcome: list[Value | CheckpointError | None] = [None]
    if dist.get_rank() == 0:
        # What is raised is kept for the broadcast, in which all others wait.
        try:
            outcome = [work()]
        except CheckpointError as error:
            outcome = [error]
        except (StorageError, DataError, OSError) as error:
            outcome = [CheckpointError(f"{what_happened}{cannot_read(error)}")]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], CheckpointError):
        raise outcome[0]
    return outcome[0]  # type: ignore[return-value]  # what `work` has returned on rank 0


def cannot_read(error: Exception) -> CheckpointError:
    """Return the error of a start that cannot reach its checkpoints, none of which is to blame."""
    return CheckpointError(f"cannot read the checkpoints: {error}\n  nothing was changed; see to the storage")
