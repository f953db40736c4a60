"""Names to configs to modules, configs to plain values and back, and what a model costs.

How a name becomes a module:
1. NAME splits it:           "R50+B/16" -> stem R50, size B, patch 16
2. the tables of the family turn the parts into fields: B -> width 768, depth 12; (R50, 16) -> stem (3, 4, 9), patch 1
3. the caller's fields win over these, and the config's own checks look at the whole
4. `empty` makes the module on the meta device, `from_config` gives it memory and first values

    config_of("mu/8", image_size=16, classes=5)   ViTConfig(image_size=(16, 16), patch=(8, 8), classes=5, width=32, ...)
    to_dict(config)                               {"family": "vit", "image_size": (16, 16), "patch": (8, 8), ...}

    config = config_of("B/16")
    parameters_of(config)                         86_567_656
    macs_of(config)                               17.56e9 multiply-accumulates of one image's forward pass
    training_flops(config, images=1)              105.4e9, by the rule of the paper's table 6
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

import torch
from torch import Generator, nn
from torch.utils.flop_counter import FlopCounterMode

from models import initial, masked, resnet, vit
from models.checks import did_you_mean

# Another architecture is a file with its config and its module, and one entry in each of these three. A module has
# `config`, `recomputed_blocks`, `features(images)` and `forward(images)`; its config is a frozen dataclass with
# `family`, `image_size`, `classes`, `head_bias`, `head_fields`, `absent` and `with_new_head()`.
ModelConfig = vit.ViTConfig | resnet.BiTConfig  # AxialConfig and MaskedConfig are ViTConfigs
Model = vit.ViT | masked.MaskedViT | resnet.BiT  # AxialViT is a ViT
# The family's name stands in every model.json: a name that changes here makes saved weights unreadable.
FAMILIES: dict[str, tuple[type[ModelConfig], type[Model]]] = {  # family: (config, module)
    "vit": (vit.ViTConfig, vit.ViT),
    "bit": (resnet.BiTConfig, resnet.BiT),
    "axial": (vit.AxialConfig, vit.AxialViT),
    "masked": (masked.MaskedConfig, masked.MaskedViT),
}

ImageSize = int | tuple[int, int]  # pixels; (height, width) where not square
ConfigFields = dict[str, Any]  # values of a config's fields by name, as a user or a file gives them: not yet checked
Config = TypeVar("Config", bound=ModelConfig)

# The paper writes "ViT-B/16", so that "ViT-" may stand before a size. In the name of a hybrid the number after the
# slash is the total stride, not a patch size (SPEC 1.6).
NAME = re.compile(
    r"BiT-R(?P<resnet>\d+)x(?P<factor>\d+)"
    r"|(?:(?P<kind>Axial|Masked)-|(?P<stem>R\d*)\+)?(?:ViT-)?(?P<size>[A-Za-z0-9-]+)/(?P<patch>\d+)"
)
NEARLY_A_SIZE = re.compile(
    r"(?:^|[-_ ])(tiny|small|base|large|huge|Ti|[SMBLHG])(?:_?patch|[-_ /])?(\d+)?(?:[-_ ]|$)", re.IGNORECASE
)
SPELT_SIZES = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H"}
VIT_KINDS: dict[str | None, type[vit.ViTConfig]] = {  # what stands before the size in a name
    "Axial": vit.AxialConfig,
    "Masked": masked.MaskedConfig,
    None: vit.ViTConfig,
}
FLOPS_PER_MAC_TRAINED = 6  # multiply and add, forward and twice backward: the rule of table 6


def config_of(name: str, image_size: ImageSize = 224, classes: int = 1000, **config: object) -> ModelConfig:
    """Return the config a name stands for, fields overridden by `config`; ValueError on a wrong name or value."""
    parts = NAME.fullmatch(name)
    if parts is None:
        # S16, ViT-S, and vit_small_patch16_224 of timm.
        close = NEARLY_A_SIZE.search(name)
        nearest = ""
        if close is not None:
            word = close[1].lower()
            nearest = f"; did you mean {SPELT_SIZES.get(word, word.title())}/{close[2] or 16}?"
        raise ValueError(
            f"{name} is not a model's name{nearest}\n"
            "  expected a size and a patch, as B/16; or R50+B/16, BiT-R50x1, Axial-B/32, Masked-B/16"
        )
    # The caller's fields come last in each merge, so that they win over what the name stands for.
    caller_fields = {"image_size": image_size, "classes": classes, **config}
    if parts["resnet"]:
        # "BiT-R50x2" is a ResNet of 50 layers, all channels times 2.
        layers = int(parts["resnet"])
        if layers not in resnet.UNITS:
            known = ", ".join(f"BiT-R{depth}" for depth in resnet.UNITS)
            raise ValueError(f"{parts[0]!r}: no ResNet of {parts['resnet']} layers; known: {known}")
        named: ConfigFields = {"units": resnet.UNITS[layers], "width": 64 * int(parts["factor"])}
        return checked(resnet.BiTConfig, {**named, **caller_fields})

    # "B/16", "Axial-B/32" or, where /16 is the total stride, "R50+B/16".
    size = parts["size"]
    if size not in vit.SIZES:
        raise ValueError(f"{parts[0]!r}: no size {size!r}{did_you_mean(size, vit.SIZES)}")
    width, depth, mlp, heads = vit.SIZES[size]
    named = {"width": width, "depth": depth, "mlp": mlp, "heads": heads, "patch": int(parts["patch"])}
    if parts["stem"]:
        # STEMS tells which patch on the stem's map makes this total stride; most often it is 1.
        stem = (parts["stem"], int(parts["patch"]))
        if stem not in resnet.STEMS:
            known = ", ".join(f"{prefix}+{size}/{stride}" for prefix, stride in resnet.STEMS)
            raise ValueError(f"{parts[0]!r}: no such stem; known: {known}")
        named["stem"], named["patch"] = resnet.STEMS[stem]
    return checked(VIT_KINDS[parts["kind"]], {**named, **caller_fields})


def checked(kind: type[Config], values: Mapping[str, object]) -> Config:
    """Make a config from plain values; unknown names are a ValueError with the nearest one."""
    types = {field.name: field.type for field in fields(kind)}
    known = list(types)
    hashable: ConfigFields = {}
    for name, value in values.items():
        if name not in known and name in kind.absent and value == kind.absent[name]:
            continue
        if name not in known:
            raise ValueError(f"a {kind.family} model has no field {name!r}{did_you_mean(name, known)}")
        if types[name] == "float" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{name} must be a number, found {value}")
        # JSON knows no tuples; a config is a key of caches, so that its lists must not stay lists.
        hashable[name] = tuple(value) if isinstance(value, list) else value
    return kind(**hashable)


def to_dict(config: ModelConfig) -> ConfigFields:
    """Return plain values with the family's name: what stands in model.json."""
    return {"family": config.family, **asdict(config)}


def from_dict(values: Mapping[str, object]) -> ModelConfig:
    """Return the config `to_dict` was given, also after a trip through JSON."""
    config_fields = dict(values)
    family = config_fields.pop("family", None)
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"no model family {family!r}; known: {', '.join(FAMILIES)}")
    kind, _ = FAMILIES[family]
    return checked(kind, config_fields)


def empty(config: ModelConfig) -> Model:
    """Return the module on the meta device: names and shapes, no memory."""
    module: Any  # mypy cannot know that the table pairs each config with a module that takes it
    _, module = FAMILIES[config.family]
    # torch's layers draw first values of their own when they are made. On meta that costs nothing.
    with torch.device("meta"):
        return module(config)


def from_config(config: ModelConfig, generator: Generator | None = None) -> Model:
    """Return the module with freshly drawn parameters on the default device; on meta it takes no memory."""
    model = empty(config)
    device = torch.get_default_device()
    if device.type != "meta":
        # No module keeps a buffer (models/positions.py): once the parameters are drawn, the model is whole.
        model.to_empty(device=device)
        # In the module's order, so that one seed always gives one model.
        for name, parameter in model.named_parameters():
            initial.fill(name, parameter.data, config, generator)
    return model


def build(name: str, image_size: ImageSize = 224, classes: int = 1000, **config: object) -> Model:
    """Return a freshly initialised model by name: `build("B/16", image_size=384, pool="gap")`."""
    return from_config(config_of(name, image_size, classes, **config))


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by name, the modules that a model is made of many of: a ViT's blocks, a ResNet's units."""
    repeated = (vit.Block, resnet.StemUnit, resnet.BiTUnit)
    return {name: module for name, module in model.named_modules() if isinstance(module, repeated)}


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """`torch.compile` each block in place, names unchanged: one block's compilation serves all of them."""
    # `torch.compile(model)` would put `_orig_mod.` before all names of the state dict. Not `Module.compile` either: it
    # takes in the hooks around `forward`, where ZeRO 3 gathers a block, and gives up after eight compilations.
    for block in blocks(model).values():
        block.forward = torch.compile(block.forward, **options)


def decayed(model: nn.Module) -> set[str]:
    """Return the names of the parameters with weight decay: the official `*/kernel`s and nothing else (SPEC 2.2).

    Goes by module type, not by rank: ZeRO-3 flattens the parameters it has partitioned.
    """
    # Norms, biases, tokens, probes and position tables are left out, as in the original.
    kernels = (nn.Linear, nn.Conv2d, vit.PatchEmbedding)
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kernels)}


@functools.lru_cache(maxsize=64)
def parameters_of(config: ModelConfig) -> int:
    """Return how many numbers the optimizer trains."""
    return sum(parameter.numel() for parameter in empty(config).parameters())


# A call with the default and one that spells it out are two to the cache: the model is then counted twice.
@functools.lru_cache(maxsize=64)
def macs_of(config: ModelConfig, kept_patches: int | None = None) -> int:
    """Return the multiply-accumulates of one image's forward pass: every matrix product and convolution.

    Counted as the paper counts: with the last block's work on tokens that pooling does not read. With `kept_patches`
    only so many of the patches go through the blocks, as `ViT.encode` does it.
    """
    model = empty(config).eval()
    # The counter hooks onto a MAP probe that requires a gradient. None are recorded here, so that the hook would fail
    # with "Expected gradient function to be set".
    model.requires_grad_(False)
    if isinstance(model, vit.ViT):
        # The published figures count all tokens of the last block; a model that skips them would count about 6 % less
        # with 12 layers (docs/models.md).
        model.skip_unread = False
    images = torch.empty(1, 3, *config.image_size, device="meta")
    inputs = [images]
    if kept_patches is not None:
        inputs.append(torch.empty(1, kept_patches, dtype=torch.int64, device="meta"))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*inputs)
    # The counter takes a multiplication and an addition as two operations.
    return counter.get_total_flops() // 2


def training_flops(config: ModelConfig, images: int, kept_patches: int | None = None) -> int:
    """Return the floating-point operations to train on `images` images, by the accounting rule of SPEC 2.8."""
    return FLOPS_PER_MAC_TRAINED * macs_of(config, kept_patches) * images
