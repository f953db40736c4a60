"""Add the recipe keys `keep_best` and `patience` to training stages, and each metric's best value to done.json."""

from collections.abc import Iterator
from typing import Any

from jobs.resolved_recipe import Available, CheckResult, Context, Stage
from jobs.stages.training import TrainingExtra
from models.checks import did_you_mean
from pipeline.config import require
from pipeline.extras.best import BestConfig
from pipeline.extras.needed import best_of, evaluations_of
from pipeline.monitoring.telemetry import read_metrics
from pipeline.training_config import TrainConfig


class Best(TrainingExtra):
    """Adds the recipe keys `keep_best` and `patience`."""

    config = BestConfig
    hook = "pipeline.extras.best:KeepBest"

    def checks(self, stage: Stage, available: Available) -> Iterator[CheckResult]:
        """Raise ConfigError if the stage does not evaluate the metric, or if the run is in an object store."""
        keep_best = stage.config.keep_best
        if keep_best is None:
            return
        name = stage.name
        metrics = list(stage.kind.metrics(stage.config))
        require(
            keep_best in metrics,
            f"{name}.keep_best is {keep_best}, but the stage does not evaluate this metric"
            f"{did_you_mean(keep_best, metrics)}\n"
            f"  expected a metric that the stage evaluates: {', '.join(metrics) or 'none'}\n"
            "  set data.evaluate to get accuracy, or probe to get 1shot, 5shot and so on",
        )
        require(
            available.campaign.remote is None,
            f"{name}.keep_best needs the records of all attempts in a shared folder, "
            f"but the run is in the object store {available.campaign.remote}\n"
            f"  to turn it off, set {name}.keep_best=null",
        )
        yield from ()

    def after(self, cfg: TrainConfig, context: Context, outcome: dict[str, Any]) -> None:
        """Add the best evaluation of each metric, including evaluations on a spare worker, to the outcome."""
        outcome["best"] = best_of(evaluations_of(read_metrics(context.directory, None)))
