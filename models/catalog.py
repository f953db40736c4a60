"""Build models from configs, compute their cost, and check that weights fit (configs.py defines names and configs).

`empty` makes a module on the meta device; `from_config` allocates its memory and initialises it.

    config = config_of("B/16")
    parameters_of(config)                         86_567_656
    macs_of(config)                               17.56e9 multiply-accumulates in the forward pass of one image
    training_flops(config, images=1)              105.4e9, by the rule of the paper's table 6
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Generator, Tensor, nn

from models import initial, vit
from models.checks import MAX_NAMED, refuse_not_finite
from models.configs import HALF, ImageSize, ModelConfig, ViTConfig, config_of

if TYPE_CHECKING:
    from models.resnet import BiT

# To add an architecture, add a config in configs.py, a file with its module, and one entry in each of these two. A
# module has `config`, `recomputed_blocks`, `features(images)` and `forward(images)`; its config is a frozen dataclass
# with `family`, `image_size`, `classes`, `head_bias`, `head_fields`, `absent` and `with_new_head()`.
Model: TypeAlias = "vit.ViT | BiT"  # AxialViT is a ViT; extras have other classes with the same members
MODULES = {  # family: module and class; a module is imported only when a model of its family is built
    "vit": "models.vit:ViT",
    "bit": "models.resnet:BiT",
    "axial": "models.vit:AxialViT",
    "masked": "models.extras.masked:MaskedViT",
}

Shape = tuple[int, ...]

FLOPS_PER_MAC_TRAINED = 6  # a multiplication and an addition; one forward and two backward: the rule of table 6


def module_of(config: ModelConfig) -> Any:
    """Return the module class for a config's family; its constructor takes the config."""
    file, _, name = MODULES[config.family].partition(":")
    return getattr(import_module(file), name)


def empty(config: ModelConfig) -> Model:
    """Return the module on the meta device, with parameter names and shapes but no allocated memory."""
    module = module_of(config)
    # torch's layers initialise themselves at construction; on the meta device that is free.
    with torch.device("meta"):
        return module(config)


def from_config(config: ModelConfig, generator: Generator | None = None) -> Model:
    """Return a freshly initialised module on the default device; on the meta device, no memory is allocated."""
    model = empty(config)
    device = torch.get_default_device()
    if device.type != "meta":
        # No module has buffers (models/positions.py), so initialising the parameters completes the model.
        model.to_empty(device=device)
        # Initialise in the module's order, so that a seed always produces the same model.
        for name, parameter in model.named_parameters():
            initial.fill(name, parameter.data, config, generator)
    return model


def build(name: str, image_size: ImageSize = 224, classes: int = 1000, **config: object) -> Model:
    """Return a freshly initialised model by name, as in `build("B/16", image_size=384, pool="gap")`."""
    return from_config(config_of(name, image_size, classes, **config))


def normalise(images: Tensor, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Move uint8 images to the device and normalise them as the model expects.

    The default range is [−1, 1] (SPEC 2.5: value_range(-1, 1)); the config can set pixel_mean and pixel_std instead.
    """
    pixels = images.to(device, non_blocking=True).float()
    # Decoded images have channels last. On CPUs, a step of BiT in bf16 takes 1.4 times as long in this format.
    if dtype == torch.bfloat16 and pixels.device.type == "cpu":
        pixels = pixels.contiguous()
    mean = getattr(config, "pixel_mean", HALF)
    std = getattr(config, "pixel_std", HALF)
    if (mean, std) == (HALF, HALF):
        return pixels.mul_(1 / 127.5).sub_(1).to(dtype)
    factor, offset = scaling(mean, std, pixels.device)
    return pixels.mul_(factor).sub_(offset).to(dtype)


# Cached, because every step needs them and a copy to the GPU takes time.
@functools.lru_cache(maxsize=32)
def scaling(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the factor and offset, each (3, 1, 1), for normalising pixels from 0 to 255: pixel * factor - offset."""
    deviation = torch.tensor(std, dtype=torch.float64)
    factor = 1 / (255 * deviation)
    offset = torch.tensor(mean, dtype=torch.float64) / deviation
    return factor.float()[:, None, None].to(device), offset.float()[:, None, None].to(device)


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's repeated modules (`is_repeated`) by name: the blocks of a ViT or the units of a ResNet."""
    return {name: module for name, module in model.named_modules() if getattr(module, "is_repeated", False)}


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Apply `torch.compile` to each block in place; blocks share one compilation, and parameters keep their names."""
    # `torch.compile(model)` would prefix all names in the state dict with `_orig_mod.`. `Module.compile` would include
    # the hooks around `forward`, in which ZeRO 3 gathers a block, and give up after eight compilations.
    for block in blocks(model).values():
        block.forward = torch.compile(block.forward, **options)


def decayed_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters with weight decay: the `*/kernel` parameters of the original (SPEC 2.2).

    Selects by module type, not by rank, because ZeRO-3 flattens the parameters that it partitions.
    """
    # Norms, biases, tokens, probes and position tables are not decayed, as in the original.
    kernels = (nn.Linear, nn.Conv2d, vit.PatchEmbedding)
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kernels)}


@functools.lru_cache(maxsize=64)
def parameters_of(config: ModelConfig) -> int:
    """Return the number of trainable parameters."""
    return sum(parameter.numel() for parameter in empty(config).parameters())


# The cache distinguishes a call with an explicit default from one without; the model is then counted twice.
@functools.lru_cache(maxsize=64)
def macs_of(config: ModelConfig, kept_patches: int | None = None) -> int:
    """Return the multiply-accumulates of all matrix products and convolutions in the forward pass of one image.

    Counted as in the paper, including the last block's work on tokens that pooling does not read. With `kept_patches`,
    only this many patches pass through the blocks, as in `ViT.encode`.
    """
    if type(config) is not ViTConfig or config.stem is not None:
        return _counted_macs(config, kept_patches)
    if config.positions == "relative" or config.rope != "none":
        return _counted_macs(config, kept_patches)
    return _macs_of_layers(config, kept_patches)


def _macs_of_layers(config: ViTConfig, kept_patches: int | None) -> int:
    """Return `macs_of` for a ViT whose only products are its linear layers and attention, from their sizes.

    Counting the operations gives the same number, but imports `torch._dynamo`, which takes 1.4 CPU-seconds.
    """
    rows, columns = config.grid
    patches = rows * columns
    kept = patches if kept_patches is None else kept_patches
    tokens = config.prefix_tokens + kept
    pooled_tokens = tokens if config.pool_prefix else kept  # of a MAP head
    macs = 2 * config.depth * tokens**2 * config.width
    if config.pool == "map":
        macs += 2 * pooled_tokens * config.width
    for name, module in empty(config).named_modules():
        if isinstance(module, vit.PatchEmbedding):
            vectors = patches
        elif name.startswith("blocks."):
            vectors = tokens
        elif name == "map_head.kv":
            vectors = pooled_tokens
        else:
            vectors = 1  # of an image: in the head
        if isinstance(module, (nn.Linear, vit.PatchEmbedding)):
            macs += vectors * module.weight.numel()
    return macs


def _counted_macs(config: ModelConfig, kept_patches: int | None) -> int:
    """Return `macs_of` for any model, by counting the operations of a forward pass on the meta device."""
    # Slow to import, and only a few models need it.
    from torch.utils.flop_counter import FlopCounterMode

    if isinstance(config, ViTConfig) and config.depth > 3:
        # All blocks need the same operations: count two small models instead of the deep one, which takes seconds.
        two, three = (_counted_macs(replace(config, depth=blocks), kept_patches) for blocks in (2, 3))
        return two + (config.depth - 2) * (three - two)
    model = empty(config).eval()
    # The counter hooks onto a MAP probe that requires a gradient. No gradients are recorded here, so the hook would
    # fail with "Expected gradient function to be set".
    model.requires_grad_(False)
    if isinstance(model, vit.ViT):
        # The published figures include all tokens of the last block; without them, the count is about 6 % lower with 12
        # layers (docs/models.md).
        model.skip_unread = False
    images = torch.empty(1, 3, *config.image_size, device="meta")
    inputs = [images]
    if kept_patches is not None:
        inputs.append(torch.empty(1, kept_patches, dtype=torch.int64, device="meta"))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*inputs)
    # The counter counts a multiplication and an addition as two operations.
    return counter.get_total_flops() // 2


def training_flops(config: ModelConfig, images: int, kept_patches: int | None = None) -> int:
    """Return the floating-point operations for training on this many images, by the accounting rule of SPEC 2.8."""
    return FLOPS_PER_MAC_TRAINED * macs_of(config, kept_patches) * images


# ------------------------------------------------------------------------ checking weights


def shape_text(shape: Shape | None) -> str:
    """Format a shape as "1x197x768", and None as "-"."""
    if shape is None:
        return "-"
    return "x".join(map(str, shape))


def tensor_shapes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Shape]:
    """Return {name: shape} for these tensors."""
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def check_weights(weights: dict[str, Tensor], config: ModelConfig) -> None:
    """Raise ValueError if keys of `weights` are missing, unknown or wrongly shaped for a model with `config`."""
    expected = tensor_shapes(empty(config).named_parameters())
    check_shapes(tensor_shapes(weights.items()), expected, config.label)


def check_shapes(shapes: dict[str, Shape], expected: dict[str, Shape], label: str) -> None:
    """Raise ValueError if keys of `shapes` are missing, unknown or wrongly shaped, compared with `expected`."""
    wrong = []
    for name, shape in expected.items():
        if name not in shapes:
            wrong.append(f"missing {name} {shape_text(shape)}")
    for name, shape in shapes.items():
        if name not in expected:
            wrong.append(f"unknown {name} {shape_text(shape)}")
        elif shape != expected[name]:
            wrong.append(f"{name} is {shape_text(shape)}, expected {shape_text(expected[name])}")
    if not wrong:
        return
    named = "; ".join(wrong[:MAX_NAMED])
    if len(wrong) > MAX_NAMED:
        named += f"; and {len(wrong) - MAX_NAMED:,} more"
    text = f"weights do not fit this {label} (wrong keys: {len(wrong):,}): {named}"
    actual, of_model = outline(shapes), outline(expected)
    if actual != of_model:
        text += f"\n  the weights are of {actual}, but expected {of_model}\n  use the model.json of these weights"
    raise ValueError(text)


def outline(shapes: dict[str, Shape]) -> str:
    """Describe the architecture that weights have by their names: "a ViT (depth 12, width 768, patch 16x16)"."""
    # The names of a masked model's ViT have a prefix.
    shapes = {name.removeprefix("vit."): shape for name, shape in shapes.items()}
    parts = []
    head = shapes.get("head.weight")
    if len(shapes.get("embedding.weight", ())) == 4:
        kind = "a hybrid" if any(name.startswith("stem.") for name in shapes) else "a ViT"
        depth = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
        width, *_, height, across = shapes["embedding.weight"]
        parts = [f"depth {depth}", f"width {width}", f"patch {height}x{across}"]
    elif len(shapes.get("conv_root.weight", ())) == 4:
        kind = "a ResNet"
        parts = [f"width {shapes['conv_root.weight'][0]}"]
    else:
        return "another kind of model"
    if head:
        parts.append(f"{head[0]:,} classes")
    return f"{kind} ({', '.join(parts)})"


def check_finite(weights: dict[str, Tensor]) -> None:
    """Raise ValueError listing the tensors with non-finite values, and the number of these values in each."""
    counts = {}
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            counts[name] = (int((~tensor.isfinite()).sum()), tensor.numel())
    refuse_not_finite(counts, len(weights))
