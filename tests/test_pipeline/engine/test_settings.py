"""DeepSpeed's settings of a stage."""

import pytest

from pipeline.engine.settings import bucket_size, deepspeed_config

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_summed_in_fp32_and_the_stage_is_the_recipes(zero: int, precision: str) -> None:
    settings = deepspeed_config(zero=zero, precision=precision, micro_batch=4, accumulation=2, clip=1.0, user_file=None)
    assert settings["zero_optimization"]["stage"] == zero
    assert settings["communication_data_type"] == "fp32"
    assert settings.get("data_types", {}).get("grad_accum_dtype", "fp32") == "fp32"
    assert settings.get("bf16", {}).get("enabled", False) == (precision == "bf16")
    assert settings["train_micro_batch_size_per_gpu"] == 4
    assert settings["gradient_accumulation_steps"] == 2


def test_a_bucket_has_at_most_50_million_gradients() -> None:
    assert bucket_size(632_045_800) == 50_000_000
    assert bucket_size(22_000_000) == 22_000_000
