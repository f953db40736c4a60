"""Initialise parameters as in the original code (SPEC 1.2), with one table of rules for all model families.

How a parameter is initialised:
1. its full name, such as "blocks.0.attention.qkv.weight", is matched against the patterns of RULES, top to bottom;
2. the first matching rule draws the values in place, from the given generator.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Generator, Tensor, nn

from models.configs import ROPES, BiTConfig, ViTConfig

# Standard deviation of a normal distribution truncated at two sigma; JAX divides by it to obtain the requested value.
CUT_NORMAL_STD = 0.87962566103423978

# First match wins, on the parameter's full name. The number is the value for "constant", the standard deviation for
# "normal", and the number of matrices stacked in the parameter for "xavier"; the other rules ignore it.
RULES: tuple[tuple[str, str, float], ...] = (
    # Special cases precede patterns that would also match them: the head and the stem's gn3 first.
    (r"\bhead\.bias$", "head bias", 0),
    (r"\bhead\.weight$|\bcls$", "constant", 0.0),
    (r"\bstem\..*\bgn3\.weight$", "constant", 0.0),  # units start as identity shortcuts: vit_jax models_resnet.py:89
    (r"\bqkv\.weight$", "xavier", 3),
    (r"\b(kv|gate_up)\.weight$", "xavier", 2),
    (r"\b(q|out|up|down)\.weight$", "xavier", 1),
    (r"\b(gate_up|up|down)\.bias$", "normal", 1e-6),
    (r"\bscale[12]\.gamma$", "layer scale", 0),
    (r"\bfrequencies$", "frequencies", 0),
    (r"\bprobe$", "probe", 0),
    (r"\bpositions\.", "positions", 0),
    (r"\b(registers|corruption\.token)$", "normal", 0.02),  # like positions; the papers specify no value
    (r"\b(\w*norm\d?|gn\w+)\.weight$", "constant", 1.0),
    (r"\b(embedding|pre_logits|prediction|conv\w+)\.weight$", "lecun normal", 0),
    (r"\.bias$", "constant", 0.0),
)


@torch.no_grad()
def fill(name: str, tensor: Tensor, config: ViTConfig | BiTConfig, generator: Generator | None = None) -> Tensor:
    """Initialise the parameter `name` in place and return it; equal generator states produce equal bits."""
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
        # -10 makes a sigmoid loss start from "no class" (SPEC 1.5).
        tensor.fill_(config.head_bias)
    elif rule == "layer scale":
        assert isinstance(config, ViTConfig) and config.layer_scale is not None
        tensor.fill_(config.layer_scale)
    elif rule == "frequencies":
        # Each head turns in two perpendicular directions, which are random: Heo et al. 2024, init_random_2d_freqs.
        assert isinstance(config, ViTConfig)
        _, heads, pairs = tensor.shape
        exponent = torch.arange(pairs // 2) / (pairs // 2)
        size = ROPES[config.rope][1] ** -exponent
        direction = torch.rand(heads, 1, generator=generator, device=tensor.device).cpu() * 2 * math.pi
        both = torch.cat([direction, direction + math.pi / 2], dim=1)[:, :, None]  # (H, 2, 1)
        along = torch.stack([both.cos() * size, both.sin() * size])  # (2, H, 2, d/4)
        tensor.copy_(along.flatten(2))
    elif rule == "normal":
        tensor.normal_(0.0, number, generator=generator)
    elif rule == "positions":
        assert isinstance(config, ViTConfig), "a ResNet has no positions"
        # As configured; otherwise as in the code that defines this layout.
        std = config.position_std
        if std is None and config.class_slot and config.pool != "map":
            std = 0.02  # vit_jax models_vit.py, AddPositionEmbs
        elif std is None:
            std = 1 / math.sqrt(config.width)  # big_vision models/vit.py, get_posemb
        tensor.normal_(0.0, std, generator=generator)
    elif rule == "xavier":
        # The original draws q, k and v separately, with a bound of 0.0625 in B/16. As one packed matrix, as in torch's
        # MultiheadAttention and timm, the bound would be 0.0442 (SPEC 1.2).
        for part in tensor.chunk(int(number)):
            nn.init.xavier_uniform_(part, generator=generator)
    elif rule == "probe":
        # Draw the probe (1, 1, D) of MAP pooling as a (1, D) matrix.
        nn.init.xavier_uniform_(tensor[0], generator=generator)
    elif rule == "lecun normal":
        # A normal distribution truncated at two sigma, of variance 1 / fan-in: JAX's `lecun_normal`. Filters are
        # (outputs, channels, rows, columns); the fan-in covers all axes after the first.
        inputs = tensor[0].numel()
        sigma = 1 / math.sqrt(inputs) / CUT_NORMAL_STD
        nn.init.trunc_normal_(tensor, std=sigma, a=-2 * sigma, b=2 * sigma, generator=generator)
    else:
        # Without a rule, the parameter would keep arbitrary memory: `empty` and `to_empty` initialise nothing.
        raise AssertionError(f"no rule in models/initial.py matches parameter {name}")
    return tensor
