"""DeepSpeed's settings, and the line about the reduction of gradients in `plan`."""

import pytest

from pipeline.engine.settings import deepspeed_config, reduction_line

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("zero", "tuning", "world", "parts", "line"),
    [
        (2, {}, 8, 0, "13 buckets of 50 million gradients, 190.7 MiB each; the backward pass waits for each"),
        (3, {}, 8, 0, "13 buckets of 50 million gradients, 190.7 MiB each; during the backward pass"),
        (1, {"overlap_comm": True, "reduce_bucket_size": 5e8}, 8, 0, "2 buckets of 500 million gradients, 1.9 GiB"),
        (1, {"overlap_comm": True}, 8, 0, "during the backward pass (overlap_comm on)"),
        (3, {"overlap_comm": False}, 8, 0, "the backward pass waits for each (overlap_comm off)"),
        (0, {}, 8, 0, "all gradients at once after the backward pass (ZeRO 0)"),
        (2, {}, 8, 16, "all gradients at once after the backward pass, in a fixed order (exact_parts)"),
    ],
)
def test_plan_describes_the_reduction_of_gradients(zero, tuning, world, parts, line):
    settings = deepspeed_config(zero=zero, precision="fp32", micro_batch=1, accumulation=1, clip=1.0, user_file=None)
    section = {**settings["zero_optimization"], **tuning}
    assert line in reduction_line(section, 632_045_800, world, parts)


def test_small_model_has_one_bucket_and_one_worker_needs_no_reduction():
    assert "one bucket of 22 million gradients" in reduction_line({"stage": 2}, 22_000_000, 4)
    assert reduction_line({"stage": 2}, 22_000_000, 1) == ""
