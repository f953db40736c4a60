"""The official flat `.npz` files (SPEC 6.1) of vit_jax, big_vision and BiT, in all generations of parameter names.

How a file is read:
1. remove the prefix of its generation, `opt/target/` or `params/`; keys without the prefix do not belong to the model;
2. convert all generations of names to those of the current code: separate layers, submodules numbered per class from 0;
3. infer the config from keys and shapes, and select the layout of the config;
4. read every key according to the layout, or list the keys that do not fit.

    opt/target/Transformer/encoderblock_0/LayerNorm_2/scale   (768,)
    Transformer/encoderblock_0/LayerNorm_1/scale              (768,)    the same key after steps 1 and 2
    blocks.0.norm2.weight                                     (768,)    our name
"""

from __future__ import annotations

import math
import os
import re
import warnings
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.catalog import Shape, check_finite
from models.configs import ACTIVATIONS, HALF, SWITCHES, BiTConfig, ConfigFields, ModelConfig, ViTConfig, checked
from models.extras.weights.layout import Layout, read, units_of, unlearnable_positions, vit_config, write

# Weights hardly compress: float32 by 1.1, bfloat16 stored as float32 by 2.5. But 6.3 MB can unpack to 6 GB of zeros.
MAX_EXPANSION = 20
SMALL_BYTES = 100_000_000  # accept any expansion up to this size: a small model may be mostly a head of zeros

FIRST_BLOCK = "Transformer/encoderblock_0"
# Each table maps our names to theirs, applied top to bottom; the last rule turns dots into slashes.
VIT = (
    (r"^stem\.(stages\.)?", ""),
    (r"^blocks\.(\d+)\.", r"Transformer.encoderblock_\1."),
    (r"norm1\.", "LayerNorm_0."),
    (r"norm2\.", "LayerNorm_1."),
    (r"attention\.", "MultiHeadDotProductAttention_0."),
    (r"^map_head\.(q|kv|out)\.", r"MAPHead_0.MultiHeadDotProductAttention_0.\1."),
    (r"^map_head\.norm\.", "MAPHead_0.LayerNorm_0."),
    (r"^map_head\.", "MAPHead_0."),
    (r"mlp\.up\.", "MlpBlock_0.Dense_0."),
    (r"mlp\.down\.", "MlpBlock_0.Dense_1."),
    (r"^norm\.", "Transformer.encoder_norm."),
    (r"^prefix\.", ""),
    (r"((?:Norm_\d|norm|gn\w+)\.)weight$", r"\1scale"),
    (r"\.weight$", ".kernel"),
    (r"\.", "/"),
)
PACKED = (
    ("/qkv/", ("/query/", "/key/", "/value/")),
    ("/kv/", ("/key/", "/value/")),
    ("/q/", ("/query/",)),
)
VIT_JAX_POSITIONS = "Transformer/posembed_input/pos_embedding"
BIG_VISION_POSITIONS = "pos_embedding"

BIG_VISION_BIT = (
    (r"^conv_root\.", "root_block.conv_root."),
    (r"^stages\.", ""),
    (r"^norm\.", "norm-pre-head."),
    (r"((?:norm-pre-head|gn\d)\.)weight$", r"\1scale"),
    (r"\.weight$", ".kernel"),
    (r"\.", "/"),
)
BIT = (
    (r"^conv_root\.", "root_block.standardized_conv2d."),
    (r"^stages\.", ""),
    (r"conv_proj\.", "a.proj.standardized_conv2d."),
    (r"(conv|gn)1\.", r"a.\1."),
    (r"(conv|gn)2\.", r"b.\1."),
    (r"(conv|gn)3\.", r"c.\1."),
    (r"\.conv\.", ".standardized_conv2d."),
    (r"\.gn\.|^norm\.", ".group_norm."),
    (r"group_norm\.weight$", "group_norm.gamma"),
    (r"group_norm\.bias$", "group_norm.beta"),
    (r"^head\.", "head.conv2d."),
    (r"\.weight$", ".kernel"),
    (r"^\.?", "resnet."),
    (r"\.", "/"),
)


def stored_shape(key: str, shape: Shape, config: ModelConfig) -> Shape:
    """Return the shape of a parameter in these files; `shape` is our shape, with the axes in the order of the files."""
    # Attention heads have a separate axis.
    if isinstance(config, ViTConfig) and re.search(r"/(query|key|value)/(kernel|bias)$", key):
        return (*shape[:-1], config.heads, shape[-1] // config.heads)
    if isinstance(config, ViTConfig) and key.endswith("/out/kernel"):
        return (config.heads, shape[0] // config.heads, shape[1])
    # The head of published BiT files is a 1x1 convolution.
    if key == "resnet/head/conv2d/kernel":
        return (1, 1, *shape)
    return shape


# vit_jax and big_vision differ only in the key of the position table.
VIT_JAX = Layout(((r"^positions\.0\.table$", VIT_JAX_POSITIONS), *VIT), PACKED, True, stored_shape)
BIG_VISION = Layout(((r"^positions\.0\.table$", BIG_VISION_POSITIONS), *VIT), PACKED, True, stored_shape)


def layout_of(config: ModelConfig) -> Layout:
    """Return the parameter layout used by the code base that defines this config."""
    # The pool's padding identifies the kind of BiT: -inf for big_vision, zeros for the published code (SPEC 1.8).
    if isinstance(config, BiTConfig) and config.pool_padding == "zero":
        return Layout(BIT, kernels_last=True, shape_of=stored_shape)
    if isinstance(config, BiTConfig):
        return Layout(BIG_VISION_BIT, kernels_last=True, shape_of=stored_shape)
    # vit_jax has no MAP head, and its class token has a position entry.
    if config.class_slot and config.pool != "map":
        return VIT_JAX
    return BIG_VISION


def load(path: str | Path, overrides: ConfigFields) -> tuple[dict[str, Tensor], ModelConfig]:
    """Return the state dict and config of a file; `file.npz:img` selects the part under `img/`.

    If nothing is selected in the file of an image-text model, its `img/` is read.
    """
    file, _, part = str(path).partition(".npz:")
    if part:
        file += ".npz"
    # np.load reads arrays lazily: those of the optimizer are never read.
    with np.load(file, allow_pickle=False) as arrays:
        # Map each parameter's name without prefixes to its key; arrays outside the prefix are excluded.
        keys = {key: key for key in arrays.files}
        prefixes = ["opt/target/", "params/"]
        if part:
            prefixes.append(f"{part}/")
        # Remove one prefix after the other: `params/img/` consists of two.
        for prefix in prefixes:
            inside: dict[str, str] = {}
            for name, key in keys.items():
                if name.startswith(prefix):
                    inside[name.removeprefix(prefix)] = key
            if inside:
                keys = inside
        # big_vision's models of images and texts, such as SigLIP: img/, txt/, and the temperature and bias of the loss.
        if not part and any(name.startswith("img/") for name in keys) and not any(map(is_of_a_vit, keys)):
            keys = {name.removeprefix("img/"): key for name, key in keys.items() if name.startswith("img/")}
        check_sizes(arrays.zip, list(keys.values()), file)
        stored: dict[str, Tensor] = {}
        for name, key in keys.items():
            array = arrays[key]
            # bfloat16, which NumPy does not support, is stored as two void bytes.
            if array.dtype == np.dtype("V2"):
                stored[name] = torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16).float()
            elif array.dtype.kind == "f":
                stored[name] = torch.from_numpy(array.astype(np.float32))
            else:
                raise ValueError(f"expected floating-point weights, found {key} of {array.dtype}")
    check_finite(stored)
    stored = canonical(stored)
    config = infer(stored, overrides)
    return read(stored, config, layout_of(config)), config


def is_of_a_vit(name: str) -> bool:
    """Return whether a name, without prefixes, is the name of a ViT's first layer."""
    return name.startswith("embedding/")


def check_sizes(archive: zipfile.ZipFile, keys: list[str], file: str) -> None:
    """Raise ValueError if arrays would unpack to far more than the file's size, or contradict their headers.

    Unpacks only the headers: the directory of a zip states the unpacked size of every entry, and no reader unpacks more
    than that.
    """
    names = set(archive.namelist())
    entries = {}
    for key in keys:
        name = f"{key}.npy" if f"{key}.npy" in names else key
        entries[key] = archive.getinfo(name)

    unpacked_bytes = sum(entry.file_size for entry in entries.values())
    file_bytes = os.path.getsize(file)
    if unpacked_bytes > max(MAX_EXPANSION * file_bytes, SMALL_BYTES):
        raise ValueError(
            f"it would unpack from {file_bytes / 1e6:.1f} MB to {unpacked_bytes / 1e6:,.0f} MB, far more than real "
            "weights would\n"
            f"  expected at most {MAX_EXPANSION} times the file size; if you trust the file, save it again with "
            "numpy.savez"
        )

    for key, entry in entries.items():
        with archive.open(entry) as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0
            if version != (1, 0):
                read = np.lib.format.read_array_header_2_0
            shape, _, dtype = read(stream)
            content_bytes = entry.file_size - stream.tell()
        claimed_bytes = math.prod(shape) * dtype.itemsize
        if claimed_bytes != content_bytes and not dtype.hasobject:
            raise ValueError(
                f"{key}: its header describes {shape} of {dtype}, {claimed_bytes} bytes, but the entry has "
                f"{content_bytes} bytes\n"
                "  the file is damaged or truncated; download it again"
            )


def canonical(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename all keys to those of the current code: separate layers, submodules numbered per class from 0.

    Linen numbers the submodules of a block per class; older versions numbered all of them together. LayerNorm_0,
    MultiHead..._1, LayerNorm_2, MlpBlock_3 become LayerNorm_0, MultiHead..._0, LayerNorm_1, MlpBlock_0.
    """
    # A scanned encoder stacks all layers along the first axis of one array.
    scanned = "Transformer/encoderblock/"
    apart: dict[str, Tensor] = {}
    layers: dict[str, Tensor] = {}
    for key, tensor in stored.items():
        if not key.startswith(scanned):
            apart[key] = tensor
            continue
        for depth, layer in enumerate(tensor):
            layers[f"Transformer/encoderblock_{depth}/{key.removeprefix(scanned)}"] = layer
    apart |= layers
    # Some BiT files number their convolutions; each part of a unit has only one, so the number is redundant.
    unnumbered: dict[str, Tensor] = {}
    for key, tensor in apart.items():
        unnumbered[re.sub(r"standardized_conv2d_\d+", "standardized_conv2d", key)] = tensor

    # Linen's names do not change.
    numbered = re.compile(r"(.*encoderblock_\d+)/(LayerNorm|MlpBlock|MultiHead\w+)_(\d+)/(.*)")
    numbers: dict[tuple[str, str], set[int]] = {}  # (block, class): the numbers its submodules have
    for key in unnumbered:
        match = numbered.fullmatch(key)
        if match:
            block, kind, number, _ = match.groups()
            numbers.setdefault((block, kind), set()).add(int(number))

    renumbered: dict[str, Tensor] = {}
    for key, tensor in unnumbered.items():
        match = numbered.fullmatch(key)
        if match:
            block, kind, number, parameter = match.groups()
            # Keep the order and close the gaps: LayerNorm_0 and LayerNorm_2 become 0 and 1.
            rank = sorted(numbers[block, kind]).index(int(number))
            key = f"{block}/{kind}_{rank}/{parameter}"
        renumbered[key] = tensor
    return renumbered


def infer(stored: dict[str, Tensor], overrides: ConfigFields) -> ModelConfig:
    """Infer the config from keys and shapes; `overrides` take precedence."""
    # The two kinds of BiT files have different names and pool padding. A hybrid also has a ResNet, whose root is called
    # conv_root.
    known: ConfigFields = {}
    for root, head, pool_padding in (
        ("resnet/root_block/standardized_conv2d/kernel", "resnet/head/conv2d/bias", "zero"),
        ("root_block/conv_root/kernel", "head/bias", "-inf"),
    ):
        if root in stored:
            known["width"] = stored[root].shape[3]
            known["units"] = units_of(stored)
            known["classes"] = stored[head].numel() if head in stored else 0
            known["pool_padding"] = pool_padding
            return checked(BiTConfig, known | overrides)

    query = f"{FIRST_BLOCK}/MultiHeadDotProductAttention_0/query/kernel"
    if query in stored:
        known["heads"] = stored[query].shape[1]  # (D, heads, D/heads)
    root = "conv_root/kernel"
    if root in stored:
        known["stem"] = units_of(stored)
        known["stem_width"] = stored[root].shape[-1]
    # The key of the position table identifies the code base, and so whether the class token has an entry. A missing
    # table means sincos2d, which `vit_config` infers with either layout.
    layout = VIT_JAX
    if BIG_VISION_POSITIONS in stored:
        known["class_slot"] = False
        layout = BIG_VISION
    return vit_config(stored, layout, known | overrides)


def save(state: dict[str, Tensor], config: ModelConfig, path: str | Path) -> None:
    """Write a file in the layout of current vit_jax, or in big_vision's if only that one can store the model.

    Raises ValueError if neither can store the model.
    """
    # The format lacks names for some parts of a ViT; for ResNets it has all.
    reasons = []
    if config.family not in ("vit", "bit"):
        reasons.append(f"a model of family {config.family}")
    elif isinstance(config, ViTConfig):
        if config.registers:
            reasons.append(f"{config.registers} registers")
        unwritten = unlearnable_positions(config)
        if not unwritten and config.positions not in ("learned", "sincos2d"):
            unwritten = [f"{config.positions} positions"]
        reasons += unwritten
        for field in fields(ViTConfig):
            value = getattr(config, field.name)
            if field.name in SWITCHES and value != field.default:
                reasons.append(f"{field.name}={value!r}")
        if config.activation not in ACTIVATIONS:
            reasons.append(f"activation {config.activation}")
    if reasons:
        raise ValueError(f"the official .npz format does not support {', '.join(reasons)}; save as safetensors")
    # The file cannot store these two settings, and its readers use the original values.
    if isinstance(config, ViTConfig) and (config.activation != "gelu_tanh" or config.norm_eps != 1e-6):
        warnings.warn("the original computes gelu_tanh with norm_eps 1e-6: logits will differ", stacklevel=3)
    if isinstance(config, ViTConfig) and (config.pixel_mean, config.pixel_std) != (HALF, HALF):
        warnings.warn("the original normalises pixels to −1 … 1, these weights differently", stacklevel=3)
    tensors = write(state, config, layout_of(config))
    arrays: dict[str, Any] = {key: tensor.float().cpu().numpy() for key, tensor in tensors.items()}
    # Pass an open file: np.savez would append .npz to other names, such as the temporary name of an atomic write.
    with open(path, "wb") as file:
        np.savez(file, **arrays)
