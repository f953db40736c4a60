"""Masked patch prediction (paper B.1.2, SPEC 2.7): corrupt half of the patch embeddings and predict the patches.

1. The ordinary ViT embeds the images.
2. `Corruption` selects half of the embeddings. It replaces most of them with the mask embedding and some with another
   patch's embedding, and leaves the rest unchanged.
3. The ViT's blocks process all tokens, and a linear layer predicts each corrupted patch from its token.
4. `objective` compares the predictions with the mean colours or the pixels of the original patches.

    model = models.build("Masked-B/16", target="mean_color")
    loss_sum, count = masked.objective(model, images, generator)    # images (B, 3, height, width) in [-1, 1]

`model.vit` is the ordinary ViT; `models.transfer` to a ViT config drops everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from models.configs import CELLS, HALF, MaskedConfig
from models.vit import ViT

# B batch, N patches, K corrupted patches per image, D width, S colours predicted per patch
Predict = Callable[[Tensor, Generator | None], tuple[Tensor, Tensor]]  # a MaskedViT, or an engine around it

COLORS = 512  # 3 bits per channel


class Corruption(nn.Module):
    """Replaces a random subset of the patch embeddings; the subset has the same size for every image."""

    def __init__(self, config: MaskedConfig) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(1, 1, config.width))
        # A fixed count keeps shapes static. At least one, because the mean loss over no patches would be 0 / 0.
        self.count = max(round(config.corrupted * math.prod(config.grid)), 1)
        self.masked = config.masked
        self.swapped = config.swapped

    def forward(self, patches: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """Corrupt some of the patches (B, N, D); return all patches, and the positions (B, K) of those corrupted."""
        batch, patch_count, width = patches.shape
        device = patches.device
        # A seed determines the result only if the order of these three draws stays the same.
        order = torch.rand(batch, patch_count, generator=generator, device=device).argsort(dim=1)
        places = order[:, : self.count]
        # Moving 1 to N - 1 patches ahead, cyclically, reaches every other patch with equal probability.
        distance = torch.randint(1, patch_count, places.shape, generator=generator, device=device)
        others = (places + distance) % patch_count  # any other patch of the image
        fate = torch.rand(places.shape, generator=generator, device=device)[..., None]
        # fate below 0.8: the mask embedding; below 0.9: another patch; otherwise the patch itself.
        swapped = torch.where(fate < self.masked + self.swapped, pick(patches, others), pick(patches, places))
        replaced = torch.where(fate < self.masked, self.token, swapped)  # (B, K, D)
        index = places[..., None].expand(-1, -1, width)
        return patches.scatter(1, index, replaced.to(patches.dtype)), places


def pick(values: Tensor, places: Tensor) -> Tensor:
    """Gather the entries (B, K, ...) at positions (B, K) from values (B, N, ...)."""
    images = torch.arange(len(values), device=values.device)
    return values[images[:, None], places]


class MaskedViT(nn.Module):
    """Maps images to predictions and targets for their corrupted patches."""

    def __init__(self, config: MaskedConfig) -> None:
        super().__init__()
        self.config = config
        self.vit = ViT(config.vit)
        self.corruption = Corruption(config)
        outputs = 3 * math.prod(config.stride)  # per patch: its pixels, or below, logits of its colours
        if config.target != "pixels":
            outputs = CELLS[config.target] ** 2 * COLORS
        self.prediction = nn.Linear(config.width, outputs)

    @property
    def recomputed_blocks(self) -> int:
        """The number of ViT blocks, counted from the first, that recompute their activations in training."""
        return self.vit.recomputed_blocks

    @recomputed_blocks.setter
    def recomputed_blocks(self, blocks: int) -> None:
        self.vit.recomputed_blocks = blocks

    def features(self, images: Tensor) -> Tensor:
        """Return the features of uncorrupted images, as a classifier's ViT does."""
        return self.vit.features(images)

    def forward(self, images: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Map images (B, 3, height, width) in [-1, 1] to predictions and targets.

        For colours: logits (B, K, S, 512) and classes (B, K, S). For pixels: both (B, K, 3 x patch height x width).
        """
        patches, places = self.corruption(self.vit.embed(images), generator)
        # Prefix tokens take part in attention but correspond to no patch: remove them before indexing.
        tokens = self.vit.encode(patches)[:, self.config.prefix_tokens :]  # (B, N, D)
        predictions = self.prediction(pick(tokens, places))
        if self.config.target != "pixels":
            predictions = predictions.unflatten(-1, (-1, COLORS))
        return predictions, pick(targets(images, self.config), places)


def targets(images: Tensor, config: MaskedConfig) -> Tensor:
    """Return each patch's target: normalised pixels (B, N, 3hw), or colour classes 64 r + 8 g + b (B, N, S)."""
    if config.target == "pixels":
        return F.unfold(images, config.stride, stride=config.stride).transpose(1, 2)
    cells = CELLS[config.target]
    rows, columns = config.grid
    mean = F.adaptive_avg_pool2d(images.float(), (rows * cells, columns * cells))
    if (config.pixel_mean, config.pixel_std) != (HALF, HALF):
        # Back to [-1, 1]: a colour is a class of the image's pixels, however the model normalises them.
        factor = 2 * images.new_tensor(config.pixel_std)
        offset = 2 * images.new_tensor(config.pixel_mean) - 1
        mean = mean * factor[:, None, None] + offset[:, None, None]
    # Map [-1, 1] to 0..255 and eight bins of 32. The paper does not give bin edges; these are our choice (SPEC 2.7).
    bits = ((mean + 1) * (127.5 / 32)).floor().clamp(0, 7).long()
    color = 64 * bits[:, 0] + 8 * bits[:, 1] + bits[:, 2]  # (B, rows x cells, columns x cells)
    by_patch = color.unflatten(2, (columns, cells)).unflatten(1, (rows, cells)).transpose(2, 3)
    return by_patch.flatten(3).flatten(1, 2)  # the cells of a patch row by row


def objective(
    predict: Predict, images: Tensor, generator: Generator | None = None, left_out: Tensor | None = None
) -> tuple[Tensor, int]:
    """Return the sum over images of the mean loss on the image's corrupted patches, and the number of images.

    `predict` is a MaskedViT or an engine around it; `generator` is on the images' device. Images marked in `left_out`
    (B,) are corrupted like all others, but their loss is excluded from the sum.
    """
    predictions, answers = predict(images, generator)
    if left_out is not None:
        predictions = predictions[~left_out]
        answers = answers[~left_out]
    # Floating-point targets are pixels for regression; integer targets are colour classes.
    if answers.is_floating_point():
        total = F.mse_loss(predictions.float(), answers.float(), reduction="sum")
    else:
        total = F.cross_entropy(predictions.float().flatten(0, 2), answers.flatten(), reduction="sum")
    # Average over the predictions of an image, and sum over the images: a micro-batch may be empty, and a mean over no
    # images would be 0 / 0.
    return total / math.prod(answers.shape[1:]), len(images)
