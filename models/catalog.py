"""Names to configs to modules: "B/16", "H/14", "mu/4"; a family is one row of FAMILIES and a name pattern."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Generator, nn

from models import initial, vit

ImageSize = int | tuple[int, int]  # pixels; (height, width) where not square

FAMILIES: dict[str, tuple[type, type]] = {  # family: (config, module)
    "vit": (vit.ViTConfig, vit.ViT),
}


def config_of(name: str, image_size: ImageSize = 224, classes: int = 1000, **config: Any) -> Any:
    """The config a name stands for, fields overridden by `config`; ValueError on a wrong name or value."""
    found = re.fullmatch(r"(?:ViT-)?(?P<size>[A-Za-z0-9-]+)/(?P<patch>\d+)", name)
    if not found:
        raise ValueError(f'{name!r} is not a model name; write for example "B/16" or "H/14"')
    row = vit.SIZES.get(found["size"])
    if row is None:
        raise ValueError(f"{name!r}: no size {found['size']!r}; {suggestion(found['size'], vit.SIZES)}")
    shape = dict(zip(("width", "depth", "mlp", "heads"), row, strict=True))
    named = {"image_size": image_size, "classes": classes, "patch": int(found["patch"]), **shape}
    return checked(vit.ViTConfig, {**named, **config})


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """'did you mean X? known: ...' for an error message."""
    known = list(known)
    close = difflib.get_close_matches(wrong, known, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(known)}"


def checked(kind: type, values: dict[str, Any]) -> Any:
    """Make a config from plain values; unknown names are a ValueError with the nearest one."""
    known = [field.name for field in fields(kind)]
    for name in values:
        if name not in known:
            raise ValueError(f"{kind.__name__} has no field {name!r}; {suggestion(name, known)}")
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


def decayed(model: nn.Module) -> set[str]:
    """Names of the parameters with weight decay: the official `*/kernel`s and nothing else (SPEC 2.2).

    Goes by module type, not by rank: ZeRO-3 flattens the parameters it has partitioned.
    """
    kernels = (nn.Linear, nn.Conv2d, vit.PatchEmbedding)
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kernels)}
