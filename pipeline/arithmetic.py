"""What follows from a trained stage's config: how batches fall on workers, steps, recomputed blocks, bytes.

In:  batch_size 4096, micro_batch 64, 16 workers
Out: accumulation 4; the worker of rank 3 owns the slots 768 … 1023 of every global batch
"""

import math
from dataclasses import dataclass

import models
from data.errors import ConfigError
from models import ModelConfig
from models.cost import block_activation_bytes
from pipeline.config import require
from pipeline.optimization.optimizer import STATE
from pipeline.training_config import TrainConfig
from pipeline.zero.buckets import bucket_size

BYTES_FP32 = 4
BYTES_BF16 = 2


@dataclass(frozen=True)
class Arithmetic:
    """Says how a global batch falls on the workers."""

    batch_size: int
    micro_batch: int
    world: int
    accumulation: int

    def slots(self, rank: int) -> range:
        """Return the contiguous slots of the global batch that a worker owns."""
        # Rounded down at both ends: shares differ by one at most, and every slot has exactly one owner.
        first = rank * self.batch_size // self.world
        stop = (rank + 1) * self.batch_size // self.world
        return range(first, stop)


def batch_arithmetic(cfg: TrainConfig, world: int) -> Arithmetic:
    """Derive the accumulation from batch_size, micro_batch and the world.

    Raises ConfigError with the nearest sizes that fit where they do not divide, unless `uneven` allows it.
    """
    require(
        cfg.batch_size >= world,
        f"batch_size {cfg.batch_size} is less than {world} workers: some would have no sample\n"
        f"  use cluster.workers={cfg.batch_size} or fewer",
    )
    unit = cfg.micro_batch * world
    if cfg.batch_size % unit != 0 and not cfg.uneven:
        # The message names sizes that work, so that nobody has to find them by trial.
        below = cfg.batch_size // unit * unit
        above = below + unit
        # The nearest batch may be thousands of times as large as the one that was asked for: then the mistake is in
        # the micro-batch, and `uneven` would only hide it.
        if below == 0:
            share = cfg.batch_size // world
            remedy = f"set micro_batch={share}"
            if cfg.batch_size % world != 0:
                remedy += f" and batch_size={share * world}"
            raise ConfigError(
                f"micro_batch {cfg.micro_batch} × {world} workers = {unit} is more than batch_size {cfg.batch_size}\n"
                f"  expected a micro_batch of a worker's share of the batch, {share}, or less\n"
                f"  {remedy}, or batch_size={above} if that is meant"
            )
        sizes = f"{below} or {above}"
        raise ConfigError(
            f"batch_size {cfg.batch_size} is not a multiple of micro_batch {cfg.micro_batch} × {world} workers = "
            f"{unit}; nearest: {sizes}\n"
            "  set batch_size or micro_batch to fit, or uneven=true to let workers differ by one sample"
        )
    require(
        not cfg.exact_parts or cfg.exact_parts % world == 0,
        f"exact_parts {cfg.exact_parts} cannot be shared by {world} workers; use 1, 2, 4, … up to {cfg.exact_parts}",
    )
    # All workers take equally many micro-batches, since their collectives must pair up: the largest share counts.
    largest_share = math.ceil(cfg.batch_size / world)
    accumulation = math.ceil(largest_share / cfg.micro_batch)
    return Arithmetic(cfg.batch_size, cfg.micro_batch, world, accumulation)


def steps_of(cfg: TrainConfig, samples: int) -> int:
    """Return the optimizer steps of the stage: passes · samples / batch, rounded, as big_vision utils.steps does.

    `samples` holds those of dropped shards too, so that a stage which drops a shard keeps its number of steps.
    """
    if cfg.steps is not None:
        return cfg.steps
    assert cfg.passes is not None
    return max(1, round(cfg.passes * samples / cfg.batch_size))


def recomputed_blocks(cfg: TrainConfig, model: ModelConfig) -> int:
    """Return `checkpoint_blocks`, or the fewest that fit `activation_gb`. Raises ConfigError where none does."""
    if cfg.activation_gb is None:
        return cfg.checkpoint_blocks
    if not isinstance(model, models.ViTConfig):
        raise ConfigError(
            "activation_gb counts the activations of transformers; a ResNet's are not known: leave it out"
        )
    limit_bytes = int(cfg.activation_gb * 2**30)
    try:
        return models.recomputed_blocks_for(model, cfg.micro_batch, limit_bytes, bytes_of_a_number(cfg))
    except ValueError as error:
        raise ConfigError(f"activation_gb: {error}") from None


def bytes_of_a_number(cfg: TrainConfig) -> int:
    """Return the bytes of a number in the weights and activations that compute."""
    return BYTES_BF16 if cfg.precision == "bf16" else BYTES_FP32


def exact_gradient_bytes(cfg: TrainConfig, world: int) -> float:
    """Return the bytes of gradients that `exact_parts` holds at most for each parameter.

    They are a micro-batch's gradient in the precision of computing and, in fp32, its part's sum, one sum for each level
    of the worker's subtree, and the optimizer's share.
    """
    levels = (cfg.exact_parts // world).bit_length() - 1
    sums = BYTES_FP32 * (1 + levels)
    optimizer_share = BYTES_FP32 / world
    return bytes_of_a_number(cfg) + sums + optimizer_share


def bucket_bytes(cfg: TrainConfig) -> int:
    """Return the bytes for each element of the bucket in which DeepSpeed sums gradients over the workers.

    A `reduce_bucket_size` or a type of the sums in the user's own DeepSpeed file is not looked at.
    """
    # Stage 0 sums in place. Exact mode does not use the bucket, which only stage 3 sets apart in any case.
    if cfg.zero == 0 or (cfg.exact_parts and cfg.zero < 3):
        return 0
    # Stage 2 collects gradients as they are, and sums a copy in fp32.
    if cfg.zero == 2 and cfg.precision == "bf16":
        return BYTES_BF16 + BYTES_FP32
    return BYTES_FP32


def memory_estimate(cfg: TrainConfig, model: ModelConfig, world: int) -> tuple[int, int]:
    """Estimate the bytes a worker needs for (weights, gradients and optimizer state, activations of a micro-batch).

    ZeRO 1 splits masters and moments over the workers, 2 also gradients, 3 also weights (Rajbhandari et al. 2020,
    figure 1). With the gradients counts the bucket in which they are summed over the workers. Activations are
    `models.cost`'s count. What comes on top: gathered weights of ZeRO 3, other buffers of libraries, allocators.
    """
    # Bytes a parameter: weights, gradients, and what is fp32 for each of masters, moments and average.
    weights = float(bytes_of_a_number(cfg))
    gradients = float(BYTES_FP32)
    fp32_copies = len(STATE[cfg.optim.name])
    # At stage 0 the weights themselves are the masters.
    if cfg.zero > 0:
        fp32_copies += 1
    if cfg.polyak:
        fp32_copies += 1
    state = float(BYTES_FP32 * fp32_copies)

    if cfg.zero >= 3:
        weights /= world
    # Exact mode keeps whole gradients on every worker, whatever the stage.
    if cfg.exact_parts:
        gradients = exact_gradient_bytes(cfg, world)
    elif cfg.zero >= 2:
        gradients /= world
    if cfg.zero >= 1:
        state /= world
    parameters = models.parameters_of(model)
    bucket = bucket_bytes(cfg) * bucket_size(parameters)
    states = round(parameters * (weights + gradients + state)) + bucket

    # Activations of a ResNet are not known: the count is of a transformer's block.
    if not isinstance(model, models.ViTConfig):
        return states, 0
    whole, recomputed = block_activation_bytes(model, bytes_of_a_number(cfg))
    recomputed_count = min(recomputed_blocks(cfg, model), model.depth)
    per_image = (model.depth - recomputed_count) * whole + recomputed_count * recomputed
    # In the backward pass one recomputed block at a time has all its activations again.
    if recomputed_count > 0:
        per_image += whole
    return states, cfg.micro_batch * per_image
