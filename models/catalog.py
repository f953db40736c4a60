"""Configs to modules, what a model costs, and whether weights fit it (configs.py has names and configs).

`empty` makes a module on the meta device, `from_config` gives it memory and first values.

    config = config_of("B/16")
    parameters_of(config)                         86_567_656
    macs_of(config)                               17.56e9 multiply-accumulates of one image's forward pass
    training_flops(config, images=1)              105.4e9, by the rule of the paper's table 6
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Generator, Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from models import initial, vit
from models.configs import ImageSize, ModelConfig, config_of

if TYPE_CHECKING:
    from models.masked import MaskedViT
    from models.resnet import BiT

# Another architecture is a config in configs.py, a file with its module, and one entry in each of these two. A module
# has `config`, `recomputed_blocks`, `features(images)` and `forward(images)`; its config is a frozen dataclass with
# `family`, `image_size`, `classes`, `head_bias`, `head_fields`, `absent` and `with_new_head()`.
Model: TypeAlias = "vit.ViT | MaskedViT | BiT"  # AxialViT is a ViT
MODULES = {  # by the config's family; a file is imported when a model of its family is made
    "vit": "models.vit:ViT",
    "bit": "models.resnet:BiT",
    "axial": "models.vit:AxialViT",
    "masked": "models.masked:MaskedViT",
}

Shape = tuple[int, ...]

FLOPS_PER_MAC_TRAINED = 6  # multiply and add, forward and twice backward: the rule of table 6


def module_of(config: ModelConfig) -> Any:
    """Return the class of a config's family, which takes the config."""
    file, _, name = MODULES[config.family].partition(":")
    return getattr(import_module(file), name)


def empty(config: ModelConfig) -> Model:
    """Return the module on the meta device: names and shapes, no memory."""
    module = module_of(config)
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


def normalise(images: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Bring uint8 pixels to the [−1, 1] that every model takes, on the device (SPEC 2.5: value_range(-1, 1))."""
    return images.to(device, non_blocking=True).float().mul_(1 / 127.5).sub_(1).to(dtype)


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by name, modules that a model is made of many of (`is_repeated`): a ViT's blocks, a ResNet's units."""
    return {name: module for name, module in model.named_modules() if getattr(module, "is_repeated", False)}


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """`torch.compile` each block in place, names unchanged: one block's compilation serves all of them."""
    # `torch.compile(model)` would put `_orig_mod.` before all names of the state dict. Not `Module.compile` either: it
    # takes in the hooks around `forward`, where ZeRO 3 gathers a block, and gives up after eight compilations.
    for block in blocks(model).values():
        block.forward = torch.compile(block.forward, **options)


def decayed_parameters(model: nn.Module) -> set[str]:
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


# ------------------------------------------------------------------------ do weights fit?


def shape_text(shape: Shape | None) -> str:
    """Write a shape as "1x197x768", and none as "-"."""
    if shape is None:
        return "-"
    return "x".join(map(str, shape))


def tensor_shapes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Shape]:
    """Return the shapes of tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def check_weights(weights: dict[str, Tensor], config: ModelConfig) -> None:
    """Raise ValueError naming every key of `weights` that is missing, unknown or mis-shaped for `config`."""
    expected = tensor_shapes(empty(config).named_parameters())
    check_shapes(tensor_shapes(weights.items()), expected, config.family)


def check_shapes(shapes: dict[str, Shape], expected: dict[str, Shape], family: str) -> None:
    """Raise ValueError naming every key of `shapes` that is missing, unknown or shaped otherwise than expected."""
    # All of them at once: who mends a file by hand should not need a run for each key.
    wrong = []
    for name, shape in expected.items():
        if name not in shapes:
            wrong.append(f"missing {name} {shape_text(shape)}")
    for name, shape in shapes.items():
        if name not in expected:
            wrong.append(f"unknown {name} {shape_text(shape)}")
        elif shape != expected[name]:
            wrong.append(f"{name} is {shape_text(shape)}, expected {shape_text(expected[name])}")
    if wrong:
        raise ValueError(f"weights do not fit this {family}, {len(wrong)} keys: " + "; ".join(wrong))
