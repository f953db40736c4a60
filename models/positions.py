"""Position embeddings (SPEC 1.1, 1.4, 2.7): tables that are added, relative attention, and their resizing.

No module here keeps a buffer, so a model built on the meta device is whole once its parameters are drawn.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import checks

# B batch, T tokens (prefix first, then the grid row by row), N = rows x columns, D width, H heads, d = D/H
# S = slots + N entries of a table; slots counts the prefix tokens that have one
Grid = tuple[int, int]  # (rows, columns)


class Added(nn.Module):
    """A table added to the last `slots + N` tokens; `slots` counts the prefix tokens with an entry."""

    def __init__(self, grid: Grid, width: int, slots: int) -> None:
        super().__init__()
        self.grid = grid
        self.width = width
        self.slots = slots

    def entries(self, grid: Grid, like: Tensor) -> Tensor:
        """Return the table (1, S, D) for its own grid or a smaller one.

        A table that is computed, not learned, has the device and the dtype of `like`.
        """
        raise NotImplementedError

    def forward(self, tokens: Tensor, grid: Grid | None = None) -> Tensor:
        table = self.entries(grid or self.grid, tokens)
        # Prefix tokens come first, so that those without an entry are the first ones: they get zeros.
        without_entry = tokens.shape[1] - table.shape[1]
        return tokens + F.pad(table, (0, 0, without_entry, 0))


class Learned(Added):
    """A learned entry for each position: `table` (1, S, D)."""

    def __init__(self, grid: Grid, width: int, slots: int) -> None:
        super().__init__(grid, width, slots)
        self.table = nn.Parameter(torch.empty(1, slots + math.prod(grid), width))

    def entries(self, grid: Grid, like: Tensor) -> Tensor:
        return shrink(self.table, self.grid, grid, self.slots)


class Learned2d(Added):
    """Two tables of width D/2, of the column (x) then of the row (y), as in the paper's D.4."""

    def __init__(self, grid: Grid, width: int, slots: int) -> None:
        super().__init__(grid, width, slots)
        rows, columns = grid
        self.x = nn.Parameter(torch.empty(1, columns, width // 2))
        self.y = nn.Parameter(torch.empty(1, rows, width // 2))
        self.slot = nn.Parameter(torch.empty(1, slots, width)) if slots else None

    def entries(self, grid: Grid, like: Tensor) -> Tensor:
        rows, columns = self.grid
        x = self.x[:, None].expand(-1, rows, -1, -1)  # (1, rows, columns, D/2)
        y = self.y[:, :, None].expand(-1, -1, columns, -1)  # the same
        table = torch.cat([x, y], dim=-1).flatten(1, 2)  # (1, N, D)
        if self.slot is not None:
            table = torch.cat([self.slot, table], dim=1)
        return shrink(table, self.grid, grid, self.slots)


class Sincos2d(Added):
    """The fixed table of big_vision; it has no entries for prefix tokens, and no parameters."""

    def entries(self, grid: Grid, like: Tensor) -> Tensor:
        return sincos2d(grid, self.width, like.device).to(like.dtype)


# Cached, because every forward pass asks for the table and no module keeps it.
@functools.lru_cache(maxsize=32)
def sincos2d(grid: Grid, width: int, device: torch.device | None = None) -> Tensor:
    """(1, N, D) with channels sin x, cos x, sin y, cos y and the denominator D/4 - 1 (SPEC 1.4)."""
    rows, columns = grid
    row = torch.arange(rows, dtype=torch.float64, device=device)
    column = torch.arange(columns, dtype=torch.float64, device=device)
    # A quarter of the width each for sin x, cos x, sin y and cos y. The denominator is D/4 - 1, not D/4, as in
    # big_vision; `max` is for a width of 4, which has a single frequency.
    frequencies = width // 4
    exponent = torch.arange(frequencies, dtype=torch.float64, device=device) / max(frequencies - 1, 1)
    omega = 10_000.0**-exponent
    x = (column.repeat(rows)[:, None] * omega)[None]  # (1, N, D/4)
    y = (row.repeat_interleave(columns)[:, None] * omega)[None]
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=-1).float()


class Relative(nn.Module):
    """Biases attention logits by each query's product with a key embedding of the offset p_q - p_k (paper D.4).

    `table` (1, 2S - 1, D); offsets run from -(S - 1) to S - 1 over row-major positions.
    """

    def __init__(self, grid: Grid, width: int, slots: int) -> None:
        super().__init__()
        self.grid = grid
        self.slots = slots
        self.length = slots + math.prod(grid)
        self.table = nn.Parameter(torch.empty(1, 2 * self.length - 1, width))

    def forward(self, q: Tensor) -> Tensor:
        """Queries (B, H, T, d) to biases (B, H, T, T), scaled like the logits of the content."""
        batch, heads, tokens, dim = q.shape
        length = self.length
        without_entry = tokens - length  # prefix tokens, whose bias is 0 as query and as key
        # Every query against every offset first, then for each key the one offset it is at.
        keys = self.table.view(2 * length - 1, heads, dim).permute(1, 2, 0)  # (H, d, 2S - 1)
        logits = (q[:, :, without_entry:] * dim**-0.5) @ keys  # (B, H, S, 2S - 1)
        position = torch.arange(length, device=q.device)
        offset = position[:, None] - position[None, :] + length - 1  # (S, S), from 0
        bias = logits.gather(-1, offset.expand(batch, heads, -1, -1))  # (B, H, S, S)
        return F.pad(bias, (without_entry, 0, without_entry, 0))


ADDED: dict[str, type[Added]] = {"learned": Learned, "learned2d": Learned2d, "sincos2d": Sincos2d}
KINDS: dict[str, type[nn.Module]] = {**ADDED, "relative": Relative}


def resize_positions(table: Tensor, old_grid: Grid, new_grid: Grid, prefix_tokens: int) -> Tensor:
    """Resize a (P + N, D) or (1, P + N, D) table to another grid (rows, columns); the P prefix entries stay.

    Bilinear with aligned corners in float64, as `scipy.ndimage.zoom(order=1)` in the original (SPEC 3).
    Raises ValueError where the table has another shape than the old grid and the prefix ask for.
    """
    old_grid = checks.pair("old_grid", old_grid)
    new_grid = checks.pair("new_grid", new_grid)
    if table.ndim not in (2, 3) or (table.ndim == 3 and table.shape[0] != 1):
        raise ValueError(f"a position table is (N, D) or (1, N, D), found {tuple(table.shape)}")
    expected = prefix_tokens + math.prod(old_grid)
    if table.shape[-2] != expected:
        raise ValueError(
            f"position table has {table.shape[-2]} entries; grid {old_grid[0]}x{old_grid[1]} with "
            f"{prefix_tokens} prefix tokens needs {expected}; check old_grid and prefix_tokens"
        )
    # The same grid keeps its table to the last bit.
    if old_grid == new_grid:
        return table.clone()
    prefix = table[..., :prefix_tokens, :]
    grid = table[..., prefix_tokens:, :]
    # SciPy's zoom to 4e-6 in float32 and 1e-7 in float64. Without aligned corners, as in timm and transformers, entries
    # of unit variance are off by 0.3 to 1.6 (SPEC 3).
    image = grid.reshape(*old_grid, -1).permute(2, 0, 1)[None].double()  # (1, D, rows, columns)
    resized = F.interpolate(image, size=new_grid, mode="bilinear", align_corners=True)
    resized = resized[0].permute(1, 2, 0).reshape(*table.shape[:-2], -1, table.shape[-1])
    return torch.cat([prefix, resized.to(table.dtype)], dim=-2)


def shrink(table: Tensor, grid: Grid, smaller: Grid, slots: int) -> Tensor:
    """Shrink a table (1, slots + N, D) to a smaller grid, for training on smaller images first; the slots stay."""
    if smaller == grid:
        return table
    weights = shrinking(grid, smaller, table.device)
    on_grid = (weights @ table[0, slots:].float()).to(table.dtype)
    return torch.cat([table[:, :slots], on_grid[None]], dim=1)


# Cached, because every forward pass asks for it and no module keeps it.
@functools.lru_cache(maxsize=32)
def shrinking(grid: Grid, smaller: Grid, device: torch.device | None = None) -> Tensor:
    """Return weights (n, N) that make a table of the smaller grid from one of the grid; each row adds up to 1.

    They are those of `resize_positions`, which enlarges a table of the smaller grid, the other way round: an entry
    counts as much as enlarging would take from the smaller one for it. So a step on small images changes the table as
    it would change the smaller one, enlarged, and every entry has its share. Interpolation downwards reads but four
    entries for each of its own: from 8 rows to 4 it leaves out two, which would keep their first values.
    """
    # Enlarging is linear: what it makes of each entry alone is its whole matrix. A product of matrices is also the same
    # every time on a GPU, where the gradient of an interpolation is not.
    with torch.inference_mode(False):
        alone = torch.eye(math.prod(smaller), dtype=torch.float64)
        enlarging = resize_positions(alone, smaller, grid, 0)  # (N, n)
        weights = enlarging.T / enlarging.sum(0)[:, None]
        return weights.float().to(device)


def resize_relative(table: Tensor, old_grid: Grid, new_grid: Grid, slots: int, new_slots: int) -> Tensor:
    """Resize the offsets of `Relative`: each new one is read where its (rows, columns) lie on the old grid.

    A row-major offset stands for dy = round(offset / columns), dx = the rest; corners stay aligned.
    """
    # Stretched as a flat list, the offset for "one row down" would come to mean something else (docs/models.md).
    old_reach = slots + math.prod(old_grid) - 1
    new_reach = new_slots + math.prod(new_grid) - 1
    # 1. Each new offset as a step (dy, dx) on the new grid ...
    offsets = torch.arange(-new_reach, new_reach + 1, dtype=torch.float64)
    dy = (offsets / new_grid[1]).round()
    dx = offsets - dy * new_grid[1]
    # 2. ... and as the step on the old grid that reaches as far, the first and the last position aligned.
    dy = dy * ((old_grid[0] - 1) / max(new_grid[0] - 1, 1))
    dx = dx * ((old_grid[1] - 1) / max(new_grid[1] - 1, 1))
    # 3. The value there, bilinear between the four whole steps around it.
    result = torch.zeros(offsets.numel(), table.shape[-1], dtype=torch.float64)
    for y in (dy.floor(), dy.floor() + 1):
        for x in (dx.floor(), dx.floor() + 1):
            share = (1 - (dy - y).abs()) * (1 - (dx - x).abs())
            old_offset = (y * old_grid[1] + x).clamp(-old_reach, old_reach).long()
            result += share[:, None] * table[0, old_offset + old_reach].double()
    return result.to(table.dtype)[None]
