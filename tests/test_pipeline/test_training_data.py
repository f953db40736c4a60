"""The division of a batch among workers, and the length of a stage."""

import dataclasses

import pytest

from data.errors import ConfigError
from pipeline.training_config import TrainConfig
from pipeline.training_data import batch_arithmetic, steps_of

pytestmark = pytest.mark.quick


def test_indivisible_batch_is_refused_with_the_nearest_sizes():
    cfg = TrainConfig(steps=1, batch_size=4000, micro_batch=32)
    with pytest.raises(ConfigError, match=r"micro_batch 32 × 12 workers = 384; nearest: 3840 or 4224"):
        batch_arithmetic(cfg, 12)
    with pytest.raises(ConfigError, match=r"(?s)131072 × 2 workers = 262144 is more .* set micro_batch=2000, or"):
        batch_arithmetic(dataclasses.replace(cfg, micro_batch=131_072), 2)
    assert batch_arithmetic(dataclasses.replace(cfg, micro_batch=2000), 2).accumulation == 1
    with pytest.raises(ConfigError, match="set micro_batch=1333 and batch_size=3999, or"):
        batch_arithmetic(dataclasses.replace(cfg, micro_batch=131_072), 3)
    with pytest.raises(ConfigError, match="less than 5000 workers"):
        batch_arithmetic(cfg, 5000)


def test_workers_that_cannot_share_the_exact_parts_are_refused():
    cfg = TrainConfig(steps=1, exact_parts=4)
    assert batch_arithmetic(cfg, 2).accumulation == 32
    for workers in (8, 32):
        with pytest.raises(ConfigError, match=f"cannot be shared by {workers} workers; use 1, 2, 4, … up to 4"):
            batch_arithmetic(cfg, workers)


def test_uneven_slots_cover_the_batch_once():
    arithmetic = batch_arithmetic(TrainConfig(steps=1, batch_size=100, micro_batch=8, uneven=True), 7)
    slots = [arithmetic.slots(rank) for rank in range(7)]
    assert [slot for part in slots for slot in part] == list(range(100))
    assert {len(part) for part in slots} == {14, 15} and arithmetic.accumulation == 2


def test_passes_are_converted_to_steps_as_in_the_original():
    assert steps_of(TrainConfig(passes=14), 303_000_000) == 1_035_645  # H/14 on JFT
    assert steps_of(TrainConfig(passes=90), 14_197_122) == 311_948  # ImageNet-21k
    assert steps_of(TrainConfig(passes=300), 1_281_167) == 93_835  # ImageNet
