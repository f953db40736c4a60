"""On how many workers a stage may run: the numbers that `cluster.workers` leaves and that its batch allows.

    batch_size 16, micro_batch 4, cluster.workers {least: 1, most: 8}
    allowed_worlds(cfg, cluster)  →  (4, 2, 1), the largest first

The supervisor takes one of them at each attempt, and the batch is the same for all.
"""

from data.errors import ConfigError
from jobs.cluster_config import ClusterConfig
from pipeline.engine.settings import engine_settings
from pipeline.training_config import TrainConfig
from pipeline.training_data import batch_arithmetic


def allowed_worlds(cfg: TrainConfig, cluster: ClusterConfig) -> tuple[int, ...]:
    """Return the worlds on which a stage may train, the largest first; there is one at least.

    Raises ConfigError where the stage's batch or its DeepSpeed file allows none, with the nearest that it allows.
    """
    worlds = [world for world in cluster.worlds if batch_fits(cfg, world)]
    # Of a range without any the nearest below and above are named. Of a single number the batch's message says more.
    if not worlds and cluster.least < cluster.most:
        remedies = []
        for world in range(cluster.least - 1, 0, -1):
            if batch_fits(cfg, world):
                remedies.append(f"cluster.workers.least={world}")
                break
        largest = cfg.batch_size if cfg.uneven else cfg.batch_size // cfg.micro_batch
        for world in range(cluster.most + 1, largest + 1):
            if batch_fits(cfg, world):
                remedies.append(f"cluster.workers.most={world}")
                break
        parts = f" and exact_parts of {cfg.exact_parts}" if cfg.exact_parts else ""
        raise ConfigError(
            f"no number of workers from {cluster.least} to {cluster.most} can share batch_size {cfg.batch_size} "
            f"in micro-batches of {cfg.micro_batch}{parts}\n"
            f"  type {' or '.join(remedies) or 'another batch_size or micro_batch'}"
        )

    # The stage's DeepSpeed file may refuse some of them. Its settings depend on the accumulation alone.
    refusals: dict[int, ConfigError | None] = {}  # by accumulation
    allowed = []
    for world in worlds or [cluster.most]:
        accumulation = batch_arithmetic(cfg, world).accumulation
        if accumulation not in refusals:
            refusals[accumulation] = None
            try:
                engine_settings(cfg, accumulation)
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
