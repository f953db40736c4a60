"""Models with random weights, and comparisons of weights and logits."""

import hashlib
from pathlib import Path

import numpy as np
import torch

import models

IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)


def channels_first(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2)


@torch.no_grad()
def assert_logits(model, images, expected, atol, rtol=0):
    torch.testing.assert_close(model(images), torch.as_tensor(expected), atol=atol, rtol=0 if atol == 0 else 2e-6)


def equal_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def random_model(name="mu/8", image_size=16, classes=5, **config) -> torch.nn.Module:
    """Return a model whose parameters all differ from their initial values, so that a lost one is noticed."""
    model = models.build(name, image_size, classes, **{"depth": 2, **config} if "BiT" not in name else config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def save_small(folder: Path) -> Path:
    """Save a small random ViT with ten classes in our format, and return its folder."""
    models.save(models.from_config(models.config_of("mu/8", 16, 10), torch.Generator().manual_seed(0)), folder)
    return folder


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
