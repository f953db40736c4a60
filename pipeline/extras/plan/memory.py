"""Estimate a worker's device memory and host memory, from a trace of its training step.

    need = memory_need(cfg, model, world=8, is_gpu=True)
    need.device_bytes     peak: weights, optimizer state, gradients, buckets, activations, images
    need.loader           host memory for the loader's batches
    need.snapshot         host memory for the copy of the state that a save makes

The traced step uses full images; with token dropping, a step needs less memory (token_dropping.py). The estimate covers
the memory that torch allocates. On a GPU, the CUDA context, library workspaces and fragmentation need additional
memory.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import models
from data.errors import ConfigError
from data.files import DISK_BLOCK, memory_text
from models import ModelConfig
from pipeline.checkpoints.saver import HEADER_BYTES, checkpoint_bytes
from pipeline.extras.plan.memory_traces import Kind, cached_trace, silent, step_to_trace, trace_of
from pipeline.training_config import TrainConfig
from pipeline.training_data import batch_arithmetic

GIB = 2**30
LAST_STAGE = 3  # highest ZeRO stage
AHEAD = 2  # micro-batches that a decoding process prefetches (data.loader.TrainLoader)
LABELS = 8  # bytes per label, an int64
MAX_BYTES_OF_RGB = 3  # bytes per pixel
BYTES_OF = {"bf16": 2, "fp32": 4}  # bytes of a number

WORDS = {
    Kind.STATES: "weights and optimizer",
    Kind.ACTIVATIONS: "activations",
    Kind.GRADIENTS: "gradients and buckets",
    Kind.GATHERED: "gathered weights",
    Kind.IMAGES: "images",
}


@dataclass(frozen=True)
class MemoryNeed:
    """Memory that a worker needs, in bytes."""

    phase: str  # phase of the step with the peak of device memory
    parts: dict[Kind, int]  # device memory at the peak of the step, by kind
    start: int  # peak of device memory while the engine is built
    loader: int  # host memory of the loader in bytes
    snapshot: int  # host memory of checkpoint snapshots in bytes
    recomputed: int  # number of blocks with activation checkpointing

    @property
    def device_bytes(self) -> int:
        """Return the peak device memory, over startup and steps."""
        return max(self.start, sum(self.parts.values()))


def memory_need(
    cfg: TrainConfig,
    model: ModelConfig,
    world: int,
    *,
    is_gpu: bool,
    report: Callable[[str], None] = silent,
) -> MemoryNeed:
    """Return the memory that each of `world` workers needs. Raises TraceFailed if the step cannot be traced.

    `report` receives what the call waits for, because a new trace takes seconds to minutes.
    """
    recomputed = recomputed_blocks(cfg, model)
    arithmetic = batch_arithmetic(cfg, world)
    step = step_to_trace(cfg, model, world, arithmetic.accumulation, recomputed, is_gpu=is_gpu)
    trace = trace_of(step, report)
    moment = trace.peak(cfg.micro_batch)
    rows, columns = model.image_size
    images = cfg.micro_batch * MAX_BYTES_OF_RGB * rows * columns
    labels = cfg.micro_batch * LABELS * cfg.data.max_labels
    places = max(1, cfg.data.processes * AHEAD)
    if cfg.data.processes and not is_gpu:
        # Each process has one more slot, for a micro-batch that is used in place instead of being copied. Only one is
        # in use at a time, and it is counted as part of the step.
        places += cfg.data.processes - 1
    loader = places * (images + labels)
    # With a GPU, the current micro-batch also has a copy in host memory.
    if is_gpu:
        loader += pinned_bytes(images) + pinned_bytes(labels)
    return MemoryNeed(
        phase=moment.phase,
        parts=dict(zip(Kind, moment.parts(cfg.micro_batch), strict=True)),
        start=trace.start,
        loader=loader,
        snapshot=snapshot_bytes(cfg, model, world, is_gpu=is_gpu),
        recomputed=recomputed,
    )


def least_bytes(cfg: TrainConfig, model: ModelConfig, world: int) -> int:
    """Return a lower bound of a worker's device memory, without a trace: its weights, optimizer state and gradients.

    0 for a user's DeepSpeed config, which may move these tensors to the host.
    """
    if cfg.deepspeed is not None:
        return 0
    parameters = models.parameters_of(model)
    number = BYTES_OF[cfg.precision] * parameters  # bytes of all weights, or of all gradients, in the step's precision
    state = checkpoint_bytes(cfg, model) - HEADER_BYTES  # fp32 masters, moments and averages
    # In fp32, the weights may be their own masters.
    if cfg.precision == "fp32":
        state -= number
    # ZeRO 1 divides the optimizer state between the workers, ZeRO 2 also the gradients, and ZeRO 3 also the weights.
    weights = number // world if cfg.zero == LAST_STAGE else number
    gradients = number // world if cfg.zero > 1 or cfg.exact_parts else number
    return weights + gradients + (state // world if cfg.zero or cfg.exact_parts else state)


def snapshot_bytes(cfg: TrainConfig, model: ModelConfig, world: int, *, is_gpu: bool) -> int:
    """Return the host memory that each of `world` workers needs to copy its state for a save."""
    # The same size as in `pipeline.checkpoints.saver.host_memory`.
    size = checkpoint_bytes(cfg, model) // world + DISK_BLOCK
    if is_gpu:
        return pinned_bytes(size)
    return size


def pinned_bytes(size: int) -> int:
    """Return the host memory that torch allocates for `size` bytes of pinned memory: the next power of two.

    Torch rounds up so that it can reuse freed blocks (`CachingHostAllocatorImpl::allocate` in
    aten/src/ATen/core/CachingHostAllocator.h).
    """
    return 1 << (size - 1).bit_length()


def need_if_traced(cfg: TrainConfig, model: ModelConfig, world: int, *, is_gpu: bool) -> MemoryNeed | None:
    """Return `memory_need` if the step's trace is cached; return None otherwise, or if the step is compiled."""
    if cfg.compile:
        return None
    accumulation = batch_arithmetic(cfg, world).accumulation
    recomputed = recomputed_blocks(cfg, model)
    if cached_trace(step_to_trace(cfg, model, world, accumulation, recomputed, is_gpu=is_gpu)) is None:
        return None
    return memory_need(cfg, model, world, is_gpu=is_gpu)


def blocks_of(model: ModelConfig) -> int:
    """Return the number of blocks of a model that support activation checkpointing."""
    if isinstance(model, models.ViTConfig):
        return model.depth
    return sum(model.units)


def recomputed_blocks(cfg: TrainConfig, model: ModelConfig) -> int:
    """Return the number of blocks with activation checkpointing."""
    return min(cfg.checkpoint_blocks, blocks_of(model))


def fewest_blocks(needed: Callable[[int], float], most: int, limit: float) -> int | None:
    """Return a small number of blocks to recompute so that `needed(blocks)` is within the limit, or None.

    More recomputed blocks cost training time, and each call of `needed` costs a trace of several seconds. The search is
    therefore a bisection with linear interpolation. It ends as soon as the interpolation gives no smaller number, which
    is then the smallest if each block saves the same memory.
    """
    # Largest number that does not fit, and smallest number that fits.
    low = 0
    low_needed = needed(0)
    if low_needed <= limit:
        return 0
    high = most
    high_needed = needed(most)
    if high_needed > limit:
        return None
    while high - low > 1:
        share = (low_needed - limit) / (low_needed - high_needed)
        middle = max(low + math.ceil(share * (high - low)), low + 1)
        if middle >= high:
            break
        middle_needed = needed(middle)
        if middle_needed <= limit:
            high = middle
            high_needed = middle_needed
        else:
            low = middle
            low_needed = middle_needed
    return high


def describe_need(need: MemoryNeed, *, is_gpu: bool) -> str:
    """Describe a memory need in one line, with the largest part first."""
    parts = sorted(need.parts.items(), key=lambda part: -part[1])
    words = [f"{memory_text(size)} {WORDS[kind]}" for kind, size in parts if size > 0]
    line = f"{memory_text(need.device_bytes)} per worker, peak in {need.phase}: {' + '.join(words)}"
    if need.start > sum(need.parts.values()):
        line = f"{memory_text(need.device_bytes)} per worker, peak at startup; later {' + '.join(words)}"
    host = f"{memory_text(need.snapshot)} for checkpoint snapshots, {memory_text(need.loader)} for batches"
    if is_gpu:
        return f"{line} (with flash attention, without the CUDA context); host memory: {host}"
    # Measured as PSS during digits with two workers (54e5832, 2026-11-28): 206 MiB per worker, including its share of
    # the libraries, 307 MiB for the fork server, 495 MiB for the driver.
    return (
        f"tensors of {line}; in addition {host}, about 200 MiB for Python and its libraries, and 800 MiB once per "
        "machine for the fork server and the driver"
    )


# ------------------------------------------------------------------------------------------------ what does not fit


def check_fits(
    cfg: TrainConfig,
    model: ModelConfig,
    world: int,
    limit: int,
    *,
    is_gpu: bool,
    name: str,
    report: Callable[[str], None] = silent,
) -> None:
    """Raise ConfigError with suggested overrides if a worker of stage `name` needs more than `limit` bytes.

    Each suggested override is sufficient by itself. If no single override is, the error states the memory need with all
    of them at their extreme values. If the lower bound exceeds the limit already, nothing is traced. `report` receives
    what the call waits for. Raises TraceFailed if the step cannot be traced.
    """
    least = least_bytes(cfg, model, world)
    if least > limit:
        ways = []
        for zero in range(cfg.zero + 1, LAST_STAGE + 1):
            size = least_bytes(replace(cfg, zero=zero), model, world)
            if world > 1 and size <= limit:
                ways.append(f"{name}.zero={zero} (needs at least {memory_text(size)})")
        ways.append("more workers with ZeRO 3, GPUs with more memory, or a smaller model")
        raise ConfigError(
            f"{name}: a worker needs at least {memory_text(least)} of device memory for weights, gradients and "
            f"optimizer state alone, but only {memory_text(limit)} is free\n  use {'; or '.join(ways)}"
        )

    def needed(**changes: Any) -> int:
        return memory_need(replace(cfg, **changes), model, world, is_gpu=is_gpu, report=report).device_bytes

    needed_now = needed()
    if needed_now <= limit:
        return

    # The best remedy first: the largest micro-batch that fits.
    remedies = []
    for micro_batch in smaller_micro_batches(cfg, world):
        size = needed(micro_batch=micro_batch)
        if size <= limit:
            remedies.append(f"{name}.micro_batch={micro_batch} (needs {memory_text(size)})")
            break
    # The fewest recomputed blocks.
    all_blocks = blocks_of(model)
    blocks = fewest_blocks(lambda count: needed(checkpoint_blocks=count), all_blocks, limit)
    if blocks:
        size = needed(checkpoint_blocks=blocks)
        remedies.append(f"{name}.checkpoint_blocks={blocks} (needs {memory_text(size)})")
    # The next ZeRO stage that fits.
    for zero in range(cfg.zero + 1, LAST_STAGE + 1):
        if least_bytes(replace(cfg, zero=zero), model, world) > limit:
            continue
        size = needed(zero=zero)
        if size <= limit:
            remedies.append(f"{name}.zero={zero} (needs {memory_text(size)})")
            break

    way_out = "set one of these: " + "; ".join(remedies)
    if not remedies:
        smallest = min(smaller_micro_batches(cfg, world), default=cfg.micro_batch)
        size = needed(micro_batch=smallest, checkpoint_blocks=all_blocks, zero=LAST_STAGE)
        way_out = (
            f"micro_batch, checkpoint_blocks and zero are not sufficient; even {name}.micro_batch={smallest} "
            f"{name}.checkpoint_blocks={all_blocks} {name}.zero={LAST_STAGE} together need {memory_text(size)}"
        )
    raise ConfigError(
        f"{name}: a worker needs {memory_text(needed_now)} of device memory, but only {memory_text(limit)} is free\n"
        f"  {way_out}"
    )


def smaller_micro_batches(cfg: TrainConfig, world: int) -> Iterator[int]:
    """Yield the smaller micro-batch sizes that divide the batch evenly, largest first."""
    for micro_batch in range(cfg.micro_batch - 1, 0, -1):
        try:
            batch_arithmetic(replace(cfg, micro_batch=micro_batch), world)
        except ConfigError:
            continue
        yield micro_batch
