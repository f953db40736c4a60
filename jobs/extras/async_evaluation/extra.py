"""Use spare resources during training, to evaluate checkpoints and to find the samples that cause loss spikes.

The recipe keys are `evaluate_on: spare` and `health.on_spike: bisect`.
"""

from data.errors import CheckpointError, StorageError
from jobs.resolved_recipe import Context
from jobs.stages.training import Companion, TrainingExtra
from pipeline.artifacts import EVALUATIONS
from pipeline.extras.async_evaluation import AsyncConfig
from pipeline.extras.replays.spikes import SpikeConfig
from pipeline.hooks import HookOptions, compose
from pipeline.training_config import TrainConfig

EVALUATION = "pipeline.extras.async_evaluator:AsyncEvaluation"
SEARCH = "pipeline.extras.replays.spikes:SpikeSearch"
MASKING = "pipeline.extras.replays.spikes:Masking"


class SpareConfig(AsyncConfig, SpikeConfig):
    """A training config with the keys for asynchronous evaluation and spike searches."""


class AsyncEvaluationExtra(TrainingExtra):
    """Adds the recipe keys `evaluate_on` and `health`."""

    config = compose(AsyncConfig, SpikeConfig)

    def hooks(self, cfg: SpareConfig, context: Context) -> HookOptions:  # type: ignore[override]
        """Return the hooks for the keys in use, and for requests and masked samples left by earlier attempts."""
        hooks: dict[str, dict[str, object]] = {}
        has_requests = (context.directory / EVALUATIONS).exists()
        if getattr(cfg, "evaluate_on", "training") == "spare" or has_requests:
            hooks[EVALUATION] = {}
        if searches_spikes(cfg):
            hooks[SEARCH] = {}
        elif is_masking(context):
            hooks[MASKING] = {}
        return hooks

    def companion(self, cfg: SpareConfig, context: Context) -> Companion | None:  # type: ignore[override]
        """Return the spare worker if a key requires it and the checkpoints are in a shared folder."""
        has_sets = bool(cfg.data.evaluate or cfg.probe.train)
        evaluates = getattr(cfg, "evaluate_on", "training") == "spare" and cfg.evaluate_every > 0 and has_sets
        if not evaluates and not searches_spikes(cfg):
            return None
        if not context.campaign.storage.is_shared:
            context.log(
                f"{context.stage.name}: evaluate_on=spare and health.on_spike=bisect have no effect, because they "
                "require checkpoints in a shared folder, and this run is in an object store"
            )
            return None
        from jobs.extras.async_evaluation.spare_worker import SpareWorker  # imports torch

        return SpareWorker(cfg, context)


def searches_spikes(cfg: TrainConfig) -> bool:
    """Return whether the config requests spike searches; the config of a replay may not have the key."""
    health = getattr(cfg, "health", None)
    return health is not None and health.on_spike == "bisect"


def is_masking(context: Context) -> bool:
    """Return whether the newest checkpoint masks samples, so that a resumed run must keep masking them."""
    names = context.checkpoints.committed()
    if not names:
        return False
    try:
        return bool(context.checkpoints.manifest(names[0]).masked)
    except (CheckpointError, StorageError, OSError):
        return True  # the workers may resume from an older checkpoint; if it masks no samples, the hook does nothing
