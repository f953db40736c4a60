"""What follows from a trained stage's config: how batches fall on workers, steps, recomputed blocks, bytes."""

from dataclasses import dataclass
from typing import Any

import models
from data.errors import ConfigError
from models.cost import block_activation_bytes
from pipeline.config import require
from pipeline.optimizer import STATE
from pipeline.training_config import TrainConfig


@dataclass(frozen=True)
class Arithmetic:
    """How a global batch falls on the workers."""

    batch_size: int
    micro_batch: int
    world: int
    accumulation: int

    def slots(self, rank: int) -> range:
        """The contiguous slots of the global batch that a worker owns."""
        return range(rank * self.batch_size // self.world, (rank + 1) * self.batch_size // self.world)


def batch_arithmetic(cfg: TrainConfig, world: int) -> Arithmetic:
    """Accumulation from batch_size, micro_batch and the world.

    Raises ConfigError with the nearest sizes that fit where they do not divide, unless `uneven` allows it.
    """
    unit = cfg.micro_batch * world
    require(
        cfg.batch_size >= world,
        f"batch_size {cfg.batch_size} is less than {world} workers: some would have no sample\n"
        f"  use cluster.workers={cfg.batch_size} or fewer",
    )
    if cfg.batch_size % unit and not cfg.uneven:
        below, above = cfg.batch_size // unit * unit, -(-cfg.batch_size // unit) * unit
        sizes = " or ".join(str(size) for size in (below, above) if size)
        raise ConfigError(
            f"batch_size {cfg.batch_size} is not a multiple of micro_batch {cfg.micro_batch} × {world} workers = "
            f"{unit}; nearest: {sizes}\n"
            "  set batch_size or micro_batch to fit, or uneven=true to let workers differ by one sample"
        )
    require(
        not cfg.exact_parts or cfg.exact_parts % world == 0,
        f"exact_parts {cfg.exact_parts} cannot be shared by {world} workers; use 1, 2, 4, … up to {cfg.exact_parts}",
    )
    share = -(-cfg.batch_size // world)
    return Arithmetic(cfg.batch_size, cfg.micro_batch, world, -(-share // cfg.micro_batch))


def steps_of(cfg: TrainConfig, samples: int) -> int:
    """Optimizer steps of the stage (big_vision utils.steps: passes · samples / batch, rounded); `data.drop` counts."""
    if cfg.steps is not None:
        return cfg.steps
    assert cfg.passes is not None
    return max(1, round(cfg.passes * samples / cfg.batch_size))


def recomputed_blocks(cfg: TrainConfig, model: Any) -> int:
    """`checkpoint_blocks`, or the fewest that fit `activation_gb`. Raises ConfigError where none does."""
    if cfg.activation_gb is None:
        return cfg.checkpoint_blocks
    numbers = 2 if cfg.precision == "bf16" else 4
    try:
        return models.recomputed_blocks_for(model, cfg.micro_batch, int(cfg.activation_gb * 2**30), numbers)
    except ValueError as error:
        raise ConfigError(f"activation_gb: {error}") from None


def exact_gradient_bytes(cfg: TrainConfig, world: int) -> float:
    """Bytes a parameter that `exact_parts` holds at most: a micro-batch's gradient, its part's and, in fp32, one for
    each level of the worker's subtree, and the optimizer's share."""
    levels = (cfg.exact_parts // world).bit_length() - 1
    return (2 if cfg.precision == "bf16" else 4) + 4 * (1 + levels) + 4 / world


def memory_estimate(cfg: TrainConfig, model: Any, world: int) -> tuple[int, int]:
    """Bytes a worker needs for (weights, gradients and optimizer state, activations of a micro-batch).

    ZeRO 1 splits masters and moments over the workers, 2 also gradients, 3 also weights (Rajbhandari et al. 2020,
    figure 1). Activations are `models.cost`'s count; buffers of libraries and allocators come on top.
    """
    numbers = 2 if cfg.precision == "bf16" else 4
    masters = 4 if cfg.zero else 0  # at stage 0 the weights are the masters
    state = masters + 4 * (len(STATE[cfg.optim.name]) + bool(cfg.polyak))
    gradients = exact_gradient_bytes(cfg, world) if cfg.exact_parts else 4
    shares = (numbers, gradients, state)  # weights, gradients, masters and moments: bytes a parameter
    split = (cfg.zero >= 3, cfg.zero >= 2 and not cfg.exact_parts, cfg.zero >= 1)
    bytes_each = sum(size / (world if parted else 1) for size, parted in zip(shares, split, strict=True))
    states = round(models.parameters_of(model) * bytes_each)
    if not hasattr(model, "depth"):
        return states, 0
    whole, recomputed = block_activation_bytes(model, numbers)
    blocks = min(recomputed_blocks(cfg, model), model.depth)
    kept = (model.depth - blocks) * whole + blocks * recomputed + (whole if blocks else 0)
    return states, cfg.micro_batch * kept
