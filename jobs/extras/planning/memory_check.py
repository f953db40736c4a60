"""What a trained stage needs of its device's memory, checked before it runs and before each attempt.

1. With `cluster.gpu_memory_gb` a stage that does not fit is refused, with what to type.
2. If a plan has traced such a step before, workers compare their need with what is free on their device.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from data.errors import ConfigError
from jobs.resolved_recipe import MEMORY, Available, CheckResult, Context, Stage
from jobs.stages.training import TrainingExtra, allowed_worlds
from models import ModelConfig
from pipeline.phases import has_whole_images
from pipeline.training_config import TrainConfig

MANY = 1_000_000  # steps: enough that each phase has some


class MemoryCheck(TrainingExtra):
    """Compares a stage's need of memory with its devices."""

    def checks(self, stage: Stage, available: Available) -> Iterator[CheckResult]:
        """Yield what is wrong with the memory of a stage whose model is known."""
        if stage.model is None or not available.checks_files:
            return
        # A worker needs the most if the workers are the fewest.
        fewest = allowed_worlds(stage.config, available.campaign.cluster)[-1]
        try:
            yield from check_memory(stage, available, fewest)
        except ConfigError as error:
            yield CheckResult.of(error, MEMORY)

    def job_fields(self, cfg: TrainConfig, context: Context) -> Mapping[str, Any]:
        """Return what a worker needs of its device, if a plan has traced such a step: a run does not wait for a trace.

        If the recipe leaves the number of workers open, this is the need with the most that it allows: each then needs
        the least, and no start is refused for a world that it does not have. A traced step sees whole images: a stage
        that never does needs less.
        """
        from pipeline.extras.plan.memory import need_if_traced

        if not sees_whole_images(cfg, context.model):
            return {}
        cluster = context.campaign.cluster
        most_workers = allowed_worlds(cfg, cluster)[0]
        need = need_if_traced(cfg, context.model, most_workers, is_gpu=cluster.gpus_per_worker > 0)
        return {} if need is None else {"device_bytes": need.device_bytes}


def sees_whole_images(cfg: TrainConfig, model: ModelConfig) -> bool:
    """Return whether any step of a stage sees whole images, as a traced step does."""
    return has_whole_images(cfg.phases(MANY, model))


def check_memory(stage: Stage, available: Available, fewest: int) -> Iterator[CheckResult]:
    """Raise ConfigError, with what to change, if a stage on `fewest` workers does not fit `cluster.gpu_memory_gb`.

    Without this field nothing is traced, which takes some seconds for a new step. A need that cannot be traced is a
    warning.
    """
    cfg: TrainConfig = stage.config
    model = stage.model
    assert model is not None, "only for stages whose model is known"
    limit = available.campaign.cluster.gpu_memory_gb
    if limit is None or available.campaign.cluster.gpus_per_worker == 0:
        return
    # Only now: they import torch, for which a recipe without this limit does not wait.
    from pipeline.extras.plan.memory import GIB, check_fits
    from pipeline.extras.plan.memory_traces import TraceFailed

    unknown = f"{stage.name}: whether it fits cluster.gpu_memory_gb={limit:g} is not known"
    if not sees_whole_images(cfg, model):
        yield CheckResult("WARN", MEMORY, f"{unknown} with patch dropout")
        return
    try:
        check_fits(cfg, model, fewest, int(limit * GIB), is_gpu=True, name=stage.name)
    except TraceFailed as error:
        yield CheckResult("WARN", MEMORY, f"{unknown}: {error}")
