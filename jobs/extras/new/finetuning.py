"""Published fine-tuning settings for each kind of weights, used by `patchline new --init`.

    a DINOv2 of timm, transformers or its repository    AdamW, 1e-5 at batch size 512, images of 224 pixels
    pretraining of this project or AugReg               SGD, 0.03 at batch size 512, the size of the weights

Patchline has one learning rate for all layers. Settings published with a rate per layer are converted to one rate; the
table rows mention this.
"""

import math
from dataclasses import dataclass
from typing import Any

from models import ModelConfig
from models.configs import HALF, ViTConfig

LARGEST = 448  # pixels; larger weights are fine-tuned at EVALUATED, the size at which they were evaluated
EVALUATED = 224
# 0.65 for each layer below the head (MAE's FINETUNE.md): the mean rate of the 12 layers of ViT-B, as a fraction.
MEAN_OF_LAYERS = sum(0.65**layer for layer in range(1, 13)) / 12


@dataclass(frozen=True)
class FineTuning:
    """An optimizer with a learning rate for one batch size, and the publication that reports them."""

    optimizer: str  # adam (decoupled decay, so AdamW) or sgd
    lr: float
    batch_size: int  # for which the rate was published
    weight_decay: float
    source: str

    def lr_at(self, batch_size: int) -> float:
        """Return the learning rate at another batch size, scaled with the square root of the batch size."""
        return self.lr * math.sqrt(batch_size / self.batch_size)


SUPERVISED = FineTuning("sgd", 0.03, 512, 0.0, "SGD: 0.03 at batch size 512 (ViT paper, table 4)")
CONTRASTIVE = FineTuning(
    "adam", 3e-5, 512, 0.1, "image-text weights, AdamW: 3e-5 at batch size 512 (Wortsman et al. 2022, WiSE-FT)"
)
SELF_DISTILLED = FineTuning(
    "adam", 1e-5, 512, 0.1, "DINOv2's choice, AdamW of DeiT III: 1e-5 at batch size 512 (Oquab et al. 2024, section 7)"
)
DEIT = FineTuning("adam", 1e-5, 512, 0.1, "AdamW: 1e-5 at batch size 512 (Touvron et al. 2022, DeiT III)")
MASKED = FineTuning(
    "adam",
    5e-4 * 1024 / 256 * MEAN_OF_LAYERS,
    1024,
    0.05,
    f"AdamW: 2e-3 at batch size 1024 with 0.65 per layer, on average {MEAN_OF_LAYERS:.2f} of it (He et al. 2022, MAE)",
)


def settings_of(source: ModelConfig, form: dict[str, Any] | None) -> FineTuning:
    """Return the settings for weights with this config and format; the first match wins."""
    name = str((form or {}).get("architecture") or (form or {}).get("model_type") or "")
    if not isinstance(source, ViTConfig):
        return SUPERVISED
    # 1. Contrastive image-text training leaves a norm before the blocks (CLIP), or attention pooling (SigLIP).
    if source.pre_norm or (source.pool == "map" and source.activation != "swiglu") or "clip" in name:
        return CONTRASTIVE
    # 2. Self-distillation: DINOv2 and DINOv3, recognised by LayerScale without a head.
    if source.rope == "dinov3" or "dino" in name or (source.layer_scale is not None and not source.classes):
        return SELF_DISTILLED
    # 3. Masked image modelling without labels. ImageNet's pixels and no head: MAE, and BEiT before its labels.
    has_other_pixels = (source.pixel_mean, source.pixel_std) != (HALF, HALF)
    if not source.classes and (has_other_pixels or name in ("vit_mae", "beit") or source.rope == "eva02"):
        return MASKED
    # 4. Supervised training with the recipes of DeiT.
    if source.layer_scale is not None or has_other_pixels or source.rope != "none":
        return DEIT
    return SUPERVISED


def image_size_of(source: ModelConfig) -> tuple[int, int]:
    """Return the image size for fine-tuning: the size used by the weights, or EVALUATED if that exceeds LARGEST."""
    height, width = source.image_size
    if not isinstance(source, ViTConfig) or max(height, width) <= LARGEST:
        return source.image_size
    rows, columns = source.stride
    return EVALUATED // rows * rows, EVALUATED // columns * columns
