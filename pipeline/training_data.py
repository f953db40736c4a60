"""Derives a stage's length, its sample order, the distribution of a batch over workers, and each worker's loader.

In:  a TrainConfig and the indexes of its data sets
Out: a number of steps; a joined index with its sample order; an Arithmetic; a TrainLoader for some slots of each batch

Example of the distribution: batch_size 4096 on 16 workers with micro_batch 64 gives accumulation 4, and the worker with
rank 3 owns the slots 768 … 1023 of every global batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data.errors import ConfigError
from data.index.index import Index, exclude, join
from data.order import Mixture, Order
from data.remote.config import remote_shards_ahead
from pipeline.config import require
from pipeline.training_config import DataConfig, TrainConfig

if TYPE_CHECKING:
    from data.loader import TrainLoader

BYTES_FP32 = 4
BYTES_BF16 = 2
MAX_SAMPLES = 2**63 - 1  # limit of the sample counter of a stage


# ------------------------------------------------------------------------ steps and batches


@dataclass(frozen=True)
class Arithmetic:
    """The division of a global batch among workers and micro-batches."""

    batch_size: int
    micro_batch: int
    world: int
    accumulation: int

    def slots(self, rank: int) -> range:
        """Return the contiguous slots of the global batch that belong to a worker."""
        # Rounded down at both ends: shares differ by at most one, and every slot belongs to exactly one worker.
        first = rank * self.batch_size // self.world
        stop = (rank + 1) * self.batch_size // self.world
        return range(first, stop)


def batch_arithmetic(cfg: TrainConfig, world: int) -> Arithmetic:
    """Derive the accumulation from batch_size, micro_batch and the number of workers.

    Raises ConfigError with the nearest valid sizes if the batch does not divide evenly, unless `uneven` allows this.
    """
    require(
        cfg.batch_size >= world,
        f"batch_size {cfg.batch_size} is less than the {world} workers, so some workers would get no samples\n"
        f"  use cluster.workers={cfg.batch_size} or fewer",
    )
    unit = cfg.micro_batch * world
    if cfg.batch_size % unit != 0 and not cfg.uneven:
        # The message suggests valid sizes, so that the user need not find them by trial.
        below = cfg.batch_size // unit * unit
        above = below + unit
        # The nearest valid batch may be thousands of times larger than the requested one. Then micro_batch is wrong,
        # and `uneven` would only hide the mistake.
        if below == 0:
            share = cfg.batch_size // world
            remedy = f"set micro_batch={share}"
            if cfg.batch_size % world != 0:
                remedy += f" and batch_size={share * world}"
            raise ConfigError(
                f"micro_batch {cfg.micro_batch} × {world} workers = {unit} is more than batch_size {cfg.batch_size}\n"
                f"  expected a micro_batch of at most {share}, a worker's share of the batch\n"
                f"  {remedy}, or batch_size={above} if that was intended"
            )
        sizes = f"{below} or {above}"
        raise ConfigError(
            f"batch_size {cfg.batch_size} is not a multiple of micro_batch {cfg.micro_batch} × {world} workers = "
            f"{unit}; nearest: {sizes}\n"
            "  change batch_size or micro_batch, or set uneven=true to let workers differ by one sample"
        )
    require(
        not cfg.exact_parts or cfg.exact_parts % world == 0,
        f"exact_parts {cfg.exact_parts} cannot be divided among {world} workers; use 1, 2, 4, … up to "
        f"{cfg.exact_parts} workers",
    )
    # All workers process the same number of micro-batches, because their collectives must match. The largest share
    # determines it.
    largest_share = math.ceil(cfg.batch_size / world)
    accumulation = math.ceil(largest_share / cfg.micro_batch)
    smallest_share = cfg.batch_size // world
    require(
        not cfg.mixup or smallest_share >= 2 * accumulation,
        f"mixup blends images within a micro-batch, but splitting a worker's {smallest_share} images into "
        f"{accumulation} micro-batches leaves some with a single image\n"
        f"  expected micro-batches of 2 images or more on each of {world} workers\n"
        f"  set micro_batch={max(largest_share, 2)} or mixup=0, or use fewer workers",
    )
    return Arithmetic(cfg.batch_size, cfg.micro_batch, world, accumulation)


def steps_of(cfg: TrainConfig, samples: int) -> int:
    """Return a stage's number of optimizer steps: passes · samples / batch, rounded like big_vision's utils.steps.

    `samples` includes the samples of dropped shards, so that dropping a shard does not change the number of steps.
    """
    if cfg.steps is not None:
        return cfg.steps
    assert cfg.passes is not None
    return max(1, round(cfg.passes * samples / cfg.batch_size))


def check_schedule(cfg: TrainConfig, steps: int, key: str) -> None:
    """Raise ConfigError if warm-up and cool-down exceed the stage, or if the stage exceeds the sample counter.

    In the first case, the learning rate would never reach its peak, and the training would be wasted. `key` is the
    stage's name.
    """
    most_steps = MAX_SAMPLES // cfg.batch_size
    require(
        steps <= most_steps,
        f"{key}: {steps:,} steps of {cfg.batch_size:,} images exceed the 64-bit sample counter\n"
        f"  expected at most {most_steps:,} steps\n  set {key}.steps=…, or {key}.passes=…",
    )
    schedule = cfg.optim.schedule
    rising_and_cooling = schedule.warmup_steps + schedule.cooldown_steps
    require(
        (steps, schedule.warmup_steps) != (1, 1),
        f"{key}: the only step is a warm-up step, whose learning rate is 0\n"
        "  expected a step after the warm-up\n"
        f"  set {key}.optim.schedule.warmup_steps=0, or increase the number of steps",
    )
    if rising_and_cooling <= steps:
        return
    message = f"{key}: {schedule.warmup_steps:,} warm-up steps"
    if schedule.cooldown_steps:
        message += f" and {schedule.cooldown_steps:,} of cool-down"
    overrides = f"{key}.optim.schedule.warmup_steps={steps // 10}"
    if schedule.cooldown_steps > steps // 2:
        overrides += f" {key}.optim.schedule.cooldown_steps={steps // 10}"
    raise ConfigError(
        f"{message} exceed the length of the stage, {steps:,} steps\n"
        f"  expected at most {steps:,} steps in total, so that the learning rate reaches optim.lr\n"
        f"  set {overrides}, or increase the number of steps"
    )


def check_end_of_decay(cfg: TrainConfig, key: str) -> None:
    """Raise ConfigError if a linear decay ends above the peak, so that the learning rate would rise.

    `key` is the stage's name."""
    schedule = cfg.optim.schedule
    require(
        schedule.decay != "linear" or schedule.end <= cfg.optim.lr,
        f"{key}.optim.lr {cfg.optim.lr:g} is below {key}.optim.schedule.end {schedule.end:g}, so the learning rate "
        "would rise instead of decay\n  expected a peak rate no lower than the final rate\n"
        f"  set {key}.optim.schedule.end=0, or a larger {key}.optim.lr",
    )


# ------------------------------------------------------------------------ samples


def training_order(cfg: TrainConfig, sets: Sequence[Index]) -> tuple[Index, Order | Mixture]:
    """Build the index of the training data and the order of its samples.

    The index joins the data sets in `cfg.data.sets()`; shards in `cfg.data.drop` are empty in this index.
    """
    # Do this first: a dropped shard counts as empty, and the other shards keep their numbers.
    sets = exclude(sets, cfg.data.drop)
    options: dict[str, Any] = {"seed": cfg.seed, "batch_size": cfg.batch_size, "tail": cfg.data.tail}
    # Unset options use the defaults of data.Order, which depend on the batch size.
    if cfg.data.lanes is not None:
        options["lanes"] = cfg.data.lanes
    if cfg.data.shuffle_block is not None:
        options["shuffle_block"] = cfg.data.shuffle_block
    if not cfg.data.mixture:
        return sets[0], Order(sets[0].shard_samples, **options)
    weights = cfg.data.weights()
    shard_counts = [len(index.shards) for index in sets]
    joined = join(sets, weights)
    return joined, Mixture(joined.shard_samples, groups=shard_counts, weights=weights, **options)


def training_loader(
    cfg: TrainConfig,
    index: Index,
    order: Order | Mixture,
    *,
    image_size: int,
    slots: range,
    start_step: int,
    micro_batch: int,
    accumulation: int | None = None,
    processes: int = 0,
) -> "TrainLoader":
    """Build the loader for these slots of every global batch, starting at `start_step` (counted from 0)."""
    from data.loader import TrainLoader  # imported here, so that recipes can be checked without torch

    return TrainLoader(
        index,
        order,
        image_size=image_size,
        slots=slots,
        micro_batch=micro_batch,
        accumulation=accumulation,
        start_step=start_step,
        seed=cfg.seed,
        augment=cfg.data.augment,
        max_labels=cfg.labels_read,
        processes=processes,
        timeout_s=cfg.data.timeout_s,
        cache=cfg.data.cache,
        decode=cfg.data.decode,
    )


def cache_line(index: Index, order: Order | Mixture, slots: range, step: int, cfg: DataConfig) -> str:
    """Describe whether the upcoming shards fit into a node's cache and, if not, which setting to change."""
    count, size = remote_shards_ahead(index, order, slots, step, cfg.cache)
    last_step = step + cfg.cache.ahead
    limit = cfg.cache.limit_bytes
    line = (
        f"{count} remote shards ({size / 2**30:.3g} GiB) for steps {step} … {last_step}; "
        f"the cache holds {limit / 2**30:.3g} GiB"
    )
    if count:
        line += "; until a shard is downloaded, its samples are read by range requests"
    if size <= limit:
        return line
    return (
        f"{line}: THEY DO NOT FIT and would be downloaded repeatedly; "
        f"set data.cache.limit_bytes={size} or more, or a smaller data.cache.ahead"
    )
