"""Computes losses on dense targets, converts padded label lists to targets, and applies mixup.

targets = dense_targets(labels, classes=1000)               labels (B, L), padded with −1
LOSSES["sigmoid"](logits, targets)                          (B,)
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.optimization import Loss

# B: batch size, C: number of classes, L: maximum number of labels per sample


def dense_targets(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """Convert class ids (B, L), padded with −1, to multi-hot float32 targets (B, C), smoothed to t·(1 − s) + s/C."""
    # scatter_ needs a valid index for the padding too: it writes to an extra column, which is then removed.
    targets = torch.zeros(len(labels), classes + 1, device=labels.device)
    targets.scatter_(1, labels.masked_fill(labels < 0, classes), 1.0)
    targets = targets[:, :classes]
    if not smoothing:
        return targets
    return targets * (1 - smoothing) + smoothing / classes


def sigmoid_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sigmoid cross-entropy (B,) between logits and targets (B, C), summed over classes.

    Matches big_vision's `utils.sigmoid_xent`.
    """
    # Use fp32 even if the model computes in bf16: the sum can be over more than 20,000 classes.
    return F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").sum(-1)


def softmax_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the softmax cross-entropy (B,) between logits and targets (B, C); targets need not sum to 1.

    Matches big_vision's `utils.softmax_xent`.
    """
    return -(targets * F.log_softmax(logits.float(), -1)).sum(-1)


LOSSES: dict[Loss, Callable[[Tensor, Tensor], Tensor]] = {
    "sigmoid": sigmoid_cross_entropy,  # ImageNet-21k and JFT (authors, vision_transformer issue 34)
    "softmax": softmax_cross_entropy,  # fine-tuning (paper, B.1.1)
}


def mixup(images: Tensor, targets: Tensor, p: float, seed: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Blend every image and target with its neighbour in the batch, like big_vision's `utils.get_mixup`.

    Each call draws a single ratio a ~ Beta(p, p) and uses max(a, 1 − a); the partners are the batch rolled by one.
    Pass (seed, step) as `seed`, so that all workers draw the same ratio in a step.
    """
    # NumPy accepts no negative seeds; other parts stay as they are.
    drawn = float(np.random.default_rng([part % 2**64 for part in seed]).beta(p, p))
    a = max(drawn, 1 - drawn)  # the image itself always gets the larger weight
    mixed_images = a * images + (1 - a) * images.roll(1, 0)
    mixed_targets = a * targets + (1 - a) * targets.roll(1, 0)
    return mixed_images, mixed_targets
