"""The official flat `.npz` files (SPEC 6.1): vit_jax, big_vision and BiT, in all generations of names."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models import catalog
from models.resnet import BiTConfig
from models.vit import ViTConfig
from models.weights import infer as weights_infer
from models.weights import layout as weights_map

FIRST_BLOCK = "Transformer/encoderblock_0"
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
PACKED = (("/qkv/", ("/query/", "/key/", "/value/")), ("/kv/", ("/key/", "/value/")), ("/q/", ("/query/",)))
VIT_JAX_POSITIONS, BIG_VISION_POSITIONS = "Transformer/posembed_input/pos_embedding", "pos_embedding"

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
    *((rf"(conv|gn){i}\.", rf"{letter}.\1.") for i, letter in enumerate("abc", start=1)),
    (r"\.conv\.", ".standardized_conv2d."),
    (r"\.gn\.|^norm\.", ".group_norm."),
    (r"group_norm\.weight$", "group_norm.gamma"),
    (r"group_norm\.bias$", "group_norm.beta"),
    (r"^head\.", "head.conv2d."),
    (r"\.weight$", ".kernel"),
    (r"^\.?", "resnet."),
    (r"\.", "/"),
)


def split_heads(key: str, shape: tuple[int, ...], config: ViTConfig) -> tuple[int, ...]:
    """Shape of an attention parameter there, where the heads are an axis of their own."""
    heads = config.heads
    if re.search(r"/(query|key|value)/(kernel|bias)$", key):
        return (*shape[:-1], heads, shape[-1] // heads)
    if key.endswith("/out/kernel"):
        return (heads, shape[0] // heads, shape[1])
    return shape


def convolutional_head(key: str, shape: tuple[int, ...], config: BiTConfig) -> tuple[int, ...]:
    """BiT's published head is a 1x1 convolution."""
    return (1, 1, *shape) if key == "resnet/head/conv2d/kernel" else shape


def layout_of(config: Any) -> weights_map.Layout:
    if isinstance(config, BiTConfig):
        renames = BIT if config.pool_padding == "zero" else BIG_VISION_BIT
        return weights_map.Layout(renames, kernels_last=True, shape_of=convolutional_head)
    vit_jax = config.class_slot and config.pool != "map"
    return vit_layout(VIT_JAX_POSITIONS if vit_jax else BIG_VISION_POSITIONS)


def vit_layout(positions: str) -> weights_map.Layout:
    """`positions` is the key of the table: vit_jax and big_vision differ in nothing else."""
    renames = ((r"^positions\.0\.table$", positions), *VIT)
    return weights_map.Layout(renames, PACKED, kernels_last=True, shape_of=split_heads)


def load(path: str | Path, overrides: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """State dict and config of a file; `file.npz:img` takes the part of it under `img/`."""
    file, _, part = str(path).partition(".npz:")
    with np.load(file + ".npz" if part else file, allow_pickle=False) as arrays:
        names = model_keys(arrays.files, part)
        stored = canonical({name: tensor_of(arrays[key], key) for name, key in names.items()})
    config = infer(stored, overrides)
    return weights_map.read(stored, config, layout_of(config)), config


def model_keys(keys: list[str], part: str) -> dict[str, str]:
    """Each parameter's name without the prefix of its file, and its key; what lies beside the model is left out."""
    names = {key: key for key in keys}
    for prefix in ("opt/target/", "params/", f"{part}/" if part else ""):
        if prefix and any(name.startswith(prefix) for name in names):
            names = {name.removeprefix(prefix): key for name, key in names.items() if name.startswith(prefix)}
    return names


def tensor_of(array: np.ndarray, key: str) -> Tensor:
    """Float32; bfloat16, which NumPy does not know, is stored as two void bytes."""
    if array.dtype == np.dtype("V2"):
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16).float()
    if array.dtype.kind != "f":
        raise ValueError(f"expected floating-point weights, found {key} of {array.dtype}")
    return torch.from_numpy(array.astype(np.float32))


def canonical(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keys as today's code writes them: layers apart, numbers of each class from 0."""
    scanned = "Transformer/encoderblock/"
    for key in [key for key in stored if key.startswith(scanned)]:
        for i, layer in enumerate(stored.pop(key)):
            stored[f"Transformer/encoderblock_{i}/{key.removeprefix(scanned)}"] = layer
    stored = {re.sub(r"standardized_conv2d_\d+", "standardized_conv2d", key): v for key, v in stored.items()}
    return renumber(stored)


def renumber(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Pre-Linen names counted all submodules of a parent together; Linen counts each class from 0."""
    numbered = re.compile(r"(.*encoderblock_\d+)/(LayerNorm|MlpBlock|MultiHead\w+)_(\d+)/(.*)")
    seen: dict[tuple[str, str], set[int]] = {}
    for key in stored:
        if found := numbered.fullmatch(key):
            seen.setdefault((found[1], found[2]), set()).add(int(found[3]))

    def linen(key: str) -> str:
        found = numbered.fullmatch(key)
        if not found:
            return key
        rank = sorted(seen[found[1], found[2]]).index(int(found[3]))
        return f"{found[1]}/{found[2]}_{rank}/{found[4]}"

    return {linen(key): tensor for key, tensor in stored.items()}


def infer(stored: dict[str, Tensor], overrides: dict[str, Any]) -> Any:
    """The config these keys and shapes belong to; `overrides` wins."""
    if any(key.startswith(("resnet/", "root_block/")) for key in stored):
        return infer_bit(stored, overrides)
    known: dict[str, Any] = {}
    if (query := f"{FIRST_BLOCK}/MultiHeadDotProductAttention_0/query/kernel") in stored:
        known["heads"] = stored[query].shape[1]
    if (root := "conv_root/kernel") in stored:
        known["stem"], known["stem_width"] = weights_infer.units_of(stored), stored[root].shape[-1]
    if BIG_VISION_POSITIONS in stored:
        known["class_slot"] = False
    positions = BIG_VISION_POSITIONS if BIG_VISION_POSITIONS in stored else VIT_JAX_POSITIONS
    return weights_infer.vit_config(stored, vit_layout(positions), known | overrides)


def infer_bit(stored: dict[str, Tensor], overrides: dict[str, Any]) -> BiTConfig:
    published = any(key.startswith("resnet/") for key in stored)
    root = "resnet/root_block/standardized_conv2d/kernel" if published else "root_block/conv_root/kernel"
    head = stored.get("resnet/head/conv2d/bias" if published else "head/bias")
    found = {
        "width": stored[root].shape[3],
        "units": weights_infer.units_of(stored),
        "classes": 0 if head is None else head.numel(),
        "pool_padding": "zero" if published else "-inf",
    }
    return catalog.checked(BiTConfig, {**found, **overrides})


def save(state: dict[str, Tensor], config: Any, path: str | Path) -> None:
    """Write today's vit_jax names, or big_vision's where only it has the layout; ValueError if neither."""
    reasons = obstacles(config)
    if reasons:
        raise ValueError(f"an official .npz cannot hold {', '.join(reasons)}; save as safetensors")
    if getattr(config, "activation", "gelu_tanh") != "gelu_tanh" or getattr(config, "norm_eps", 1e-6) != 1e-6:
        warnings.warn("the original computes gelu_tanh with norm_eps 1e-6: logits will differ", stacklevel=3)
    tensors = weights_map.write(state, config, layout_of(config))
    arrays: dict[str, Any] = {key: tensor.float().numpy() for key, tensor in tensors.items()}
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def obstacles(config: Any) -> list[str]:
    """What of this model the format has no name for."""
    if isinstance(config, BiTConfig):
        return []
    if config.family != "vit":
        return [f"a model of family {config.family}"]
    reasons = [f"{config.registers} registers"] if config.registers else []
    if config.positions not in ("learned", "sincos2d") or config.positions_at != "stem":
        reasons.append(f"{config.positions} positions at {config.positions_at}")
    return reasons
