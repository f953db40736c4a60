"""Suggest a new schedule from a checkpoint's weights, if somebody has changed the length of an unfinished stage.

to train longer, start a new schedule from its newest weights: python -m jobs export runs/photos/pretrain/step-500
FOLDER, then add pretrain.init=FOLDER --fresh
"""

import shlex
from collections.abc import Iterator
from pathlib import Path

from jobs.resolved_recipe import Available, Stage
from jobs.stage_folders import CHECKPOINTS
from jobs.stages.training import TrainingExtra
from pipeline.artifacts import DONE
from pipeline.checkpoints.manifest import committed, step_of


class NewSchedule(TrainingExtra):
    """Names the newest checkpoint of the earlier start."""

    def ways_to_train_longer(self, stage: Stage, folder: Path, available: Available) -> Iterator[str]:
        """Yield the commands; nothing if the stage has finished or has no checkpoint on this machine."""
        saved = [] if available.campaign.remote is not None else committed(folder / CHECKPOINTS)
        if not saved or (folder / DONE).exists():
            return
        checkpoint = shlex.quote(f"{folder}/step-{step_of(saved[0])}")
        yield (
            f"start a new schedule from its newest weights: python -m jobs export {checkpoint} "
            f"FOLDER, then add {stage.source}.init=FOLDER --fresh\n      "
            "with new optimizer state, warm-up and sample order; step 0 has the weights of the checkpoint"
        )
