"""Position embeddings (SPEC 1.1, 1.4, 2.7): tables that are added, relative attention, and their resizing.

No module here keeps a buffer, so a model built on the meta device is whole once its parameters are.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import checks

# B batch, T tokens (prefix first, then the grid row by row), N = rows x columns, D width, H heads, d = D/H
Grid = tuple[int, int]  # (rows, columns)


class Added(nn.Module):
    """A table added to the last `slots + N` tokens; `slots` counts the prefix tokens with an entry."""

    def __init__(self, grid: Grid, width: int, slots: int) -> None:
        super().__init__()
        self.grid, self.width, self.slots = grid, width, slots

    def entries(self, like: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, tokens: Tensor) -> Tensor:
        table = self.entries(tokens)
        return tokens + F.pad(table, (0, 0, tokens.shape[1] - table.shape[1], 0))


class Learned(Added):
    """One free entry a position: `table` (1, slots + N, D)."""

    def __init__(self, grid: Grid, width: int, slots: int) -> None:
        super().__init__(grid, width, slots)
        self.table = nn.Parameter(torch.empty(1, slots + math.prod(grid), width))

    def entries(self, like: Tensor) -> Tensor:
        return self.table


class Learned2d(Added):
    """Two tables of width D/2, of the column (x) then of the row (y), as in the paper's D.4."""

    def __init__(self, grid: Grid, width: int, slots: int) -> None:
        super().__init__(grid, width, slots)
        self.x = nn.Parameter(torch.empty(1, grid[1], width // 2))
        self.y = nn.Parameter(torch.empty(1, grid[0], width // 2))
        self.slot = nn.Parameter(torch.empty(1, slots, width)) if slots else None

    def entries(self, like: Tensor) -> Tensor:
        rows, columns = self.grid
        x = self.x[:, None].expand(-1, rows, -1, -1)
        y = self.y[:, :, None].expand(-1, -1, columns, -1)
        table = torch.cat([x, y], dim=-1).flatten(1, 2)
        return table if self.slot is None else torch.cat([self.slot, table], dim=1)


class Sincos2d(Added):
    """The fixed table of big_vision; it knows no prefix slot and holds no parameter."""

    def entries(self, like: Tensor) -> Tensor:
        return sincos2d(self.grid, self.width, like.device).to(like.dtype)


@functools.lru_cache(maxsize=32)
def sincos2d(grid: Grid, width: int, device: torch.device | None = None) -> Tensor:
    """(1, N, D) with channels sin x, cos x, sin y, cos y and the denominator D/4 - 1 (SPEC 1.4)."""
    rows, columns = (torch.arange(n, dtype=torch.float64, device=device) for n in grid)
    quarter = width // 4
    omega = 10_000.0 ** -(torch.arange(quarter, dtype=torch.float64, device=device) / max(quarter - 1, 1))
    x = (columns.repeat(grid[0])[:, None] * omega)[None]
    y = (rows.repeat_interleave(grid[1])[:, None] * omega)[None]
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=-1).float()


class Relative(nn.Module):
    """Bias of the attention logits: queries against one key embedding for each offset p_q - p_k (paper D.4).

    `table` (1, 2S - 1, D) with S = slots + N; offsets run from -(S - 1) to S - 1 over row-major positions.
    """

    def __init__(self, grid: Grid, width: int, slots: int) -> None:
        super().__init__()
        self.grid, self.slots, self.length = grid, slots, slots + math.prod(grid)
        self.table = nn.Parameter(torch.empty(1, 2 * self.length - 1, width))

    def forward(self, q: Tensor) -> Tensor:
        """Queries (B, H, T, d) to biases (B, H, T, T), scaled like the logits of the content."""
        batch, heads, tokens, dim = q.shape
        extra, length = tokens - self.length, self.length
        keys = self.table.view(2 * length - 1, heads, dim).permute(1, 2, 0)  # (H, d, offsets)
        logits = (q[:, :, extra:] * dim**-0.5) @ keys
        position = torch.arange(length, device=q.device)
        offset = position[:, None] - position[None, :] + length - 1
        return F.pad(logits.gather(-1, offset.expand(batch, heads, -1, -1)), (extra, 0, extra, 0))


ADDED: dict[str, type[Added]] = {"learned": Learned, "learned2d": Learned2d, "sincos2d": Sincos2d}
KINDS: dict[str, type[nn.Module]] = {**ADDED, "relative": Relative}


def whole_table(state: dict[str, Tensor], config: Any) -> Tensor:
    """What the first added table of a state dict comes to: (1, slots + N, D)."""
    module = ADDED[config.positions](config.grid, config.width, config.position_slots)
    module.load_state_dict({name.rpartition(".")[2]: w for name, w in state.items() if "positions.0." in name})
    return module.entries(torch.empty(0)).detach()


def resize_positions(table: Tensor, old_grid: Grid, new_grid: Grid, prefix_tokens: int) -> Tensor:
    """Resize a (P + N, D) or (1, P + N, D) table to another grid (rows, columns); prefix entries stay.

    Bilinear with aligned corners in float64, as `scipy.ndimage.zoom(order=1)` in the original (SPEC 3).
    """
    old_grid, new_grid = checks.pair("old_grid", old_grid), checks.pair("new_grid", new_grid)
    if table.ndim not in (2, 3) or (table.ndim == 3 and table.shape[0] != 1):
        raise ValueError(f"a position table is (N, D) or (1, N, D), found {tuple(table.shape)}")
    expected = prefix_tokens + math.prod(old_grid)
    if table.shape[-2] != expected:
        raise ValueError(
            f"position table has {table.shape[-2]} entries; grid {old_grid[0]}x{old_grid[1]} with "
            f"{prefix_tokens} prefix tokens needs {expected}; check old_grid and prefix_tokens"
        )
    if old_grid == new_grid:
        return table.clone()
    prefix, grid = table[..., :prefix_tokens, :], table[..., prefix_tokens:, :]
    image = grid.reshape(*old_grid, -1).permute(2, 0, 1)[None].double()
    resized = F.interpolate(image, size=new_grid, mode="bilinear", align_corners=True)
    resized = resized[0].permute(1, 2, 0).reshape(*table.shape[:-2], -1, table.shape[-1])
    return torch.cat([prefix, resized.to(table.dtype)], dim=-2)


def resize_relative(table: Tensor, old_grid: Grid, new_grid: Grid, slots: int, new_slots: int) -> Tensor:
    """Resize the offsets of `Relative`: each new one is read where its (rows, columns) lie on the old grid.

    A row-major offset stands for dy = round(offset / columns), dx = the rest; corners stay aligned.
    """
    old_reach, new_reach = (slots + math.prod(old_grid) - 1, new_slots + math.prod(new_grid) - 1)
    offsets = torch.arange(-new_reach, new_reach + 1, dtype=torch.float64)
    dy = (offsets / new_grid[1]).round()
    dx = offsets - dy * new_grid[1]
    dy, dx = (
        delta * ((old - 1) / max(new - 1, 1)) for delta, old, new in zip((dy, dx), old_grid, new_grid, strict=True)
    )
    result = torch.zeros(offsets.numel(), table.shape[-1], dtype=torch.float64)
    for y in (dy.floor(), dy.floor() + 1):
        for x in (dx.floor(), dx.floor() + 1):
            share = (1 - (dy - y).abs()) * (1 - (dx - x).abs())
            at = (y * old_grid[1] + x).clamp(-old_reach, old_reach).long() + old_reach
            result += share[:, None] * table[0, at].double()
    return result.to(table.dtype)[None]


def neighbour_similarity(table: Tensor, grid: Grid) -> float:
    """Mean cosine similarity of adjacent entries of an (N, D) table, across and down; 1.0 for one entry."""
    image = F.normalize(table.double().reshape(*grid, -1), dim=-1)
    down, across = (image[1:] * image[:-1]).sum(-1), (image[:, 1:] * image[:, :-1]).sum(-1)
    pairs = torch.cat([down.flatten(), across.flatten()])
    return pairs.mean().item() if pairs.numel() else 1.0
