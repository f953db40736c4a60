"""Weights of one layout turned into another, every key accounted for: what all file formats share.

A layout says under which keys the parts of each of our parameters lie (a packed qkv has three), and which
shape a part has there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models import catalog, positions
from models.transfer import check_shapes

Shape = tuple[int, ...]


def same_shape(key: str, shape: Shape, config: Any) -> Shape:
    return shape


@dataclass(frozen=True)
class Layout:
    """How another code base stores our parameters."""

    renames: tuple[tuple[str, str], ...]  # regular expression and replacement, applied to our name in turn
    packed: tuple[tuple[str, tuple[str, ...]], ...] = ()  # a piece of the new name: the parts it stands for
    kernels_last: bool = False  # JAX's (in, out) and (rows, columns, in, out) instead of torch's order
    shape_of: Callable[[str, Shape, Any], Shape] = same_shape  # of a part there, from that in this order

    def keys(self, name: str) -> tuple[str, ...]:
        """Where the parts of our parameter `name` are stored."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        for piece, parts in self.packed:
            if piece in name:
                return tuple(name.replace(piece, part) for part in parts)
        return (name,)

    def kernel(self, tensor: Tensor) -> Tensor:
        """Ours in the order of axes there."""
        if not self.kernels_last or tensor.ndim not in (2, 4):
            return tensor
        return tensor.T if tensor.ndim == 2 else tensor.permute(2, 3, 1, 0)


def parts_of(config: Any, layout: Layout) -> dict[str, list[tuple[str, Shape, Shape]]]:
    """For each of our parameters its parts: key there, shape here, shape there."""
    result: dict[str, list[tuple[str, Shape, Shape]]] = {}
    for name, parameter in catalog.empty(config).named_parameters():
        keys = layout.keys(name)
        result[name] = []
        for key, part in zip(keys, parameter.detach().chunk(len(keys)), strict=True):
            there = layout.shape_of(key, tuple(layout.kernel(part).shape), config)
            result[name].append((key, tuple(part.shape), there))
    return result


def read(stored: dict[str, Tensor], config: Any, layout: Layout) -> dict[str, Tensor]:
    """Our state dict from stored tensors; ValueError naming every key that does not fit."""
    parts = parts_of(config, layout)
    wanted = {key: squeezed(there) for rows in parts.values() for key, _, there in rows}
    check_shapes({key: squeezed(tensor.shape) for key, tensor in stored.items()}, wanted, config.family)
    return {
        name: torch.cat([unfold(stored[key], shape, layout) for key, shape, _ in rows]) for name, rows in parts.items()
    }


def squeezed(shape: Shape) -> Shape:
    """Without leading ones: old files keep (1, 1, 1, C) for GroupNorm and (1, 1, C, K) for a head."""
    return tuple(shape) if len(shape) < 2 or shape[0] != 1 else squeezed(tuple(shape[1:]))


def unfold(tensor: Tensor, shape: Shape, layout: Layout) -> Tensor:
    """A stored part in our shape."""
    if not layout.kernels_last or len(shape) not in (2, 4):
        return tensor.reshape(shape)
    if len(shape) == 2:
        return tensor.reshape(shape[1], shape[0]).T
    return tensor.reshape(*shape[2:], shape[1], shape[0]).permute(3, 2, 0, 1)


def write(state: dict[str, Tensor], config: Any, layout: Layout) -> dict[str, Tensor]:
    """Stored tensors from our state dict: the inverse of `read`, bit for bit."""
    result = {}
    for name, rows in parts_of(config, layout).items():
        for (key, _, there), part in zip(rows, state[name].chunk(len(rows)), strict=True):
            result[key] = layout.kernel(part.detach().cpu()).reshape(there).contiguous()
    return result


def with_learned_positions(state: dict[str, Tensor], config: Any, slots: int) -> tuple[dict[str, Tensor], Any]:
    """The same function with one free table where positions were fixed, factored or had no prefix slots."""
    if config.positions == "none":
        return state, config
    table = F.pad(positions.whole_table(state, config), (0, 0, slots - config.position_slots, 0))
    others = {name: tensor for name, tensor in state.items() if "positions." not in name}
    return {**others, "positions.0.table": table}, replace(config, positions="learned", class_slot=slots > 0)
