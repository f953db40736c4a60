"""Builds DeepSpeed's settings for a stage; a user's file may tune data movement (pipeline/extras/tuning.py)."""

from collections.abc import Mapping
from typing import Any, TypeAlias

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
