"""Check that a training stage fits into its devices' memory, before the stage and before each attempt.

1. If `cluster.gpu_memory_gb` is set, raise an error for a stage that does not fit, and suggest changes.
2. If a plan has already traced the stage's step, each worker compares the required memory with the free memory of its
   device.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from data.checks import printable_lines
from data.errors import ConfigError
from jobs.resolved_recipe import MEMORY, Available, Campaign, CheckResult, Context, Stage
from jobs.stages.training import TrainingExtra, allowed_worlds
from jobs.terminal import activity
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


def place_of(stage: Stage, campaign: Campaign) -> str:
    """Return a stage's name and, if several stages train, its place among them: "pretrain, stage 2 of 14"."""
    trained = [other.name for other in campaign.stages if other.kind.trains]
    if len(trained) < 2:
        return stage.name
    return f"{stage.name}, stage {trained.index(stage.name) + 1} of {len(trained)} that train"


def report(text: str) -> None:
    """Show what a check waits for: as the command's activity, or in `run`, which shows none, as a line on stderr."""
    if activity.text:
        activity.now(text)
    else:
        print(printable_lines(text), file=sys.stderr, flush=True)


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
        place = place_of(stage, available.campaign)
        check_fits(
            cfg,
            model,
            fewest,
            int(limit * GIB),
            is_gpu=True,
            name=stage.name,
            report=lambda text: report(f"{place}: {text}"),
        )
    except TraceFailed as error:
        yield CheckResult("WARN", MEMORY, f"{unknown}: {error}")
