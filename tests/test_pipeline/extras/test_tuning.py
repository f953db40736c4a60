"""The user's ds_config.json: what it may contain; anything else stops plan and run before they start."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from data.errors import ConfigError
from jobs.__main__ import main
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline.engine.settings import deepspeed_config
from pipeline.extras.tuning import TUNING
from tests.support import ranks


def settings_with(text: str, folder: Path, *, zero: int = 2, precision: str = "fp32") -> dict[str, Any]:
    file = folder / "ds.json"
    file.write_text(text)
    return deepspeed_config(
        zero=zero, precision=precision, micro_batch=4, accumulation=2, clip=1.0, user_file=str(file)
    )


def test_tuning_is_merged_and_derived_settings_may_be_auto(tmp_path: Path):
    merged = settings_with(
        '{"zero_optimization": {"overlap_comm": false, "stage": "auto"}, "gradient_clipping": "auto", '
        '"train_batch_size": "auto", "gradient_accumulation_steps": 2, "fp16": {"enabled": false}}',
        tmp_path,
    )
    assert merged["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    assert (merged["gradient_clipping"], merged["gradient_accumulation_steps"]) == (1.0, 2)
    assert "fp16" not in merged
    assert "train_batch_size" not in merged


@pytest.mark.parametrize(
    "content",
    [{"bf16": {"enabled": "auto"}}, {"bf16": {"enabled": True}}, {"bf16": {}}, {"communication_data_type": "auto"}],
)
def test_auto_and_values_equal_to_the_recipe_change_nothing(content: dict[str, Any], tmp_path: Path):
    plain = settings_with("{}", tmp_path, precision="bf16")
    assert settings_with(json.dumps(content), tmp_path, precision="bf16") == plain
    with pytest.raises(ConfigError, match=r"is {'enabled': False} in your file, but {'enabled': True"):
        settings_with('{"bf16": {"enabled": false}}', tmp_path, precision="bf16")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"fp16": {"enabled": True}}, "fp16 is not allowed\n  set precision=bf16 or precision=fp32"),
        ({"bf16": {"enabled": True}}, "bf16 is not allowed\n  set precision=bf16"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast is not allowed\n  set precision=bf16"),
        ({"optimizer": {"type": "Adam"}}, "optimizer is not allowed\n  set the section optim"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler is not allowed\n  set the section optim.schedule"),
        ({"train_batch_size": 64}, "train_batch_size is not allowed\n  set batch_size"),
        ({"prescale_gradients": True}, "changes how gradients are summed"),
        ({"zero_optimizaton": {}}, "did you mean 'zero_optimization'?"),
        ({"zero_optimization": {"overlap_com": True}}, "unknown key zero_optimization.overlap_com"),
        ({"zero_optimization": {"overlap_com": True}}, "did you mean 'overlap_comm'?"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "Patchline does not support it"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "rounds transferred gradients"),
        (
            {"zero_optimization": {"stage": 3}},
            "is 3 in your file, but 2 in the recipe\n  remove one of the two: set zero",
        ),
        (
            {"zero_optimization": {"stage3_max_live_parameters": 1}},
            "has no effect at zero=2\n  remove this key, or set zero=3",
        ),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "reduce_bucket_size is 0\n  DeepSpeed says: "),
        ({"zero_optimization": {"overlap_comm": "perhaps"}}, "overlap_comm is 'perhaps'\n  DeepSpeed says: "),
        ({"zero_optimization": True}, "zero_optimization is True\n  replace this entry by a mapping"),
        ({"gradient_accumulation_steps": 3}, "is 3 in your file, but 2 in the recipe"),
        (
            {"communication_data_type": "bf16"},
            "'fp32' in the recipe\n  remove one of the two: precision=fp32 sums gradients",
        ),
        (
            {"timers": {"throughput": {"enabled": True}}},
            "DeepSpeed's timer would make the host wait twice per micro-batch",
        ),
        ({"xyzzy": 1}, "xyzzy is not allowed\n  remove it; expected only zero_optimization, with any of the keys"),
        ([], "does not contain a mapping"),
    ],
)
def test_other_settings_are_refused_with_a_replacement(content, message, tmp_path: Path):
    with pytest.raises(ConfigError) as refusal:
        settings_with(json.dumps(content), tmp_path)
    assert message in str(refusal.value)
    assert "ds.json" in str(refusal.value)


def test_type_of_sums_can_be_chosen_only_with_precision_bf16(tmp_path: Path):
    chosen = settings_with('{"communication_data_type": "bf16"}', tmp_path, precision="bf16")
    assert chosen["communication_data_type"] == "bf16"
    with pytest.raises(ConfigError, match="communication_data_type is 'fp16'\n  expected fp32, or bf16"):
        settings_with('{"communication_data_type": "fp16"}', tmp_path, precision="bf16")


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"a": 1, "a": 2}', "a appears twice"), ("{", "is not valid JSON")],
)
def test_file_that_is_not_strict_json_is_refused(text: str, message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        settings_with(text, tmp_path)


def test_missing_file_is_refused_with_a_remedy(tmp_path: Path):
    with pytest.raises(
        ConfigError, match="No such file or directory\n  expected the path of a JSON file, or deepspeed=null"
    ):
        deepspeed_config(
            zero=2, precision="fp32", micro_batch=1, accumulation=1, clip=1.0, user_file=str(tmp_path / "none.json")
        )


def test_deepspeed_still_has_every_key_that_may_be_set():
    names = set()
    for name, field in DeepSpeedZeroConfig.model_fields.items():
        names.add(field.alias or name)
    assert set(TUNING) <= names


@pytest.mark.parametrize(
    ("key", "value", "stages"),
    [("contiguous_gradients", True, [1, 2, 3]), ("allgather_bucket_size", 9, [1, 2]), ("sub_group_size", 9, [3])],
)
def test_key_is_accepted_only_at_stages_that_read_it(key: str, value: object, stages: list[int], tmp_path: Path):
    taken = []
    for zero in (0, 1, 2, 3):
        with contextlib.suppress(ConfigError):
            settings_with(json.dumps({"zero_optimization": {key: value}}), tmp_path, zero=zero)
            taken.append(zero)
    assert taken == stages


@pytest.mark.parametrize("command", ["plan", "run"])
def test_plan_and_run_both_refuse_before_anything_starts(command: str, recipe: Path, capsys):
    file = recipe.parent / "ds.json"
    file.write_text('{"fp16": {"enabled": true}}')
    assert main([command, str(recipe), f"pretrain.deepspeed={file}"]) == 78
    error = capsys.readouterr().err
    assert "pretrain: deepspeed file" in error
    assert "set precision=bf16 or precision=fp32" in error
    assert not list((recipe.parent / "run").glob("*/checkpoints/step-*"))


# Odd values for every key that a user's DeepSpeed file may set, by ZeRO stage.
ODD_VALUES: dict[str, Any] = {
    "overlap_comm": True,
    "contiguous_gradients": False,
    "reduce_bucket_size": 50,
    "allgather_bucket_size": 40,
    "use_multi_rank_bucket_allreduce": False,
    "sub_group_size": 100,
    "stage3_prefetch_bucket_size": 30,
    "stage3_param_persistence_threshold": 0,
    "stage3_model_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_module_granularity_threshold": 10,
    "stage3_use_all_reduce_for_fetch_params": True,
    "stage3_allgather_sequential": True,
}


@pytest.mark.parametrize(("zero", "precision"), [(1, "bf16"), (2, "bf16"), (3, "fp32")])
def test_allowed_settings_of_a_deepspeed_file_change_no_bit(zero, precision, tmp_path: Path):
    assert set(ODD_VALUES) == set(TUNING)
    section = {}
    for key, value in ODD_VALUES.items():
        if zero in TUNING[key]:
            section[key] = value
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": section}))
    results: dict[str, Any] = {}
    for name, settings in (("plain", {}), ("tuned", {"deepspeed": str(file)})):
        results[name] = run_worker_group(
            ranks.go_back_and_repeat,
            {"zero": zero, "precision": precision, **settings},
            cluster=ClusterConfig(workers=2, backend="processes"),
            name=name,
            directory=tmp_path,
        )
    plain = results["plain"]
    tuned = results["tuned"]
    assert tuned["bucket"] == 50
    assert tuned["end"] == plain["end"]
    assert tuned["losses"] == plain["losses"]
    assert tuned["back"]
    assert tuned["repeats"]
    assert tuned["unharmed"]
