"""The phases of a trained stage: stretches of steps whose images have one size, and whose models see as many patches.

Without an extra a stage is one phase of whole images (`TrainConfig.phases`). Phases are pure functions of the step: a
resume repeats them, at any world size.

In:  1,000 steps of B/16, an extra that trains the first 700 on images of 128 px
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
    """Steps, counted from 0, whose images have one size and keep one number of patches."""

    steps: range
    image_size: int  # pixels of a side
    patches: int = 0  # of an image; 0: not counted
    kept: int | None = None  # patches of an image that the model sees; None: all
    # (step, ids (b, 3): epoch, shard, sample) → (b, kept), which patches; None: all
    draw_patches: "Callable[[int, Tensor], Tensor] | None" = None


def phase_at(step: int, phases: Sequence[Phase]) -> Phase:
    """Return the phase of a step, counted from 0; the last one for a step after the end."""
    for phase in phases:
        if step < phase.steps.stop:
            return phase
    return phases[-1]


def has_whole_images(phases: Sequence[Phase]) -> bool:
    """Return whether any step sees all patches of its images."""
    return any(phase.kept is None for phase in phases)


def has_one_shape(phases: Sequence[Phase], model: ModelConfig) -> bool:
    """Return whether every step sees whole images of the model's own size, as evaluation does."""
    return all(phase.kept is None and phase.image_size == model.image_size[0] for phase in phases)


def smaller_sizes(phases: Sequence[Phase], model: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Return the image sizes of these phases other than the model's own, in order."""
    sizes = []
    for phase in phases:
        size = (phase.image_size, phase.image_size)
        if phase.image_size != model.image_size[0] and size not in sizes:
            sizes.append(size)
    return tuple(sizes)


def flops_of(phases: Sequence[Phase], model: ModelConfig, steps: range, batch_size: int) -> int:
    """Return the floating-point operations of these steps, counted from 0."""
    total = 0
    for phase in phases:
        common = range(max(steps.start, phase.steps.start), min(steps.stop, phase.steps.stop))
        if common:
            model_of_phase = model
            if phase.image_size != model.image_size[0]:  # else the model's own, which need not be a square
                model_of_phase = replace(model, image_size=(phase.image_size, phase.image_size))
            total += models.training_flops(model_of_phase, len(common) * batch_size, phase.kept)
    return total
