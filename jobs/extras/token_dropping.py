"""Token dropping and smaller images (`thinning`) in the stages that train; all the work is in the workers."""

from jobs.stages.training import TrainingExtra
from pipeline.extras.token_dropping import TokenDroppingTrainConfig


class TokenDroppingExtra(TrainingExtra):
    """Adds the section `thinning`."""

    config = TokenDroppingTrainConfig
    hook = "pipeline.extras.token_dropping:TokenDropping"
