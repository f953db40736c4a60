"""Config keys of trained stages in a scaling study: `begin` and `law`.

A branch (`begin`) continues training from a checkpoint of another stage, the trunk. The driver links this checkpoint
into the branch's folder (jobs/extras/studies/law.py), and the workers of the branch resume from it.
"""

from dataclasses import dataclass
from typing import ClassVar

from data.checks import at_least
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
