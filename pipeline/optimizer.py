"""The paper's optimizers in torch terms: Adam with decoupled decay on kernels only, and SGD with momentum."""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from pipeline.config import Tags, require, tags
from pipeline.schedule import ScheduleConfig


@dataclass(frozen=True)
class OptimConfig:
    name: Literal["adam", "sgd"] = "adam"
    lr: float = 8e-4  # peak, at batch_size 4096 (paper, table 3: B/16 and B/32 on JFT)
    weight_decay: float = 0.1  # torch convention: multiplied by the rate; kernels only (paper, table 3)
    head_weight_decay: float | None = None  # of the head's kernel; None: as the rest (ViT-G: 3.0 beside 0.03)
    clip: float = 1.0  # global gradient norm; 0 is off
    beta1: float = 0.9  # paper, section 4.1
    beta2: float = 0.999  # paper, section 4.1
    eps: float = 1e-8
    momentum: float = 0.9  # sgd: buf = 0.9·buf + g; p −= lr·buf (paper, section 4.1)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    RESUME: ClassVar[Tags] = tags(
        forbid="name lr weight_decay head_weight_decay clip beta1 beta2 eps momentum schedule"
    )

    def __post_init__(self) -> None:
        require(self.lr > 0, f"lr is {self.lr}, expected more than 0")
        require(self.weight_decay >= 0, f"weight_decay is {self.weight_decay}, expected 0 or more")
        require(self.clip >= 0, f"clip is {self.clip}, expected 0 (off) or more")
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{name} is {value}, expected 0 ≤ {name} < 1")


def build_optimizer(model: nn.Module, decayed: Set[str], cfg: OptimConfig) -> torch.optim.Optimizer:
    """A group for each strength of decay; the rate is set by the loop before every step."""
    by_decay: dict[float, list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        head = cfg.head_weight_decay if name.startswith("head.") else None
        decay = (cfg.weight_decay if head is None else head) if name in decayed else 0.0
        by_decay.setdefault(decay, []).append(p)
    groups: list[dict[str, Any]] = [{"params": params, "weight_decay": decay} for decay, params in by_decay.items()]
    if cfg.name == "adam":
        fused = next(model.parameters()).is_cuda
        return torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=fused)
    return torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum)


STATE = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
}  # per element, fp32, what a checkpoint holds
