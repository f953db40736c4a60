"""Which ViT a set of foreign keys and shapes belongs to.

1. Shapes tell the width, depth, MLP, patch, classes, pooling and registers.
2. What a file beside them says, or the caller, wins over the shapes: the `known` fields.
3. The heads, which no shape of a packed projection tells, come from the table of variants.
4. The length of the position table tells whether prefix tokens have entries, and the size of a square image.

    timm's keys of B/16    patch_embed.proj.weight (768, 3, 16, 16), cls_token (1, 1, 768), pos_embed (1, 197, 768), ...
    become                 ViTConfig(image_size=(224, 224), patch=(16, 16), width=768, heads=12, pool="token", ...)
"""

from __future__ import annotations

import math
import re

from torch import Tensor

from models import catalog, checks, resnet
from models.catalog import ConfigFields
from models.transfer import Shape, tensor_shapes
from models.vit import SIZES, ViTConfig
from models.weights.layout import Layout

CHANNELS_PER_HEAD = 64  # in every variant of the paper's table 1 but H


class StoredShapes:
    """Shapes of stored tensors, found under our names of the parameters."""

    def __init__(self, stored: dict[str, Tensor], layout: Layout) -> None:
        self.shapes = tensor_shapes(stored.items())
        self.layout = layout

    def shape(self, name: str) -> Shape | None:
        """Shape of the parameter's first part; None where it is not stored."""
        first_key = self.layout.keys(name)[0]
        return self.shapes.get(first_key)

    def size(self, name: str) -> int | None:
        """How many numbers the parameter's first part has; leading ones in its shape do not matter."""
        shape = self.shape(name)
        if shape is None:
            return None
        return math.prod(shape)


def vit_config(stored: dict[str, Tensor], layout: Layout, known: ConfigFields) -> ViTConfig:
    """Return the config behind `stored`; `known` fields (from a file beside it, from the caller) win over shapes.

    Raises ValueError where these keys are no ViT, and where neither shapes nor `known` tell a field.
    """
    shapes = StoredShapes(stored, layout)
    embedding = shapes.shape("embedding.weight")
    if embedding is None or shapes.shape("blocks.0.mlp.up.bias") is None:
        key = layout.keys("embedding.weight")[0]
        raise ValueError(f"no {key} and blocks among {len(stored)} keys: this is no ViT known here")
    # Blocks are counted up to the first number that is missing.
    depth = 0
    while shapes.shape(f"blocks.{depth}.norm1.bias") is not None:
        depth += 1
    # Each way of pooling but the mean has a parameter of its own.
    pool = "gap"
    if shapes.shape("prefix.cls"):
        pool = "token"
    elif shapes.shape("map_head.probe"):
        pool = "map"
    registers = shapes.shape("prefix.registers")  # (1, registers, D)
    # JAX keeps (rows, columns, in, out), torch (out, in, rows, columns).
    if layout.kernels_last:
        rows, columns, _, width = embedding
    else:
        width, _, rows, columns = embedding
    config: ConfigFields = {
        "width": width,
        "depth": depth,
        "mlp": shapes.size("blocks.0.mlp.up.bias"),
        "patch": (rows, columns),
        "classes": shapes.size("head.bias") or 0,
        "representation": shapes.size("pre_logits.bias"),
        "pool": pool,
        "registers": registers[1] if registers else 0,
        **known,
    }
    # From here on these two are calculated with; a config.json may give one number for both sides.
    for name in ("patch", "image_size"):
        if name in config:
            config[name] = checks.pair(name, config[name])
    config["heads"] = config.get("heads") or usual_heads(config["width"])
    return catalog.checked(ViTConfig, with_positions(config, shapes.shape("positions.0.table")))


def usual_heads(width: int) -> int:
    """Return the heads of the variant of this width, else one for 64 channels; ValueError where that leaves a rest."""
    # H has heads of 80 channels, so that the table is asked before the usual 64 (SPEC 1.7).
    for size, _, _, heads in SIZES.values():
        if size == width:
            return heads
    if width % CHANNELS_PER_HEAD:
        raise ValueError(f"the number of heads of width {width} is not in the file: pass heads=")
    return width // CHANNELS_PER_HEAD


def with_positions(config: ConfigFields, table: Shape | None) -> ConfigFields:
    """Add what the table's shape (1, slots + patches, D) tells: kind, slots and, if it is square, the image size.

    Fields that are there already stay. Raises ValueError where the table does not fit them.
    """
    if table is None:
        if "image_size" not in config:
            raise ValueError("no position table tells the image size: pass image_size=(height, width)")
        # A fixed table is not stored: no table and a known size mean big_vision's sincos2d.
        return {"positions": "sincos2d", "class_slot": False, **config}
    length = table[1]
    class_tokens = 1 if config["pool"] == "token" else 0
    prefix = class_tokens + config["registers"]
    stem = resnet.stem_stride(config.get("stem"))
    patch_height, patch_width = config["patch"]
    rows_stride = patch_height * stem
    columns_stride = patch_width * stem
    if "image_size" not in config:
        # The image is square, and the table has entries for all prefix tokens, else for none of them: 197 is 14 x 14
        # patches and a class token; 196 beside a class token are 14 x 14 without an entry for it.
        for slots in (prefix, 0):
            side = math.isqrt(length - slots)
            if side**2 + slots == length:
                break
        else:
            raise ValueError(f"{length} position entries are no square grid: pass image_size=(height, width)")
        config["image_size"] = (side * rows_stride, side * columns_stride)
    height, width = config["image_size"]
    patches = (height // rows_stride) * (width // columns_stride)
    # A table has entries for all prefix tokens or for none of them (docs/models.md).
    if length not in (patches, patches + prefix):
        raise ValueError(
            f"image_size {config['image_size']} has {patches} patches and {prefix} prefix tokens, the file has "
            f"{length} position entries; load it at its own size and resize it with models.transfer"
        )
    return {"class_slot": length == patches + prefix, **config}


def units_of(stored: dict[str, Tensor]) -> tuple[int, ...]:
    """Return the units of each ResNet stage, counted in names such as block1/unit2 or block1.unit02."""
    units: dict[int, int] = {}
    for key in stored:
        for stage, unit in re.findall(r"block(\d+).unit(\d+)", key):
            units[int(stage)] = max(units.get(int(stage), 0), int(unit))
    return tuple(units[stage] for stage in sorted(units))
