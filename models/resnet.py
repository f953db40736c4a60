"""ResNets with GroupNorm and weight standardisation: the stem of the hybrids (SPEC 1.6) and BiT (SPEC 1.8).

The stem is post-activation (v1) with TensorFlow's SAME padding; BiT is pre-activation (v2) with symmetric padding. The
two use different epsilons and add them in different places.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.configs import GROUPS, BiTConfig

# B: batch, C: channels; images and maps are (B, C, rows, columns)

EXPANSION = 4  # a bottleneck outputs 4 times its inner channels: He et al. 2016
# From vit_jax models_resnet.py for the stem, and from bit_pytorch for BiT.
STEM_NORM_EPS = 1e-6
BIT_NORM_EPS = 1e-5


def same_padding(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad like TensorFlow's SAME, for ceil(size / stride) outputs; an odd pixel is added at the bottom or right."""
    # Torch pads both sides equally, which would change a hybrid's logits by 0.2 to 1.7 (SPEC 1.1).
    borders: list[int] = []  # in F.pad's order, last axis first: left, right, above, below
    for size in (x.shape[3], x.shape[2]):
        outputs = -(-size // stride)  # rounded up
        # If the stride exceeds the kernel, the difference may be negative, and F.pad would crop.
        missing = max((outputs - 1) * stride + kernel - size, 0)
        borders += [missing // 2, missing - missing // 2]
    return F.pad(x, borders, value=value)


class StdConv(nn.Conv2d):
    """A convolution that standardises its filters over (in, kh, kw) to mean 0 and standard deviation 1 on each call."""

    def __init__(self, inside: int, outside: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inside, outside, kernel, stride, bias=False)


class StemConv(StdConv):
    """The stem's convolution: pads like TensorFlow; adds epsilon to the standard deviation, or to timm's variance."""

    variance_eps: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        padded = same_padding(x.to(self.weight.dtype), self.kernel_size[0], self.stride[0])
        # correction=0: JAX divides by the number of entries; torch by default divides by one less.
        deviation, mean = torch.std_mean(self.weight.float(), dim=(1, 2, 3), correction=0, keepdim=True)
        divisor = deviation + 1e-5
        if self.variance_eps is not None:
            divisor = (deviation.square() + self.variance_eps).sqrt()
        filters = (self.weight - mean) / divisor  # in float32
        return F.conv2d(padded, filters.to(padded.dtype), stride=self.stride)


class BiTConv(StdConv):
    """BiT's convolution: adds epsilon to the variance, and pads all sides equally."""

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.to(self.weight.dtype), [self.kernel_size[0] // 2] * 4)
        # correction=0, as in the stem.
        variance, mean = torch.var_mean(self.weight.float(), dim=(1, 2, 3), correction=0, keepdim=True)
        filters = (self.weight - mean) * torch.rsqrt(variance + 1e-10)  # in float32
        return F.conv2d(padded, filters.to(padded.dtype), stride=self.stride)


class StemUnit(nn.Module):
    """Post-activation bottleneck with the stride on its 3x3 convolution."""

    is_repeated = True  # for models.blocks

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = width * EXPANSION
        self.conv1 = StemConv(inside, width, 1)
        self.gn1 = nn.GroupNorm(GROUPS, width, eps=STEM_NORM_EPS)
        self.conv2 = StemConv(width, width, 3, stride)
        self.gn2 = nn.GroupNorm(GROUPS, width, eps=STEM_NORM_EPS)
        self.conv3 = StemConv(width, outside, 1)
        self.gn3 = nn.GroupNorm(GROUPS, outside, eps=STEM_NORM_EPS)
        # Project the shortcut if its shape differs from the output's.
        self.conv_proj = None
        self.gn_proj = None
        if stride != 1 or inside != outside:
            self.conv_proj = StemConv(inside, outside, 1, stride)
            self.gn_proj = nn.GroupNorm(GROUPS, outside, eps=STEM_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self.conv_proj is not None and self.gn_proj is not None:
            # No ReLU on the shortcut: it follows the sum.
            shortcut = self.gn_proj(self.conv_proj(x))
        y = F.relu(self.gn1(self.conv1(x)))
        y = F.relu(self.gn2(self.conv2(y)))
        return F.relu(shortcut + self.gn3(self.conv3(y)))


class BiTUnit(nn.Module):
    """Pre-activation bottleneck; the shortcut's projection reads the activated input."""

    is_repeated = True  # for models.blocks

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = width * EXPANSION
        self.gn1 = nn.GroupNorm(GROUPS, inside, eps=BIT_NORM_EPS)
        self.conv1 = BiTConv(inside, width, 1)
        self.gn2 = nn.GroupNorm(GROUPS, width, eps=BIT_NORM_EPS)
        self.conv2 = BiTConv(width, width, 3, stride)
        self.gn3 = nn.GroupNorm(GROUPS, width, eps=BIT_NORM_EPS)
        self.conv3 = BiTConv(width, outside, 1)
        # Project the shortcut if its shape differs from the output's.
        self.conv_proj = None
        if stride != 1 or inside != outside:
            self.conv_proj = BiTConv(inside, outside, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        # The projection reads the activated input, the identity shortcut the unchanged input (bit_pytorch models.py).
        y = F.relu(self.gn1(x))
        shortcut = x
        if self.conv_proj is not None:
            shortcut = self.conv_proj(y)
        y = self.conv1(y)
        y = self.conv2(F.relu(self.gn2(y)))
        return shortcut + self.conv3(F.relu(self.gn3(y)))


def make_stages(units: tuple[int, ...], width: int, unit: type[nn.Module], name: str) -> nn.Sequential:
    """Build a ResNet's stages (`block1.unit1`, …); each doubles the channels and halves the resolution."""
    stages = nn.Sequential()
    inside = width
    for stage, count in enumerate(units):
        block = nn.Sequential()
        stage_width = width * 2**stage
        for number in range(count):
            # The first stage keeps the size of the map; every other stage halves it in its first unit.
            stride = 1
            if stage > 0 and number == 0:
                stride = 2
            # Names follow the published files: unit1 in a hybrid, unit01 in a BiT (SPEC 6.1).
            block.add_module(name.format(number + 1), unit(inside, stage_width, stride))
            inside = stage_width * EXPANSION
        stages.add_module(f"block{stage + 1}", block)
    return stages


class Stem(nn.Module):
    """Maps images to the feature map (B, C, rows, columns) that a hybrid cuts into patches."""

    def __init__(self, units: tuple[int, ...], width: int, epsilons: str = "original") -> None:
        super().__init__()
        self.conv_root = StemConv(3, width, 7, 2)
        self.gn_root = nn.GroupNorm(GROUPS, width, eps=STEM_NORM_EPS)
        self.stages = make_stages(units, width, StemUnit, "unit{}")
        # Channels of the map; without stages, those of the root.
        self.channels = width
        if units:
            self.channels = width * EXPANSION * 2 ** (len(units) - 1)
        if epsilons == "timm":
            for part in self.modules():
                if isinstance(part, StemConv):
                    part.variance_eps = 1e-8  # timm models/vision_transformer_hybrid.py, _resnetv2
                elif isinstance(part, nn.GroupNorm):
                    part.eps = 1e-5  # GroupNormAct

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.gn_root(self.conv_root(images)))
        # TensorFlow's SAME padding is asymmetric at even sizes (0 before, 1 after), which `max_pool2d` cannot do.
        x = F.max_pool2d(same_padding(x, 3, 2, value=float("-inf")), 3, 2)
        return self.stages(x)


class BiT(nn.Module):
    """The paper's ResNet baseline (BiT); maps images (B, 3, height, width) to logits."""

    def __init__(self, config: BiTConfig) -> None:
        super().__init__()
        self.config = config
        self.recomputed_blocks = 0  # number of first units that recompute their activations in training
        self.conv_root = BiTConv(3, config.width, 7, 2)
        self.stages = make_stages(config.units, config.width, BiTUnit, "unit{:02}")
        channels = config.width * EXPANSION * 2 ** (len(config.units) - 1)  # of the last map
        self.norm = nn.GroupNorm(GROUPS, channels, eps=BIT_NORM_EPS)
        self.head = nn.Linear(channels, config.classes) if config.classes else nn.Identity()

    def features(self, images: Tensor) -> Tensor:
        """Return the head's input (B, C): the mean over the last feature map."""
        # Recomputing only helps a backward pass.
        recompute = self.training and torch.is_grad_enabled()
        border = 0.0 if self.config.pool_padding == "zero" else float("-inf")
        # No norm or ReLU precedes this pool, so values may be negative and the border matters: zero and -inf differ by
        # 3e-3 to 5e-3 in the golden logits (SPEC 1.8). `max_pool2d` only pads with -inf.
        x = F.max_pool2d(F.pad(self.conv_root(images), (1, 1, 1, 1), value=border), 3, 2)
        units_done = 0
        for block in self.stages:
            for unit in block.children():
                if recompute and units_done < self.recomputed_blocks:
                    # The reentrant variant gives no gradients if no input requires one.
                    x = checkpoint(unit, x, use_reentrant=False)
                else:
                    x = unit(x)
                units_done += 1
        return F.relu(self.norm(x)).mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))
