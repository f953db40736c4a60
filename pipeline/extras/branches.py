"""What makes a trained stage a part of a scaling study: the keys `begin` and `law`.

A branch (`begin`) continues from a checkpoint of another stage, its trunk: the driver links that checkpoint as the
first of the branch (jobs/extras/studies/law.py), and its workers resume from it as from one of their own.
"""

from dataclasses import dataclass
from typing import ClassVar

from data.checks import at_least
from pipeline.config import Tags, require, tags
from pipeline.hooks import Hook
from pipeline.training_config import TrainConfig


@dataclass(frozen=True)
class BranchConfig(TrainConfig):
    """Adds `begin` and `law` to a trained stage."""

    # a branch: go on from this commit of the stage that `init` names, with its moments and the order of its samples;
    # all values are that stage's, but for the steps and the cool-down (docs/studies.md); null: weights alone, step 0
    begin: int | None = None
    # "@figure/figure.json" of a figure with a fit: what it foretells is logged before the first step and compared after
    # the last
    law: str | None = None

    RESUME: ClassVar[Tags] = tags(forbid="begin law")
    LATER: ClassVar[tuple[str, ...]] = ("begin", "law")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "begin")
        require(self.begin is None or self.init is not None, "begin is a step of the stage that init names: give init")

    @property
    def first_step(self) -> int:
        """Return the step that the stage starts from: that of its trunk's checkpoint."""
        return self.begin or super().first_step


class Branch(Hook):
    """Names the config of a branch to its workers."""

    Config = BranchConfig
