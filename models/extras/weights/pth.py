"""Read and write the `.pth` files of DINOv2 and DINOv3, and read those of repositories that use timm's names.

How a file is read:
1. unpickle tensors only: torch's weights-only loading executes no code from the file;
2. unwrap what training scripts put around the weights: {"teacher": {"backbone.cls_token": ...}} or {"model": {...}};
3. the keys identify the repository: rotary periods are DINOv3's, a mask token next to a position table is DINOv2's, and
   everything else is read as timm's (DeiT, ViT-MAE);
4. the repository's code determines all fields that keys and shapes do not: 64 channels per head, erf GELU, epsilon.

    blocks.0.attn.qkv.bias_mask    DINOv3 multiplies the bias by it: zeros for the keys, ones for queries and values
    rope_embed.periods             constants, which must be those of base 100
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from models.catalog import check_finite
from models.configs import ConfigFields, ModelConfig, ViTConfig
from models.extras.weights.hf_families import FAMILIES
from models.extras.weights.layout import (
    ForeignConfig,
    Layout,
    read,
    vit_config,
    with_learned_positions,
    write,
)
from models.extras.weights.preprocessing import IMAGENET_MEAN, IMAGENET_STD, from_timm
from models.weights.folder import Preprocessing

SATELLITE = ((0.430, 0.411, 0.296), (0.213, 0.156, 0.143))  # mean and std of the SAT-493M weights: DINOv3's README
RENAMES = (
    (r"^embedding\.", "patch_embed.proj."),
    (r"^prefix\.cls$", "cls_token"),
    (r"^positions\.0\.table$", "pos_embed"),
    (r"\.attention\.out\.", ".attn.proj."),
    (r"\.attention\.", ".attn."),
    (r"\.scale([12])\.", r".ls\1."),
    (r"\.mlp\.up\.", ".mlp.fc1."),
)
GATED = (".mlp.gate_up.", (".mlp.w1.", ".mlp.w2."))
BASE = 100.0  # of DINOv3's rotary periods


def layout_of(is_dinov3: bool, is_gated: bool) -> Layout:
    """Return the layout of the files of DINOv2 or DINOv3, with SwiGLU if `is_gated`."""
    registers = "storage_tokens" if is_dinov3 else "register_tokens"
    renames = (
        *RENAMES,
        (r"^prefix\.registers$", registers),
        (r"\.mlp\.down\.", ".mlp.w3." if is_gated else ".mlp.fc2."),
    )
    if is_dinov3:
        return Layout(renames, (GATED,))
    return Layout((*renames, (r"\.mlp\.gate_up\.", ".mlp.w12.")))


def load(path: Path, overrides: ConfigFields) -> tuple[dict[str, Tensor], ViTConfig]:
    """Return the state dict and config of a file. Raises ValueError if it contains code or an unsupported model."""
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{path} cannot be read as a file of tensors: {reason}\n"
            "  pickled checkpoints (.pth, .bin) with other objects are not supported: convert them to safetensors first"
        ) from None
    stored = unwrapped(contents)
    if not stored:
        raise ValueError(f"{path} contains no named tensors, so it is not a ViT in a supported format")
    masks = {}
    for key in list(stored):
        if key.endswith(".bias_mask"):
            masks[key.removesuffix("_mask")] = stored.pop(key)
    check_finite(stored)
    is_dinov3 = "rope_embed.periods" in stored or "storage_tokens" in stored
    is_dinov2 = "pos_embed" in stored and "mask_token" in stored
    if not is_dinov3 and not is_dinov2:
        from models.extras.weights import timm

        pixels: ConfigFields = {}
        # DeiT's and ViT-MAE's files, unlike those of timm itself, wrap their weights, and their code normalises so.
        if isinstance(contents.get("model"), Mapping):
            pixels = {"pixel_mean": IMAGENET_MEAN, "pixel_std": IMAGENET_STD}
        return timm.load(stored, {}, {**pixels, **overrides})
    stored.pop("mask_token", None)  # only pretraining reads it
    known = dinov3_fields(stored, masks) if is_dinov3 else dinov2_fields(stored)
    is_satellite = "sat493m" in path.name.lower()
    known["pixel_mean"], known["pixel_std"] = SATELLITE if is_satellite else (IMAGENET_MEAN, IMAGENET_STD)
    layout = layout_of(is_dinov3, any(".mlp.w3." in key for key in stored))
    config = vit_config(stored, layout, known | overrides, infer_switches=True)
    return read(stored, config, layout), config


def unwrapped(contents: object) -> dict[str, Tensor]:
    """Return the named tensors in a file's contents, as float32, without the prefixes added by training scripts."""
    for name in ("teacher", "model", "state_dict"):
        if isinstance(contents, Mapping) and isinstance(contents.get(name), Mapping):
            contents = contents[name]
    if not isinstance(contents, Mapping):
        return {}
    stored: dict[str, Tensor] = {}
    has_backbone = any(str(key).startswith("backbone.") for key in contents)
    for key, value in contents.items():
        name = str(key).removeprefix("module.")
        # Next to its backbone, a teacher has the heads of pretraining.
        if not isinstance(value, Tensor) or (has_backbone and not name.startswith("backbone.")):
            continue
        name = name.removeprefix("backbone.")
        # Training scripts put blocks into chunks: the second number counts all blocks.
        name = re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)
        stored[name] = value.float()
    return stored


def heads_of(width: int) -> int:
    """Return the number of attention heads for this width: 64 channels per head, 128 in DINOv3's 7B."""
    return width // (128 if width == 4096 else 64) or 1


def dinov2_fields(stored: dict[str, Tensor]) -> ConfigFields:
    """Return the config fields fixed by DINOv2's code.

    In a model with registers, which have no position embeddings, the class token's position embedding is folded into
    the token; this changes `stored`.
    """
    width = stored["cls_token"].shape[-1]
    if "register_tokens" in stored:
        # Registers have no entry in the table: add the class token's entry to the token itself.
        stored["cls_token"] = stored["cls_token"] + stored["pos_embed"][:, :1]
        stored["pos_embed"] = stored["pos_embed"][:, 1:]
    return {"activation": "gelu", "norm_eps": 1e-6, "heads": heads_of(width), "layer_scale": 1.0} | gated_field(stored)


def dinov3_fields(stored: dict[str, Tensor], masks: dict[str, Tensor]) -> ConfigFields:
    """Return the config fields fixed by DINOv3's code, and remove the masked key biases from `stored`.

    Raises ValueError if masks or rotary periods differ from those of the published models.
    """
    width = stored["cls_token"].shape[-1]
    heads = heads_of(width)
    periods = stored.pop("rope_embed.periods", None)
    # Rounded to bfloat16, a period differs by up to 0.4 %.
    if periods is not None and not torch.allclose(periods, rope_periods(4 * len(periods)), rtol=0.01):
        raise ValueError(
            f"this DINOv3 model has rotary positions with a base other than {BASE:g}, which is not supported"
        )
    if periods is not None:
        heads = width // (4 * len(periods))
    if "cls_norm.weight" in stored:
        raise ValueError(
            "this DINOv3 model normalises the class token and the patches separately, which is not supported"
        )
    for name in ("local_cls_norm.weight", "local_cls_norm.bias"):
        stored.pop(name, None)  # of small crops in pretraining
    qkv_bias = "all"
    for name, mask in masks.items():
        expected = torch.ones(3, len(mask) // 3)
        expected[1] = 0
        if not torch.equal(mask, expected.flatten()):
            raise ValueError(
                f"{name}_mask has unsupported values; expected 0 for the keys, and 1 for the queries and values"
            )
        q, _, v = stored[name].chunk(3)
        stored[name] = torch.cat([q, v])
        qkv_bias = "qv"
    fields = {"activation": "gelu", "norm_eps": 1e-5, "heads": heads, "layer_scale": 1.0, "qkv_bias": qkv_bias}
    return fields | {"positions": "none", "rope": "dinov3", "image_size": 224} | gated_field(stored)


def gated_field(stored: dict[str, Tensor]) -> ConfigFields:
    """Return {"activation": "swiglu"} if the file's MLPs are SwiGLU; otherwise an empty dict."""
    return {"activation": "swiglu"} if any(".mlp.w3." in key for key in stored) else {}


def rope_periods(head_width: int) -> Tensor:
    """Return the periods of DINOv3's rotary positions, in patches of an image that spans -1 to 1."""
    return BASE ** (2 * torch.arange(head_width // 4, dtype=torch.float32) / (head_width // 2))


def preprocessing_of(config: ViTConfig) -> Preprocessing | None:
    """Return the preprocessing with which a repository evaluates its models; None for models of other repositories.

    The sources are DINOv2's data/transforms.py and the README of DINOv3.
    """
    if config.layer_scale is None:
        return None
    described: ForeignConfig = {"mean": config.pixel_mean, "std": config.pixel_std}
    if config.rope == "dinov3":
        described |= {"crop_mode": "squash", "crop_pct": 1.0, "interpolation": "bilinear"}
    else:
        described |= {"crop_pct": 0.875, "interpolation": "bicubic"}
    return from_timm(described, config.image_size)


def save(state: dict[str, Tensor], config: ModelConfig, path: Path) -> None:
    """Write a file that `load_state_dict` of DINOv2 or DINOv3 accepts.

    Raises ValueError if neither supports this model.
    """
    if not isinstance(config, ViTConfig) or config.family != "vit":
        raise ValueError(f"DINOv2 and DINOv3 have no models of family {config.family}; save as safetensors")
    is_dinov3 = config.rope == "dinov3"
    name = "dinov3_vit" if is_dinov3 else "dinov2_with_registers" if config.registers else "dinov2"
    family = FAMILIES[name]
    reasons = []
    if config.classes:
        reasons.append("classifier")
    if config.norm_eps != (1e-5 if is_dinov3 else 1e-6):
        reasons.append(f"norm_eps={config.norm_eps}")
    if config.heads != heads_of(config.width):
        reasons.append(f"{config.heads} heads at width {config.width}")
    reasons += family.differences(config)
    if reasons:
        raise ValueError(f"{family.title} has no {', no '.join(reasons)}; save as safetensors")
    state, config = with_learned_positions(state, config, family.slots)
    tensors = write(state, config, layout_of(is_dinov3, config.activation == "swiglu"))
    tensors["mask_token"] = torch.zeros(1, config.width)
    if name == "dinov2_with_registers":
        tensors["pos_embed"] = F.pad(tensors["pos_embed"], (0, 0, 1, 0))
    if is_dinov3:
        tensors["rope_embed.periods"] = rope_periods(config.width // config.heads)
        for key in [key for key in tensors if key.endswith(".qkv.bias")]:
            if config.qkv_bias == "qv":
                q, v = tensors[key].chunk(2)
                tensors[key] = torch.cat([q, torch.zeros_like(q), v])
                ones = torch.ones_like(q)
                tensors[f"{key}_mask"] = torch.cat([ones, torch.zeros_like(q), ones])
    torch.save(tensors, path)
