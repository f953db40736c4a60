"""Filling the engines of all workers with one checkpoint: one decision of all, and each reads what it needs alone.

`choose_together` agrees on the newest checkpoint that is there, and makes its files readable on every node;
`load_together` fills the engines with it, or with an older one where bytes were bad. Both are steps of all workers.

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

from data.errors import CheckpointError, DataError, RunOwned, StorageError
from pipeline.checkpoints.manifest import DamagedCheckpoint, NewerSchema
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
    while True:
        # 1. Rank 0 sweeps what died, and takes the newest whose manifest is whole and whose files are all there in
        #    their sizes. One decision before anything is built on it: no worker may start anew while the others resume.
        candidate = on_rank_0(lambda: checkpoints.choose(attempt, log))
        if candidate is None:
            return None
        name, manifest = candidate

        # 2. On every node one worker makes the files readable there, which copies them where nodes share no folder.
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

        # 3. All hear how it went on every node. A storage that fails ends the start and condemns no checkpoint.
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
        if not problem:
            return Chosen(name, checkpoints.local / name, manifest)

        # 4. What is bad on every node is refused, and the checkpoint before it is looked at. One node with a bad disk
        #    must not condemn checkpoint after checkpoint for all.
        if is_whole_somewhere:
            raise CheckpointError(
                f"{node_with_problem} cannot keep a good copy of {name}, and another node can: {problem}\n"
                "  take the node out, or look at its disk; then run the same command again"
            )
        on_rank_0(lambda: checkpoints.refuse(name, attempt, problem, log))  # noqa: B023 (called in this round)


def load_together(fill: Fill, checkpoints: StageCheckpoints, chosen: Chosen, attempt: int, log: Log) -> Chosen:
    """Collective: fill the engine with the checkpoint, or with the newest before it that is whole; returns which.

    Raises CheckpointError on every worker alike: for the reasons of `choose_together`, where one cannot read or reads
    other bytes than rank 0 does, and where the checkpoint is of another model.
    """
    while True:
        # 1. Every worker opens the files that hold its fragments and reads them; each chunk is compared as it is read.
        #    Adam's bias correction counts updates, not steps: steps that were skipped are not among them.
        reading = Reading(chosen)
        fill(reading, chosen.manifest.updates)

        # 2. All hear who has read bytes that were not committed, and who could not read.
        outcomes: list[tuple[CheckpointError | None, str]] = [(None, "")] * dist.get_world_size()
        dist.all_gather_object(outcomes, (reading.failure, socket.gethostname()))
        problem = ""  # the first
        for rank, (failure, node) in enumerate(outcomes):
            if failure is None:
                continue
            if not isinstance(failure, DamagedCheckpoint):
                raise failure
            if not problem:
                problem = f"{failure} (read by worker {rank} on {node})"
        if not problem:
            return chosen

        # 3. Rank 0 reads every byte anew, and refuses what is bad for it too. What is whole for rank 0 is the fault of
        #    the other's node, which must not condemn checkpoint after checkpoint for all.
        def refuse_or_raise(bad: Chosen = chosen, problem: str = problem) -> None:
            try:
                checkpoints.verify(bad.name)
            except CheckpointError:
                checkpoints.refuse(bad.name, attempt, problem, log)
                return
            raise CheckpointError(
                f"{problem}; rank 0 on {socket.gethostname()} has read all of it, and finds it whole\n"
                "  nothing was changed; look at the disk, the mount and the memory of that node, or take it\n"
                "  out, then run the same command again"
            )

        on_rank_0(refuse_or_raise, f"{problem}; ")

        # 4. The engine is of no use until it is filled from the checkpoint before it.
        next_chosen = choose_together(checkpoints, attempt, log)
        assert next_chosen is not None, "choose raises where the last one was refused"
        chosen = next_chosen


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


def on_rank_0(work: Callable[[], Value], what_happened: str = "") -> Value:
    """Collective: let rank 0 work; every worker gets the value, or the same CheckpointError or RunOwned.

    `what_happened` comes first in the error of a storage that fails.
    """
    outcome: list[Value | CheckpointError | RunOwned | None] = [None]
    if dist.get_rank() == 0:
        # What is raised is kept for the broadcast, in which all others wait.
        try:
            outcome = [work()]
        except (CheckpointError, RunOwned) as error:
            outcome = [error]
        except (StorageError, DataError, OSError) as error:
            outcome = [CheckpointError(f"{what_happened}{cannot_read(error)}")]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], CheckpointError | RunOwned):
        raise outcome[0]
    return outcome[0]  # type: ignore[return-value]  # what `work` has returned on rank 0


def cannot_read(error: Exception) -> CheckpointError:
    """Return the error of a start that cannot reach its checkpoints, none of which is to blame."""
    return CheckpointError(f"cannot read the checkpoints: {error}\n  nothing was changed; see to the storage")
