"""ResNets with GroupNorm and weight standardisation: the stem of the hybrids (SPEC 1.6) and BiT (SPEC 1.8).

The two differ in everything small: the stem is post-activation (v1) with TF's SAME padding, BiT is
pre-activation (v2) with symmetric padding, and each has its own epsilons.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models import checks

# B batch, C channels; images and maps are (B, C, rows, columns)

UNITS = {  # bottleneck units of the four stages: He et al. 2016; big_vision models/bit.py, get_block_desc
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
STEMS = {  # (name, total stride): (units of the stages, patch on the map); vit_jax configs/models.py:252-328
    ("R50", 16): ((3, 4, 9), 1),
    ("R50", 32): ((3, 4, 6, 3), 1),
    ("R26", 32): ((2, 2, 2, 2), 1),
    ("R", 16): ((), 8),  # the published name; the stem's stride is 4, so that the tokens are 32 pixels apart
}
EXPANSION = 4
GROUPS = 32


@dataclass(frozen=True)
class BiTConfig:
    image_size: tuple[int, int] = (224, 224)  # height, width in pixels; one number means a square
    classes: int = 1000  # 0: no head
    units: tuple[int, ...] = UNITS[50]  # bottleneck units of each stage
    width: int = 64  # channels of the root: 64 times the width factor
    pool_padding: str = "zero"  # of the root's max-pool: zero (bit_pytorch, bit_jax) or -inf (big_vision)
    head_bias: float = 0.0  # initial

    family = "bit"

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", checks.pair("image_size", self.image_size))
        checks.choices(self, {"pool_padding": ("zero", "-inf")})
        checks.at_least(self, 0, ("classes",))
        checks.at_least(self, 1, ("width",))
        checks.multiple("width", self.width, GROUPS, "groups")
        if not self.units or min(self.units) < 1:
            raise ValueError(f"units must name at least one unit for each stage, found {self.units}")

    @property
    def feature_width(self) -> int:
        return self.width * EXPANSION * 2 ** (len(self.units) - 1)


def same_padding(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """TF's SAME: just enough for ceil(size / stride) outputs, the odd pixel below and to the right."""
    rows, columns = (max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in x.shape[2:])
    return F.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2), value=value)


class StdConv(nn.Conv2d):
    """Convolution whose filters are standardised, over (in, kh, kw), at every use."""

    def __init__(self, inside: int, outside: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inside, outside, kernel, stride, bias=False)

    def standardized(self) -> Tensor:
        raise NotImplementedError

    def padded(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        return F.conv2d(self.padded(x), self.standardized().to(x.dtype), stride=self.stride)


class StemConv(StdConv):
    def standardized(self) -> Tensor:
        deviation, mean = torch.std_mean(self.weight.float(), dim=(1, 2, 3), correction=0, keepdim=True)
        return (self.weight - mean) / (deviation + 1e-5)

    def padded(self, x: Tensor) -> Tensor:
        return same_padding(x, self.kernel_size[0], self.stride[0])


class BiTConv(StdConv):
    def standardized(self) -> Tensor:
        variance, mean = torch.var_mean(self.weight.float(), dim=(1, 2, 3), correction=0, keepdim=True)
        return (self.weight - mean) * torch.rsqrt(variance + 1e-10)

    def padded(self, x: Tensor) -> Tensor:
        return F.pad(x, [self.kernel_size[0] // 2] * 4)


class StemUnit(nn.Module):
    """Post-activation bottleneck; the stride is on the 3x3."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = width * EXPANSION
        self.conv1, self.gn1 = StemConv(inside, width, 1), nn.GroupNorm(GROUPS, width, eps=1e-6)
        self.conv2, self.gn2 = StemConv(width, width, 3, stride), nn.GroupNorm(GROUPS, width, eps=1e-6)
        self.conv3, self.gn3 = StemConv(width, outside, 1), nn.GroupNorm(GROUPS, outside, eps=1e-6)
        project = stride != 1 or inside != outside
        self.conv_proj = StemConv(inside, outside, 1, stride) if project else None
        self.gn_proj = nn.GroupNorm(GROUPS, outside, eps=1e-6) if project else None

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        if self.conv_proj is not None and self.gn_proj is not None:
            residual = self.gn_proj(self.conv_proj(x))
        y = F.relu(self.gn1(self.conv1(x)))
        y = F.relu(self.gn2(self.conv2(y)))
        return F.relu(residual + self.gn3(self.conv3(y)))


class BiTUnit(nn.Module):
    """Pre-activation bottleneck; the projection sees the activated input."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = width * EXPANSION
        self.gn1, self.conv1 = nn.GroupNorm(GROUPS, inside, eps=1e-5), BiTConv(inside, width, 1)
        self.gn2, self.conv2 = nn.GroupNorm(GROUPS, width, eps=1e-5), BiTConv(width, width, 3, stride)
        self.gn3, self.conv3 = nn.GroupNorm(GROUPS, width, eps=1e-5), BiTConv(width, outside, 1)
        project = stride != 1 or inside != outside
        self.conv_proj = BiTConv(inside, outside, 1, stride) if project else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.gn1(x))
        residual = x if self.conv_proj is None else self.conv_proj(y)
        y = self.conv1(y)
        y = self.conv2(F.relu(self.gn2(y)))
        return residual + self.conv3(F.relu(self.gn3(y)))


class Stages(nn.Module):
    """`block1.unit1` ...: channels double and the map halves from stage to stage."""

    def __init__(self, units: tuple[int, ...], width: int, unit: type[nn.Module], name: str) -> None:
        super().__init__()
        inside = width
        for stage, count in enumerate(units):
            block = nn.Sequential()
            for i in range(count):
                stride = 2 if stage and i == 0 else 1
                block.add_module(name.format(i + 1), unit(inside, width * 2**stage, stride))
                inside = width * 2**stage * EXPANSION
            self.add_module(f"block{stage + 1}", block)

    def __iter__(self) -> Iterator[nn.Module]:
        return (unit for block in self.children() for unit in block.children())


class Stem(nn.Module):
    """Images to the map (B, C, rows, columns) a hybrid cuts into patches."""

    def __init__(self, units: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.conv_root = StemConv(3, width, 7, 2)
        self.gn_root = nn.GroupNorm(GROUPS, width, eps=1e-6)
        self.stages = Stages(units, width, StemUnit, "unit{}")
        self.channels = stem_channels(units, width)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.gn_root(self.conv_root(images)))
        x = F.max_pool2d(same_padding(x, 3, 2, value=float("-inf")), 3, 2)
        for unit in self.stages:
            x = unit(x)
        return x


def stem_channels(units: tuple[int, ...], width: int) -> int:
    return width * EXPANSION * 2 ** (len(units) - 1) if units else width


def stem_stride(units: tuple[int, ...] | None) -> int:
    """Pixels between neighbours on the stem's map: 4 of the root, 2 a stage after the first; else 1."""
    return 1 if units is None else 4 * 2 ** max(len(units) - 1, 0)


class BiT(nn.Module):
    """The paper's ResNet baseline: images (B, 3, height, width) to logits."""

    def __init__(self, config: BiTConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_blocks = 0  # how many units, from the first, recompute their activations in training
        self.conv_root = BiTConv(3, config.width, 7, 2)
        self.stages = Stages(config.units, config.width, BiTUnit, "unit{:02}")
        self.norm = nn.GroupNorm(GROUPS, config.feature_width, eps=1e-5)
        self.head = nn.Linear(config.feature_width, config.classes) if config.classes else nn.Identity()

    def features(self, images: Tensor) -> Tensor:
        """What enters the head: the mean over the last map, (B, C)."""
        value = 0.0 if self.config.pool_padding == "zero" else float("-inf")
        x = F.max_pool2d(F.pad(self.conv_root(images), (1, 1, 1, 1), value=value), 3, 2)
        for i, unit in enumerate(self.stages):
            recompute = self.training and torch.is_grad_enabled() and i < self.checkpoint_blocks
            x = checkpoint(unit, x, use_reentrant=False) if recompute else unit(x)
        return F.relu(self.norm(x)).mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))
