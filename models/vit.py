"""The Vision Transformer of Dosovitskiy et al. 2021, exact to the original code (SPEC 1.1 to 1.7).

    model = models.build("B/16", image_size=224, classes=1000)
    logits = model(images)             # images (B, 3, height, width) in [-1, 1]

Every parameter sits in a submodule that is called, never on the model itself: ZeRO-3 gathers parameters
when the module that owns them runs, so `features` and `encode` work there too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models import checks, positions, resnet

# B batch, N patches, T tokens (prefix + N), D width, H heads, C channels, P patch

SIZES = {  # width, depth, mlp, heads
    "mu": (32, 1, 128, 2),  # big_vision models/vit.py:297, for tests
    "Ti": (192, 12, 768, 3),  # vit_jax configs/models.py
    "S": (384, 12, 1536, 6),
    "M": (512, 12, 2048, 8),
    "B": (768, 12, 3072, 12),  # Dosovitskiy et al. 2021, table 1
    "L": (1024, 24, 4096, 16),
    "H": (1280, 32, 5120, 16),
    "So400m": (1152, 27, 4304, 16),  # big_vision models/vit.py:297-300
    "g": (1408, 40, 6144, 16),
    "g-opt": (1536, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
    "G-opt": (1536, 48, 8192, 16),
    "e": (1792, 56, 15360, 16),
}
ACTIVATIONS = {"gelu_tanh": "tanh", "gelu": "none"}  # the paper's code, and the erf of timm and Hugging Face
CHOICES = {
    "pool": ("token", "gap", "map"),
    "positions": ("none", *positions.KINDS),
    "positions_at": ("stem", "every", "shared"),
    "activation": tuple(ACTIVATIONS),
}


@dataclass(frozen=True)
class ViTConfig:
    image_size: tuple[int, int] = (224, 224)  # height, width in pixels; one number means a square
    patch: tuple[int, int] = (16, 16)  # height, width of a patch in pixels; after a stem, in its output's
    classes: int = 1000  # 0: no head, the logits are the features
    width: int = 768  # of a token
    depth: int = 12  # transformer blocks
    mlp: int = 3072  # hidden width of a block's MLP
    heads: int = 12  # attention heads of a block
    pool: str = "token"  # token: a class token; gap: mean of the patches; map: attention from a probe
    representation: int | None = None  # size of the tanh layer before the head, used at pre-training
    positions: str = "learned"  # kind of position embedding (paper, D.4)
    positions_at: str | None = None  # None: the stem; relative, which acts inside attention: every layer
    class_slot: bool = True  # prefix tokens have position entries (vit_jax) or none (big_vision)
    position_std: float | None = None  # None: 0.02, or width**-0.5 in big_vision's layouts (slotless, MAP)
    registers: int = 0  # extra learned tokens, ignored by pooling
    dropout: float = 0.0  # SPEC 1.3: after positions, attention, GELU and the second MLP layer
    drop_path: float = 0.0  # stochastic depth of the last block, rising linearly from 0
    head_bias: float = 0.0  # initial; -10 for sigmoid losses on ImageNet-21k and JFT (SPEC 1.5)
    activation: str = "gelu_tanh"  # gelu_tanh: the paper's code; gelu: by erf, as timm and Hugging Face
    norm_eps: float = 1e-6  # added to the variance in LayerNorm
    stem: tuple[int, ...] | None = None  # units of the stages of a ResNet before the patches; None: plain ViT
    stem_width: int = 64  # channels of its root

    family = "vit"

    def __post_init__(self) -> None:
        for name in ("image_size", "patch"):
            object.__setattr__(self, name, checks.pair(name, getattr(self, name)))
        if self.positions_at is None:
            object.__setattr__(self, "positions_at", "every" if self.positions == "relative" else "stem")
        checks.choices(self, CHOICES)
        checks.at_least(self, 1, ("width", "depth", "mlp", "heads", "stem_width"))
        checks.at_least(self, 0, ("classes", "registers"))
        checks.multiple("stem_width", self.stem_width, resnet.GROUPS, "groups")
        checks.rates(self, ("dropout", "drop_path"))
        if self.representation is not None:
            checks.at_least(self, 1, ("representation",))
        checks.multiple("width", self.width, self.heads, "heads")
        if self.positions in ("sincos2d", "learned2d"):
            checks.multiple("width", self.width, 4 if self.positions == "sincos2d" else 2, "position parts")
        checks.image_size(self.image_size, self.stride)

    @property
    def stride(self) -> tuple[int, int]:
        """Pixels between neighbouring patches, (rows, columns)."""
        stem = resnet.stem_stride(self.stem)
        return self.patch[0] * stem, self.patch[1] * stem

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image_size[0] // self.stride[0], self.image_size[1] // self.stride[1]

    @property
    def prefix_tokens(self) -> int:
        return (self.pool == "token") + self.registers

    @property
    def position_slots(self) -> int:
        """Prefix tokens with an entry in the position table; a sincos table has none."""
        return self.prefix_tokens if self.class_slot and self.positions != "sincos2d" else 0

    @property
    def feature_width(self) -> int:
        return self.representation or self.width

    @property
    def initial_position_std(self) -> float:
        """As configured, else that of the code base this layout comes from."""
        if self.position_std is not None:
            return self.position_std
        return 0.02 if self.class_slot and self.pool != "map" else 1 / math.sqrt(self.width)


class PatchEmbedding(nn.Module):
    """The strided patch convolution, written as one matrix product: (B, C, h, w) to (B, N, D), row by row."""

    def __init__(self, channels: int, width: int, patch: tuple[int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, channels, *patch))
        self.bias = nn.Parameter(torch.empty(width))
        self.patch = patch

    def forward(self, images: Tensor) -> Tensor:
        (batch, channels, height, width), (ph, pw) = images.shape, self.patch
        patches = images.to(self.weight.dtype).view(batch, channels, height // ph, ph, width // pw, pw)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # (B, N, C P P), also of no images
        return F.linear(patches, self.weight.flatten(1), self.bias)


class Prefix(nn.Module):
    """Puts the class token, then the registers, before the patches."""

    def __init__(self, width: int, class_token: bool, registers: int) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.empty(1, 1, width)) if class_token else None
        self.registers = nn.Parameter(torch.empty(1, registers, width)) if registers else None

    def forward(self, patches: Tensor) -> Tensor:
        prefix = [p.expand(patches.shape[0], -1, -1) for p in (self.cls, self.registers) if p is not None]
        return torch.cat([*prefix, patches], dim=1) if prefix else patches


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, D) to (B, H, T, D/H)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Softmax attention of (B, H, T, d) with logits scaled by d**-0.5 and an optional bias added to them."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        # The fused kernel here costs a fifth of the whole step more (benchmarks/README.md).
        logits = torch.bmm(q.flatten(0, 1) * q.shape[-1] ** -0.5, k.flatten(0, 1).mT)
        weights = (logits if bias is None else logits + bias.flatten(0, 1)).softmax(-1)
        return torch.bmm(weights, v.flatten(0, 1)).unflatten(0, q.shape[:2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class Attention(nn.Module):
    """Self-attention with one packed projection, initialised as three (models/initial.py)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, relative: positions.Relative | None = None, queries: int | None = None) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        bias = None if relative is None else relative(q)[:, :, :queries]
        return self.out(attend(q[:, :, :queries], k, v, bias).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.act = nn.GELU(approximate=ACTIVATIONS[activation])
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.dropout(self.act(self.up(x)))))


class DropPath(nn.Module):
    """Stochastic depth: in training, zeroes the residual branch of a sample with probability `rate`."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        keep = x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * keep / (1 - self.rate)


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)); with `queries`, of that many first tokens."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config.width, config.heads)
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = Mlp(config.width, config.mlp, config.activation, config.dropout)
        self.dropout = nn.Dropout(config.dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, relative: positions.Relative | None = None, queries: int | None = None) -> Tensor:
        mixed = self.attention(self.norm1(x), relative, queries)
        x = x[:, :queries] + self.drop_path(self.dropout(mixed))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class MapHead(nn.Module):
    """big_vision's attention pooling (SPEC 1.4): a probe attends to the tokens, then y + mlp(norm(y))."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.probe = nn.Parameter(torch.empty(1, 1, config.width))
        self.q = nn.Linear(config.width, config.width)
        self.kv = nn.Linear(config.width, 2 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = Mlp(config.width, config.mlp, config.activation, dropout=0.0)

    def forward(self, tokens: Tensor) -> Tensor:
        q = split_heads(self.q(self.probe.expand(tokens.shape[0], -1, -1)), self.heads)
        k, v = (split_heads(part, self.heads) for part in self.kv(tokens).chunk(2, dim=-1))
        y = self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return (y + self.mlp(self.norm(y)))[:, 0]


class ViT(nn.Module):
    """Images to logits; `embed`, `encode`, `features` are the stations on the way."""

    block: type[nn.Module] = Block  # made from (config, rate of stochastic depth)

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_blocks = 0  # how many blocks, from the first, recompute their activations in training
        self.skip_unread = True  # the last block computes the class token alone where that alone is pooled
        self.stem = None if config.stem is None else resnet.Stem(config.stem, config.stem_width)
        self.embedding = PatchEmbedding(self.stem.channels if self.stem else 3, config.width, config.patch)
        self.prefix = Prefix(config.width, config.pool == "token", config.registers)
        self.positions = nn.ModuleList(position_tables(config))
        self.dropout = nn.Dropout(config.dropout)
        rates = [config.drop_path * i / max(config.depth - 1, 1) for i in range(config.depth)]
        self.blocks = nn.ModuleList(self.block(config, rate) for rate in rates)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.map_head = MapHead(config) if config.pool == "map" else None
        self.pre_logits = nn.Linear(config.width, config.representation) if config.representation else None
        self.head = nn.Linear(config.feature_width, config.classes) if config.classes else nn.Identity()

    def embed(self, images: Tensor) -> Tensor:
        """Images to patch embeddings (B, N, D), before positions and prefix tokens."""
        if images.shape[1:] != (3, *self.config.image_size):
            expected = ", ".join(map(str, self.config.image_size))
            raise ValueError(
                f"images are {tuple(images.shape)}, this model takes (batch, 3, {expected}); resize them, or "
                "carry the weights to another size with models.transfer"
            )
        return self.embedding(images if self.stem is None else self.stem(images))

    def encode(self, patches: Tensor, queries: int | None = None) -> Tensor:
        """Patch embeddings to tokens (B, T, D) after the last norm, prefix tokens first.

        With `queries`, only that many first tokens come out: the last block leaves out the others' work.
        """
        x = self.prefix(patches)
        for i, block in enumerate(self.blocks):
            added, relative = self.positions_of_layer(i)
            x = x if added is None else added(x)
            x = x if i else self.dropout(x)
            wanted = queries if i == self.config.depth - 1 else None
            if self.training and torch.is_grad_enabled() and i < self.checkpoint_blocks:
                x = checkpoint(block, x, relative, wanted, use_reentrant=False)
            else:
                x = block(x, relative, wanted)
        return self.norm(x)

    def positions_of_layer(self, layer: int) -> tuple[nn.Module | None, nn.Module | None]:
        """What this layer adds to its input, and what biases its attention."""
        kind, at = self.config.positions, self.config.positions_at
        if kind == "none" or (at == "stem" and layer > 0):
            return None, None
        table = self.positions[layer if at == "every" else 0]
        return (None, table) if kind == "relative" else (table, None)

    def pool(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T, D) to one vector an image (B, D)."""
        if self.config.pool == "token":
            return tokens[:, 0]
        patches = tokens[:, self.config.prefix_tokens :]
        return patches.mean(dim=1) if self.map_head is None else self.map_head(patches)

    def features(self, images: Tensor) -> Tensor:
        """What enters the head: the pooled token, through the tanh layer where there is one."""
        read = 1 if self.config.pool == "token" and self.skip_unread else None
        pooled = self.pool(self.encode(self.embed(images), read))
        return pooled if self.pre_logits is None else self.pre_logits(pooled).tanh()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


def position_tables(config: ViTConfig) -> list[nn.Module]:
    """No table, one, or one a layer."""
    if config.positions == "none":
        return []
    count = config.depth if config.positions_at == "every" else 1
    kind = positions.KINDS[config.positions]
    return [kind(config.grid, config.width, config.position_slots) for _ in range(count)]
