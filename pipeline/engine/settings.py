"""Builds DeepSpeed's settings for a stage; a user's ds_config.json may tune data movement (pipeline/extras/tuning.py).

Gradients are summed over the workers in buckets, which `plan` describes:
    reduction_line({"stage": 2}, parameters=632_045_800, world=8)
    →  "13 buckets of 50 million gradients, 190.7 MiB each; the backward pass waits for each (overlap_comm off)"
"""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from data.files import memory_text
from pipeline.training_config import TrainConfig

Settings: TypeAlias = Mapping[str, Any]  # a DeepSpeed configuration, or a section of one, as JSON values

# Elements. A bucket's memory is allocated whole. DeepSpeed's default of 500 million takes 1.9 GiB in fp32 and holds a
# ViT-H/14 in two buckets, so that nothing could be summed during the backward pass. Buckets of 50 million take 0.2 GiB,
# and there are 13 of them in H/14's backward pass.
MAX_IN_A_BUCKET = 50_000_000


def engine_settings(cfg: TrainConfig, accumulation: int) -> Settings:
    """Return DeepSpeed's settings for a stage; `plan` and `run` also call this, to detect an invalid file early.

    Raises ConfigError if the user's DeepSpeed file sets keys that are not for tuning.
    """
    return deepspeed_config(
        zero=cfg.zero,
        precision=cfg.precision,
        micro_batch=cfg.micro_batch,
        accumulation=accumulation,
        clip=cfg.optim.clip,
        user_file=cfg.deepspeed,
    )


def deepspeed_config(
    *, zero: int, precision: str, micro_batch: int, accumulation: int, clip: float, user_file: str | None
) -> Settings:
    """Return our DeepSpeed settings, combined with the tuning keys in the user's ds_config.json.

    Raises ConfigError if that file sets any other key.
    """
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "steps_per_print": None,
        # Without this DeepSpeed rejects torch's SGD under ZeRO.
        "zero_allow_untested_optimizer": True,
        # DeepSpeed would add bf16 gradients in bf16, rounding at every worker: 0.8 % off over 64, 1.6 % over 256.
        "communication_data_type": "fp32",
        # DeepSpeed's throughput timer, unused here, makes the host wait for the device twice per micro-batch.
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": {"stage": zero},
    }
    if zero == 3:
        # The default replaces torch's linear function in the whole process, even after the engine is closed, which
        # changes the bf16 results of later models.
        ours["zero_optimization"]["memory_efficient_linear"] = False
    if precision == "bf16":
        ours["bf16"] = {"enabled": True}
        # By default DeepSpeed would sum micro-batches in bf16.
        ours["data_types"] = {"grad_accum_dtype": "fp32"}
    if user_file is None:
        return ours
    from data.optional import load_optional  # imported here, because few stages have such a file

    merged: Settings = load_optional("pipeline.extras.tuning:merge_file", "deepspeed")(ours, user_file, zero)
    return merged


def bucket_size(parameters: int) -> int:
    """Return the default bucket size, in elements, for stages whose DeepSpeed file does not set one."""
    return min(parameters, MAX_IN_A_BUCKET)


def reduction_line(zero_optimization: Settings, parameters: int, world: int, exact_parts: int = 0) -> str:
    """Describe the gradient reduction over workers: the buckets, and whether it overlaps with the backward pass.

    `zero_optimization` is the section with that name in `deepspeed_config`. Returns "" for a single worker.
    """
    if world == 1:
        return ""
    if exact_parts:
        return "all gradients at once after the backward pass, in a fixed order (exact_parts)"
    if zero_optimization["stage"] == 0:
        return "all gradients at once after the backward pass (ZeRO 0)"
    size = zero_optimization.get("reduce_bucket_size", bucket_size(parameters))
    buckets = math.ceil(parameters / size)
    pieces = f"{buckets} buckets of {size / 1e6:,.3g} million gradients"
    if buckets == 1:
        pieces = f"one bucket of {parameters / 1e6:,.3g} million gradients"
    when = "the backward pass waits for each (overlap_comm off)"
    overlaps = zero_optimization.get("overlap_comm")
    if overlaps is None:  # by default DeepSpeed overlaps only at ZeRO 3
        overlaps = zero_optimization["stage"] == 3
    if overlaps:
        when = "during the backward pass (overlap_comm on)"
    return f"{pieces}, {memory_text(size * 4)} each; {when}"
