"""Check that a training stage fits into its devices' memory, before the stage and before each attempt.

1. If `cluster.gpu_memory_gb` is set, raise an error for a stage that does not fit, and suggest changes.
2. If a plan has already traced the stage's step, each worker compares the required memory with the free memory of its
   device.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from data.errors import ConfigError
from jobs.resolved_recipe import MEMORY, Available, CheckResult, Context, Stage
from jobs.stages.training import TrainingExtra, allowed_worlds
from models import ModelConfig
from pipeline.training_config import TrainConfig, has_whole_images

MANY_STEPS = 1_000_000  # number of steps large enough for each phase of the schedule to occur


class MemoryCheck(TrainingExtra):
    """Compares a stage's memory needs with the memory of its devices."""

    def checks(self, stage: Stage, available: Available) -> Iterator[CheckResult]:
        """Yield a stage's memory problems, if its model is known."""
        if stage.model is None or not available.checks_files:
            return
        # Check the fewest workers, with which each worker needs the most memory.
        fewest = allowed_worlds(stage.config, available.campaign.cluster)[-1]
        try:
            yield from check_memory(stage, available, fewest)
        except ConfigError as error:
            yield CheckResult.of(error, MEMORY)

    def job_fields(self, cfg: TrainConfig, context: Context) -> Mapping[str, Any]:
        """Return the device memory that a worker needs, if a plan has already traced this step; otherwise {}.

        If the recipe allows a range of worker counts, use the largest: each worker then needs the least memory, so no
        start is refused wrongly. Return {} for a stage that never uses whole images, because it needs less memory than
        the traced step.
        """
        from pipeline.extras.plan.memory import need_if_traced

        if not sees_whole_images(cfg, context.model):
            return {}
        cluster = context.campaign.cluster
        most_workers = allowed_worlds(cfg, cluster)[0]
        need = need_if_traced(cfg, context.model, most_workers, is_gpu=cluster.gpus_per_worker > 0)
        return {} if need is None else {"device_bytes": need.device_bytes}


def sees_whole_images(cfg: TrainConfig, model: ModelConfig) -> bool:
    """Return whether any step of a stage trains on whole images, as the traced step does."""
    return has_whole_images(cfg.phases(MANY_STEPS, model))


def check_memory(stage: Stage, available: Available, fewest: int) -> Iterator[CheckResult]:
    """Raise ConfigError, with suggestions, if a stage needs more than `cluster.gpu_memory_gb` on `fewest` workers.

    If there is no limit, nothing is traced, because a trace takes several seconds. A failed trace is reported as a
    warning.
    """
    cfg: TrainConfig = stage.config
    model = stage.model
    assert model is not None, "called only for stages with a known model"
    limit = available.campaign.cluster.gpu_memory_gb
    if limit is None or available.campaign.cluster.gpus_per_worker == 0:
        return
    # Imported only if there is a limit, because these modules import torch, which takes seconds.
    from pipeline.extras.plan.memory import GIB, check_fits
    from pipeline.extras.plan.memory_traces import TraceFailed

    unknown = f"{stage.name}: cannot determine whether it fits into cluster.gpu_memory_gb={limit:g}"
    if not sees_whole_images(cfg, model):
        yield CheckResult("WARN", MEMORY, f"{unknown} with patch dropout")
        return
    try:
        check_fits(cfg, model, fewest, int(limit * GIB), is_gpu=True, name=stage.name)
    except TraceFailed as error:
        yield CheckResult("WARN", MEMORY, f"{unknown}: {error}")
