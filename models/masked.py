"""Masked patch prediction (paper B.1.2, SPEC 2.7): corrupt half the patch embeddings, predict the patches.

1. the ordinary ViT embeds the images;
2. `Corruption` picks half of the embeddings: most become the mask embedding, some another patch's, some stay;
3. the ViT's blocks run over all tokens, and a linear layer predicts each corrupted patch from its own token;
4. `objective` compares the predictions with what the patches were, their mean colours or their pixels.

    model = models.build("Masked-B/16", target="mean_color")
    loss_sum, count = masked.objective(model, images, generator)    # images (B, 3, height, width) in [-1, 1]

The ordinary ViT inside is `model.vit`; `models.transfer` to a ViT config drops everything around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from models.configs import CELLS, MaskedConfig
from models.vit import ViT

# B batch, N patches, K corrupted patches of an image, D width, S colours predicted for a patch
Predict = Callable[[Tensor, Generator | None], tuple[Tensor, Tensor]]  # a MaskedViT, or an engine around it

COLORS = 512  # 3 bits a channel


class Corruption(nn.Module):
    """Replaces a random, equally large share of every image's patch embeddings."""

    def __init__(self, config: MaskedConfig) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(1, 1, config.width))
        # A fixed count keeps shapes static. At least one, because the loss of no patch is 0 / 0.
        self.count = max(round(config.corrupted * math.prod(config.grid)), 1)
        self.masked = config.masked
        self.swapped = config.swapped

    def forward(self, patches: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """Turn patches (B, N, D) into corrupted ones; return them and the places (B, K) of the corruption."""
        batch, patch_count, width = patches.shape
        device = patches.device
        # The order of the three draws is part of what a seed means.
        order = torch.rand(batch, patch_count, generator=generator, device=device).argsort(dim=1)
        places = order[:, : self.count]
        # A walk of 1 to N - 1 patches around the sequence ends at each other patch equally often.
        distance = torch.randint(1, patch_count, places.shape, generator=generator, device=device)
        others = (places + distance) % patch_count  # any other patch of the image
        fate = torch.rand(places.shape, generator=generator, device=device)[..., None]
        # fate below 0.8: the mask embedding; below 0.9: another patch; else the patch itself.
        swapped = torch.where(fate < self.masked + self.swapped, pick(patches, others), pick(patches, places))
        replaced = torch.where(fate < self.masked, self.token, swapped)  # (B, K, D)
        index = places[..., None].expand(-1, -1, width)
        return patches.scatter(1, index, replaced.to(patches.dtype)), places


def pick(values: Tensor, places: Tensor) -> Tensor:
    """Return the entries (B, K, ...) of (B, N, ...) at places (B, K)."""
    images = torch.arange(len(values), device=values.device)
    return values[images[:, None], places]


class MaskedViT(nn.Module):
    """Turns images into predictions and targets for their corrupted patches."""

    def __init__(self, config: MaskedConfig) -> None:
        super().__init__()
        self.config = config
        self.vit = ViT(config.vit)
        self.corruption = Corruption(config)
        outputs = 3 * math.prod(config.stride)  # numbers predicted for one patch: its pixels, or logits of colours
        if config.target != "pixels":
            outputs = CELLS[config.target] ** 2 * COLORS
        self.prediction = nn.Linear(config.width, outputs)

    @property
    def recomputed_blocks(self) -> int:
        """Return how many blocks of the ViT, from the first, recompute their activations in training."""
        return self.vit.recomputed_blocks

    @recomputed_blocks.setter
    def recomputed_blocks(self, blocks: int) -> None:
        self.vit.recomputed_blocks = blocks

    def features(self, images: Tensor) -> Tensor:
        """Return what a classifier would see of the image, nothing corrupted."""
        return self.vit.features(images)

    def forward(self, images: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Turn images (B, 3, height, width) in [-1, 1] into predictions and targets.

        Colours: logits (B, K, S, 512) and classes (B, K, S). Pixels: both (B, K, 3 x patch height x width).
        """
        patches, places = self.corruption(self.vit.embed(images), generator)
        # Prefix tokens take part in attention but stand for no patch: they are cut off before places are looked up.
        tokens = self.vit.encode(patches)[:, self.config.prefix_tokens :]  # (B, N, D)
        predictions = self.prediction(pick(tokens, places))
        if self.config.target != "pixels":
            predictions = predictions.unflatten(-1, (-1, COLORS))
        return predictions, pick(targets(images, self.config), places)


def targets(images: Tensor, config: MaskedConfig) -> Tensor:
    """Return what to predict for each patch: pixels (B, N, 3hw) in [-1, 1], or classes 64 r + 8 g + b (B, N, S)."""
    if config.target == "pixels":
        return F.unfold(images, config.stride, stride=config.stride).transpose(1, 2)
    cells = CELLS[config.target]
    rows, columns = config.grid
    mean = F.adaptive_avg_pool2d(images.float(), (rows * cells, columns * cells))
    # [-1, 1] back to 0..255, in eight bins of 32: the paper names no bin edges, and these are our choice (SPEC 2.7).
    bits = ((mean + 1) * (127.5 / 32)).floor().clamp(0, 7).long()
    color = 64 * bits[:, 0] + 8 * bits[:, 1] + bits[:, 2]  # (B, rows x cells, columns x cells)
    by_patch = color.unflatten(2, (columns, cells)).unflatten(1, (rows, cells)).transpose(2, 3)
    return by_patch.flatten(3).flatten(1, 2)  # each patch's cells in reading order


def objective(
    predict: Predict, images: Tensor, generator: Generator | None = None, left_out: Tensor | None = None
) -> tuple[Tensor, int]:
    """Return the sum over the images of the mean loss of their corrupted patches, and the number of images.

    `predict` is a MaskedViT or an engine around it; `generator` lies on the images' device. `left_out` (B,) are images
    whose patches are corrupted as those of all are, and whose loss is not in the sum.
    """
    predictions, answers = predict(images, generator)
    if left_out is not None:
        predictions = predictions[~left_out]
        answers = answers[~left_out]
    # Pixels are regressed, colours are classes: the type of the answers tells which.
    if answers.is_floating_point():
        total = F.mse_loss(predictions.float(), answers.float(), reduction="sum")
    else:
        total = F.cross_entropy(predictions.float().flatten(0, 2), answers.flatten(), reduction="sum")
    # The mean over what one image predicts, the sum over the images: a micro-batch may hold none, and a mean over
    # no images would be 0 / 0.
    return total / math.prod(answers.shape[1:]), len(images)
