"""The recipe key `check_engine`: before the first step of an attempt, compare the engine with plain torch."""

from jobs.resolved_recipe import Context
from jobs.stages.training import TrainingExtra
from pipeline.extras.engine_check.hook import EngineCheckConfig
from pipeline.hooks import HookOptions
from pipeline.training_config import TrainConfig


class EngineCheckExtra(TrainingExtra):
    """Adds the recipe key `check_engine`, which is on by default."""

    config = EngineCheckConfig
    hook = "pipeline.extras.engine_check.hook:EngineCheck"

    def hooks(self, cfg: TrainConfig, context: Context) -> HookOptions:
        """Return the hook that checks the engine; {} if the recipe disables the check."""
        return {self.hook: {}} if getattr(cfg, "check_engine", False) else {}
