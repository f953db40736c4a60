"""One decision of all workers about which checkpoint of an object store to load, and its loading, in order:

1. rank 0 sweeps, and lists what is committed (`candidates`);
2. on every node one worker fetches the newest into the stage's local folder and reads every byte (`fetch_together`);
3. where it is bad on every node, though fetched twice, rank 0 marks it, and the one before it is tried;
4. all workers read the local copy as they would read any checkpoint on disk (`load`).

In:  <run>/<stage>/checkpoints/step-0000001200-000007/ in the store, of which no node has a copy
Out: <stage>/checkpoints/step-0000001200-000007/ on every node, and engines that hold step 1200
"""

import os
import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from data.errors import CheckpointError, DataError, StorageError
from data.files import locked
from pipeline.checkpoints import restore
from pipeline.checkpoints.checkpoint import Chosen, cannot_read
from pipeline.checkpoints.manifest import NewerSchema, read_manifest
from pipeline.checkpoints.stored import FETCHING, REFUSED, StoredCheckpoints


def choose_together(stored: StoredCheckpoints, attempt: int, say: Callable[[str], None]) -> Chosen | None:
    """Collective: return a local copy of the newest checkpoint that is whole; None where none was ever committed.

    Raises CheckpointError on every worker alike, for the reasons of `checkpoint.choose`.
    """
    checkpoints = on_rank_0(lambda: candidates(stored, attempt))
    for checkpoint in checkpoints:
        problem = fetch_together(stored, checkpoint)
        if not problem:
            folder = stored.folder / checkpoint
            return Chosen(folder, read_manifest(folder))
        on_rank_0(lambda: stored.refuse(checkpoint, problem, attempt))  # noqa: B023 (called in this round)
        say_once(say, f"checkpoint refused: {problem}; marked {REFUSED} in the store, trying the one before it")
    if checkpoints:
        folder = stored.store.address(f"{stored.stage}/checkpoints")
        raise CheckpointError(
            f"none of {len(checkpoints)} checkpoints in {folder} is whole; they are kept, each with a {REFUSED}\n"
            f"  repair one and delete its {REFUSED}, or run the same command again to start from step 0"
        )
    return None


def candidates(stored: StoredCheckpoints, attempt: int) -> list[str]:
    """Sweep, then list what is committed: in this order, because what is swept cannot be committed any more."""
    stored.sweep(attempt)
    return stored.committed()


def fetch_together(stored: StoredCheckpoints, checkpoint: str) -> str:
    """Collective: fetch a checkpoint once a node; returns why it is bad on all of them, "" where it is whole.

    Raises CheckpointError, on every worker alike, where a node could not fetch it, or it is bad on some alone.
    """
    outcome: str | CheckpointError | None = None  # of a worker that does not read; "" where it is whole
    if os.environ["LOCAL_RANK"] == "0":
        try:
            stored.folder.mkdir(parents=True, exist_ok=True)
            # The scratch of two nodes may be one folder, such as a home on NFS.
            with locked(stored.folder / FETCHING):
                stored.forget_others(checkpoint)
                stored.fetch(checkpoint)
            outcome = ""
        except NewerSchema as error:
            outcome = error
        except CheckpointError as error:
            outcome = str(error)
        except (StorageError, DataError, OSError) as error:
            outcome = cannot_read(error)
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (outcome, socket.gethostname()))
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
            f"{node_with_problem} cannot keep a good copy of {checkpoint}, and another node can: {problem}\n"
            "  take the node out, or look at its disk; then run the same command again"
        )
    return problem


def load(fill: restore.Fill, chosen: Chosen) -> None:
    """Collective: fill the engine with what every worker reads of its node's copy.

    Raises CheckpointError, on every worker alike, where a copy has changed since it was fetched or cannot be read.
    """
    problem = restore.load(fill, chosen)
    if problem:
        raise CheckpointError(
            f"{problem}; it was whole when it was fetched\n"
            "  nothing was changed in the store; look at that node's disk, or take the node out;\n"
            "  then run the same command again"
        )


def on_rank_0(work: Callable[[], Any]) -> Any:
    """Collective: let rank 0 work; every worker gets the value, or the same CheckpointError."""
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [work()]
        except CheckpointError as error:
            outcome = [error]
        except (StorageError, OSError) as error:
            outcome = [cannot_read(error)]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], CheckpointError):
        raise outcome[0]
    return outcome[0]


def say_once(say: Callable[[str], None], text: str) -> None:
    """Say a line from rank 0 alone."""
    if dist.get_rank() == 0:
        say(text)
