"""Add the recipe section `thinning` to training stages: token dropping and training on smaller images."""

from jobs.stages.training import TrainingExtra
from pipeline.extras.token_dropping import TokenDroppingTrainConfig


class TokenDroppingExtra(TrainingExtra):
    """Adds the recipe section `thinning`."""

    config = TokenDroppingTrainConfig
    hook = "pipeline.extras.token_dropping:TokenDropping"
