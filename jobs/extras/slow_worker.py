"""The recipe key `name_slow_workers`: log a worker that is slower than the others, by how much, and why."""

from jobs.resolved_recipe import Context
from jobs.stages.training import TrainingExtra
from pipeline.extras.slow_worker.hook import SlowWorkerConfig
from pipeline.hooks import HookOptions
from pipeline.training_config import TrainConfig


class SlowWorkerExtra(TrainingExtra):
    """Adds the recipe key `name_slow_workers`, which is on by default."""

    config = SlowWorkerConfig
    hook = "pipeline.extras.slow_worker.hook:SlowWorkers"

    def hooks(self, cfg: TrainConfig, context: Context) -> HookOptions:
        """Return the hook that compares the workers; {} if the recipe disables it."""
        return {self.hook: {}} if getattr(cfg, "name_slow_workers", False) else {}
