"""Builds the small model that the engine check trains: the run's kinds of layers, and one block of full width.

checked_config(config_of("B/16"), is_full_width=True)    a B/16 with one block, a small image and a small head
"""

from dataclasses import replace

import torch
from torch import Generator, Tensor, nn

import models
from models import ModelConfig, ViTConfig
from models.configs import BiTConfig, MaskedConfig

CLASSES = 8
# Sizes of the narrow model. Its blocks have matrices of more than 100,000 elements together: ZeRO 3 keeps smaller
# parameters gathered by default, and both cases must be checked.
WIDTH = 96
MLP = 384
HEADS = 2
STEM_WIDTH = 32  # the smallest that GroupNorm accepts
GRID = 2  # patches along each side of an image
NOISE = 0.05  # standard deviation of the noise added to the initial weights


class CheckedModel(nn.Module):
    """A model with three parts: a narrow model of the run's kind, optionally a block of full width, and a layer.

    The layer is used twice in each forward pass.
    """

    def __init__(self, configs: list[ModelConfig], generator: Generator) -> None:
        super().__init__()
        self.parts = nn.ModuleList(models.from_config(config, generator) for config in configs)
        self.twice = nn.Linear(CLASSES, CLASSES)
        self.sizes = [config.image_size for config in configs]
        with torch.no_grad():
            for p in self.twice.parameters():
                p.normal_(generator=generator)
            # Heads start at zero and layer scales near it, so the other layers would get no gradient.
            for p in self.parameters():
                p.add_(torch.randn(p.shape, generator=generator), alpha=NOISE)

    def forward(self, *images: Tensor) -> Tensor:
        """Map the images of every part, each (B, 3, height, width), to logits (B, CLASSES)."""
        logits = torch.stack([part(own) for part, own in zip(self.parts, images, strict=True)]).sum(0)
        # DeepSpeed 0.18.3 to 0.19.3 computed a wrong gradient for a module used twice in a forward pass.
        return logits + self.twice(self.twice(logits).tanh())

    def images(self, count: int, generator: Generator) -> list[Tensor]:
        """Draw random input images (count, 3, height, width) for every part."""
        return [torch.randn(count, 3, *size, generator=generator) for size in self.sizes]


def checked_config(config: ModelConfig, *, is_full_width: bool) -> ModelConfig:
    """Return a small config with the same kinds of layers: two narrow blocks, or one block of the original width."""
    if isinstance(config, BiTConfig):
        # A unit of the first stage is the smallest of a ResNet.
        units = (1,) if is_full_width else (1, 1)
        width = config.width if is_full_width else STEM_WIDTH
        return replace(config, image_size=(32, 32), classes=CLASSES, units=units, width=width, head_bias=0.0)
    assert isinstance(config, ViTConfig)
    if isinstance(config, MaskedConfig):
        config = config.vit
    stem = config.stem
    if stem:
        stem = (1,)
    rows, columns = stride_of(config, stem)
    narrow: dict[str, object] = {}
    if not is_full_width:
        narrow = {
            "depth": 2,
            "width": WIDTH,
            "mlp": MLP,
            "heads": HEADS,
            "stem_width": STEM_WIDTH,
            "map_heads": None,
            "map_mlp": None,
        }
    small = replace(
        config,
        image_size=(GRID * rows, GRID * columns),
        classes=CLASSES,
        depth=1,
        stem=stem,
        representation=CLASSES if config.representation else None,
        registers=min(config.registers, 1),
        head_bias=0.0,
        dropout=0.0,
        drop_path=0.0,
    )
    return replace(small, **narrow)  # type: ignore[arg-type]


def stride_of(config: ViTConfig, stem: tuple[int, ...] | None) -> tuple[int, int]:
    """Return the vertical and horizontal distance between patches, in pixels, for the config with this stem."""
    total = models.configs.stem_stride(stem)
    return config.patch[0] * total, config.patch[1] * total
