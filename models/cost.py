"""What a model costs, computed from the model itself on the meta device: parameters, products, memory."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from models import catalog
from models.catalog import ImageSize

FLOPS_PER_MAC_TRAINED = 6  # multiply and add, forward and twice backward: the rule of table 6


def parameters_of(config: Any) -> int:
    return sum(parameter.numel() for parameter in catalog.empty(config).parameters())


def parameter_count(name: str, image_size: ImageSize = 224, classes: int = 1000, **config: Any) -> int:
    """How many numbers the optimizer trains."""
    return parameters_of(catalog.config_of(name, image_size, classes, **config))


@functools.lru_cache(maxsize=64)
def macs_of(config: Any) -> int:
    """Multiply-accumulates of one image's forward pass: every matrix product and convolution.

    Counted as the paper counts: with the last block's work on tokens that pooling does not read.
    """
    from torch.utils.flop_counter import FlopCounterMode

    model: Any = catalog.empty(config).eval().requires_grad_(False)  # else the counter hooks onto a MAP probe
    model.skip_unread = False
    images = torch.empty(1, 3, *config.image_size, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    return counter.get_total_flops() // 2


def forward_macs(name: str, image_size: ImageSize = 224, classes: int = 1000, **config: Any) -> int:
    """`macs_of` by name."""
    return macs_of(catalog.config_of(name, image_size, classes, **config))


def training_flops(config: Any, images: int) -> int:
    """Floating-point operations to train on `images` images, by the accounting rule of SPEC 2.8."""
    return FLOPS_PER_MAC_TRAINED * macs_of(config) * images


def block_activation_bytes(config: Any, bytes_per_number: int = 2) -> tuple[int, int]:
    """Bytes one image leaves in one block for the backward pass: kept whole, and recomputed (input alone).

    A token keeps both norms' inputs and outputs, q, k, v, the mixed values, and the MLP's middle before and
    after GELU; fused attention keeps no matrix of T x T. An Axial block is two of these.
    """
    tokens = math.prod(config.grid) + config.prefix_tokens
    halves = 2 if config.family == "axial" else 1
    whole = halves * tokens * (8 * config.width + 2 * config.mlp) * bytes_per_number
    return whole, tokens * config.width * bytes_per_number


def checkpoint_blocks_for(config: Any, micro_batch: int, budget_bytes: int, bytes_per_number: int = 2) -> int:
    """The fewest blocks to recompute so that the activations of all fit: a value for `checkpoint_blocks`.

    Raises ValueError with the largest micro batch that fits where recomputing every block is not enough.
    """
    whole, recomputed = (micro_batch * size for size in block_activation_bytes(config, bytes_per_number))
    if config.depth * whole <= budget_bytes:
        return 0
    for blocks in range(1, config.depth + 1):  # in the backward pass one recomputed block is whole again
        if (config.depth - blocks + 1) * whole + blocks * recomputed <= budget_bytes:
            return blocks
    least = whole + config.depth * recomputed
    raise ValueError(
        f"activations of micro_batch {micro_batch} take {least / 2**30:.1f} GiB with all blocks recomputed, "
        f"{budget_bytes / 2**30:.1f} GiB are free; largest that fits: {budget_bytes * micro_batch // least}"
    )
