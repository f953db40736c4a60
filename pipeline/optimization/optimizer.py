"""The paper's optimizers in torch terms: Adam with decoupled decay on kernels only, and SGD with momentum."""

import inspect
from collections.abc import Set
from dataclasses import dataclass, field
from types import MethodType
from typing import ClassVar, Literal

import torch
from torch import nn

from data.checks import at_least, more_than_0
from models.cost import without_compiler
from pipeline.config import Tags, require, tags
from pipeline.optimization.schedule import ScheduleConfig

# What the optimizer keeps per element of a parameter, fp32; a checkpoint holds it under these names of torch's.
STATE = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
}


@dataclass(frozen=True)
class OptimConfig:
    """Which optimizer, how fast, with how much decay. The defaults are the paper's pretraining on JFT-300M."""

    name: Literal["adam", "sgd"] = "adam"  # adam decays decoupled from the gradient, as torch's AdamW
    lr: float = 8e-4  # the peak; 8e-4 is for batch_size 4096 (paper, table 3: B/16 and B/32 on JFT)
    weight_decay: float = 0.1  # torch convention: multiplied by the rate; kernels only (paper, table 3)
    head_weight_decay: float | None = None  # of the head's kernel; None: as the rest (ViT-G: 3.0 beside 0.03)
    clip: float = 1.0  # largest global gradient norm (the paper mentions 1 for ImageNet, SPEC 2.1); 0 is off
    beta1: float = 0.9  # adam: decay of the gradient's mean a step (paper, section 4.1)
    beta2: float = 0.999  # adam: decay of the squared gradient's mean a step (paper, section 4.1)
    eps: float = 1e-8  # adam: added to the root of the squared gradient's mean
    momentum: float = 0.9  # sgd: buf = 0.9·buf + g; p −= lr·buf (paper, section 4.1)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)  # of the learning rate

    RESUME: ClassVar[Tags] = tags(
        forbid="name lr weight_decay head_weight_decay clip beta1 beta2 eps momentum schedule"
    )

    def __post_init__(self) -> None:
        more_than_0(self, "lr eps", "optim.")
        at_least(self, 0, "weight_decay head_weight_decay clip", "optim.")
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optim.{name} is {value}, expected 0 ≤ {name} < 1")


def build_optimizer(model: nn.Module, decayed: Set[str], cfg: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimizer with a parameter group for each strength of decay; `decayed` names those that decay at all.

    The rate is set by the loop before every step.
    """
    # Torch has one decay a group. Groups are by value, so equal decays of head and body make a single group.
    by_decay: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decay = 0.0
        if name in decayed:
            decay = cfg.weight_decay
            if name.startswith("head.") and cfg.head_weight_decay is not None:
                decay = cfg.head_weight_decay
        by_decay.setdefault(decay, []).append(parameter)
    groups: list[dict[str, object]] = [{"params": group, "weight_decay": decay} for decay, group in by_decay.items()]
    with without_compiler():
        optimizer = _torch_optimizer(groups, cfg, is_cuda=next(model.parameters()).is_cuda)
    _free_from_compiler(optimizer)
    return optimizer


def _torch_optimizer(groups: list[dict[str, object]], cfg: OptimConfig, *, is_cuda: bool) -> torch.optim.Optimizer:
    if cfg.name == "adam":
        # Not on CPUs: there torch's fused kernels give other bits where a vector is cut in pieces. Exact mode cannot
        # have that: with 30,011 pieces 72,002 of 200,003 second moments differed after five steps (docs/exact.md).
        return torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=is_cuda)
    return torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum)


def _free_from_compiler(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer step without importing torch._dynamo, which takes 1.3 CPU-seconds of every worker.

    Torch wraps `step` and `zero_grad` so that its compiler leaves them out of what it compiles, and imports it to say
    so. Three things are left out, and nothing else: that wrapper of either; the breaks of the compiled graph around
    `step`, which do nothing where nothing is compiled, and an optimizer's step never is here; and the option
    `differentiable`, which keeps gradients on within `step` and which `_torch_optimizer` never sets. The hooks around
    a step and its name in a profile stay. A copy by pickle has torch's own functions again.
    """
    step = torch.no_grad()(inspect.unwrap(type(optimizer).step))
    with_hooks = torch.optim.Optimizer.profile_hook_step(step)
    zero_grad = inspect.unwrap(type(optimizer).zero_grad)
    optimizer.step = MethodType(with_hooks, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
