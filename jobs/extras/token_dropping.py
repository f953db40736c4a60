"""Token dropping and smaller images (recipe section `thinning`) in stages that train; the workers do all the work."""

from jobs.stages.training import TrainingExtra
from pipeline.extras.token_dropping import ThinnedConfig


class TokenDroppingExtra(TrainingExtra):
    """Adds the recipe section `thinning`."""

    config = ThinnedConfig
    hook = "pipeline.extras.token_dropping:TokenDropping"
