"""Loads a checkpoint into the engines of all workers: they agree on a checkpoint, then each reads its own part.

`choose_together` agrees on the newest checkpoint and makes its files readable on every node; `load_together` loads it,
or an older checkpoint if it is damaged, into the engines. Both are collective.

In:  step-0000001200, written by two workers, with a flipped bit in rank-00001.safetensors; step-0000001100
Out: bad-0000001200-000007, and engines with the state of step 1100, on any number of workers
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
# Fills a worker's engine, collectively. Its arguments: a function that returns flat fp32 tensors for (parameter, kind,
# first element, count), and the number of optimizer updates so far.
Fill: TypeAlias = Callable[[Callable[[str, str, int, int], Tensor], int], None]


def choose_together(checkpoints: StageCheckpoints, attempt: int, log: Log) -> Chosen | None:
    """Collective: return the newest checkpoint whose files all have the recorded sizes; None if there is none.

    Files that had to be copied to the nodes are fully verified. Raises CheckpointError on all workers if
    `StageCheckpoints.choose` does, if the storage fails, or if any node cannot read the checkpoint.
    """
    while True:
        # 1. Rank 0 deletes leftovers and picks the newest checkpoint with a valid manifest and files of the right
        #    sizes. The decision is made once for all: no worker may start from scratch while others resume.
        candidate = on_rank_0(lambda: checkpoints.choose(attempt, log))
        if candidate is None:
            return None
        name, manifest = candidate

        # 2. On every node one worker makes the files readable there; if nodes share no folder, it copies them.
        outcome: str | CheckpointError | None = None  # "": the copy is good; None: this worker does not fetch
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

        # 3. All workers learn the results of all nodes. A failing storage ends the start and blames no checkpoint.
        outcomes = [(outcome, socket.gethostname())] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcomes[0])
        problem = ""  # the first problem that a node reports
        node_with_problem = ""
        is_whole_somewhere = False
        for reported, node in outcomes:
            if isinstance(reported, CheckpointError):
                raise reported
            if reported == "":
                is_whole_somewhere = True
            elif reported is not None and not problem:
                problem = reported
                node_with_problem = node
        if not problem:
            return Chosen(name, checkpoints.local / name, manifest)

        # 4. A checkpoint damaged on every node is quarantined, and the previous one is tried. A single node
        #    with a bad disk must not condemn one checkpoint after another for all.
        if is_whole_somewhere:
            raise CheckpointError(
                f"{node_with_problem} failed to store an intact copy of {name}, but another node succeeded: {problem}\n"
                "  exclude this node or check its disk, then run the same command again"
            )
        on_rank_0(lambda: checkpoints.refuse(name, attempt, problem, log))  # noqa: B023 (called in this round)


def load_together(fill: Fill, checkpoints: StageCheckpoints, chosen: Chosen, attempt: int, log: Log) -> Chosen:
    """Collective: load the chosen checkpoint, or the newest intact older one, into the engine; return the loaded one.

    Raises CheckpointError on all workers if `choose_together` does, if a worker cannot read the files or reads
    different bytes than rank 0, or if the checkpoint belongs to another model.
    """
    while True:
        # 1. Every worker opens the files with its fragments and reads them; each chunk is verified as it is read. The
        #    engine gets the number of updates, not of steps: Adam's bias correction does not count skipped steps.
        reading = Reading(chosen)
        fill(reading, chosen.manifest.updates)

        # 2. All workers learn who read damaged bytes and who could not read at all.
        outcomes: list[tuple[CheckpointError | None, str]] = [(None, "")] * dist.get_world_size()
        dist.all_gather_object(outcomes, (reading.failure, socket.gethostname()))
        problem = ""  # the first problem that a worker reports
        for rank, (failure, node) in enumerate(outcomes):
            if failure is None:
                continue
            if not isinstance(failure, DamagedCheckpoint):
                raise failure
            if not problem:
                problem = f"{failure} (read by worker {rank} on {node})"
        if not problem:
            return chosen

        # 3. Rank 0 reads every byte again, and quarantines the checkpoint if it is damaged for rank 0 too. Otherwise
        #    the fault lies with the other node, which must not condemn one checkpoint after another for all.
        def refuse_or_raise(bad: Chosen = chosen, problem: str = problem) -> None:
            try:
                checkpoints.verify(bad.name)
            except CheckpointError:
                checkpoints.refuse(bad.name, attempt, problem, log)
                return
            raise CheckpointError(
                f"{problem}; but rank 0 on {socket.gethostname()} read the same checkpoint without errors\n"
                "  nothing was changed; check the disk, mount and memory of the node that failed, or exclude it, then "
                "run "
                "the same command again"
            )

        on_rank_0(refuse_or_raise, f"{problem}; ")

        # 4. The engine is partly filled and unusable until another checkpoint is loaded.
        next_chosen = choose_together(checkpoints, attempt, log)
        assert next_chosen is not None, "choose raises if the last checkpoint was quarantined"
        chosen = next_chosen


class Reading:
    """Reads a checkpoint for one worker without raising: it stores the first failure, and then returns zeros.

    Filling an engine ends with a collective, in which the other workers would otherwise wait for a failed worker.
    """

    def __init__(self, chosen: Chosen) -> None:
        self.chosen = chosen
        self.reader: Reader | None = None
        self.failure: CheckpointError | None = None

    def __call__(self, name: str, kind: str, start: int, count: int) -> Tensor:
        """Return elements [start, start + count) of one parameter's master weight or moment, as flat fp32."""
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
    """Collective: run `work` on rank 0; on every worker, return its value, or raise its CheckpointError or RunOwned.

    `what_happened` is the beginning of the error message if the storage fails.
    """
    outcome: list[Value | CheckpointError | RunOwned | None] = [None]
    if dist.get_rank() == 0:
        # Errors are kept for the broadcast, in which all other workers wait.
        try:
            outcome = [work()]
        except (CheckpointError, RunOwned) as error:
            outcome = [error]
        except (StorageError, DataError, OSError) as error:
            outcome = [CheckpointError(f"{what_happened}{cannot_read(error)}")]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], CheckpointError | RunOwned):
        raise outcome[0]
    return outcome[0]  # type: ignore[return-value]  # the value that `work` returned on rank 0


def cannot_read(error: Exception) -> CheckpointError:
    """Return the error for an attempt that cannot read from its storage; the checkpoints may be intact."""
    return CheckpointError(f"cannot read the checkpoints: {error}\n  nothing was changed; check the storage")
