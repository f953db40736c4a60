"""Axial ViT (paper D.6): each block attends along the rows, then along the columns, each followed by an MLP.

The tokens form a 2-D grid, which a class token or registers would not fit: pooling is by mean or MAP.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from models.positions import Relative
from models.vit import Attention, Block, ViT, ViTConfig


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
        return super().forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class AxialBlock(nn.Module):
    def __init__(self, config: AxialConfig, drop_path: float) -> None:
        super().__init__()
        self.grid = config.grid
        self.row, self.column = Block(config, drop_path), Block(config, drop_path)
        for block in (self.row, self.column):
            block.attention = AxisAttention(config.width, config.heads)

    def forward(self, x: Tensor, relative: None = None, queries: None = None) -> Tensor:
        x = self.row(x.unflatten(1, self.grid))  # (B, rows, columns, D)
        return self.column(x.transpose(1, 2)).transpose(1, 2).flatten(1, 2)


class AxialViT(ViT):
    block = AxialBlock
