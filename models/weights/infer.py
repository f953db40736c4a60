"""Which ViT a set of foreign keys and shapes belongs to."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

from torch import Tensor

from models import catalog, checks, resnet
from models.vit import SIZES, ViTConfig
from models.weights.layout import Layout


def vit_config(stored: dict[str, Tensor], layout: Layout, known: dict[str, Any]) -> ViTConfig:
    """The config behind `stored`; `known` fields (from a file beside it, from the caller) win over shapes."""
    shapes = {key: tuple(tensor.shape) for key, tensor in stored.items()}

    def shape(name: str) -> tuple[int, ...] | None:
        return shapes.get(layout.keys(name)[0])

    def size(name: str) -> int | None:
        return math.prod(found) if (found := shape(name)) else None

    embedding = shape("embedding.weight")
    if embedding is None or shape("blocks.0.mlp.up.bias") is None:
        wanted = layout.keys("embedding.weight")[0]
        raise ValueError(f"no {wanted} and blocks among {len(stored)} keys: this is no ViT known here")
    registers = shape("prefix.registers")
    found = {
        "width": embedding[-1 if layout.kernels_last else 0],
        "depth": next(i for i in itertools.count() if size(f"blocks.{i}.norm1.bias") is None),
        "mlp": size("blocks.0.mlp.up.bias"),
        "patch": embedding[:2] if layout.kernels_last else embedding[2:],
        "classes": size("head.bias") or 0,
        "representation": size("pre_logits.bias"),
        "pool": "token" if shape("prefix.cls") else "map" if shape("map_head.probe") else "gap",
        "registers": registers[1] if registers else 0,
        **known,
    }
    found |= {name: checks.pair(name, found[name]) for name in ("patch", "image_size") if name in found}
    found["heads"] = found.get("heads") or usual_heads(found["width"])
    return catalog.checked(ViTConfig, with_positions(found, shape("positions.0.table")))


def usual_heads(width: int) -> int:
    """Shapes of a packed projection do not tell: the variants table does, and else 64 channels a head."""
    for size, _, _, heads in SIZES.values():
        if size == width:
            return heads
    if width % 64:
        raise ValueError(f"the number of heads of width {width} is not in the file: pass heads=")
    return width // 64


def with_positions(found: dict[str, Any], table: tuple[int, ...] | None) -> dict[str, Any]:
    """Adds the kind of positions, whether prefixes have slots and, if the table is square, the image size."""
    if table is None:
        if "image_size" not in found:
            raise ValueError("no position table tells the image size: pass image_size=(height, width)")
        return {"positions": "sincos2d", "class_slot": False, **found}
    length, prefix = table[1], (found["pool"] == "token") + found["registers"]
    stride = [side * resnet.stem_stride(found.get("stem")) for side in found["patch"]]
    if "image_size" not in found:
        sides = [math.isqrt(patches) for patches in (length - prefix, length)]
        fitting = [side for side, slots in zip(sides, (prefix, 0), strict=True) if side**2 + slots == length]
        if not fitting:
            raise ValueError(f"{length} position entries are no square grid: pass image_size=(height, width)")
        found["image_size"] = fitting[0] * stride[0], fitting[0] * stride[1]
    patches = math.prod(pixels // step for pixels, step in zip(found["image_size"], stride, strict=True))
    if length not in (patches, patches + prefix):
        raise ValueError(
            f"image_size {found['image_size']} has {patches} patches and {prefix} prefix tokens, the file has {length} "
            "position entries; load it at its own size and resize it with models.transfer"
        )
    return {"class_slot": length == patches + prefix, **found}


def units_of(stored: dict[str, Tensor]) -> tuple[int, ...]:
    """Units of each ResNet stage, counted in names such as block1/unit2 or block1.unit02."""
    units = {(int(b), int(u)) for key in stored for b, u in re.findall(r"block(\d+).unit(\d+)", key)}
    return tuple(max(u for b, u in units if b == stage) for stage in sorted({b for b, _ in units}))
