"""Contexts of stages, for tests that run attempts without a recipe."""

from collections.abc import Callable
from pathlib import Path

from jobs.cluster_config import ClusterConfig
from jobs.resolved_recipe import Campaign, Context, Stage
from jobs.stages.training import Pretrain


def pretrain_context(
    run: Path,
    cluster: ClusterConfig,
    *,
    remote: str | None = None,
    log: Callable[[str], None] = print,
    poll: Callable[[int, int], None] = lambda attempt, step: None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Context:
    """Return the context of a stage `pretrain` with default settings and the folder pretrain-1."""
    stage = Stage("pretrain", Pretrain(), Pretrain.defaults, "pretrain", key="1")
    return Context(Campaign(run, cluster, (stage,), remote=remote), stage, log, poll, stop_requested)
