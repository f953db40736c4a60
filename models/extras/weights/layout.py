"""Convert weights between our names and shapes and another library's layout, with every key checked.

A layout defines the keys under which the parts of each parameter are stored (a packed qkv has three parts), and the
stored shape of each part.

1. `Layout.keys` converts our name to stored keys: it applies the renames in order, and splits packed parameters.
2. `vit_config` infers the config of a ViT from stored keys and shapes.
3. `write` converts our state dict to stored tensors.
4. `read` compares stored tensors with what `write` would produce, and assembles our state dict.

    npz.VIT_JAX.keys("blocks.0.attention.qkv.weight")
    ("Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel", ".../key/kernel", ".../value/kernel")
    our parts are (768, 768), outputs first; the stored ones are (768, 12, 64), inputs first and heads separate

    timm's keys of B/16    patch_embed.proj.weight (768, 3, 16, 16), cls_token (1, 1, 768), pos_embed (1, 197, 768), ...
    become                 ViTConfig(image_size=(224, 224), patch=(16, 16), width=768, heads=12, pool="token", ...)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models import catalog, checks
from models.catalog import Shape, check_shapes
from models.configs import SIZES, ConfigFields, ModelConfig, ViTConfig, checked, stem_stride
from models.vit import position_table

ForeignConfig = dict[str, Any]  # a parsed config.json of another library, with any fields
# Fields that have no effect on what a trained model computes, or that the preprocessing describes.
UNCOMPUTED = ("dropout", "drop_path", "head_bias", "position_std", "pixel_mean", "pixel_std")
CHANNELS_PER_HEAD = 64  # in every variant of the paper's table 1 except H


@dataclass(frozen=True)
class Layout:
    """The names and shapes of our parameters in another code base."""

    renames: tuple[tuple[str, str], ...]  # pairs of regular expression and replacement, applied to our name in order
    packed: tuple[tuple[str, tuple[str, ...]], ...] = ()  # substring of the new name, and its replacement for each part
    kernels_last: bool = False  # JAX's order (in, out) and (rows, columns, in, out) instead of torch's
    # Returns the stored shape of a part, from its key and its shape in this order of axes; None: the shape is the same.
    shape_of: Callable[[str, Shape, ModelConfig], Shape] | None = None

    def keys(self, name: str) -> tuple[str, ...]:
        """Return the keys under which the parts of our parameter `name` are stored."""
        # The order of renames matters, because each is applied to the result of the previous one.
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        for piece, parts in self.packed:
            if piece in name:
                return tuple(name.replace(piece, part) for part in parts)
        return (name,)


def read(stored: dict[str, Tensor], config: ModelConfig, layout: Layout) -> dict[str, Tensor]:
    """Return our state dict from stored tensors; raises ValueError naming keys that do not fit."""
    # Take the expected parameters from a module on the meta device: a separate table could drift from the code.
    parameters: dict[str, Tensor] = dict(catalog.empty(config).named_parameters())
    expected = {key: squeezed(tensor) for key, tensor in write(parameters, config, layout).items()}
    shapes = {key: squeezed(tensor) for key, tensor in stored.items()}
    # Reject unknown keys, because ignoring the weights of an unsupported layer would silently change the model.
    check_shapes(shapes, expected, config.label)

    state: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        keys = layout.keys(name)
        parts = []
        for key, here in zip(keys, parameter.chunk(len(keys)), strict=True):
            tensor = stored[key]
            # The inverse of `write` for any stored shape. JAX's attention kernels have heads as a separate axis next to
            # the inputs or the outputs; the same reshape merges it in both cases.
            if layout.kernels_last and here.ndim == 2:
                outputs, inputs = here.shape
                tensor = tensor.reshape(inputs, outputs).T
            elif layout.kernels_last and here.ndim == 4:
                outputs, inputs, rows, columns = here.shape
                tensor = tensor.reshape(rows, columns, inputs, outputs).permute(3, 2, 0, 1)
            parts.append(tensor.reshape(here.shape))
        state[name] = torch.cat(parts)
    return state


def squeezed(tensor: Tensor) -> Shape:
    """Return the shape without leading ones: old files store (1, 1, 1, C) for GroupNorm and (1, 1, C, K) for a head."""
    shape = tuple(tensor.shape)
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def write(state: dict[str, Tensor], config: ModelConfig, layout: Layout) -> dict[str, Tensor]:
    """Convert our state dict to stored tensors: the inverse of `read`, bit for bit."""
    stored: dict[str, Tensor] = {}
    # In the module's order, independent of the state dict's.
    for name, _ in catalog.empty(config).named_parameters():
        keys = layout.keys(name)
        for key, part in zip(keys, state[name].detach().chunk(len(keys)), strict=True):
            if layout.kernels_last and part.ndim == 2:
                part = part.T
            elif layout.kernels_last and part.ndim == 4:
                part = part.permute(2, 3, 1, 0)
            shape = tuple(part.shape)
            if layout.shape_of is not None:
                shape = layout.shape_of(key, shape, config)
            # safetensors requires contiguous tensors, and a transposed tensor is not contiguous.
            stored[key] = part.reshape(shape).contiguous()
    return stored


def with_learned_positions(
    state: dict[str, Tensor], config: ViTConfig, slots: int
) -> tuple[dict[str, Tensor], ViTConfig]:
    """Return an equivalent model with one learned position table, which has entries for `slots` prefix tokens.

    If more prefix tokens have position embeddings, all of these are folded into the tokens first.
    """
    if config.positions == "none":
        return state, config
    if config.position_slots > slots:
        state, config = without_slots(state, config)
    # A prefix token without an entry gets nothing added; an entry of zeros is equivalent.
    missing_slots = slots - config.position_slots
    table = F.pad(position_table(state, config), (0, 0, missing_slots, 0))
    learned: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if "positions." not in name:
            learned[name] = tensor
    learned["positions.0.table"] = table
    return learned, replace(config, positions="learned", class_slot=slots > 0)


def unlearnable_positions(config: ViTConfig) -> list[str]:
    """Return why a learned position table cannot replace a model's position embeddings; an empty list if it can."""
    if config.positions == "relative":
        return ["relative positions"]
    if config.positions == "none":
        return []
    if config.positions_at == "every":
        return [f"{config.positions} positions in every layer"]
    if config.positions_at == "shared":
        return [f"{config.positions} positions shared by all layers"]
    return []


def differing_fields(theirs: ViTConfig, ours: ViTConfig) -> list[str]:
    """Return the names of the fields that would make another library's model compute something different from ours."""
    # Without a table or a prefix token, nothing has an entry.
    has_no_entry = ours.positions == "none" or not ours.prefix_tokens
    names = []
    for field in fields(ViTConfig):
        differs = getattr(theirs, field.name) != getattr(ours, field.name)
        # Only the initial value of LayerScale may differ.
        if field.name == "layer_scale":
            differs = (theirs.layer_scale is None) != (ours.layer_scale is None)
        if field.name in UNCOMPUTED or (field.name == "class_slot" and has_no_entry):
            continue
        if differs:
            names.append(field.name)
    return names


def without_slots(state: dict[str, Tensor], config: ViTConfig) -> tuple[dict[str, Tensor], ViTConfig]:
    """Return an equivalent model without position embeddings for prefix tokens: each is folded into its token."""
    slots = config.position_slots
    state, config = with_learned_positions(state, config, slots)
    table = state["positions.0.table"]
    moved = {**state, "positions.0.table": table[:, slots:]}
    first = 0
    for name in ("prefix.cls", "prefix.registers"):
        if name in state:
            count = state[name].shape[1]
            moved[name] = state[name] + table[:, first : first + count]
            first += count
    return moved, replace(config, class_slot=False)


# Our names of parameters whose presence or shape determines a field of the config.
INFORMATIVE = (
    *("embedding.weight", "head.bias", "pre_logits.bias"),
    *("prefix.cls", "prefix.registers", "map_head.probe", "positions.0.table"),
    *("blocks.0.mlp.up.weight", "blocks.0.mlp.gate_up.weight", "map_head.mlp.up.weight"),
)
# Presence of one parameter determines a switch: field, our name of the parameter, value if present, value if absent.
PRESENT: tuple[tuple[str, str, object, object], ...] = (
    ("patch_bias", "embedding.bias", True, False),
    ("patch_norm", "patch_norm.weight", True, False),
    ("pre_norm", "pre_norm.weight", True, False),
    ("norm", "blocks.0.norm1.bias", "layer", "rms"),
    ("layer_scale", "blocks.0.scale1.gamma", 1e-5, None),  # its initial value is not in the file
    ("qk_norm", "blocks.0.attention.q_norm.weight", True, False),
    ("attention_norm", "blocks.0.attention.norm.weight", True, False),
    ("mlp_norm", "blocks.0.mlp.norm.weight", True, False),
    ("block_bias", "blocks.0.attention.out.bias", True, False),
)


def vit_config(
    stored: dict[str, Tensor], layout: Layout, known: ConfigFields, infer_switches: bool = False
) -> ViTConfig:
    """Infer the config of stored weights; fields in `known` (from a file or the caller) override inferred ones.

    With `infer_switches`, the presence of parameters decides which optional layers are on; otherwise the layers of the
    paper's ViT are expected. Raises ValueError if the keys do not belong to a ViT, or if neither shapes nor `known`
    determine a field.
    """
    # Stored shapes by our names; for a packed parameter, the shape of its first part.
    shapes: dict[str, Shape] = {}
    for name in INFORMATIVE:
        key = layout.keys(name)[0]
        if key in stored:
            shapes[name] = tuple(stored[key].shape)
    hidden = shapes.get("blocks.0.mlp.up.weight") or shapes.get("blocks.0.mlp.gate_up.weight")
    if "embedding.weight" not in shapes or hidden is None:
        key = layout.keys("embedding.weight")[0]
        raise ValueError(
            f"the file has {len(stored)} keys, but no {key} and no blocks, so it is not a ViT in a supported format"
        )

    # JAX stores (rows, columns, in, out), torch (out, in, rows, columns).
    if layout.kernels_last:
        rows, columns, _, width = shapes["embedding.weight"]
    else:
        width, _, rows, columns = shapes["embedding.weight"]
    config: ConfigFields = {"width": width, "patch": (rows, columns), "depth": 0, "classes": 0, "registers": 0}
    # Count blocks up to the first missing number.
    while layout.keys(f"blocks.{config['depth']}.norm1.weight")[0] in stored:
        config["depth"] += 1
    outputs = -1 if layout.kernels_last else 0  # the axis of a matrix
    config["mlp"] = hidden[outputs]
    if "blocks.0.mlp.up.weight" not in shapes:
        config["activation"] = "swiglu"
        # Both halves under one key, or each under its own.
        config["mlp"] = hidden[outputs] * len(layout.keys("blocks.0.mlp.gate_up.weight")) // 2
    if "map_head.mlp.up.weight" in shapes and shapes["map_head.mlp.up.weight"][outputs] != config["mlp"]:
        config["map_mlp"] = shapes["map_head.mlp.up.weight"][outputs]
    if infer_switches:
        config |= switches_of(stored, layout)
    # A bias has one value per output of its layer; old files store it with leading ones in its shape.
    biases = {"classes": "head.bias", "representation": "pre_logits.bias"}
    for field, name in biases.items():
        if name in shapes:
            config[field] = math.prod(shapes[name])
    # Every kind of pooling except the mean has a characteristic parameter.
    config["pool"] = "gap"
    if "prefix.cls" in shapes:
        config["pool"] = "token"
    elif "map_head.probe" in shapes:
        config["pool"] = "map"
    if "prefix.registers" in shapes:
        config["registers"] = shapes["prefix.registers"][1]  # (1, registers, D)
    config |= known
    # The code below computes with these two fields; a config.json may give one number for both sides.
    for name in ("patch", "image_size"):
        if name in config:
            config[name] = checks.pair(name, config[name])

    # The shape of a packed projection does not determine the heads. Heads of H have 80 channels, so look up the table
    # of variants before assuming the usual 64 (SPEC 1.7).
    if not config.get("heads"):
        heads_by_width = {width: heads for width, _, _, heads in SIZES.values()}
        width = config["width"]
        if width not in heads_by_width and width % CHANNELS_PER_HEAD:
            raise ValueError(f"the file does not determine the number of heads for width {width}; pass heads=NUMBER")
        config["heads"] = heads_by_width.get(width, width // CHANNELS_PER_HEAD)
    return checked(ViTConfig, with_positions(config, shapes.get("positions.0.table")))


def switches_of(stored: dict[str, Tensor], layout: Layout) -> ConfigFields:
    """Return the switches of the config, inferred from the presence or absence of stored parameters."""
    switches: ConfigFields = {}
    for field, name, present, absent in PRESENT:
        switches[field] = present if layout.keys(name)[0] in stored else absent
    # In a layout of a model without a bias of the keys, two parts make up our bias.
    biases = layout.keys("blocks.0.attention.qkv.bias")
    switches["qkv_bias"] = "none"
    if biases[0] in stored:
        switches["qkv_bias"] = "qv" if len(biases) == 2 else "all"
    switches["last_norm"] = "none"
    if layout.keys("norm.weight")[0] in stored:
        switches["last_norm"] = "tokens"
    elif layout.keys("pool_norm.weight")[0] in stored:
        switches["last_norm"] = "pooled"
    return switches


def with_positions(config: ConfigFields, table: Shape | None) -> ConfigFields:
    """Return `config` with additional fields inferred from the position table's shape (1, slots + patches, D).

    The fields are the kind of positions, the slots and a square image size. Existing fields do not change. Raises
    ValueError if the table does not fit them.
    """
    if table is None:
        if "image_size" not in config:
            raise ValueError(
                "the file has no position table, so the image size is unknown; pass image_size=(height, width)"
            )
        # A fixed table is not stored: without a table but with a known size, it is big_vision's sincos2d.
        return {"positions": "sincos2d", "class_slot": False, **config}
    length = table[1]
    class_tokens = 1 if config["pool"] == "token" else 0
    prefix = class_tokens + config["registers"]
    stem = stem_stride(config.get("stem"))
    patch_height, patch_width = config["patch"]
    rows_stride = patch_height * stem
    columns_stride = patch_width * stem
    if "image_size" not in config:
        # Assume a square image, and a table with entries for all prefix tokens or for none: 197 entries are 14 x 14
        # patches and a class token; 196 entries with a class token are 14 x 14 patches only.
        for slots in (prefix, 0):
            side = math.isqrt(length - slots)
            if side**2 + slots == length:
                break
        else:
            raise ValueError(
                f"the {length} entries of the position table do not form a square grid; pass image_size=(height, width)"
            )
        config["image_size"] = (side * rows_stride, side * columns_stride)
    height, width = config["image_size"]
    patches = (height // rows_stride) * (width // columns_stride)
    # A table has entries for all prefix tokens or for none of them (docs/models.md).
    if length not in (patches, patches + prefix):
        raise ValueError(
            f"image_size={config['image_size']} needs {patches + prefix} position entries ({patches} patches, {prefix} "
            f"prefix tokens), but the file has {length}; load the file without image_size, then use models.transfer"
        )
    return {"class_slot": length == patches + prefix, **config}


def units_of(stored: dict[str, Tensor]) -> tuple[int, ...]:
    """Return the number of units of each ResNet stage, from names such as block1/unit2 or block1.unit02."""
    units: dict[int, int] = {}
    for key in stored:
        for stage, unit in re.findall(r"block(\d+).unit(\d+)", key):
            units[int(stage)] = max(units.get(int(stage), 0), int(unit))
    return tuple(units[stage] for stage in sorted(units))
