"""Reads the user's ds_config.json, which may tune data movement and nothing else.

1. The file is read as strict JSON; repeated keys are rejected, as by DeepSpeed.
2. Settings that Patchline derives itself may be present with the same value or as "auto"; disabled sections may be
   present too.
3. Otherwise only the keys in TUNING may be set, at the ZeRO stages that read them, and DeepSpeed's schema checks their
   values.
4. `communication_data_type` may cause bf16 gradients to be summed in bf16; the attempt's first log line then says so.
5. Every other key is rejected; the error names the recipe key for the same purpose, or the most similar allowed key.

In:  {"zero_optimization": {"reduce_bucket_size": 5e7}, "gradient_clipping": "auto"} and our settings at ZeRO 2
Out: our settings with zero_optimization: {"stage": 2, "reduce_bucket_size": 5e7}

`plan` and `run` read the file before anything starts; the workers read it again when they build the engine.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.errors import ConfigError
from models.checks import did_you_mean
from pipeline.config import require

# Keys of zero_optimization, and the ZeRO stages at which DeepSpeed 0.19.8 reads them. They decide when data moves and
# in what pieces; test_engine.py trains on two workers with odd values for all of them, with equal bits. With more
# workers the size of a bucket affects the last bits of sums (docs/design/step.md).
TUNING: dict[str, tuple[int, ...]] = {
    "overlap_comm": (1, 2, 3),
    "contiguous_gradients": (1, 2, 3),
    "reduce_bucket_size": (1, 2, 3),
    "allgather_bucket_size": (1, 2),
    "use_multi_rank_bucket_allreduce": (1, 2),
    "sub_group_size": (3,),
    "stage3_prefetch_bucket_size": (3,),
    "stage3_param_persistence_threshold": (3,),
    "stage3_model_persistence_threshold": (3,),
    "stage3_max_live_parameters": (3,),
    "stage3_max_reuse_distance": (3,),
    "stage3_module_granularity_threshold": (3,),
    "stage3_use_all_reduce_for_fetch_params": (3,),
    "stage3_allgather_sequential": (3,),
}

# Keys with an equivalent in the recipe, or deliberately not supported. Each text follows "… is not allowed".
ONLY_PATCHLINE = "Patchline writes and reads its own checkpoints (docs/design/checkpoints.md); remove it"
OTHER_SUMS = "it changes how gradients are summed; remove it"
NOT_SUPPORTED = "Patchline does not support it; remove it"
INSTEAD: dict[str, str] = {
    "train_batch_size": "set batch_size in the recipe",
    "train_micro_batch_size_per_gpu": "set micro_batch in the recipe",
    "gradient_accumulation_steps": "it is derived from batch_size, micro_batch and the number of workers; remove it",
    "gradient_clipping": "set optim.clip in the recipe",
    "steps_per_print": "set log_every in the recipe",
    "fp16": "set precision=bf16 or precision=fp32 in the recipe; fp16 is not supported",
    "bf16": "set precision=bf16 or precision=fp32 in the recipe",
    "bfloat16": "set precision=bf16 or precision=fp32 in the recipe",
    "amp": "set precision=bf16 or precision=fp32 in the recipe",
    "torch_autocast": "set precision=bf16 or precision=fp32 in the recipe",
    "data_types": "data types of optimizer and sums are fixed (docs/design/checkpoints.md); remove it",
    "optimizer": "set the section optim in the recipe",
    "scheduler": "set the section optim.schedule in the recipe",
    "zero_allow_untested_optimizer": "set optim.name in the recipe",
    "zero_force_ds_cpu_optimizer": "set optim.name in the recipe",
    "activation_checkpointing": "set checkpoint_blocks in the recipe",
    "compile": "set compile=true in the recipe",
    "checkpoint": ONLY_PATCHLINE,
    "nebula": ONLY_PATCHLINE,
    "datastates": ONLY_PATCHLINE,
    "communication_data_type": "precision=fp32 sums gradients in fp32; remove it",
    "prescale_gradients": OTHER_SUMS,
    "gradient_predivide_factor": OTHER_SUMS,
    "gradient_allreduce_op": OTHER_SUMS,
    "seq_parallel_communication_data_type": NOT_SUPPORTED,
    "disable_allgather": NOT_SUPPORTED,
    "managed_gradient_accumulation": NOT_SUPPORTED,
    "tensorboard": "TensorBoard, metrics.jsonl and the log have these numbers every log_every steps; remove it",
    "csv_monitor": "metrics.jsonl has these numbers every log_every steps; remove it",
    "wandb": "metrics.jsonl has these numbers every log_every steps; remove it",
    "comet": "metrics.jsonl has these numbers every log_every steps; remove it",
    "wall_clock_breakdown": "the log and `python -m jobs status` show how the time was spent; remove it",
    "memory_breakdown": "metrics.jsonl has the peak memory; remove it",
    "flops_profiler": "metrics.jsonl has the share of the GPU's peak FLOP/s (mfu); remove it",
    "comms_logger": "the log and `python -m jobs status` show how the time was spent; remove it",
    "timers": "the log has the speed, and DeepSpeed's timer would make the host wait twice per micro-batch; remove it",
    "zero_optimization.stage": "set zero in the recipe",
    "zero_optimization.memory_efficient_linear": "it would replace torch's linear in the whole process; remove it",
    "zero_optimization.offload_optimizer": NOT_SUPPORTED,
    "zero_optimization.offload_param": NOT_SUPPORTED,
    "zero_optimization.cpu_offload": NOT_SUPPORTED,
    "zero_optimization.cpu_offload_param": NOT_SUPPORTED,
    "zero_optimization.cpu_offload_use_pin_memory": NOT_SUPPORTED,
    "zero_optimization.zenflow": NOT_SUPPORTED,
    "zero_optimization.zero_hpz_partition_size": NOT_SUPPORTED,
    "zero_optimization.zero_quantized_weights": "it rounds transferred weights to 8 bits; remove it",
    "zero_optimization.zero_quantized_nontrainable_weights": "it rounds weights to 8 bits; remove it",
    "zero_optimization.zero_quantized_gradients": "it rounds transferred gradients to 4 bits; remove it",
    "zero_optimization.reduce_scatter": OTHER_SUMS,
    "zero_optimization.round_robin_gradients": "it only helps CPU offload, which is not supported; remove it",
    "zero_optimization.allgather_partitions": "DeepSpeed 0.19.8 does not read it; remove it",
    "zero_optimization.elastic_checkpoint": ONLY_PATCHLINE,
    "zero_optimization.load_from_fp32_weights": ONLY_PATCHLINE,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": ONLY_PATCHLINE,
    "zero_optimization.compute_grad_norm": "clipping and the log need the norm; remove it",
}

DERIVED = ("train_batch_size",)  # DeepSpeed derives it from our settings; "auto" is the same as omitting it


def merge_file(ours: Mapping[str, Any], path: str, zero: int) -> Mapping[str, Any]:
    """Return our settings combined with the tuning keys in the user's file.

    Raises ConfigError if the file cannot be read, if a key must not be set (at this stage or at all), or if DeepSpeed's
    schema rejects a value.
    """
    where = f"deepspeed file {path}"
    user = read_json(path, where)
    merged = dict(ours)
    for key, value in user.items():
        if key == "zero_optimization":
            merged[key] = merge_zero(ours[key], value, zero, where)
        elif changes_nothing(key, value, ours):
            continue
        elif key == "communication_data_type" and "bf16" in ours:
            require(
                value in ("fp32", "bf16"),
                f"{where}: {key} is {value!r}\n  expected fp32, or bf16, which halves the traffic but rounds every sum",
            )
            merged[key] = value
        else:
            refuse(key, value, ours, where)
    zero_section = merged["zero_optimization"]
    from pipeline.engine.deepspeed import check_zero_section  # imported here: it imports torch, which few recipes need

    try:
        check_zero_section(zero_section)
    except ValueError as error:  # pydantic's ValidationError is a subclass
        first = {"loc": (), "msg": str(error)}
        if hasattr(error, "errors"):
            first = error.errors()[0]
        refused = first["loc"]  # path to the rejected value; () for the section itself
        value = zero_section.get(str(refused[-1])) if refused else zero_section
        path_of_key = ".".join(["zero_optimization", *map(str, refused)])
        raise ConfigError(f"{where}: {path_of_key} is {value!r}\n  DeepSpeed says: {first['msg']}") from None
    return merged


def read_json(path: str, where: str) -> Mapping[str, Any]:
    """Read a JSON file that contains a mapping. Raises ConfigError for other contents, or if a key is repeated."""

    def reject_repeated_keys(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
        section: dict[str, Any] = {}
        for key, value in pairs:
            require(
                key not in section, f"{where}: {key} appears twice\n  expected each key once; remove one of the two"
            )
            section[key] = value
        return section

    try:
        text = Path(path).read_text()
        content = json.loads(text, object_pairs_hook=reject_repeated_keys)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}\n  expected the path of a JSON file, or deepspeed=null") from None
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from None
    require(
        isinstance(content, dict),
        f"{where} does not contain a mapping\n  expected {{}}, or a mapping with keys such as zero_optimization",
    )
    return content


def merge_zero(ours: Mapping[str, Any], section: object, zero: int, where: str) -> Mapping[str, Any]:
    """Return our zero_optimization section combined with the user's tuning keys. Raises ConfigError for other keys."""
    name = "zero_optimization"
    require(
        isinstance(section, Mapping),
        f"{where}: {name} is {section!r}\n  replace this entry by a mapping, or remove it",
    )
    assert isinstance(section, Mapping)
    merged = dict(ours)
    for key, value in section.items():
        if key not in TUNING:
            if not changes_nothing(key, value, ours):
                refuse(key, value, ours, where, name)
            continue
        stages = TUNING[key]
        readers = " or ".join(str(stage) for stage in stages)
        require(
            zero in stages,
            f"{where}: {name}.{key} has no effect at zero={zero}\n"
            f"  remove this key, or set zero={readers} in the recipe",
        )
        merged[key] = value
    return merged


def changes_nothing(key: str, value: object, ours: Mapping[str, Any]) -> bool:
    """Return whether a key has no effect: it has our value, is "auto" and we set it, or is a disabled section."""
    if key in ours or key in DERIVED:
        # In Python, True == 1; in a JSON file, a boolean in place of a number is a mistake.
        is_same = key in ours and value == ours[key] and isinstance(value, bool) == isinstance(ours[key], bool)
        if is_same or value == "auto":
            return True
    if not isinstance(value, Mapping):
        return False
    if key not in ours:
        return value.get("enabled") is False or value.get("enabled") == "auto"
    # A section with a part of our settings, for example bf16: {"enabled": true}.
    settings = ours[key]
    if not isinstance(settings, Mapping):
        return False
    return all(changes_nothing(inner_key, inner_value, settings) for inner_key, inner_value in value.items())


def refuse(key: str, value: object, ours: Mapping[str, Any], where: str, section: str = "") -> None:
    """Raise ConfigError for a key that must not be set; the error names a replacement or the most similar key."""
    path = f"{section}.{key}" if section else key
    if key in ours:
        raise ConfigError(
            f"{where}: {path} is {value!r} in your file, but {ours[key]!r} in the recipe\n"
            f"  remove one of the two: {INSTEAD.get(path, NOT_SUPPORTED)}"
        )
    if path in INSTEAD:
        raise ConfigError(f"{where}: {path} is not allowed\n  {INSTEAD[path]}")
    names = ["zero_optimization"]
    if section:
        names = list(TUNING)
    for known in INSTEAD:
        parent, _, name = known.rpartition(".")
        if parent == section:
            names.append(name)
    nearest = did_you_mean(key, names)
    if "did you mean" in nearest:
        raise ConfigError(f"{where}: unknown key {path}{nearest}\n  rename or remove it")
    # Listing all known names would hide the few allowed ones.
    allowed = "only zero_optimization, with any of the keys " + ", ".join(TUNING)
    raise ConfigError(f"{where}: {path} is not allowed\n  remove it; expected {allowed}")
