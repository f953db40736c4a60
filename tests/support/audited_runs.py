"""Hooks for the live audit's tests, which flip a bit of a gradient or change the order of sums, and an extra."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import jobs.__main__
from jobs.kinds import load_kinds
from jobs.resolved_recipe import Context
from jobs.stages.training import TrainingExtra
from pipeline.batches import OBJECTIVES
from pipeline.hooks import Hook, HookOptions
from pipeline.training_config import TrainConfig

FLIP = "tests.support.audited_runs:Flip"
OTHER_ORDER = "tests.support.audited_runs:OtherOrder"


class Flip(Hook):
    """Flips one bit of worker `rank`'s gradient in a step (counted from 0), in the run's first attempt."""

    def __init__(self, cfg: TrainConfig, job: Any, step: int, rank: int) -> None:
        super().__init__(cfg, job)
        self.step = step
        self.rank = rank

    def begin(self, worker: Any, progress: Any) -> None:
        """Flip the first gradient of the step; the others of this step are repetitions."""
        added = worker.engine.added
        flipped: list[int] = []

        def adding(loss: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor:
            result: torch.Tensor = added(loss, part)
            if progress.step == self.step and not flipped:
                flipped.append(progress.step)
                result.view(torch.int32)[3] ^= 1 << 20
            return result

        if self.job.attempt == 1 and dist.get_rank() == self.rank:
            worker.engine.added = adding


class OtherOrder(Hook):
    """Makes worker 1 compute the samples of a micro-batch in reverse, so that its sums have other last bits."""

    def begin(self, worker: Any, progress: Any) -> None:
        """Replace the objective on this worker."""
        objective = OBJECTIVES["classification"]

        def reversing(worker: Any, step: int, images: torch.Tensor, batch: Any) -> torch.Tensor:
            return objective(worker, step, images.flip(0), replace(batch, labels=batch.labels.flip(0)))

        if dist.get_rank() == 1:
            OBJECTIVES["classification"] = reversing


class FlipExtra(TrainingExtra):
    """Loads the hook in training stages."""

    def hooks(self, cfg: TrainConfig, context: Context) -> HookOptions:
        """Flip a bit in step 5, counted from 0, on worker 1."""
        return {FLIP: {"step": 5, "rank": 1}}


def kinds() -> dict[str, Any]:
    """Return all kinds of stages, with the flip in `pretrain`."""
    table = jobs.__main__.KINDS
    return load_kinds({**table, "pretrain": f"{table['pretrain']} tests.support.audited_runs:FlipExtra"})


def losses_of(stage: Path) -> dict[int, float]:
    """Return the loss of each step of a stage, of the last attempt that computed it."""
    from pipeline.extras.replays.batch import TrainedStage

    return {step: record.loss for step, record in TrainedStage(stage).step_records.items()}


def changes(run: Path, audit: float) -> list[str]:
    """Return the overrides of a run in exact mode that saves every fourth step."""
    return [
        f"run={run}",
        "pretrain.exact_parts=4",
        "pretrain.save_every=4",
        "pretrain.steps=12",
        f"pretrain.health.audit={audit}",
    ]
