"""What to change where a step does not fit the memory of its device, best first, each with what is needed then.

1. A smaller micro-batch: costs little as long as products stay large, and gives the same steps.
2. Recomputed blocks: each costs a second forward pass of its own, at most a third more in all.
3. A higher ZeRO stage: costs communication in every step.

In:  a stage that needs 95 GiB where 79 are there
Out: ["pretrain.micro_batch=32 (needs 52.1 GiB)", "pretrain.checkpoint_blocks=9 (needs 78.6 GiB)",
      "pretrain.zero=3 (needs 77.0 GiB)"]
"""

from collections.abc import Iterator
from dataclasses import replace

from data.errors import ConfigError
from data.files import memory_text
from models import ModelConfig
from pipeline.arithmetic import batch_arithmetic
from pipeline.plan.memory import blocks_of, fewest_blocks, memory_need
from pipeline.training_config import TrainConfig

LAST_STAGE = 3  # of ZeRO


def check_fits(cfg: TrainConfig, model: ModelConfig, world: int, limit: int, *, is_gpu: bool, name: str) -> None:
    """Raise ConfigError with what to change where a worker needs more than `limit` bytes of its device; TraceFailed."""
    needed = memory_need(cfg, model, world, is_gpu=is_gpu).device_bytes
    if needed <= limit:
        return
    remedies = list(remedies_for(cfg, model, world, limit, is_gpu=is_gpu, name=name))
    way_out = "type one of these: " + "; ".join(remedies)
    if not remedies:
        utmost = together(cfg, model, world, is_gpu=is_gpu, name=name)
        way_out = f"neither micro_batch nor checkpoint_blocks nor zero is enough; {utmost}"
    raise ConfigError(
        f"{name}: a worker needs {memory_text(needed)} of its device's memory, {memory_text(limit)} are there\n"
        f"  {way_out}"
    )


def remedies_for(
    cfg: TrainConfig, model: ModelConfig, world: int, limit: int, *, is_gpu: bool, name: str
) -> Iterator[str]:
    """Iterate the changes of the stage `name` that are each enough alone, as they are typed, best first."""

    def needed(changed: TrainConfig) -> int:
        return memory_need(changed, model, world, is_gpu=is_gpu).device_bytes

    for micro_batch in smaller_micro_batches(cfg, world):
        size = needed(replace(cfg, micro_batch=micro_batch))
        if size <= limit:
            yield f"{name}.micro_batch={micro_batch} (needs {memory_text(size)})"
            break

    def recomputing(blocks: int) -> TrainConfig:
        return replace(cfg, checkpoint_blocks=blocks, activation_gb=None)

    blocks = fewest_blocks(lambda count: needed(recomputing(count)), blocks_of(model), limit)
    if blocks:
        yield f"{blocks_text(cfg, blocks, name)} (needs {memory_text(needed(recomputing(blocks)))})"

    for zero in range(cfg.zero + 1, LAST_STAGE + 1):
        size = needed(replace(cfg, zero=zero))
        if size <= limit:
            yield f"{name}.zero={zero} (needs {memory_text(size)})"
            break


def blocks_text(cfg: TrainConfig, blocks: int, name: str) -> str:
    """Return what is typed for a number of recomputed blocks: it takes the place of `activation_gb`."""
    typed = f"{name}.checkpoint_blocks={blocks}"
    if cfg.activation_gb is None:
        return typed
    return f"{typed} {name}.activation_gb=null"


def smaller_micro_batches(cfg: TrainConfig, world: int) -> Iterator[int]:
    """Iterate the smaller micro-batches that the batch can be cut into, the largest first."""
    for micro_batch in range(cfg.micro_batch - 1, 0, -1):
        try:
            batch_arithmetic(replace(cfg, micro_batch=micro_batch), world)
        except ConfigError:
            continue
        yield micro_batch


def together(cfg: TrainConfig, model: ModelConfig, world: int, *, is_gpu: bool, name: str) -> str:
    """Say what is needed with all three changes at their utmost."""
    smallest = list(smaller_micro_batches(cfg, world))[-1:] or [cfg.micro_batch]
    utmost = replace(
        cfg, micro_batch=smallest[0], checkpoint_blocks=blocks_of(model), activation_gb=None, zero=LAST_STAGE
    )
    size = memory_need(utmost, model, world, is_gpu=is_gpu).device_bytes
    return (
        f"{name}.micro_batch={utmost.micro_batch} {blocks_text(cfg, utmost.checkpoint_blocks, name)} "
        f"{name}.zero={LAST_STAGE} together need {memory_text(size)}"
    )
