"""Position embeddings (SPEC 1.1, 1.4, 2.7): added tables, relative attention, rotations, and resizing of tables.

No module here has a buffer, so a model on the meta device is complete once its parameters are initialised.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import checks
from models.configs import ROPES, ViTConfig

# B batch, T tokens (prefix first, then the grid row by row), N = rows x columns, D width, H heads, d = D/H
# S = slots + N entries of a table; slots is the number of prefix tokens with an entry
Grid = tuple[int, int]  # (rows, columns)
Rotation = tuple[Tensor, Tensor]  # cosine and sine, each (1 or H, T, d), or (B, 1 or H, T, d)


class Added(nn.Module):
    """Adds a position table to the last `slots + N` tokens; `slots` counts prefix tokens with a position embedding."""

    def __init__(self, grid: Grid, width: int, slots: int) -> None:
        super().__init__()
        self.grid = grid
        self.width = width
        self.slots = slots

    def entries(self, grid: Grid, like: Tensor) -> Tensor:
        """Return the table (1, S, D) for the module's grid or a smaller one.

        Computed tables use the device and dtype of `like`; learned tables use their own.
        """
        raise NotImplementedError

    def forward(self, tokens: Tensor, grid: Grid | None = None) -> Tensor:
        table = self.entries(grid or self.grid, tokens)
        # Tokens without an entry are the first prefix tokens; add zeros to them.
        without_entry = tokens.shape[1] - table.shape[1]
        return tokens + F.pad(table, (0, 0, without_entry, 0))


class Learned(Added):
    """A learned embedding for each position: `table` (1, S, D)."""

    def __init__(self, grid: Grid, width: int, slots: int) -> None:
        super().__init__(grid, width, slots)
        self.table = nn.Parameter(torch.empty(1, slots + math.prod(grid), width))

    def entries(self, grid: Grid, like: Tensor) -> Tensor:
        return shrink(self.table, self.grid, grid, self.slots)


class Learned2d(Added):
    """Two learned tables of width D/2, for the column (x), then the row (y) of a patch, as in the paper's D.4."""

    def __init__(self, grid: Grid, width: int, slots: int) -> None:
        super().__init__(grid, width, slots)
        rows, columns = grid
        self.x = nn.Parameter(torch.empty(1, columns, width // 2))
        self.y = nn.Parameter(torch.empty(1, rows, width // 2))
        self.slot = nn.Parameter(torch.empty(1, slots, width)) if slots else None

    def entries(self, grid: Grid, like: Tensor) -> Tensor:
        rows, columns = self.grid
        x = self.x[:, None].expand(-1, rows, -1, -1)  # (1, rows, columns, D/2)
        y = self.y[:, :, None].expand(-1, -1, columns, -1)  # (1, rows, columns, D/2)
        table = torch.cat([x, y], dim=-1).flatten(1, 2)  # (1, N, D)
        if self.slot is not None:
            table = torch.cat([self.slot, table], dim=1)
        return shrink(table, self.grid, grid, self.slots)


class Sincos2d(Added):
    """big_vision's fixed sine-cosine table, without parameters and without entries for prefix tokens."""

    def entries(self, grid: Grid, like: Tensor) -> Tensor:
        return sincos2d(grid, self.width, like.device).to(like.dtype)


# Cached, because every forward pass needs the table and no module stores it.
@functools.lru_cache(maxsize=32)
def sincos2d(grid: Grid, width: int, device: torch.device | None = None) -> Tensor:
    """Return the table (1, N, D) with channels sin x, cos x, sin y, cos y and the denominator D/4 - 1 (SPEC 1.4)."""
    rows, columns = grid
    row = torch.arange(rows, dtype=torch.float64, device=device)
    column = torch.arange(columns, dtype=torch.float64, device=device)
    # sin x, cos x, sin y and cos y each take a quarter of the width. The denominator is D/4 - 1, not D/4, as in
    # big_vision; `max` avoids 0 / 0 for a width of 4, which has a single frequency.
    frequencies = width // 4
    exponent = torch.arange(frequencies, dtype=torch.float64, device=device) / max(frequencies - 1, 1)
    omega = 10_000.0**-exponent
    x = (column.repeat(rows)[:, None] * omega)[None]  # (1, N, D/4)
    y = (row.repeat_interleave(columns)[:, None] * omega)[None]
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=-1).float()


class Relative(nn.Module):
    """Relative attention biases: the product of each query with a key embedding of the offset p_q - p_k (paper D.4).

    `table` is (1, 2S - 1, D); offsets are differences of row-major positions, from -(S - 1) to S - 1.
    """

    def __init__(self, grid: Grid, width: int, slots: int) -> None:
        super().__init__()
        self.grid = grid
        self.slots = slots
        self.length = slots + math.prod(grid)
        self.table = nn.Parameter(torch.empty(1, 2 * self.length - 1, width))

    def forward(self, q: Tensor) -> Tensor:
        """Map queries (B, H, T, d) to biases (B, H, T, T), scaled like the content logits."""
        batch, heads, tokens, dim = q.shape
        length = self.length
        without_entry = tokens - length  # prefix tokens, whose bias is 0 as query and as key
        # Multiply every query with every offset, then select the offset of each key.
        keys = self.table.view(2 * length - 1, heads, dim).permute(1, 2, 0)  # (H, d, 2S - 1)
        logits = (q[:, :, without_entry:] * dim**-0.5) @ keys  # (B, H, S, 2S - 1)
        position = torch.arange(length, device=q.device)
        offset = position[:, None] - position[None, :] + length - 1  # (S, S), from 0
        bias = logits.gather(-1, offset.expand(batch, heads, -1, -1))  # (B, H, S, S)
        return F.pad(bias, (without_entry, 0, without_entry, 0))


class Rotary(nn.Module):
    """Rotary positions (Su et al. 2021), in the config's variant: the angles by which channel pairs are rotated.

    Prefix tokens are not rotated. Nothing depends on the image size: angles for another size are computed, not resized.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.rope = config.rope
        self.grid = config.grid
        self.reference = config.rope_grid
        self.prefix = config.prefix_tokens
        self.head_width = config.width // config.heads
        self.frequencies = None
        if ROPES[config.rope][0] == "learned":
            # For each axis, the change of every pair's angle from one patch to the next.
            self.frequencies = nn.Parameter(torch.empty(2, config.heads, self.head_width // 2))

    def forward(self, tokens: Tensor, grid: Grid | None = None, kept: Tensor | None = None) -> Rotation:
        """Return cosine and sine of the angles of tokens (B, T, D); `kept` (B, K) are the patches left after dropping.

        `grid` is the patch grid if the images are smaller than the config's.
        """
        grid = grid or self.grid
        if self.frequencies is None:
            cos, sin = rotation(self.rope, grid, self.reference, self.head_width, self.prefix, tokens.device)
        else:
            places = coordinates(self.rope, grid, None, tokens.device)  # (N, 2)
            # A product of elements, not of matrices, which bfloat16 would round.
            angles = (places[:, :, None, None] * self.frequencies.float()).sum(1).transpose(0, 1)  # (H, N, d/2)
            cos, sin = cos_and_sin(self.rope, angles, self.prefix)
        if kept is None:
            return cos, sin
        prefix = torch.arange(self.prefix, device=kept.device).expand(len(kept), -1)
        selected = torch.cat([prefix, kept + self.prefix], dim=1)  # (B, P + K)
        return cos[:, selected].transpose(0, 1), sin[:, selected].transpose(0, 1)  # each (B, 1 or H, P + K, d)


# Cached, because every forward pass needs the tables and no module stores them.
@functools.lru_cache(maxsize=32)
def rotation(
    rope: str, grid: Grid, reference: Grid | None, head_width: int, prefix: int, device: torch.device
) -> Rotation:
    """Return the cosine and sine tables (1, prefix + N, d) for a row of ROPES with fixed frequencies."""
    # Tensors of the inference mode could not be saved for a backward pass.
    with torch.inference_mode(False):
        _, base, _, _, _ = ROPES[rope]
        frequencies = head_width // 4  # of each axis; each turns a pair
        # In float32 as in the code of these models: their last bits change logits by up to 1e-5.
        exponent = torch.arange(frequencies, device=device) / frequencies
        places = coordinates(rope, grid, reference, device)  # (N, 2)
        angles = (places[:, :, None] * (1 / base**exponent)).flatten(1)  # (N, d/2), first all pairs of the first axis
        return cos_and_sin(rope, angles[None], prefix)


def coordinates(rope: str, grid: Grid, reference: Grid | None, device: torch.device) -> Tensor:
    """Return the coordinates (N, 2) of the patches, with the axes in the order of a row of ROPES."""
    kind, _, axes, offset, _ = ROPES[rope]
    sides = []
    for axis, length in enumerate(grid):
        places = torch.arange(length, dtype=torch.float32, device=device) + offset
        if kind == "centred":
            # From -1 to 1, times 2 pi, because the base gives periods, not angles.
            places = (places / length * 2 - 1) * (2 * math.pi)
        if reference is not None:
            places = places / length * reference[axis]
        sides.append(places)
    y, x = torch.meshgrid(*sides, indexing="ij")  # each (rows, columns)
    ordered = [y, x] if axes == "yx" else [x, y]
    return torch.stack(ordered, dim=-1).flatten(0, 1)


def cos_and_sin(rope: str, angles: Tensor, prefix: int) -> Rotation:
    """Return cosine and sine (H, prefix + N, d) of angles (H, N, d/2), one for each channel of a pair."""
    angles = F.pad(angles, (0, 0, prefix, 0))  # prefix tokens turn by 0
    if ROPES[rope][4] == "halves":
        cos = torch.cat([angles.cos()] * 2, dim=-1)
        sin = torch.cat([angles.sin()] * 2, dim=-1)
    else:
        cos = angles.cos().repeat_interleave(2, dim=-1)
        sin = angles.sin().repeat_interleave(2, dim=-1)
    return cos, sin


def rotate(x: Tensor, rotation: Rotation, rope: str) -> Tensor:
    """Rotate the channel pairs of queries or keys (B, H, T, d) by the angles of their tokens."""
    cos, sin = rotation
    # Each channel pair (a, b) becomes (a cos - b sin, b cos + a sin).
    if ROPES[rope][4] == "halves":
        first, second = x.chunk(2, dim=-1)
        other = torch.cat([-second, first], dim=-1)
    else:
        other = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    return (x * cos + other * sin).to(x.dtype)


ADDED: dict[str, type[Added]] = {"learned": Learned, "learned2d": Learned2d, "sincos2d": Sincos2d}
KINDS: dict[str, type[nn.Module]] = {**ADDED, "relative": Relative}


def resize_positions(table: Tensor, old_grid: Grid, new_grid: Grid, prefix_tokens: int) -> Tensor:
    """Resize a (P + N, D) or (1, P + N, D) table to another grid (rows, columns); the P prefix entries do not change.

    Bilinear with aligned corners in float64, like `scipy.ndimage.zoom(order=1)` in the original (SPEC 3).
    Raises ValueError if the table's shape does not match the old grid and the prefix.
    """
    old_grid = checks.pair("old_grid", old_grid)
    new_grid = checks.pair("new_grid", new_grid)
    if table.ndim not in (2, 3) or (table.ndim == 3 and table.shape[0] != 1):
        raise ValueError(f"a position table must have the shape (N, D) or (1, N, D), found {tuple(table.shape)}")
    expected = prefix_tokens + math.prod(old_grid)
    if table.shape[-2] != expected:
        raise ValueError(
            f"position table has {table.shape[-2]} entries, but grid {old_grid[0]}x{old_grid[1]} with "
            f"{prefix_tokens} prefix tokens needs {expected}; check old_grid and prefix_tokens"
        )
    # An unchanged grid must return a bitwise equal table.
    if old_grid == new_grid:
        return table.clone()
    prefix = table[..., :prefix_tokens, :]
    grid = table[..., prefix_tokens:, :]
    # Equals SciPy's zoom to 4e-6 in float32 and 1e-7 in float64. Without aligned corners, as in timm and transformers,
    # entries of unit variance differ by 0.3 to 1.6 (SPEC 3).
    image = grid.reshape(*old_grid, -1).permute(2, 0, 1)[None].double()  # (1, D, rows, columns)
    resized = F.interpolate(image, size=new_grid, mode="bilinear", align_corners=True)
    resized = resized[0].permute(1, 2, 0).reshape(*table.shape[:-2], -1, table.shape[-1])
    return torch.cat([prefix, resized.to(table.dtype)], dim=-2)


def shrink(table: Tensor, grid: Grid, smaller: Grid, slots: int) -> Tensor:
    """Shrink a table (1, slots + N, D) to a smaller grid, for training on smaller images; the slots do not change."""
    if smaller == grid:
        return table
    weights = shrinking(grid, smaller, table.device)
    on_grid = (weights @ table[0, slots:].float()).to(table.dtype)
    return torch.cat([table[:, :slots], on_grid[None]], dim=1)


# Cached, because every forward pass needs the weights and no module stores them.
@functools.lru_cache(maxsize=32)
def shrinking(grid: Grid, smaller: Grid, device: torch.device | None = None) -> Tensor:
    """Return weights (n, N) that shrink a table from `grid` to `smaller`; each row sums to 1.

    They are the normalised transpose of `resize_positions`, which enlarges from `smaller` to `grid`. A step on small
    images therefore changes the table as it would change the smaller table before enlarging, and every entry takes
    part. Interpolating downwards would read only four entries per result: from 8 rows to 4, two rows are never read and
    would keep their initial values.
    """
    # Enlarging is linear: its results for single entries form its matrix. Unlike the gradient of an interpolation, a
    # matrix product is also deterministic on a GPU.
    with torch.inference_mode(False):
        identity = torch.eye(math.prod(smaller), dtype=torch.float64)
        enlarging = resize_positions(identity, smaller, grid, 0)  # (N, n)
        weights = enlarging.T / enlarging.sum(0)[:, None]
        return weights.float().to(device)


def resize_relative(table: Tensor, old_grid: Grid, new_grid: Grid, slots: int, new_slots: int) -> Tensor:
    """Resize the table of `Relative`: read each new offset at its (rows, columns) position on the old grid.

    A row-major offset is a step of dy = round(offset / columns) rows and dx = offset − dy · columns columns. The
    corners of the two grids stay aligned.
    """
    # An unchanged grid must return a bitwise equal table.
    if (old_grid, slots) == (new_grid, new_slots):
        return table.clone()
    # Resizing the table as a flat list would change the meaning of offsets such as "one row down" (docs/models.md).
    old_reach = slots + math.prod(old_grid) - 1
    new_reach = new_slots + math.prod(new_grid) - 1
    # 1. Express each new offset as a step (dy, dx) on the new grid.
    offsets = torch.arange(-new_reach, new_reach + 1, dtype=torch.float64)
    dy = (offsets / new_grid[1]).round()
    if new_grid[0] == 1:
        dy = torch.zeros_like(offsets)  # a single row has steps within the row only
    dx = offsets - dy * new_grid[1]
    # 2. Scale it to a step on the old grid, with the first and last positions aligned.
    dy = dy * ((old_grid[0] - 1) / max(new_grid[0] - 1, 1))
    dx = dx * ((old_grid[1] - 1) / max(new_grid[1] - 1, 1))
    # 3. Interpolate bilinearly between the four surrounding integer steps.
    result = torch.zeros(offsets.numel(), table.shape[-1], dtype=torch.float64)
    for y in (dy.floor(), dy.floor() + 1):
        for x in (dx.floor(), dx.floor() + 1):
            share = (1 - (dy - y).abs()) * (1 - (dx - x).abs())
            old_offset = (y * old_grid[1] + x).clamp(-old_reach, old_reach).long()
            result += share[:, None] * table[0, old_offset + old_reach].double()
    return result.to(table.dtype)[None]
