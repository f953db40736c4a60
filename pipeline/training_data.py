"""The data of a trained stage: which samples in which order, the loader of a worker's part, and its need of the cache.

In:  a TrainConfig and the indexes of its sets
Out: one joined index with its order, a TrainLoader of some slots of every batch
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from data.index.index import Index, exclude, join
from data.order import Mixture, Order
from data.remote.config import remote_ahead
from pipeline.training_config import DataConfig, TrainConfig

if TYPE_CHECKING:
    from data.loader import TrainLoader


def training_order(cfg: TrainConfig, sets: Sequence[Index]) -> tuple[Index, Order | Mixture]:
    """Return the set that is trained on and the order of its samples.

    It is the sets of `cfg.data.sets()` joined to one, where the shards of `cfg.data.drop` are empty.
    """
    # Before anything else: a dropped shard counts as empty, and the numbers of the others stay as they were.
    sets = exclude(sets, cfg.data.drop)
    options: dict[str, Any] = {"seed": cfg.seed, "batch_size": cfg.batch_size, "tail": cfg.data.tail}
    # What the recipe leaves open has its default in data.Order, which depends on the batch size.
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
    """Return the loader of these slots of every global batch from a step on, counted from 0, as the config says."""
    from data.loader import TrainLoader  # not above: a recipe is checked without torch

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
    """Say whether the shards that these slots read ahead fit a node's cache, and what to type where they do not."""
    count, size = remote_ahead(index, order, slots, step, cfg.cache)
    last_step = step + cfg.cache.ahead
    limit = cfg.cache.limit_bytes
    line = (
        f"{count} shards, {size / 2**30:.3g} GiB, for steps {step} … {last_step}; "
        f"the cache keeps {limit / 2**30:.3g} GiB"
    )
    if count:
        line += "; until a shard is there, its samples are read by range"
    if size <= limit:
        return line
    return (
        f"{line}: THEY DO NOT FIT and are fetched again and again; "
        f"type data.cache.limit_bytes={size} or more, or a smaller data.cache.ahead"
    )
