"""Weights of one layout turned into another, every key accounted for: what all file formats share.

A layout says under which keys the parts of each of our parameters lie (a packed qkv has three), and which
shape a part has there.

1. `Layout.keys` turns our name into theirs, by the renames in their order, and splits what is packed here;
2. `parts_of` lists for a config every part with its key, its shape here and its shape there;
3. `read` holds the stored tensors against that list and puts our state dict together; `write` does the inverse.

    npz.vit_layout(...).keys("blocks.0.attention.qkv.weight")
    ("Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel", ".../key/kernel", ".../value/kernel")
    here each part is (768, 768), outputs first; there it is (768, 12, 64), inputs first and the heads apart
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models import catalog
from models.catalog import ModelConfig
from models.transfer import Shape, check_shapes
from models.vit import ViTConfig, position_table

ForeignConfig = dict[str, Any]  # a config.json of another project, as JSON gives it; its fields are theirs to choose


@dataclass(frozen=True)
class Layout:
    """How another code base stores our parameters."""

    renames: tuple[tuple[str, str], ...]  # regular expression and replacement, applied to our name in turn
    packed: tuple[tuple[str, tuple[str, ...]], ...] = ()  # a piece of the new name: the parts it stands for
    kernels_last: bool = False  # JAX's (in, out) and (rows, columns, in, out) instead of torch's order
    # The shape of a part there, from its key and its shape in this order of axes; None: it is the same.
    shape_of: Callable[[str, Shape, ModelConfig], Shape] | None = None

    def keys(self, name: str) -> tuple[str, ...]:
        """Return the keys under which the parts of our parameter `name` are stored."""
        # Each rename sees what those before it made of the name, so that their order matters.
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        for piece, parts in self.packed:
            if piece in name:
                return tuple(name.replace(piece, part) for part in parts)
        return (name,)

    def kernel(self, tensor: Tensor) -> Tensor:
        """A tensor of ours in the order of axes there."""
        if self.kernels_last and tensor.ndim == 2:
            return tensor.T
        if self.kernels_last and tensor.ndim == 4:
            return tensor.permute(2, 3, 1, 0)
        return tensor


class Part(NamedTuple):
    """One stored tensor: a parameter of ours, or a third of one where qkv is packed."""

    key: str
    here: Shape
    there: Shape


def parts_of(config: ModelConfig, layout: Layout) -> dict[str, list[Part]]:
    """Return the parts of each of our parameters, in the module's order."""
    parts_by_name: dict[str, list[Part]] = {}
    # The module on meta is the list of parameters: a table of shapes beside it could drift from the code.
    for name, parameter in catalog.empty(config).named_parameters():
        keys = layout.keys(name)
        parts = []
        for key, tensor in zip(keys, parameter.detach().chunk(len(keys)), strict=True):
            there = tuple(layout.kernel(tensor).shape)
            if layout.shape_of is not None:
                there = layout.shape_of(key, there, config)
            parts.append(Part(key, tuple(tensor.shape), there))
        parts_by_name[name] = parts
    return parts_by_name


def read(stored: dict[str, Tensor], config: ModelConfig, layout: Layout) -> dict[str, Tensor]:
    """Return our state dict from stored tensors; ValueError naming every key that does not fit."""
    parts_by_name = parts_of(config, layout)
    expected: dict[str, Shape] = {}
    for parts in parts_by_name.values():
        for part in parts:
            expected[part.key] = squeezed(part.there)
    shapes = {key: squeezed(tuple(tensor.shape)) for key, tensor in stored.items()}
    # Unknown keys are an error too: a layer that no model here has would be left out without a word.
    check_shapes(shapes, expected, config.family)

    state: dict[str, Tensor] = {}
    for name, parts in parts_by_name.items():
        tensors = []
        for part in parts:
            tensor = stored[part.key]
            # The inverse of `Layout.kernel`, whatever the shape it is stored in. JAX's attention kernels keep heads as
            # an axis. It lies beside the inputs or beside the outputs, so that the same reshape closes it up for all.
            if layout.kernels_last and len(part.here) == 2:
                outputs, inputs = part.here
                tensor = tensor.reshape(inputs, outputs).T
            elif layout.kernels_last and len(part.here) == 4:
                outputs, inputs, rows, columns = part.here
                tensor = tensor.reshape(rows, columns, inputs, outputs).permute(3, 2, 0, 1)
            tensors.append(tensor.reshape(part.here))
        state[name] = torch.cat(tensors)
    return state


def squeezed(shape: Shape) -> Shape:
    """A shape without leading ones: old files keep (1, 1, 1, C) for GroupNorm and (1, 1, C, K) for a head."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def write(state: dict[str, Tensor], config: ModelConfig, layout: Layout) -> dict[str, Tensor]:
    """Return stored tensors from our state dict: the inverse of `read`, bit for bit."""
    stored: dict[str, Tensor] = {}
    for name, parts in parts_of(config, layout).items():
        for part, tensor in zip(parts, state[name].chunk(len(parts)), strict=True):
            # safetensors refuses what is not contiguous, and a transposed tensor is not.
            stored[part.key] = layout.kernel(tensor.detach().cpu()).reshape(part.there).contiguous()
    return stored


def with_learned_positions(
    state: dict[str, Tensor], config: ViTConfig, slots: int
) -> tuple[dict[str, Tensor], ViTConfig]:
    """Return weights and config of the same function with one learned table; `slots` prefix tokens have an entry."""
    if config.positions == "none":
        return state, config
    # A prefix token without an entry gets zeros added: an entry of zeros is the same function.
    missing_slots = slots - config.position_slots
    table = F.pad(position_table(state, config), (0, 0, missing_slots, 0))
    learned: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if "positions." not in name:
            learned[name] = tensor
    learned["positions.0.table"] = table
    return learned, replace(config, positions="learned", class_slot=slots > 0)
