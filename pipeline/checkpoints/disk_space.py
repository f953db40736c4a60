"""Whether the disk has room for the checkpoints that are to come: looked at before a run, and before each save.

In:  5,000 parameters under Adam, keep 3; 99.9 kB are free
Out: CheckpointError: 276.4 kB needed under /runs/x/pretrain-…/checkpoints (4 checkpoints of 64.1 kB, …), 99.9 kB free
"""

import math
from contextlib import suppress
from pathlib import Path

import models
from data.errors import CheckpointError
from data.files import free_bytes, size_text
from data.storage import Folder
from models import ModelConfig
from pipeline.checkpoints.manifest import Manifest, step_of
from pipeline.checkpoints.stage_checkpoints import LEAST_KEPT, StageCheckpoints
from pipeline.optimization import STATE
from pipeline.training_config import TrainConfig

BYTES_FP32 = 4
HEADER_BYTES = 4096  # of a worker's file and of the manifest, roughly


def checkpoint_bytes(cfg: TrainConfig, model: ModelConfig) -> int:
    """Return the size of a checkpoint, all workers' files together: fp32 masters, moments and average."""
    copies = 1 + len(STATE[cfg.optim.name])
    if cfg.polyak:
        copies += 1
    return models.parameters_of(model) * BYTES_FP32 * copies + HEADER_BYTES


def check_disk_space(cfg: TrainConfig, model: ModelConfig, checkpoints: StageCheckpoints) -> None:
    """Raise CheckpointError where a stage's checkpoints and weights will not fit on this node's disk."""
    needed, parts = bytes_to_come(cfg, model, checkpoints)
    free = free_bytes(checkpoints.local)
    if free < needed:
        raise CheckpointError(
            f"{size_text(needed)} needed under {checkpoints.local} ({parts}), {size_text(free)} free\n"
            f"  expected: room for keep={cfg.keep} checkpoints, for one more while it is written, and for the weights\n"
            "  make room there, lower keep, or give the run another disk: run=/elsewhere"
        )


def bytes_to_come(cfg: TrainConfig, model: ModelConfig, checkpoints: StageCheckpoints) -> tuple[int, str]:
    """Return the bytes that a stage will still need for checkpoints and weights, and of what they are, in words.

    At its fullest the disk holds one checkpoint more than are kept there: the oldest goes only when the newest is
    whole. What the next start sweeps away before its first save is room already.
    """
    kept = checkpoints.storage.sets_here(max(cfg.keep, LEAST_KEPT))
    # Of this disk alone: what lies in an object store needs no room here.
    existing = Folder(checkpoints.local).published("")
    to_come = kept + 1 - min(len(existing), kept)
    # A short stage makes fewer.
    if cfg.steps is not None:
        last_step = step_of(Path(existing[0])) if existing else 0
        to_come = min(to_come, math.ceil((cfg.steps - last_step) / cfg.save_every))
    one_checkpoint = checkpoint_bytes(cfg, model)
    weights = models.parameters_of(model) * BYTES_FP32
    parts = f"{to_come} checkpoints of {size_text(one_checkpoint)}, weights of {size_text(weights)}"
    swept = 0
    for leftover in checkpoints.local.glob(".tmp-*"):
        for path in [leftover, *leftover.rglob("*")]:
            # A run that goes on meanwhile may delete it.
            with suppress(FileNotFoundError):
                if path.is_file():
                    swept += path.stat().st_size
    if swept:
        parts += f", less {size_text(swept)} of .tmp-* there, which the start deletes"
    return max(to_come * one_checkpoint + weights - swept, 0), parts


def check_room(checkpoints: StageCheckpoints, manifest: Manifest, needed_bytes: int) -> None:
    """Raise CheckpointError where the disk has no room for a save of so many bytes, OSError where it does not tell.

    What the workers have written already counts as room: they do not wait for each other.
    """
    storage = checkpoints.storage
    staged = checkpoints.staged_name(manifest)
    free = storage.free_bytes(staged)
    if free < needed_bytes and free + sum(storage.list(staged).values()) < needed_bytes:
        raise CheckpointError(
            f"No space left on device: {checkpoints.address} ({size_text(needed_bytes)} needed, {size_text(free)} free)"
        )
