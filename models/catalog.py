"""Names to configs to modules: "B/16", "H/14", "mu/4"; a family is one row of FAMILIES and a name pattern."""

from __future__ import annotations

import re
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Generator, nn

from models import axial, initial, masked, resnet, vit
from models.checks import did_you_mean

ImageSize = int | tuple[int, int]  # pixels; (height, width) where not square

FAMILIES: dict[str, tuple[type, type]] = {  # family: (config, module)
    "vit": (vit.ViTConfig, vit.ViT),
    "bit": (resnet.BiTConfig, resnet.BiT),
    "axial": (axial.AxialConfig, axial.AxialViT),
    "masked": (masked.MaskedConfig, masked.MaskedViT),
}
NAME = re.compile(
    r"BiT-R(?P<resnet>\d+)x(?P<factor>\d+)"
    r"|(?:(?P<kind>Axial|Masked)-|(?P<stem>R\d*)\+)?(?:ViT-)?(?P<size>[A-Za-z0-9-]+)/(?P<patch>\d+)"
)


def config_of(name: str, image_size: ImageSize = 224, classes: int = 1000, **config: Any) -> Any:
    """The config a name stands for, fields overridden by `config`; ValueError on a wrong name or value."""
    found = NAME.fullmatch(name)
    if not found:
        examples = '"B/16", "R50+B/16", "BiT-R50x1", "Axial-B/32" or "Masked-B/16"'
        raise ValueError(f"{name!r} is not a model name; write it as {examples}")
    kind, named = bit_fields(found) if found["resnet"] else vit_fields(found)
    return checked(kind, {**named, "image_size": image_size, "classes": classes, **config})


def vit_fields(found: re.Match[str]) -> tuple[type, dict[str, Any]]:
    """Config class and named fields of "B/16", "Axial-B/32" or, where /16 is the total stride, "R50+B/16"."""
    row = vit.SIZES.get(found["size"])
    if row is None:
        raise ValueError(f"{found[0]!r}: no size {found['size']!r}{did_you_mean(found['size'], vit.SIZES)}")
    named: dict[str, Any] = dict(zip(("width", "depth", "mlp", "heads"), row, strict=True))
    named["patch"] = int(found["patch"])
    if found["stem"]:
        stem = (found["stem"], named["patch"])
        if stem not in resnet.STEMS:
            known = ", ".join(f"{prefix}+{found['size']}/{stride}" for prefix, stride in resnet.STEMS)
            raise ValueError(f"{found[0]!r}: no such stem; known: {known}")
        named["stem"], named["patch"] = resnet.STEMS[stem]
    kinds = {"Axial": axial.AxialConfig, "Masked": masked.MaskedConfig, None: vit.ViTConfig}
    return kinds[found["kind"]], named


def bit_fields(found: re.Match[str]) -> tuple[type, dict[str, Any]]:
    units = resnet.UNITS.get(int(found["resnet"]))
    if units is None:
        known = ", ".join(f"BiT-R{depth}" for depth in resnet.UNITS)
        raise ValueError(f"{found[0]!r}: no ResNet of {found['resnet']} layers; known: {known}")
    return resnet.BiTConfig, {"units": units, "width": 64 * int(found["factor"])}


def checked(kind: type, values: dict[str, Any]) -> Any:
    """Make a config from plain values; unknown names are a ValueError with the nearest one."""
    known = [field.name for field in fields(kind)]
    for name in values:
        if name not in known:
            raise ValueError(f"{kind.__name__} has no field {name!r}{did_you_mean(name, known)}")
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


def to_dict(config: Any) -> dict[str, Any]:
    """Plain values with the family's name: what stands in model.json."""
    return {"family": config.family, **asdict(config)}


def from_dict(values: dict[str, Any]) -> Any:
    """The inverse of `to_dict`, also after a trip through JSON."""
    values = dict(values)
    family = values.pop("family", None)
    if family not in FAMILIES:
        raise ValueError(f"no model family {family!r}; known: {', '.join(FAMILIES)}")
    return checked(FAMILIES[family][0], values)


def empty(config: Any) -> nn.Module:
    """The module on the meta device: names and shapes, no memory."""
    with torch.device("meta"):
        return FAMILIES[config.family][1](config)


def from_config(config: Any, generator: Generator | None = None) -> nn.Module:
    """The module with freshly drawn parameters on the default device; on meta it takes no memory."""
    model = empty(config)
    device = torch.get_default_device()
    if device.type != "meta":
        model.to_empty(device=device)
        initial.initialize(model, generator)
    return model


def build(name: str, image_size: ImageSize = 224, classes: int = 1000, **config: Any) -> nn.Module:
    """A freshly initialised model by name: `build("B/16", image_size=384, pool="gap")`."""
    return from_config(config_of(name, image_size, classes, **config))


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """`torch.compile` each block in place, names unchanged: one block's compilation serves all of them."""
    for module in model.modules():
        if isinstance(module, (vit.Block, resnet.StemUnit, resnet.BiTUnit)):
            module.compile(**options)


def decayed(model: nn.Module) -> set[str]:
    """Names of the parameters with weight decay: the official `*/kernel`s and nothing else (SPEC 2.2).

    Goes by module type, not by rank: ZeRO-3 flattens the parameters it has partitioned.
    """
    kernels = (nn.Linear, nn.Conv2d, vit.PatchEmbedding)
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kernels)}
