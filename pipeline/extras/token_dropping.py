"""Reduce training FLOPs with token dropping, and with smaller images at the beginning of training.

1. `phases` splits the steps of a stage at each change of the image size or of the fraction of dropped patches.
2. The loader makes images of the phase's size, and the loss passes the kept patches to the model.
3. `kept_patches` draws the kept patches of each image from the seed, the step and the sample's id.

All of these are pure functions of the step, so a resumed run draws the same patches at any world size. Evaluation
always uses all patches at the model's image size.

In:  patch_dropout 0.5 up to 0.9 of 1,000 steps, images of 128 px up to 0.7, then the model's 224; B/16
Out: steps 0 … 699: 128 px, 32 of 64 patches; 700 … 899: 224 px, 98 of 196; 900 … 999: 224 px, all 196

docs/fewer-flops.md reports the measured effect on speed and accuracy.
"""

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np

import models
from data.draws import key_of, mix
from models import ModelConfig
from pipeline.config import Tags, require, tags
from pipeline.hooks import Hook
from pipeline.training_config import Phase, TrainConfig

if TYPE_CHECKING:
    from torch import Tensor

# b: samples per micro-batch, N: patches per image, K: kept patches per image

PATCH_DROPOUT = 2  # makes these draws independent of others for the same seed, step and sample (batches.DROPOUT is 1)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ / φ, the step of SplitMix64's counter


@dataclass(frozen=True)
class TokenDroppingConfig:
    """Token dropping and smaller images during training, off by default. Evaluation always uses full images."""

    patch_dropout: float = 0.0  # share of an image's patches dropped in training (Li et al. 2023: 0.5); 0: none
    patch_dropout_until: float = 1.0  # share of the steps with token dropping, before training uses all patches
    image_sizes: tuple[int, ...] = ()  # image sizes in pixels at the beginning of training, below model.image_size
    image_sizes_until: tuple[float, ...] = ()  # share of the steps at which training leaves each of these sizes

    RESUME: ClassVar[Tags] = tags(forbid="patch_dropout patch_dropout_until image_sizes image_sizes_until")

    def __post_init__(self) -> None:
        require(
            0 <= self.patch_dropout < 1,
            f"thinning.patch_dropout is {self.patch_dropout}, expected 0 (off) to less than 1, for example 0.5",
        )
        require(
            0 < self.patch_dropout_until <= 1,
            f"thinning.patch_dropout_until is {self.patch_dropout_until}, expected a fraction of the steps, greater "
            "than 0 and at most 1",
        )
        require(
            len(self.image_sizes) == len(self.image_sizes_until),
            f"thinning has {len(self.image_sizes)} image_sizes and {len(self.image_sizes_until)} image_sizes_until\n"
            "  expected one fraction of the steps for each size, such as image_sizes=[128,160] "
            "image_sizes_until=[0.4,0.7]",
        )
        for size in self.image_sizes:
            require(size >= 1, f"thinning.image_sizes contains {size}, expected a number of pixels ≥ 1")
        shares = (0.0, *self.image_sizes_until)
        require(
            all(before < after < 1 for before, after in pairwise(shares)),
            f"thinning.image_sizes_until is {list(self.image_sizes_until)}, expected increasing fractions of the steps "
            "below 1\n  the remaining steps use model.image_size",
        )

    @property
    def is_on(self) -> bool:
        """Return whether token dropping or smaller images are enabled."""
        return bool(self.patch_dropout or self.image_sizes)


@dataclass(frozen=True)
class TokenDroppingTrainConfig(TrainConfig):
    """Adds the config section `thinning` to trained stages."""

    # token dropping and smaller images, which reduce the FLOPs of a step (fewer-flops.md)
    thinning: TokenDroppingConfig = field(default_factory=TokenDroppingConfig)

    RESUME: ClassVar[Tags] = tags(forbid="thinning")
    LATER: ClassVar[tuple[str, ...]] = ("thinning",)

    def phases(self, steps: int, model: ModelConfig) -> list[Phase]:
        """Return the phases of the stage, in order."""
        if not self.thinning.is_on:
            return super().phases(steps, model)
        return phases(self.thinning, steps, model, self.seed)

    def check_architecture(self, model: ModelConfig, prefix: str = "") -> None:
        """Raise ConfigError if the stage cannot train this model."""
        super().check_architecture(model, prefix)
        check_token_dropping(self.thinning, model, self.objective, f"{prefix}thinning")


class TokenDropping(Hook):
    """Hook that adds the config section `thinning`."""

    Config = TokenDroppingTrainConfig


def phases(cfg: TokenDroppingConfig, steps: int, model: ModelConfig, seed: int = 0) -> list[Phase]:
    """Return the phases of a stage, in order; phases shorter than one step are omitted."""
    size_ends = [round(share * steps) for share in cfg.image_sizes_until]
    dropout_end = round(cfg.patch_dropout_until * steps)
    edges = sorted({0, *size_ends, dropout_end, steps})
    result = []
    for first, stop in pairwise(edges):
        # Use the first size that has not ended yet, and after all of them the model's image size.
        image_size = model.image_size[0]
        for size, end in zip(cfg.image_sizes, size_ends, strict=True):
            if first < end:
                image_size = size
                break
        is_dropping = cfg.patch_dropout > 0 and first < dropout_end
        patches = 0
        kept = None
        draw_patches = None
        if isinstance(model, models.ViTConfig):
            patches = (image_size // model.stride[0]) * (image_size // model.stride[1])
            if is_dropping:
                kept = max(1, round(patches * (1 - cfg.patch_dropout)))
                draw_patches = partial(kept_patches, seed, patches=patches, kept=kept)
        result.append(Phase(range(first, stop), image_size, patches, kept, draw_patches))
    return result


def check_token_dropping(cfg: TokenDroppingConfig, model: ModelConfig, objective: str, key: str) -> None:
    """Raise ConfigError if the model does not support these settings; `key` is the section's path in the config."""
    if not cfg.is_on:
        return
    require(
        objective == "classification" and model.family == "vit",
        f"{key} supports only classification with plain or hybrid ViTs; found family {model.family}, "
        f"objective {objective}\n  remove {key}",
    )
    assert isinstance(model, models.ViTConfig)
    require(
        model.positions != "relative",
        f"{key} is not supported with relative positions, which need a fixed grid with all patches\n"
        f"  use another model.positions, or remove {key}",
    )
    require(
        not cfg.patch_dropout or model.positions_at == "stem",
        f"{key}.patch_dropout is not supported with positions_at={model.positions_at}, because every layer adds its "
        "positions to all patches\n"
        f"  use model.positions_at=stem, or remove {key}.patch_dropout",
    )
    stride = max(model.stride)
    for size in cfg.image_sizes:
        divides = size % model.stride[0] == 0 and size % model.stride[1] == 0
        below = max(stride, size // stride * stride)
        require(
            divides and size < model.image_size[0],
            f"{key}.image_sizes contains {size}; expected multiples of {stride} below model.image_size "
            f"{model.image_size[0]}, for example {min(below, model.image_size[0] - stride)}",
        )


def kept_patches(seed: int, step: int, ids: "Tensor", patches: int, kept: int) -> "Tensor":
    """Draw the patches to keep for each sample, (b, K) in increasing order; `ids` (b, 3) are epoch, shard and sample.

    All subsets of K of the N patches are equally likely. The draw for a sample does not depend on the other samples.
    """
    import torch  # imported here because checking a recipe does not need torch

    epochs, shards, samples = ids.numpy().T
    keys = key_of(seed, PATCH_DROPOUT, step, epochs, shards, samples)
    counters = np.arange(1, patches + 1, dtype=np.uint64) * GOLDEN
    numbers = mix(keys[:, None] + counters)  # (b, N) pseudorandom numbers of SplitMix64
    # Keep the patches with the smallest numbers, in the order of the image.
    chosen = np.argpartition(numbers, kept - 1, axis=1)[:, :kept]
    return torch.from_numpy(np.sort(chosen, axis=1))
