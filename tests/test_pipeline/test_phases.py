"""Phases of a stage: their FLOPs and shapes; phases of token dropping are tested in its own file."""

import pytest

import models
from pipeline.phases import Phase, flops_of, has_one_shape, has_whole_images, phase_at, smaller_sizes
from pipeline.training_config import TrainConfig

pytestmark = pytest.mark.quick

MODEL = models.config_of("mu/8", 24, 10)
# Half of the steps at 16 px, then half of the 9 patches, then whole images.
PHASES = [
    Phase(range(0, 10), 16),
    Phase(range(10, 16), 24, patches=9, kept=4, draw_patches=lambda step, ids: ids),
    Phase(range(16, 20), 24),
]


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
