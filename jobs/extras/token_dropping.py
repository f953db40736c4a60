"""Token dropping and smaller images (recipe section `thinning`) in stages that train; the workers do all the work."""

from jobs.stages.training import TrainingExtra
from pipeline.extras.token_dropping import TokenDroppingTrainConfig


class TokenDroppingExtra(TrainingExtra):
    """Adds the recipe section `thinning`."""

    config = TokenDroppingTrainConfig
    hook = "pipeline.extras.token_dropping:TokenDropping"
