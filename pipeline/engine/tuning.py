"""The user's own ds_config.json, which may tune how data moves and nothing else.

1. The file is read as strict JSON; a key that stands there twice is refused, as DeepSpeed refuses it.
2. What Patchline derives itself may stand there with the same value, or as "auto"; a section that is off may too.
3. Of the rest only the keys of TUNING may be set, at the ZeRO stages that read them, and DeepSpeed's own schema
   checks their values.
4. `communication_data_type` may make gradients of precision bf16 be summed in bf16; the start line then says so.
5. Everything else is refused with the recipe key that does the same, or with the nearest name.

In:  {"zero_optimization": {"reduce_bucket_size": 5e7}, "gradient_clipping": "auto"} and our settings at ZeRO 2
Out: our settings with zero_optimization: {"stage": 2, "reduce_bucket_size": 5e7}

`plan` and `run` read the file before anything starts, the workers read it again when they build the engine.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.errors import ConfigError
from models.checks import did_you_mean
from pipeline.config import require

# Keys of zero_optimization and the ZeRO stages at which DeepSpeed 0.19.8 reads them. They decide when and in what
# pieces data moves; test_engine.py trains by two workers with all of them at odd values to the same bits. With
# more workers a bucket's size decides the last bits of sums (docs/design/step.md).
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

# What Patchline has a key for, or deliberately has not. The texts end the sentence "… is refused: ".
ONLY_PATCHLINE = "Patchline writes and reads its own checkpoints (docs/design/checkpoints.md)"
OTHER_SUMS = "it changes how gradients are summed; leave it out"
NOT_SUPPORTED = "Patchline does not support it; leave it out"
INSTEAD: dict[str, str] = {
    "train_batch_size": "write batch_size in the recipe",
    "train_micro_batch_size_per_gpu": "write micro_batch in the recipe",
    "gradient_accumulation_steps": "it follows from batch_size, micro_batch and the workers",
    "gradient_clipping": "write optim.clip in the recipe",
    "steps_per_print": "write log_every in the recipe",
    "fp16": "write precision=bf16 or precision=fp32 in the recipe; fp16 is not supported",
    "bf16": "write precision=bf16 or precision=fp32 in the recipe",
    "bfloat16": "write precision=bf16 or precision=fp32 in the recipe",
    "amp": "write precision=bf16 or precision=fp32 in the recipe",
    "torch_autocast": "write precision=bf16 or precision=fp32 in the recipe",
    "data_types": "masters, moments and their sums are fp32 or as docs/design/checkpoints.md says; leave it out",
    "optimizer": "write the section optim in the recipe",
    "scheduler": "write the section optim.schedule in the recipe",
    "zero_allow_untested_optimizer": "write optim.name in the recipe",
    "zero_force_ds_cpu_optimizer": "write optim.name in the recipe",
    "activation_checkpointing": "write checkpoint_blocks in the recipe",
    "compile": "write compile=true in the recipe",
    "checkpoint": ONLY_PATCHLINE,
    "nebula": ONLY_PATCHLINE,
    "datastates": ONLY_PATCHLINE,
    "communication_data_type": "precision=fp32 sums gradients in fp32; leave it out",
    "prescale_gradients": OTHER_SUMS,
    "gradient_predivide_factor": OTHER_SUMS,
    "gradient_allreduce_op": OTHER_SUMS,
    "seq_parallel_communication_data_type": NOT_SUPPORTED,
    "disable_allgather": NOT_SUPPORTED,
    "managed_gradient_accumulation": NOT_SUPPORTED,
    "tensorboard": "TensorBoard, metrics.jsonl and the log have their numbers from log_every; leave it out",
    "csv_monitor": "metrics.jsonl has its numbers from log_every; leave it out",
    "wandb": "metrics.jsonl has its numbers from log_every; leave it out",
    "comet": "metrics.jsonl has its numbers from log_every; leave it out",
    "wall_clock_breakdown": "the log line and `python -m jobs status` say where the time went; leave it out",
    "memory_breakdown": "the log line says how much memory is held; leave it out",
    "flops_profiler": "the log line says what share of the peak is reached; leave it out",
    "comms_logger": "the log line and `python -m jobs status` say where the time went; leave it out",
    "timers": "the log line has the speed, and DeepSpeed's timer has the host wait twice a micro-batch; leave it out",
    "zero_optimization.stage": "write zero in the recipe",
    "zero_optimization.memory_efficient_linear": "it would replace torch's linear for the whole process; leave it out",
    "zero_optimization.offload_optimizer": NOT_SUPPORTED,
    "zero_optimization.offload_param": NOT_SUPPORTED,
    "zero_optimization.cpu_offload": NOT_SUPPORTED,
    "zero_optimization.cpu_offload_param": NOT_SUPPORTED,
    "zero_optimization.cpu_offload_use_pin_memory": NOT_SUPPORTED,
    "zero_optimization.zenflow": NOT_SUPPORTED,
    "zero_optimization.zero_hpz_partition_size": NOT_SUPPORTED,
    "zero_optimization.zero_quantized_weights": "it rounds weights on their way to 8 bits; leave it out",
    "zero_optimization.zero_quantized_nontrainable_weights": "it rounds weights to 8 bits; leave it out",
    "zero_optimization.zero_quantized_gradients": "it rounds gradients on their way to 4 bits; leave it out",
    "zero_optimization.reduce_scatter": OTHER_SUMS,
    "zero_optimization.round_robin_gradients": "it helps CPU offload alone, which is not supported; leave it out",
    "zero_optimization.allgather_partitions": "DeepSpeed 0.19.8 does not read it; leave it out",
    "zero_optimization.elastic_checkpoint": ONLY_PATCHLINE,
    "zero_optimization.load_from_fp32_weights": ONLY_PATCHLINE,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": ONLY_PATCHLINE,
    "zero_optimization.compute_grad_norm": "clipping and the log line need the norm; leave it out",
}

DERIVED = ("train_batch_size",)  # what DeepSpeed works out of our settings; "auto" is as good as nothing


def merge_file(ours: Mapping[str, Any], path: str, zero: int) -> Mapping[str, Any]:
    """Return our settings with the tuning of the user's file in them.

    Raises ConfigError for a file that cannot be read, for a key that may not be set, at this stage or at all, and for
    a value that DeepSpeed's schema refuses.
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
                f"{where}: {key} is {value!r}\n  expected fp32; or bf16: half the bytes, every sum rounded",
            )
            merged[key] = value
        else:
            refuse(key, value, ours, where)
    zero_section = merged["zero_optimization"]
    from pipeline.engine.deepspeed import check_zero_section  # it imports torch, for which few recipes wait

    try:
        check_zero_section(zero_section)
    except ValueError as error:  # pydantic's ValidationError is one
        first = {"loc": (), "msg": str(error)}
        if hasattr(error, "errors"):
            first = error.errors()[0]
        refused = first["loc"]  # the way to the value that is refused; () where it is the section
        value = zero_section.get(str(refused[-1])) if refused else zero_section
        path_of_key = ".".join(["zero_optimization", *map(str, refused)])
        raise ConfigError(f"{where}: {path_of_key} is {value!r}\n  DeepSpeed says: {first['msg']}") from None
    return merged


def read_json(path: str, where: str) -> Mapping[str, Any]:
    """Return the mapping that a JSON file holds. Raises ConfigError where there is none, or a key twice."""

    def without_doubles(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
        section: dict[str, Any] = {}
        for key, value in pairs:
            require(key not in section, f"{where}: {key} stands there twice\n  expected each key once; remove one")
            section[key] = value
        return section

    try:
        text = Path(path).read_text()
        content = json.loads(text, object_pairs_hook=without_doubles)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}\n  expected a JSON file; deepspeed=null does without") from None
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from None
    require(isinstance(content, dict), f"{where} holds no mapping\n  expected {{}} or keys such as zero_optimization")
    return content


def merge_zero(ours: Mapping[str, Any], section: object, zero: int, where: str) -> Mapping[str, Any]:
    """Return our zero_optimization with the user's tuning; raises ConfigError for any other key."""
    name = "zero_optimization"
    require(
        isinstance(section, Mapping),
        f"{where}: {name} is {section!r}\n  expected a mapping of its keys; leave it out",
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
            f"{where}: {name}.{key} does nothing at zero={zero}\n  expected at zero={readers} alone; leave it out",
        )
        merged[key] = value
    return merged


def changes_nothing(key: str, value: object, ours: Mapping[str, Any]) -> bool:
    """Return whether a key changes nothing: it has our value, is "auto" where we have one, or is off."""
    if key in ours or key in DERIVED:
        # In Python True equals 1; in a file it is a mistake.
        is_same = key in ours and value == ours[key] and isinstance(value, bool) == isinstance(ours[key], bool)
        if is_same or value == "auto":
            return True
    if not isinstance(value, Mapping):
        return False
    if key not in ours:
        return value.get("enabled") is False or value.get("enabled") == "auto"
    # A section of ours with part of what we set, for example bf16: {"enabled": true}.
    settings = ours[key]
    if not isinstance(settings, Mapping):
        return False
    return all(changes_nothing(inner_key, inner_value, settings) for inner_key, inner_value in value.items())


def refuse(key: str, value: object, ours: Mapping[str, Any], where: str, section: str = "") -> None:
    """Raise ConfigError for a key that may not be set: what to write instead, or the nearest name."""
    path = f"{section}.{key}" if section else key
    if key in ours:
        raise ConfigError(
            f"{where}: {path}: your file says {value!r}, the recipe {ours[key]!r}\n"
            f"  remove one of them: {INSTEAD.get(path, NOT_SUPPORTED)}"
        )
    if path in INSTEAD:
        raise ConfigError(f"{where}: {path} may not stand there\n  {INSTEAD[path]}")
    names = ["zero_optimization"]
    if section:
        names = list(TUNING)
    for known in INSTEAD:
        parent, _, name = known.rpartition(".")
        if parent == section:
            names.append(name)
    nearest = did_you_mean(key, names)
    if "did you mean" in nearest:
        raise ConfigError(f"{where}: {path} is no key that may stand there{nearest}\n  rename it, or leave it out")
    # The list of all names would hide what may be set.
    allowed = "zero_optimization with some of " + ", ".join(TUNING)
    raise ConfigError(f"{where}: {path} may not stand there\n  expected {allowed}; leave it out")
