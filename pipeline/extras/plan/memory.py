"""What a worker will need of its device's memory and of its node's, from a trace of the very step that it will take.

    need = memory_need(cfg, model, world=8, is_gpu=True)
    need.device_bytes     what lives at the fullest moment: weights, state, gradients, buckets, activations, images
    need.loader           of the node's memory: the loader's batches
    need.snapshot         of the node's memory: the copy of the state that a save makes

The step that is traced sees whole images, of which patch dropout may leave out a part (token_dropping.py).
It holds what torch allocates. On a GPU the context of CUDA, workspaces of its libraries and what the allocator cannot
use because it is in pieces come on top.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import models
from data.errors import ConfigError
from data.files import DISK_BLOCK, memory_text
from models import ModelConfig
from pipeline.checkpoints.saver import checkpoint_bytes
from pipeline.extras.plan.memory_traces import Kind, cached_trace, step_to_trace, trace_of
from pipeline.training_config import TrainConfig
from pipeline.training_data import batch_arithmetic

GIB = 2**30
LAST_STAGE = 3  # of ZeRO
AHEAD = 2  # micro-batches that a decoding process may be ahead (data.loader.TrainLoader)
LABELS = 8  # bytes of a label
MOST_BYTES_OF_RGB = 3  # of a pixel

WORDS = {
    Kind.STATES: "weights and optimizer",
    Kind.ACTIVATIONS: "activations",
    Kind.GRADIENTS: "gradients and buckets",
    Kind.GATHERED: "gathered weights",
    Kind.IMAGES: "images",
}


@dataclass(frozen=True)
class MemoryNeed:
    """Says what a worker needs: bytes."""

    phase: str  # of the step, at its fullest moment
    parts: dict[Kind, int]  # what lives then on the device
    start: int  # what lives on the device at most while the engine is built
    loader: int  # of the host
    snapshot: int  # of the host
    recomputed: int  # blocks

    @property
    def device_bytes(self) -> int:
        """Return what the device must hold, whenever most lives."""
        return max(self.start, sum(self.parts.values()))


def memory_need(cfg: TrainConfig, model: ModelConfig, world: int, *, is_gpu: bool) -> MemoryNeed:
    """Return what each of `world` workers needs. Raises TraceFailed."""
    recomputed = recomputed_blocks(cfg, model)
    arithmetic = batch_arithmetic(cfg, world)
    step = step_to_trace(cfg, model, world, arithmetic.accumulation, recomputed, is_gpu=is_gpu)
    trace = trace_of(step)
    moment = trace.fullest(cfg.micro_batch)
    rows, columns = model.image_size
    images = cfg.micro_batch * MOST_BYTES_OF_RGB * rows * columns
    labels = cfg.micro_batch * LABELS * cfg.data.max_labels
    places = max(1, cfg.data.processes * AHEAD)
    if cfg.data.processes and not is_gpu:
        # Each process has a place more, for a micro-batch that is lent instead of being copied out. One of them is lent
        # at a time, and counted as the step's.
        places += cfg.data.processes - 1
    loader = places * (images + labels)
    # On a GPU the micro-batch that is trained on lies in the host's memory too.
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


def snapshot_bytes(cfg: TrainConfig, model: ModelConfig, world: int, *, is_gpu: bool) -> int:
    """Return the host memory of the copy of its state that each of `world` workers makes for a save."""
    # As `pipeline.checkpoints.saver.host_memory` asks for it.
    size = checkpoint_bytes(cfg, model) // world + DISK_BLOCK
    if is_gpu:
        return pinned_bytes(size)
    return size


def pinned_bytes(size: int) -> int:
    """Return what so many bytes of pinned memory take of the host: the next power of two.

    Torch rounds them up, so that it finds what was freed by its size (`CachingHostAllocatorImpl::allocate` in
    aten/src/ATen/core/CachingHostAllocator.h).
    """
    return 1 << (size - 1).bit_length()


def need_if_traced(cfg: TrainConfig, model: ModelConfig, world: int, *, is_gpu: bool) -> MemoryNeed | None:
    """Return `memory_need` if the step has been traced before; None otherwise, and for a compiled step."""
    if cfg.compile:
        return None
    accumulation = batch_arithmetic(cfg, world).accumulation
    recomputed = recomputed_blocks(cfg, model)
    if cached_trace(step_to_trace(cfg, model, world, accumulation, recomputed, is_gpu=is_gpu)) is None:
        return None
    return memory_need(cfg, model, world, is_gpu=is_gpu)


def blocks_of(model: ModelConfig) -> int:
    """Return how many blocks of a model can recompute their activations."""
    if isinstance(model, models.ViTConfig):
        return model.depth
    return sum(model.units)


def recomputed_blocks(cfg: TrainConfig, model: ModelConfig) -> int:
    """Return how many blocks recompute their activations."""
    return min(cfg.checkpoint_blocks, blocks_of(model))


def fewest_blocks(needed: Callable[[int], float], most: int, limit: float) -> int | None:
    """Return the fewest blocks to recompute with which `needed` is within the limit; None where all are not enough.

    Each block more costs a second forward pass of its own; each look costs a trace. So the next look is where a
    straight line between the two nearest would cross the limit.
    """
    # The most that does not fit, and the fewest that do.
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
        middle = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
        middle_needed = needed(middle)
        if middle_needed <= limit:
            high = middle
            high_needed = middle_needed
        else:
            low = middle
            low_needed = middle_needed
    return high


def describe_need(need: MemoryNeed, *, is_gpu: bool) -> str:
    """Return the parts of a need, the largest first."""
    parts = sorted(need.parts.items(), key=lambda part: -part[1])
    words = [f"{memory_text(size)} {WORDS[kind]}" for kind, size in parts if size > 0]
    line = f"{memory_text(need.device_bytes)} a worker, most in {need.phase}: {' + '.join(words)}"
    if need.start > sum(need.parts.values()):
        line = f"{memory_text(need.device_bytes)} a worker, most at the start; later {' + '.join(words)}"
    host = f"{memory_text(need.snapshot)} for the copy that a save makes, {memory_text(need.loader)} for batches"
    if is_gpu:
        return f"{line}, with flash attention, without CUDA's own; of the host {host}"
    return f"{line}; beside it {host}"


# ------------------------------------------------------------------------------------------------ what does not fit


def check_fits(cfg: TrainConfig, model: ModelConfig, world: int, limit: int, *, is_gpu: bool, name: str) -> None:
    """Raise ConfigError with what to type where a worker of the stage `name` needs more than `limit` bytes.

    Each change that is offered is enough alone; where none is, the error has the need with all at their utmost. Also
    raises TraceFailed.
    """

    def needed(**changes: Any) -> int:
        return memory_need(replace(cfg, **changes), model, world, is_gpu=is_gpu).device_bytes

    needed_now = needed()
    if needed_now <= limit:
        return

    # The best change first: the largest micro-batch that fits.
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
        size = needed(zero=zero)
        if size <= limit:
            remedies.append(f"{name}.zero={zero} (needs {memory_text(size)})")
            break

    way_out = "type one of these: " + "; ".join(remedies)
    if not remedies:
        smallest = min(smaller_micro_batches(cfg, world), default=cfg.micro_batch)
        size = needed(micro_batch=smallest, checkpoint_blocks=all_blocks, zero=LAST_STAGE)
        way_out = (
            f"neither micro_batch nor checkpoint_blocks nor zero is enough; {name}.micro_batch={smallest} "
            f"{name}.checkpoint_blocks={all_blocks} {name}.zero={LAST_STAGE} together need {memory_text(size)}"
        )
    raise ConfigError(
        f"{name}: a worker needs {memory_text(needed_now)} of its device's memory, {memory_text(limit)} are there\n"
        f"  {way_out}"
    )


def smaller_micro_batches(cfg: TrainConfig, world: int) -> Iterator[int]:
    """Iterate the smaller micro-batches that the batch can be cut into, the largest first."""
    for micro_batch in range(cfg.micro_batch - 1, 0, -1):
        try:
            batch_arithmetic(replace(cfg, micro_batch=micro_batch), world)
        except ConfigError:
            continue
        yield micro_batch
