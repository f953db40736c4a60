"""On how many workers a stage may run: the numbers that `cluster.workers` leaves and that its batch allows.

    batch_size 16, micro_batch 4, cluster.workers {least: 1, most: 8}
    allowed_worlds(cfg, cluster)  →  (4, 2, 1), the largest first

The supervisor takes one of them at each attempt, and the batch is the same for all.
"""

from typing import Any

from data.errors import ConfigError
from jobs.cluster_config import ClusterConfig
from pipeline.start import engine_settings
from pipeline.training_config import TrainConfig, batch_arithmetic


def allowed_worlds(stage_config: Any, cluster: ClusterConfig) -> tuple[int, ...]:
    """Return the worlds on which a stage may run, the largest first; there is one at least.

    Raises ConfigError where the stage's batch or its DeepSpeed file allows none, with the nearest that it allows.
    """
    asked = range(cluster.most, cluster.least - 1, -1)
    # A few-shot probe has no batch that is to be shared by all.
    if not isinstance(stage_config, TrainConfig):
        return tuple(asked)
    worlds = [world for world in asked if batch_fits(stage_config, world)]
    if not worlds and cluster.least < cluster.most:
        raise none_fits(stage_config, cluster)

    # The stage's DeepSpeed file may refuse some of them. Its settings depend on the accumulation alone. Of a single
    # number that the batch refuses, the batch's own message says more.
    refusals: dict[int, ConfigError | None] = {}  # by accumulation
    allowed = []
    for world in worlds or [cluster.most]:
        accumulation = batch_arithmetic(stage_config, world).accumulation
        if accumulation not in refusals:
            refusals[accumulation] = None
            try:
                engine_settings(stage_config, accumulation)
            except ConfigError as error:
                refusals[accumulation] = error
        if refusals[accumulation] is None:
            allowed.append(world)
    for refusal in refusals.values():
        if not allowed and refusal is not None:
            raise refusal
    return tuple(allowed)


def batch_fits(cfg: TrainConfig, world: int) -> bool:
    """Tell whether the batch can be shared by so many workers."""
    try:
        batch_arithmetic(cfg, world)
    except ConfigError:
        return False
    return True


def none_fits(cfg: TrainConfig, cluster: ClusterConfig) -> ConfigError:
    """Return the error of a range of which the batch allows no number; it names the nearest below and above."""
    largest = cfg.batch_size if cfg.uneven else cfg.batch_size // cfg.micro_batch
    below = next((world for world in range(cluster.least - 1, 0, -1) if batch_fits(cfg, world)), None)
    above = next((world for world in range(cluster.most + 1, largest + 1) if batch_fits(cfg, world)), None)
    remedies = []
    if below is not None:
        remedies.append(f"cluster.workers.least={below}")
    if above is not None:
        remedies.append(f"cluster.workers.most={above}")
    parts = f" and exact_parts of {cfg.exact_parts}" if cfg.exact_parts else ""
    return ConfigError(
        f"no number of workers from {cluster.least} to {cluster.most} can share batch_size {cfg.batch_size} "
        f"in micro-batches of {cfg.micro_batch}{parts}\n"
        f"  type {' or '.join(remedies) or 'another batch_size or micro_batch'}"
    )


def in_words(worlds: tuple[int, ...]) -> str:
    """Return "2", "4, 2 or 1", or of many "64, 32, 16 … 1"."""
    if len(worlds) > 6:
        return f"{worlds[0]}, {worlds[1]}, {worlds[2]} … {worlds[-1]}"
    *others, last = [str(world) for world in worlds]
    if not others:
        return last
    return f"{', '.join(others)} or {last}"
