"""The division of a batch among workers, and the length of a stage."""

import dataclasses

import pytest

from data.errors import ConfigError
from data.loader import split_slots
from pipeline.optimization import OptimConfig, ScheduleConfig, learning_rate
from pipeline.training_config import TrainConfig
from pipeline.training_data import batch_arithmetic, check_end_of_decay, check_schedule, steps_of

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
    with pytest.raises(ConfigError, match="less than the 5000 workers"):
        batch_arithmetic(cfg, 5000)


def test_workers_that_cannot_share_the_exact_parts_are_refused():
    cfg = TrainConfig(steps=1, exact_parts=4)
    assert batch_arithmetic(cfg, 2).accumulation == 32
    for workers in (8, 32):
        with pytest.raises(
            ConfigError, match=f"cannot be divided among {workers} workers; use 1, 2, 4, … up to 4 workers"
        ):
            batch_arithmetic(cfg, workers)


def test_uneven_slots_cover_the_batch_once():
    arithmetic = batch_arithmetic(TrainConfig(steps=1, batch_size=100, micro_batch=8, uneven=True), 7)
    slots = [arithmetic.slots(rank) for rank in range(7)]
    assert [slot for part in slots for slot in part] == list(range(100))
    assert {len(part) for part in slots} == {14, 15}
    assert arithmetic.accumulation == 2


def test_passes_are_converted_to_steps_as_in_the_original():
    assert steps_of(TrainConfig(passes=14), 303_000_000) == 1_035_645  # H/14 on JFT
    assert steps_of(TrainConfig(passes=90), 14_197_122) == 311_948  # ImageNet-21k
    assert steps_of(TrainConfig(passes=300), 1_281_167) == 93_835  # ImageNet


# ------------------------------------------------------------------------ the learning rate


@pytest.mark.parametrize("decay", ["linear", "cosine", "rsqrt", "constant"])
@pytest.mark.parametrize("lr", [1e-6, 5e-6, 1e-5, 2e-5, 1e-3])
@pytest.mark.parametrize("end", [0.0, 1e-5, 1e-4])
@pytest.mark.parametrize("warmup_steps", [0, 5])
def test_decay_that_would_raise_the_rate_is_refused(decay, lr, end, warmup_steps):
    cfg = TrainConfig(steps=20, optim=OptimConfig(lr=lr, schedule=ScheduleConfig(decay, warmup_steps, end)))
    rates = [learning_rate(step, 20, lr, cfg.optim.schedule) for step in range(warmup_steps, 20)]
    if max(rates) <= lr * (1 + 1e-9):
        check_end_of_decay(cfg, "finetune")
        return
    with pytest.raises(ConfigError, match=r"(?s)would rise .* set finetune.optim.schedule.end=0, or a larger"):
        check_end_of_decay(cfg, "finetune")


def test_stage_whose_only_step_has_rate_0_is_refused():
    cfg = TrainConfig(steps=1, optim=OptimConfig(schedule=ScheduleConfig(warmup_steps=1)))
    assert learning_rate(0, 1, 1.0, cfg.optim.schedule) == 0
    with pytest.raises(ConfigError, match=r"(?s)whose learning rate is 0.* set tune.optim.schedule.warmup_steps=0"):
        check_schedule(cfg, 1, "tune")
    check_schedule(TrainConfig(steps=1, optim=OptimConfig(schedule=ScheduleConfig(warmup_steps=0))), 1, "tune")
    check_schedule(cfg, 2, "tune")


# ------------------------------------------------------------------------ mixup


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("mixup", [0.0, 0.4])
def test_mixup_is_refused_if_a_micro_batch_has_one_image(uneven, mixup):
    """Cut batches as the loader does; an image without a partner would not be mixed."""
    refused = 0
    for batch_size in (2, 3, 4, 7, 8, 9, 16, 33):
        for micro_batch in (2, 3, 4, 8, 32):
            for world in (1, 2, 3, 4):
                cfg = TrainConfig(
                    steps=1, batch_size=batch_size, micro_batch=micro_batch, uneven=uneven, precision="fp32"
                )
                try:
                    arithmetic = batch_arithmetic(cfg, world)
                except ConfigError:
                    continue
                mixed = dataclasses.replace(cfg, mixup=mixup)
                sizes = set()
                for rank in range(world):
                    parts = split_slots(arithmetic.slots(rank), micro_batch, arithmetic.accumulation)
                    sizes |= set(map(len, parts))
                if not mixup or min(sizes - {0}) >= 2:
                    assert batch_arithmetic(mixed, world) == arithmetic
                    continue
                refused += 1
                with pytest.raises(ConfigError, match="leaves some with a single image"):
                    batch_arithmetic(mixed, world)
    assert (refused > 0) == (uneven and mixup > 0)


def test_mixup_with_micro_batches_of_one_image_is_refused():
    TrainConfig(steps=1, micro_batch=1)
    with pytest.raises(ConfigError, match=r"(?s)nothing would be mixed.* set micro_batch=2, or mixup=0"):
        TrainConfig(steps=1, micro_batch=1, mixup=0.8)
