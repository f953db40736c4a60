"""Filling the engines of all workers with one checkpoint, of which each reads and verifies what it needs alone.

1. Every worker opens the files that hold its fragments and reads them; each chunk is compared as it is read.
2. All hear whether somebody has read bytes that were not committed, or could not read (`load`).
3. Where bytes were bad, rank 0 reads the whole checkpoint. What is bad for rank 0 too is refused, and all workers begin
   again with the one before it (`load_together`); what is whole for rank 0 is the fault of the other's node.

In:  step-0000001200 of two workers, with a flipped bit in rank-00001.safetensors; step-0000001100
Out: bad-0000001200-000007, and engines that hold step 1100, on whatever number of workers
"""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from data.errors import CheckpointError
from pipeline.checkpoints.checkpoint import Chosen, Reader, cannot_read, choose_together, refuse, verify
from pipeline.checkpoints.manifest import Damaged

# Fills a worker's engine, collectively, with what a function (parameter, kind, first element, how many) → flat fp32
# tensor returns, and sets its number of updates.
Fill: TypeAlias = Callable[[Callable[[str, str, int, int], Tensor], int], None]


def load_together(fill: Fill, folder: Path, chosen: Chosen, attempt: int, say: Callable[[str], None]) -> Chosen:
    """Collective: fill the engine with the checkpoint, or with the newest before it that is whole; returns which.

    Raises CheckpointError on every worker alike: for the reasons of `choose`, where a worker reads other bytes than
    rank 0 does, and where the checkpoint is of another model.
    """
    refused = 0
    while True:
        problem = load(fill, chosen)
        if not problem:
            return chosen
        condemn(chosen, problem, attempt, say)
        refused += 1
        next_chosen = choose_together(folder, attempt, say, refused)
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


def condemn(chosen: Chosen, problem: str, attempt: int, say: Callable[[str], None]) -> None:
    """Collective: rank 0 reads every byte of a checkpoint that a worker has found bad, and refuses it.

    Raises CheckpointError on every worker alike where it is whole for rank 0: one node with a bad disk or mount must
    not condemn checkpoint after checkpoint for all. The same where the storage fails rank 0 while it reads or renames.
    """
    failure: list[CheckpointError | None] = [None]
    if dist.get_rank() == 0:
        try:
            if is_whole(chosen.folder):
                failure = [
                    CheckpointError(
                        f"{problem}; rank 0 on {socket.gethostname()} has read all of it, and finds it whole\n"
                        "  nothing was changed; look at the disk, the mount and the memory of that node, or take it\n"
                        "  out, then run the same command again"
                    )
                ]
            else:
                refuse(chosen.folder, attempt, problem, say)
        except OSError as error:
            # Kept for the broadcast, in which all others wait.
            failure = [CheckpointError(f"{problem}; {cannot_read(error)}")]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise failure[0]


def is_whole(checkpoint: Path) -> bool:
    """Read every byte of a checkpoint; return whether it is what was committed. Raises OSError where storage fails."""
    try:
        verify(checkpoint)
    except CheckpointError:
        return False
    return True
