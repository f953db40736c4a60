"""What a model costs, computed from the model itself on the meta device: parameters, products, memory."""

from __future__ import annotations

import functools
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
    """Multiply-accumulates of one image's forward pass: every matrix product and convolution it runs."""
    from torch.utils.flop_counter import FlopCounterMode

    model = catalog.empty(config).eval()
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
