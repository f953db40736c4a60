"""First values of every parameter, as the original code draws them (SPEC 1.2): one table for all families."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

Fill = Callable[[Tensor, Any, Generator | None], object]  # (parameter, config, generator)

# Standard deviation of a normal cut at two sigma: JAX divides by it so that the result has the one asked for.
CUT_NORMAL_STD = 0.87962566103423978


def lecun_normal(weight: Tensor, config: Any, generator: Generator | None) -> None:
    sigma = 1 / math.sqrt(weight[0].numel()) / CUT_NORMAL_STD
    nn.init.trunc_normal_(weight, std=sigma, a=-2 * sigma, b=2 * sigma, generator=generator)


def xavier(parts: int) -> Fill:
    """Xavier uniform on each of `parts` stacked matrices: the packed one would get too small a bound."""

    def fill(weight: Tensor, config: Any, generator: Generator | None) -> None:
        for part in weight.chunk(parts):
            nn.init.xavier_uniform_(part, generator=generator)

    return fill


def normal(std: float) -> Fill:
    return lambda tensor, config, generator: tensor.normal_(0.0, std, generator=generator)


def position_normal(table: Tensor, config: Any, generator: Generator | None) -> None:
    table.normal_(0.0, config.initial_position_std, generator=generator)


def constant(value: float) -> Fill:
    return lambda tensor, config, generator: tensor.fill_(value)


RULES: tuple[tuple[str, Fill], ...] = (  # first match wins, on the parameter's full name
    (r"\bhead\.bias$", lambda bias, config, generator: bias.fill_(config.head_bias)),
    (r"\bhead\.weight$|\bcls$", constant(0.0)),
    (r"\bstem\..*\bgn3\.weight$", constant(0.0)),  # units start as shortcuts: vit_jax models_resnet.py:89
    (r"\bqkv\.weight$", xavier(3)),
    (r"\bkv\.weight$", xavier(2)),
    (r"\b(q|out|up|down)\.weight$", xavier(1)),
    (r"\b(up|down)\.bias$", normal(1e-6)),
    (r"\bprobe$", lambda table, config, generator: nn.init.xavier_uniform_(table[0], generator=generator)),
    (r"\bpositions\.", position_normal),
    (r"\b(registers|corruption\.token)$", normal(0.02)),  # as positions; the papers do not say
    (r"\b(norm\d?|gn\w+)\.weight$", constant(1.0)),
    (r"\b(embedding|pre_logits|prediction|conv\w+)\.weight$", lecun_normal),
    (r"\.bias$", constant(0.0)),
)


@torch.no_grad()
def fill(name: str, tensor: Tensor, config: Any, generator: Generator | None = None) -> Tensor:
    """Draw the first value of the parameter called `name`, in place."""
    for pattern, rule in RULES:
        if re.search(pattern, name):
            rule(tensor, config, generator)
            return tensor
    raise AssertionError(f"no rule in models/initial.py fits parameter {name}")


def initialize(model: nn.Module, generator: Generator | None = None) -> None:
    """Draw all parameters anew; the same generator state gives the same bits."""
    for name, parameter in model.named_parameters():
        fill(name, parameter.data, model.config, generator)
