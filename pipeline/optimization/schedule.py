"""The learning rate as a pure function of the step.

Steps count from 0: the first update of a warm-up has rate 0. The formulas are those of the paper's code, big_vision
utils.create_learning_rate_schedule and vit_jax utils.create_learning_rate_schedule.

    learning_rate(step=5_000, steps=100_000, peak=8e-4, cfg=ScheduleConfig(warmup_steps=10_000))  →  4e-4
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from data.checks import at_least, more_than_0
from pipeline.config import Tags, tags


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate rises to `optim.lr`, its peak, and falls again over a stage."""

    decay: Literal["linear", "cosine", "rsqrt", "constant"] = "linear"  # JFT, ImageNet-21k: linear (paper, table 3)
    warmup_steps: int = 10_000  # steps of linear rise from 0 to the peak (paper, table 3); 0: none
    end: float = 1e-5  # linear: the rate it ends with, absolute (vit_jax utils.py: linear_end)
    timescale: int = 10_000  # rsqrt: steps after the warm-up until the rate is 1/√2 of the peak (big_vision)
    shift: int = 0  # rsqrt: steps by which the decay is ahead (big_vision)
    cooldown_steps: int = 0  # last steps, over which the rate goes linearly to 0 (big_vision); 0: none

    RESUME: ClassVar[Tags] = tags(forbid="decay warmup_steps end timescale shift cooldown_steps")

    def __post_init__(self) -> None:
        at_least(self, 0, "warmup_steps end shift cooldown_steps", "optim.schedule.")
        more_than_0(self, "timescale", "optim.schedule.")


def learning_rate(step: int, steps: int, peak: float, cfg: ScheduleConfig) -> float:
    """Return the rate of update `step` (0-based) of `steps`: warm-up, decay and cool-down multiplied together."""
    # The decay runs over the steps after the warm-up; a stage that is all warm-up has none, and no division by zero.
    progress = (step - cfg.warmup_steps) / max(steps - cfg.warmup_steps, 1)
    progress = min(max(progress, 0.0), 1.0)
    if cfg.decay == "linear":
        rate = cfg.end + (peak - cfg.end) * (1 - progress)
    elif cfg.decay == "cosine":
        rate = peak * 0.5 * (1 + math.cos(math.pi * progress))
    elif cfg.decay == "rsqrt":
        # Constant during the warm-up, as in big_vision: only the linear rise changes the rate there.
        since = max(step, cfg.warmup_steps) + cfg.shift - cfg.warmup_steps
        rate = peak / math.sqrt(1 + since / cfg.timescale)
    else:
        rate = peak
    if cfg.warmup_steps:
        rate *= min(1.0, step / cfg.warmup_steps)
    if cfg.cooldown_steps:
        # The last update, step steps − 1, still has a rate above 0.
        rate *= min(1.0, (steps - step) / cfg.cooldown_steps)
    return rate
