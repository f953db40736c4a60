"""Axial ViT (paper D.6): each block attends along the rows, then along the columns, each followed by an MLP.

The tokens form a 2-D grid. A class token or a register has no place on it, so that pooling is by mean or MAP.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from models.layers import Attention
from models.positions import Relative
from models.vit import Block, ViT, ViTConfig

# B batch, N patches = rows x columns, D width


@dataclass(frozen=True)
class AxialConfig(ViTConfig):
    pool: str = "gap"

    family = "axial"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefix_tokens:
            raise ValueError(f"an Axial ViT has no prefix tokens; set pool=gap or map, registers=0: found {self}")
        if self.positions == "relative":
            raise ValueError("relative positions run over the whole sequence; an Axial ViT takes added tables")


class AxisAttention(Attention):
    """Self-attention of (B, rows, columns, D) within each row."""

    def forward(self, x: Tensor, relative: Relative | None = None, queries: int | None = None) -> Tensor:
        batch, rows = x.shape[:2]
        # The config refuses relative positions and the class token, so that neither argument is ever given here.
        mixed = super().forward(x.flatten(0, 1))  # each row is a sequence of its own: (B rows, columns, D)
        return mixed.unflatten(0, (batch, rows))


class AxialBlock(nn.Module):
    """Two ordinary blocks, one along the rows and one along the columns; it takes and gives tokens (B, N, D)."""

    def __init__(self, config: AxialConfig, drop_path: float) -> None:
        super().__init__()
        self.grid = config.grid
        self.row = Block(config, drop_path)
        self.column = Block(config, drop_path)
        # Block makes an ordinary Attention. This one has the same parameters under the same names, and attends by row.
        for block in (self.row, self.column):
            block.attention = AxisAttention(config.width, config.heads)

    def forward(self, x: Tensor, relative: None = None, queries: None = None) -> Tensor:
        # The norms and the MLP work on each token alone: they take the grid as they take a sequence.
        by_row = self.row(x.unflatten(1, self.grid))  # (B, rows, columns, D)
        by_column = self.column(by_row.transpose(1, 2))  # (B, columns, rows, D)
        return by_column.transpose(1, 2).flatten(1, 2)


class AxialViT(ViT):
    block = AxialBlock
