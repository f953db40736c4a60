"""The layers a Vision Transformer is made of, each a function of its input alone: no layer here knows the config."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import positions

# B batch, N patches, T tokens (prefix + N), D width, H heads, d = D/H, C channels, P patch

ACTIVATIONS = {"gelu_tanh": "tanh", "gelu": "none"}  # the paper's code, and the erf of timm and Hugging Face


class PatchEmbedding(nn.Module):
    """The strided patch convolution, written as one matrix product: (B, C, height, width) to (B, N, D), row by row."""

    def __init__(self, channels: int, width: int, patch: tuple[int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, channels, *patch))
        self.bias = nn.Parameter(torch.empty(width))
        self.patch = patch

    def forward(self, images: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        patch_height, patch_width = self.patch
        rows = height // patch_height
        columns = width // patch_width
        patches = images.to(self.weight.dtype).view(batch, channels, rows, patch_height, columns, patch_width)
        patches = patches.permute(0, 2, 4, 1, 3, 5)  # (B, rows, columns, C, P, P)
        # Two steps: with no image in the batch, one reshape could not tell the sizes from each other.
        patches = patches.flatten(3).flatten(1, 2)  # (B, N, C P P)
        return F.linear(patches, self.weight.flatten(1), self.bias)


class Prefix(nn.Module):
    """Puts the class token, then the registers, before the patches: (B, N, D) to (B, T, D)."""

    def __init__(self, width: int, class_token: bool, registers: int) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.empty(1, 1, width)) if class_token else None
        self.registers = nn.Parameter(torch.empty(1, registers, width)) if registers else None

    def forward(self, patches: Tensor) -> Tensor:
        tokens = []
        # The class token is the first: pooling reads token 0, and the last block may compute that one alone.
        for token in (self.cls, self.registers):
            if token is not None:
                tokens.append(token.expand(patches.shape[0], -1, -1))
        if not tokens:
            return patches
        return torch.cat([*tokens, patches], dim=1)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Give each head its channels: (B, T, D) to (B, H, T, D/H)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def unpack_heads(packed: Tensor, parts: int, heads: int) -> list[Tensor]:
    """Cut a projection (B, T, parts x D) into its parts, each (B, H, T, D/H)."""
    # Cut by `chunk` and not by a permuted view: so the backward pass copies once, not twice (benchmarks/README.md).
    return [split_heads(part, heads) for part in packed.chunk(parts, dim=-1)]


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute softmax attention of (B, H, T, d) with logits scaled by d**-0.5 and an optional bias added to them."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        # Two plain products: with the fused kernel a whole step of S/16 takes 1.22 times as long in bfloat16 on a CPU,
        # in float32 0.99 times (benchmarks/README.md).
        logits = torch.bmm(q.flatten(0, 1) * q.shape[-1] ** -0.5, k.flatten(0, 1).mT)  # (B H, T, T)
        if bias is not None:
            logits = logits + bias.flatten(0, 1)
        mixed = torch.bmm(logits.softmax(-1), v.flatten(0, 1))
        return mixed.unflatten(0, q.shape[:2])
    # It scales by d**-0.5 itself and adds the mask to the logits, so that a bias is passed as one.
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class Attention(nn.Module):
    """Self-attention with one packed projection, initialised as three (models/initial.py)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, relative: positions.Relative | None = None, queries: int | None = None) -> Tensor:
        """Return a mixed vector for each of the tokens (B, T, D), or with `queries` only for that many first ones."""
        # Fewer queries still attend to all tokens: only q is cut, never k and v. `[:None]` keeps everything.
        q, k, v = unpack_heads(self.qkv(x), 3, self.heads)  # each (B, H, T, D/H)
        bias = None
        if relative is not None:
            bias = relative(q)[:, :, :queries]
        mixed = attend(q[:, :, :queries], k, v, bias)
        return self.out(mixed.transpose(1, 2).flatten(2))  # (B, H, T, D/H) to (B, T, D)


class Mlp(nn.Module):
    """Two layers with GELU between them, on each token alone."""

    def __init__(self, width: int, hidden: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.act = nn.GELU(approximate=ACTIVATIONS[activation])
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.act(self.up(x)))
        return self.dropout(self.down(hidden))


class DropPath(nn.Module):
    """Stochastic depth: in training, zeroes the residual branch of a sample with probability `rate`."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        # One draw for a sample, whatever the axes behind: an Axial block passes (B, rows, columns, D).
        one_per_sample = (x.shape[0], *[1] * (x.ndim - 1))
        keep = x.new_empty(one_per_sample).bernoulli_(1 - self.rate)
        # Divided by the share that is kept, so that the mean is that of evaluation, where nothing is dropped.
        return x * keep / (1 - self.rate)
