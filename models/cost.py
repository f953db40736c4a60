"""What a model costs, computed from the model itself on the meta device: parameters and products.

config = models.config_of("B/16")
parameters_of(config)               86_567_656
macs_of(config)                     17.56e9 multiply-accumulates of one image's forward pass
training_flops(config, images=1)    105.4e9, by the rule of the paper's table 6
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from models import catalog
from models.catalog import ModelConfig
from models.vit import ViT

FLOPS_PER_MAC_TRAINED = 6  # multiply and add, forward and twice backward: the rule of table 6


class Size(NamedTuple):
    """How much of a model the optimizer trains."""

    tensors: int
    elements: int  # of all tensors


@functools.lru_cache(maxsize=64)
def size_of(config: ModelConfig) -> Size:
    """Return how many tensors, and numbers in them, the optimizer trains."""
    parameters = list(catalog.empty(config).parameters())
    return Size(len(parameters), sum(parameter.numel() for parameter in parameters))


def parameters_of(config: ModelConfig) -> int:
    """Return how many numbers the optimizer trains."""
    return size_of(config).elements


# A call with the default and one that spells it out are two to the cache: the model is then counted twice.
@functools.lru_cache(maxsize=64)
def macs_of(config: ModelConfig, kept_patches: int | None = None) -> int:
    """Return the multiply-accumulates of one image's forward pass: every matrix product and convolution.

    Counted as the paper counts: with the last block's work on tokens that pooling does not read. With `kept_patches`
    only so many of the patches go through the blocks, as `ViT.encode` does it.
    """
    model = catalog.empty(config).eval()
    # The counter hooks onto a MAP probe that requires a gradient. None are recorded here, so that the hook would fail
    # with "Expected gradient function to be set".
    model.requires_grad_(False)
    if isinstance(model, ViT):
        # The published figures count all tokens of the last block; a model that skips them would count about 6 % less
        # with 12 layers (docs/models.md).
        model.skip_unread = False
    images = torch.empty(1, 3, *config.image_size, device="meta")
    inputs = [images]
    if kept_patches is not None:
        inputs.append(torch.empty(1, kept_patches, dtype=torch.int64, device="meta"))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*inputs)
    # The counter takes a multiplication and an addition as two operations.
    return counter.get_total_flops() // 2


def training_flops(config: ModelConfig, images: int, kept_patches: int | None = None) -> int:
    """Return the floating-point operations to train on `images` images, by the accounting rule of SPEC 2.8."""
    return FLOPS_PER_MAC_TRAINED * macs_of(config, kept_patches) * images
