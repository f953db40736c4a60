"""DeepSpeed's settings for a stage; the user's own ds_config.json may tune how data moves (tuning.py).

Gradients are summed over the workers in buckets; `plan` says in which:
    reduction_line({"stage": 2}, parameters=632_045_800, world=8)
    →  "13 buckets of 50 million gradients, 190.7 MiB each; the backward pass waits for each (overlap_comm off)"
"""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from data.files import memory_text
from pipeline.training_config import TrainConfig

Settings: TypeAlias = Mapping[str, Any]  # a DeepSpeed configuration, or a section of one, as JSON has it

# Elements. A bucket's memory is set apart whole: DeepSpeed's default of 500 million takes 1.9 GiB in fp32 and holds a
# ViT-H/14 in two, so that nothing could be summed while the backward pass goes on. 50 million take 0.2 GiB, and are a
# thirteenth of H/14's backward pass.
MOST_IN_A_BUCKET = 50_000_000


def engine_settings(cfg: TrainConfig, accumulation: int) -> Settings:
    """Return what DeepSpeed is told for a stage; `plan` and `run` ask too, so that a wrong file stops there.

    Raises ConfigError where the user's DeepSpeed file holds more than tuning.
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
    """Return our DeepSpeed settings, with the tuning of the user's own ds_config.json in them.

    Raises ConfigError where that file sets anything else.
    """
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "steps_per_print": None,
        # DeepSpeed refuses torch's SGD under ZeRO without this.
        "zero_allow_untested_optimizer": True,
        # DeepSpeed would add bf16 gradients in bf16, which rounds at every worker: 0.8 % off over 64, 1.6 % over 256.
        "communication_data_type": "fp32",
        # DeepSpeed's speed, which is not read here, has the host wait for the device twice a micro-batch.
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": {"stage": zero},
    }
    if zero == 3:
        # The default replaces torch's linear function for the whole process, even after the engine is closed, and
        # changes the bf16 results of models that come later.
        ours["zero_optimization"]["memory_efficient_linear"] = False
    if precision == "bf16":
        ours["bf16"] = {"enabled": True}
        # Left to itself DeepSpeed would add up micro-batches in bf16.
        ours["data_types"] = {"grad_accum_dtype": "fp32"}
    if user_file is None:
        return ours
    from pipeline.engine.tuning import merge_file  # few stages have such a file

    return merge_file(ours, user_file, zero)


def bucket_size(parameters: int) -> int:
    """Return the elements of a bucket where the user's own DeepSpeed file does not say it."""
    return min(parameters, MOST_IN_A_BUCKET)


def reduction_line(zero_optimization: Settings, parameters: int, world: int, exact_parts: int = 0) -> str:
    """Return in what pieces, and when, the gradients of so many parameters are summed over the workers.

    `zero_optimization` is that section of `engine.deepspeed_config`. Returns "" where there is one worker.
    """
    if world == 1:
        return ""
    if exact_parts:
        return "all gradients at once behind the backward pass, in a fixed order (exact_parts)"
    if zero_optimization["stage"] == 0:
        return "all gradients at once behind the backward pass (ZeRO 0)"
    size = zero_optimization.get("reduce_bucket_size", bucket_size(parameters))
    buckets = math.ceil(parameters / size)
    pieces = f"{buckets} buckets of {size / 1e6:,.3g} million gradients"
    if buckets == 1:
        pieces = f"one bucket of {parameters / 1e6:,.3g} million gradients"
    when = "the backward pass waits for each (overlap_comm off)"
    overlaps = zero_optimization.get("overlap_comm")
    if overlaps is None:  # left open, DeepSpeed overlaps at ZeRO 3 alone
        overlaps = zero_optimization["stage"] == 3
    if overlaps:
        when = "while the backward pass goes on (overlap_comm on)"
    return f"{pieces}, {memory_text(size * 4)} each; {when}"
