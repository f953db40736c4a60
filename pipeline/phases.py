"""The phases of a trained stage: ranges of steps with one image size and one number of visible patches.

Without extras a stage is a single phase of whole images (`TrainConfig.phases`). Phases are pure functions of the step,
so a resume repeats them at any world size.

In:  1,000 steps of B/16, with an extra that trains the first 700 on images of 128 px
Out: steps 0 … 699: 128 px, 700 … 999: 224 px
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import models
from models import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Phase:
    """A range of steps, counted from 0, with one image size and one number of kept patches."""

    steps: range
    image_size: int  # side in pixels
    patches: int = 0  # number of patches in an image; 0: unknown
    kept: int | None = None  # number of patches of each image that the model processes; None: all
    # (step, ids (b, 3): epoch, shard, sample) → indexes (b, kept) of the kept patches; None: keep all
    draw_patches: "Callable[[int, Tensor], Tensor] | None" = None


def phase_at(step: int, phases: Sequence[Phase]) -> Phase:
    """Return the phase of a step, counted from 0; the last phase for steps beyond the end."""
    for phase in phases:
        if step < phase.steps.stop:
            return phase
    return phases[-1]


def has_whole_images(phases: Sequence[Phase]) -> bool:
    """Return whether any phase trains on whole images, without dropped patches."""
    return any(phase.kept is None for phase in phases)


def has_one_shape(phases: Sequence[Phase], model: ModelConfig) -> bool:
    """Return whether every phase trains on whole images at the model's image size, as in evaluation."""
    return all(phase.kept is None and phase.image_size == model.image_size[0] for phase in phases)


def smaller_sizes(phases: Sequence[Phase], model: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Return the image sizes, without duplicates and in order, that differ from the model's own."""
    sizes = []
    for phase in phases:
        size = (phase.image_size, phase.image_size)
        if phase.image_size != model.image_size[0] and size not in sizes:
            sizes.append(size)
    return tuple(sizes)


def flops_of(phases: Sequence[Phase], model: ModelConfig, steps: range, batch_size: int) -> int:
    """Return the number of floating-point operations for training these steps (counted from 0)."""
    total = 0
    for phase in phases:
        common = range(max(steps.start, phase.steps.start), min(steps.stop, phase.steps.stop))
        if common:
            model_of_phase = model
            if phase.image_size != model.image_size[0]:  # the model's own size need not be square
                model_of_phase = replace(model, image_size=(phase.image_size, phase.image_size))
            total += models.training_flops(model_of_phase, len(common) * batch_size, phase.kept)
    return total
