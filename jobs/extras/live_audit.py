"""The recipe key `health.audit`: repeat parts of steps on another worker during training, and compare the bits."""

from jobs.resolved_recipe import Context
from jobs.stages.training import TrainingExtra
from pipeline.hooks import HookOptions
from pipeline.training_config import TrainConfig

HOOK = "pipeline.extras.live_audit:LiveAudit"


class LiveAuditExtra(TrainingExtra):
    """Adds the hook for `health.audit`; the extra for spare workers defines the section `health`."""

    def hooks(self, cfg: TrainConfig, context: Context) -> HookOptions:
        """Return the hook that audits steps; {} if the recipe does not request an audit."""
        health = getattr(cfg, "health", None)
        return {HOOK: {}} if health is not None and health.audit else {}
