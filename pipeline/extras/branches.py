"""Config keys of trained stages in a scaling study: `begin` and `law`.

A branch (`begin`) continues training from a checkpoint of another stage, the trunk. The driver links this checkpoint
into the branch's folder (jobs/extras/studies/law.py), and the workers of the branch resume from it.
"""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from data.checks import at_least
from data.files import MANIFEST, write_atomically
from data.storage import Folder
from pipeline.checkpoints.manifest import inspect_checkpoint, sealed
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints
from pipeline.config import Tags, require, tags
from pipeline.hooks import Hook
from pipeline.training_config import TrainConfig


@dataclass(frozen=True)
class BranchConfig(TrainConfig):
    """Adds the config fields `begin` and `law` to trained stages."""

    # a branch: resume from this step of stage `init`, with its optimizer state and sample order; all keys except the
    # steps and the cool-down must equal that stage's (docs/studies.md); null: only load weights, and start at step 0
    begin: int | None = None
    # "@figure/figure.json" of a figure with a fit: its prediction is logged before the first step and compared with the
    # result after the last step
    law: str | None = None

    RESUME: ClassVar[Tags] = tags(forbid="begin law")
    LATER: ClassVar[tuple[str, ...]] = ("begin", "law")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "begin")
        require(
            self.begin is None or self.init is not None,
            f"begin is {self.begin}, which is a step of the stage in init, but init is not set\n"
            "  set init, or begin=null",
        )

    @property
    def first_step(self) -> int:
        """Return the step that the stage starts from; for a branch, the step of the trunk's checkpoint."""
        return self.begin or super().first_step


class Branch(Hook):
    """Hook that adds the config fields of BranchConfig, and has no effect on the training loop."""

    Config = BranchConfig


def link_checkpoint(source: Path, target: StageCheckpoints, key: str | None = None) -> None:
    """Add a checkpoint from another folder on this disk to a stage, atomically, with `key` as its stage key.

    Its files are hard-linked if possible, and are never modified. Raises CheckpointError if the checkpoint is damaged,
    or OSError if the storage fails.
    """
    manifest = inspect_checkpoint(Folder(source.parent), source.name)
    staged = target.local / f".tmp-{source.name}-linked"
    try:
        shutil.copytree(source, staged, copy_function=os.link)
    except OSError:  # another disk, one without hard links, or leftovers of a killed start
        shutil.rmtree(staged, ignore_errors=True)
        shutil.copytree(source, staged)
    if key is not None:
        # The manifest is replaced by a renamed new file: the other folder keeps its own.
        write_atomically(staged / MANIFEST, sealed(replace(manifest, key=key)))
    staged.rename(target.local / source.name)
