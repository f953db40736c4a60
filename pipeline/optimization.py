"""Optimizers and learning-rate schedules, as small configs and pure functions (losses are in losses.py).

- Optimizers: Adam with decoupled weight decay on kernels only, and SGD with momentum, as in the paper.
- The learning rate is a pure function of the step. Steps count from 0, so the first update of a warm-up has rate 0.
  The formulas match `create_learning_rate_schedule` in big_vision's and vit_jax's utils, the paper's code.

      learning_rate(step=5_000, steps=100_000, peak=8e-4, cfg=ScheduleConfig(warmup_steps=10_000))  →  4e-4

Only `build_optimizer` imports torch, so that recipes can be checked without it.
"""

import math
from collections.abc import Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from data.checks import at_least, more_than_0
from pipeline.config import Tags, require, tags

if TYPE_CHECKING:
    import torch
    from torch import nn

Loss = Literal["sigmoid", "softmax"]  # the keys of losses.LOSSES, repeated here because losses.py imports torch

# The optimizer's fp32 state for each element of a parameter; checkpoints store it under torch's names.
STATE = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
}


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning-rate schedule of a stage: a warm-up to the peak (`optim.lr`), then a decay."""

    decay: Literal["linear", "cosine", "rsqrt", "constant"] = "linear"  # JFT, ImageNet-21k: linear (paper, table 3)
    warmup_steps: int = 10_000  # steps of linear rise from 0 to the peak (paper, table 3); 0: no warm-up
    end: float = 1e-5  # linear: the final learning rate, absolute (vit_jax utils.py: linear_end)
    timescale: int = 10_000  # rsqrt: steps after the warm-up until the rate is 1/√2 of the peak (big_vision)
    shift: int = 0  # rsqrt: number of steps by which the decay is shifted ahead (big_vision)
    drops: tuple[int, ...] = ()  # constant: steps after which the rate is divided by 10 (BiT-HyperRule)
    cooldown_steps: int = 0  # last steps, over which the rate falls linearly to 0 (big_vision); 0: no cool-down

    RESUME: ClassVar[Tags] = tags(forbid="decay warmup_steps end timescale shift drops cooldown_steps")
    LATER: ClassVar[tuple[str, ...]] = ("drops",)

    def __post_init__(self) -> None:
        at_least(self, 0, "warmup_steps end shift cooldown_steps", "optim.schedule.")
        more_than_0(self, "timescale", "optim.schedule.")
        require(
            min(self.drops, default=1) > 0,
            f"optim.schedule.drops is {list(self.drops)}, expected positive step numbers",
        )
        is_staircase = self.decay == "constant" and list(self.drops) == sorted(set(self.drops))
        require(
            is_staircase or not self.drops,
            f"optim.schedule.drops is {list(self.drops)} and optim.schedule.decay is {self.decay}\n"
            "  expected increasing steps, for example drops: [3000, 6000, 9000], and decay: constant",
        )


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, its learning rate and weight decay; defaults except for `clip` are the paper's for JFT-300M."""

    name: Literal["adam", "sgd"] = "adam"  # adam uses decoupled weight decay, like torch's AdamW
    lr: float = 8e-4  # peak learning rate; 8e-4 is for batch_size 4096 (paper, table 3: B/16 and B/32 on JFT)
    weight_decay: float = 0.1  # as in torch, multiplied by the learning rate; kernels only (paper, table 3)
    head_weight_decay: float | None = None  # of the head's kernel; None: weight_decay (ViT-G: 3.0, body 0.03)
    # maximum global gradient norm; 0 is off. The paper uses 1 for fine-tuning (table 4) and for pretraining on
    # ImageNet, but no clipping for JFT and ImageNet-21k (table 3): their recipes set 0
    clip: float = 1.0
    beta1: float = 0.9  # adam: decay rate of the gradient's running mean (paper, section 4.1)
    beta2: float = 0.999  # adam: decay rate of the squared gradient's running mean (paper, section 4.1)
    eps: float = 1e-8  # adam: added to the square root of the squared gradient's running mean
    momentum: float = 0.9  # sgd: buf = 0.9·buf + g; p −= lr·buf (paper, section 4.1)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)  # learning-rate schedule

    RESUME: ClassVar[Tags] = tags(
        forbid="name lr weight_decay head_weight_decay clip beta1 beta2 eps momentum schedule"
    )

    def __post_init__(self) -> None:
        more_than_0(self, "lr eps", "optim.")
        at_least(self, 0, "weight_decay head_weight_decay clip", "optim.")
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optim.{name} is {value}, expected 0 ≤ {name} < 1")


def build_optimizer(model: "nn.Module", decayed: Set[str], cfg: OptimConfig) -> "torch.optim.Optimizer":
    """Build the optimizer with one parameter group per weight decay; `decayed` names the parameters with decay.

    The loop sets the learning rate before every step.
    """
    import torch

    # Torch applies one weight decay per parameter group; if head and body have the same decay, they share a group.
    by_decay: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decay = 0.0
        if name in decayed:
            decay = cfg.weight_decay
            if name.startswith("head.") and cfg.head_weight_decay is not None:
                decay = cfg.head_weight_decay
        by_decay.setdefault(decay, []).append(parameter)
    groups: list[dict[str, object]] = [{"params": group, "weight_decay": decay} for decay, group in by_decay.items()]
    if cfg.name == "adam":
        # Not on CPUs: there torch's fused kernels compute different bits if a vector is split into pieces, which would
        # break exact mode. With 30,011 pieces, 72,002 of 200,003 second moments differed after five steps
        # (docs/exact.md).
        is_fused = next(model.parameters()).is_cuda
        return torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=is_fused)
    return torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum)


def learning_rate(step: float, steps: int, peak: float, cfg: ScheduleConfig) -> float:
    """Return the learning rate of update `step` (from 0) out of `steps`: peak × warm-up × decay × cool-down."""
    # The decay covers the steps after the warm-up; `max` avoids a division by zero if the stage is all warm-up.
    progress = (step - cfg.warmup_steps) / max(steps - cfg.warmup_steps, 1)
    progress = min(max(progress, 0.0), 1.0)
    if cfg.decay == "linear":
        rate = cfg.end + (peak - cfg.end) * (1 - progress)
    elif cfg.decay == "cosine":
        rate = peak * 0.5 * (1 + math.cos(math.pi * progress))
    elif cfg.decay == "rsqrt":
        # Constant during the warm-up, as in big_vision, where only the linear rise applies.
        since = max(step, cfg.warmup_steps) + cfg.shift - cfg.warmup_steps
        rate = peak / math.sqrt(1 + since / cfg.timescale)
    else:
        # The step of a drop still uses the previous rate (big_transfer's bit_hyperrule.py, get_lr).
        rate = peak / 10 ** sum(step > drop for drop in cfg.drops)
    if cfg.warmup_steps:
        rate *= min(1.0, step / cfg.warmup_steps)
    if cfg.cooldown_steps:
        # The last update (step `steps − 1`) still has a positive rate.
        rate *= min(1.0, (steps - step) / cfg.cooldown_steps)
    return rate
