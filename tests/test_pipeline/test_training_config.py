"""The config of a trained stage: rejected values, and its methods without extras."""

import pytest

import models
from data.errors import ConfigError
from pipeline import config
from pipeline.training_config import (
    DataConfig,
    MixedConfig,
    Phase,
    TrainConfig,
    flops_of,
    has_one_shape,
    has_whole_images,
    phase_at,
    smaller_sizes,
)

pytestmark = pytest.mark.quick


MODEL = models.config_of("mu/8", 24, 10)
# Half of the steps at 16 px, then half of the 9 patches, then whole images.
PHASES = [
    Phase(range(0, 10), 16),
    Phase(range(10, 16), 24, patches=9, kept=4, draw_patches=lambda step, ids: ids),
    Phase(range(16, 20), 24),
]
MIXTURE = {"train": None, "mixture": {"a": {"train": "x", "weight": 9}, "b": {"train": "y", "weight": 1}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 1, "data": {**MIXTURE, "train": "x"}}, "both data.train and data.mixture are set"),
        ({"steps": 1, "data": MIXTURE | {"cache": {"directory": "shards"}}}, "expected an absolute path"),
        ({"steps": 1, "data": MIXTURE, "batch_size": 3}, "one data set gets no samples in a batch of 3"),
        ({"data": {"mixture": {"a": {"train": "y"}}}}, r"s\.data\.mixture\.a\.weight is missing"),
        ({"data": {"mixture": {"a": {"weight": 1}}}}, r"s\.data\.mixture\.a\.train is missing"),
        ({"data": {"mixture": {"a": {"train": "y", "wieght": 1}}}}, "did you mean 'weight'"),
        ({"data": {"mixture": {"a": {"train": "y", "weight": 0}}}}, "weight is 0.0, expected more than 0"),
        ({"zero": 4, "steps": 1}, "zero is 4, expected ZeRO stage 0, 1, 2 or 3"),
        ({"zero": 0, "steps": 1}, "use zero=1 or precision=fp32"),
        ({"steps": 1, "passes": 0.5}, "both steps=1 and passes=0.5 are set, expected one.*\n.*set passes=null"),
        ({}, "neither steps nor passes is set"),
        ({"steps": 0}, "steps is 0, expected more than 0"),
        ({"steps": 1, "exact_parts": 6}, r"exact_parts is 6, expected 0 \(off\), 1, 2, 4, 8"),
        (
            {"steps": 1, "exact_parts": 128},
            r"a multiple of 128 × micro_batch 64 = 8192; found uneven=False and batch_size 4096",
        ),
        ({"steps": 1, "exact_parts": 2, "uneven": True}, "exact_parts 2 needs uneven=false"),
        ({"steps": 1, "exact_parts": 2, "deepspeed": "ds.json"}, "remove exact_parts or deepspeed"),
        ({"steps": 1, "keep": 1}, "keep is 1, expected 2 or more"),
        ({"steps": 1, "data": {"train": "x", "augment": {"min_area": 2.0}}}, "min_area"),
    ],
)
def test_invalid_training_values_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        config.build(TrainConfig, {"data": {"train": "x"}, **changes}, "s")


def test_sets_of_a_mixture_are_sorted_by_name():
    data = DataConfig(mixture={"b": MixedConfig("y", 1.0), "a": MixedConfig("x", 9.0)})
    assert data.sets() == {"a": "x", "b": "y"}
    assert data.weights() == [9.0, 1.0]
    assert DataConfig(train="x").sets() == {"train": "x"}
    assert DataConfig(train="x").weights() == [1.0]


def test_a_stage_without_extras_is_one_phase_of_whole_images_from_step_0():
    cfg = TrainConfig(steps=10)
    (phase,) = cfg.phases(10, models.config_of("mu/8", 16, 10))
    assert (phase.steps, phase.image_size, phase.kept) == (range(10), 16, None)
    assert cfg.first_step == 0
    assert not cfg.saves_evaluated
    assert cfg.exempt_checkpoints == 0


def test_the_masked_objective_reads_no_labels():
    assert TrainConfig(steps=1, data=DataConfig(max_labels=3)).labels_read == 3
    assert TrainConfig(steps=1, objective="masked", data=DataConfig(max_labels=3)).labels_read == 0


def test_a_stage_without_extras_is_one_phase_of_whole_images() -> None:
    (phase,) = TrainConfig(steps=20).phases(20, MODEL)
    assert (phase.steps, phase.image_size, phase.kept) == (range(20), 24, None)
    assert has_one_shape([phase], MODEL)
    assert has_whole_images([phase])
    assert smaller_sizes([phase], MODEL) == ()


def test_each_step_has_its_phase_and_later_steps_the_last() -> None:
    assert [phase_at(step, PHASES).steps.start for step in (0, 9, 10, 15, 16, 19, 25)] == [0, 0, 10, 10, 16, 16, 16]


def test_shapes_are_compared_with_those_of_evaluation() -> None:
    assert smaller_sizes(PHASES, MODEL) == ((16, 16),)
    assert not has_one_shape(PHASES, MODEL)
    assert has_whole_images(PHASES)
    assert not has_whole_images(PHASES[1:2])


def test_flops_of_steps_are_those_of_their_phases() -> None:
    small = models.training_flops(models.config_of("mu/8", 16, 10), 1)
    dropped = models.training_flops(MODEL, 1, 4)
    whole = models.training_flops(MODEL, 1)
    assert flops_of(PHASES, MODEL, range(20), 3) == 3 * (10 * small + 6 * dropped + 4 * whole)
    assert flops_of(PHASES, MODEL, range(8, 12), 3) == 3 * (2 * small + 2 * dropped)
