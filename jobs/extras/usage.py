"""Record the CPU time, memory and GPU utilisation of the workers of all training stages (pipeline/extras/usage.py)."""

from jobs.resolved_recipe import Context
from jobs.stages.training import TrainingExtra
from pipeline.hooks import HookOptions
from pipeline.training_config import TrainConfig


class UsageExtra(TrainingExtra):
    """Loads the hook that records the use of each worker; there is no recipe key."""

    hook = "pipeline.extras.usage:Usage"

    def hooks(self, cfg: TrainConfig, context: Context) -> HookOptions:
        """Return the hook."""
        return {self.hook: {}}
