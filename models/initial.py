"""First values of every parameter, as the original code draws them (SPEC 1.2): one table for all families.

How a parameter gets its first values:
1. its full name, "blocks.0.attention.qkv.weight" say, is held against the patterns of RULES, from the top;
2. the rule of the first pattern that fits draws its values in place, from the generator it is given.
The parameters are drawn in the order of `named_parameters`, so that one seed always gives one model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from models.families import Model, ModelConfig
from models.resnet import BiTConfig

Fill = Callable[[Tensor, ModelConfig, Generator | None], object]  # (parameter, config, generator), in place

# Standard deviation of a normal cut at two sigma: JAX divides by it so that the result has the one asked for.
CUT_NORMAL_STD = 0.87962566103423978


def lecun_normal(weight: Tensor, config: ModelConfig, generator: Generator | None) -> None:
    """Draw from a normal cut at two sigma, with variance 1 / inputs of one output: JAX's `lecun_normal`."""
    # Filters are (outputs, channels, rows, columns): one output reads everything behind the first axis.
    inputs = weight[0].numel()
    sigma = 1 / math.sqrt(inputs) / CUT_NORMAL_STD
    nn.init.trunc_normal_(weight, std=sigma, a=-2 * sigma, b=2 * sigma, generator=generator)


def xavier(parts: int) -> Fill:
    """Return a rule that draws Xavier uniform for each of `parts` stacked matrices, with the bound of one of them."""

    def fill_parts(weight: Tensor, config: ModelConfig, generator: Generator | None) -> None:
        # The original draws q, k and v apart, with a bound of 0.0625 in B/16. Drawn as one packed matrix, as torch's
        # MultiheadAttention and timm do it, the bound would be 0.0442 (SPEC 1.2).
        for part in weight.chunk(parts):
            nn.init.xavier_uniform_(part, generator=generator)

    return fill_parts


def xavier_probe(probe: Tensor, config: ModelConfig, generator: Generator | None) -> None:
    """Draw the probe (1, 1, D) of MAP pooling as the (1, D) matrix it is."""
    nn.init.xavier_uniform_(probe[0], generator=generator)


def normal(std: float) -> Fill:
    """Return a rule that draws from a normal of mean 0 with this standard deviation."""

    def fill_normal(tensor: Tensor, config: ModelConfig, generator: Generator | None) -> None:
        tensor.normal_(0.0, std, generator=generator)

    return fill_normal


def position_normal(table: Tensor, config: ModelConfig, generator: Generator | None) -> None:
    """Draw a position table from a normal whose standard deviation depends on the layout."""
    assert not isinstance(config, BiTConfig), "a ResNet has no positions"
    table.normal_(0.0, config.initial_position_std, generator=generator)


def constant(value: float) -> Fill:
    """Return a rule that sets every entry to `value`."""

    def fill_constant(tensor: Tensor, config: ModelConfig, generator: Generator | None) -> None:
        tensor.fill_(value)

    return fill_constant


def head_bias(bias: Tensor, config: ModelConfig, generator: Generator | None) -> None:
    """Set the head's bias to the config's: -10 where a sigmoid loss starts from "no class" (SPEC 1.5)."""
    bias.fill_(config.head_bias)


RULES: tuple[tuple[str, Fill], ...] = (  # first match wins, on the parameter's full name
    # The special cases stand before the patterns that would also fit them: the head and the stem's gn3 first.
    (r"\bhead\.bias$", head_bias),
    (r"\bhead\.weight$|\bcls$", constant(0.0)),
    (r"\bstem\..*\bgn3\.weight$", constant(0.0)),  # units start as shortcuts: vit_jax models_resnet.py:89
    (r"\bqkv\.weight$", xavier(3)),
    (r"\bkv\.weight$", xavier(2)),
    (r"\b(q|out|up|down)\.weight$", xavier(1)),
    (r"\b(up|down)\.bias$", normal(1e-6)),
    (r"\bprobe$", xavier_probe),
    (r"\bpositions\.", position_normal),
    (r"\b(registers|corruption\.token)$", normal(0.02)),  # as positions; the papers do not say
    (r"\b(norm\d?|gn\w+)\.weight$", constant(1.0)),
    (r"\b(embedding|pre_logits|prediction|conv\w+)\.weight$", lecun_normal),
    (r"\.bias$", constant(0.0)),
)


@torch.no_grad()
def fill(name: str, tensor: Tensor, config: ModelConfig, generator: Generator | None = None) -> Tensor:
    """Draw the first value of the parameter called `name`, in place."""
    for pattern, rule in RULES:
        if re.search(pattern, name):
            rule(tensor, config, generator)
            return tensor
    # A parameter without a rule would keep whatever its memory held: `empty` and `to_empty` fill in nothing.
    raise AssertionError(f"no rule in models/initial.py fits parameter {name}")


def initialize(model: Model, generator: Generator | None = None) -> None:
    """Draw all parameters anew; the same generator state gives the same bits."""
    for name, parameter in model.named_parameters():
        fill(name, parameter.data, model.config, generator)
