"""Learning rate as a pure function of the step (0-based: the first update of a warm-up has rate 0; SPEC of the paper's
code, big_vision utils.create_learning_rate_schedule and vit_jax utils.create_learning_rate_schedule)."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from pipeline.config import Tags, require, tags


@dataclass(frozen=True)
class ScheduleConfig:
    decay: Literal["linear", "cosine", "rsqrt", "constant"] = "linear"  # paper, table 3: linear on JFT and ImageNet-21k
    warmup_steps: int = 10_000  # paper, table 3
    end: float = 1e-5  # where linear decay ends, absolute (vit_jax utils.py: linear_end)
    timescale: int = 10_000  # rsqrt: steps over which the rate halves fourfold (big_vision)
    shift: int = 0  # rsqrt: moves its start (big_vision)
    cooldown_steps: int = 0  # linear to 0 over the last steps (big_vision)

    RESUME: ClassVar[Tags] = tags(forbid="decay warmup_steps end timescale shift cooldown_steps")

    def __post_init__(self) -> None:
        require(self.warmup_steps >= 0, f"warmup_steps is {self.warmup_steps}, expected 0 or more")
        require(self.cooldown_steps >= 0, f"cooldown_steps is {self.cooldown_steps}, expected 0 or more")
        require(self.end >= 0, f"end is {self.end}, expected 0 or more")
        require(self.timescale > 0, f"timescale is {self.timescale}, expected 1 or more")


def learning_rate(step: int, steps: int, peak: float, cfg: ScheduleConfig) -> float:
    """The rate of update `step` (0-based) of `steps`, with warm-up, decay and cool-down multiplied together."""
    progress = (step - cfg.warmup_steps) / max(steps - cfg.warmup_steps, 1)
    progress = min(max(progress, 0.0), 1.0)
    if cfg.decay == "linear":
        rate = cfg.end + (peak - cfg.end) * (1 - progress)
    elif cfg.decay == "cosine":
        rate = peak * 0.5 * (1 + math.cos(math.pi * progress))
    elif cfg.decay == "rsqrt":
        since = max(step, cfg.warmup_steps) + cfg.shift - cfg.warmup_steps
        rate = peak / math.sqrt(1 + since / cfg.timescale)
    else:
        rate = peak
    if cfg.warmup_steps:
        rate *= min(1.0, step / cfg.warmup_steps)
    if cfg.cooldown_steps:
        rate *= min(1.0, (steps - step) / cfg.cooldown_steps)
    return rate
