"""First values of every parameter, as the original code draws them (SPEC 1.2): one table for all families.

How a parameter gets its first values:
1. its full name, "blocks.0.attention.qkv.weight" say, is held against the patterns of RULES, from the top;
2. the rule of the first pattern that fits draws its values in place, from the generator it is given.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Generator, Tensor, nn

from models.configs import BiTConfig, ViTConfig

# Standard deviation of a normal cut at two sigma: JAX divides by it so that the result has the one asked for.
CUT_NORMAL_STD = 0.87962566103423978

# First match wins, on the parameter's full name. The number is the value of "constant", the standard deviation of
# "normal", and for "xavier" how many matrices are stacked in the parameter; the other rules need none.
RULES: tuple[tuple[str, str, float], ...] = (
    # The special cases stand before the patterns that would also fit them: the head and the stem's gn3 first.
    (r"\bhead\.bias$", "head bias", 0),
    (r"\bhead\.weight$|\bcls$", "constant", 0.0),
    (r"\bstem\..*\bgn3\.weight$", "constant", 0.0),  # units start as shortcuts: vit_jax models_resnet.py:89
    (r"\bqkv\.weight$", "xavier", 3),
    (r"\bkv\.weight$", "xavier", 2),
    (r"\b(q|out|up|down)\.weight$", "xavier", 1),
    (r"\b(up|down)\.bias$", "normal", 1e-6),
    (r"\bprobe$", "probe", 0),
    (r"\bpositions\.", "positions", 0),
    (r"\b(registers|corruption\.token)$", "normal", 0.02),  # as positions; the papers do not say
    (r"\b(norm\d?|gn\w+)\.weight$", "constant", 1.0),
    (r"\b(embedding|pre_logits|prediction|conv\w+)\.weight$", "lecun normal", 0),
    (r"\.bias$", "constant", 0.0),
)


@torch.no_grad()
def fill(name: str, tensor: Tensor, config: ViTConfig | BiTConfig, generator: Generator | None = None) -> Tensor:
    """Draw the first values of the parameter called `name`, in place; the same generator state gives the same bits."""
    rule = ""
    number = 0.0
    for pattern, rule_of_pattern, number_of_pattern in RULES:
        if re.search(pattern, name):
            rule = rule_of_pattern
            number = number_of_pattern
            break

    if rule == "constant":
        tensor.fill_(number)
    elif rule == "head bias":
        # -10 where a sigmoid loss starts from "no class" (SPEC 1.5).
        tensor.fill_(config.head_bias)
    elif rule == "normal":
        tensor.normal_(0.0, number, generator=generator)
    elif rule == "positions":
        assert isinstance(config, ViTConfig), "a ResNet has no positions"
        # As configured, else as in the code that the layout comes from.
        std = config.position_std
        if std is None and config.class_slot and config.pool != "map":
            std = 0.02  # vit_jax models_vit.py, AddPositionEmbs
        elif std is None:
            std = 1 / math.sqrt(config.width)  # big_vision models/vit.py, get_posemb
        tensor.normal_(0.0, std, generator=generator)
    elif rule == "xavier":
        # The original draws q, k and v apart, with a bound of 0.0625 in B/16. Drawn as one packed matrix, as torch's
        # MultiheadAttention and timm do it, the bound would be 0.0442 (SPEC 1.2).
        for part in tensor.chunk(int(number)):
            nn.init.xavier_uniform_(part, generator=generator)
    elif rule == "probe":
        # The probe (1, 1, D) of MAP pooling is drawn as the (1, D) matrix it is.
        nn.init.xavier_uniform_(tensor[0], generator=generator)
    elif rule == "lecun normal":
        # A normal cut at two sigma, with variance 1 / inputs of one output: JAX's `lecun_normal`. Filters are
        # (outputs, channels, rows, columns): one output reads everything behind the first axis.
        inputs = tensor[0].numel()
        sigma = 1 / math.sqrt(inputs) / CUT_NORMAL_STD
        nn.init.trunc_normal_(tensor, std=sigma, a=-2 * sigma, b=2 * sigma, generator=generator)
    else:
        # A parameter without a rule would keep whatever its memory held: `empty` and `to_empty` fill in nothing.
        raise AssertionError(f"no rule in models/initial.py fits parameter {name}")
    return tensor
