"""timm's `VisionTransformer`: directories of `timm.create_model("local-dir:...")`, and bare files."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import torch
from torch import Tensor

from models.vit import ViTConfig
from models.weights import infer as weights_infer
from models.weights import layout as weights_map

LAYOUT = weights_map.Layout(
    (
        (r"^embedding\.", "patch_embed.proj."),
        (r"^prefix\.cls$", "cls_token"),
        (r"^prefix\.registers$", "reg_token"),
        (r"^positions\.0\.table$", "pos_embed"),
        (r"\.attention\.out\.", ".attn.proj."),
        (r"\.attention\.", ".attn."),
        (r"^map_head\.probe$", "attn_pool.latent"),
        (r"^map_head\.out\.", "attn_pool.proj."),
        (r"^map_head\.", "attn_pool."),
        (r"\bmlp\.up\.", "mlp.fc1."),
        (r"\bmlp\.down\.", "mlp.fc2."),
    )
)
ARCHITECTURE = "vit_base_patch16_224"  # any plain ViT: model_args say the rest
FIXED = (  # what timm's own names stand for although neither shapes nor config.json tell (timm 1.0.22)
    (
        r"vit_((base_patch32|so400m_patch16|giantopt_patch16)_siglip|large_patch16_siglip.*_512)",
        "activation",
        "gelu_tanh",
    ),
    (r"vit_base_patch16_gap_224", "heads", 16),
)
POOLS = {"token": "token", "avg": "gap", "map": "map"}  # theirs: ours
CHANGES = ("pool_include_prefix", "norm_layer", "mlp_layer", "block_fn")  # arguments that change what is computed


def load(stored: dict[str, Tensor], described: dict[str, Any], overrides: dict[str, Any]) -> tuple[dict, ViTConfig]:
    """State dict and config; timm computes erf GELU unless its config says otherwise.

    Without a config beside it, a class token counts as the one that is pooled: pass pool="gap" where it is not.
    """
    if any(key.startswith("fc_norm.") for key in stored):
        raise ValueError("this timm model normalises after pooling (fc_norm), which no model here does")
    arguments = described.get("model_args", {})
    if changed := [name for name in CHANGES if arguments.get(name)]:
        raise ValueError(f"this timm model has {', '.join(changed)}, which no model here does")
    known: dict[str, Any] = {"activation": "gelu"}
    known |= {ours: v for name, ours, v in FIXED if re.match(name, described.get("architecture", ""))}
    for ours, theirs in (("heads", "num_heads"), ("image_size", "img_size"), ("activation", "act_layer")):
        if theirs in arguments:
            known[ours] = arguments[theirs]
    if pooled := arguments.get("global_pool") or described.get("global_pool"):
        if pooled not in POOLS:
            raise ValueError(f"this timm model pools by {pooled}, which no model here does")
        known["pool"] = POOLS[pooled]
    if "cls_token" in stored and (known | overrides).get("pool", "token") != "token":
        registers = [stored[key] for key in ("cls_token", "reg_token") if key in stored]  # not pooled, so a register
        stored = {key: v for key, v in stored.items() if key != "cls_token"} | {"reg_token": torch.cat(registers, 1)}
    if "pos_embed" not in stored:
        known["positions"] = "none"
    config = weights_infer.vit_config(stored, LAYOUT, known | overrides)
    return weights_map.read(stored, config, LAYOUT), config


def save(state: dict[str, Tensor], config: ViTConfig) -> tuple[dict[str, Tensor], str]:
    """Tensors and config.json for timm; a fixed sincos table becomes a learned one of the same values."""
    reasons = obstacles(config)
    if reasons:
        raise ValueError(f"timm's VisionTransformer has no {', no '.join(reasons)}; save as npz or safetensors")
    if config.norm_eps != 1e-6:
        warnings.warn(f"timm computes norm_eps 1e-6, not {config.norm_eps}: logits will differ", stacklevel=3)
    described = {
        "architecture": ARCHITECTURE,
        "num_classes": config.classes,
        "num_features": config.width,
        "global_pool": pooling(config),
        "model_args": arguments_of(config),
        "pretrained_cfg": {
            "num_classes": config.classes,
            "input_size": [3, *config.image_size],
            "fixed_input_size": True,
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    state, config = weights_map.with_learned_positions(state, config, config.position_slots)
    return weights_map.write(state, config, LAYOUT), json.dumps(described, indent=2) + "\n"


def pooling(config: ViTConfig) -> str:
    return "avg" if config.pool == "gap" else config.pool


def arguments_of(config: ViTConfig) -> dict[str, Any]:
    """Arguments of timm's VisionTransformer that make it this model."""
    return {
        "img_size": list(config.image_size),
        "patch_size": list(config.patch),
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": (config.mlp + 0.5) / config.width,  # timm truncates the product
        "global_pool": pooling(config),
        "class_token": config.pool == "token",
        "reg_tokens": config.registers,
        "no_embed_class": not config.position_slots,
        "pos_embed": "none" if config.positions == "none" else "learn",
        "fc_norm": False,
        "act_layer": config.activation,
        "num_classes": config.classes,
    }


def obstacles(config: Any) -> list[str]:
    """What of this model timm cannot compute."""
    if config.family != "vit":
        return [f"family {config.family}"]
    reasons = [] if config.stem is None else ["stem with GroupNorm eps 1e-6"]
    if config.representation:
        reasons.append("representation layer")
    if config.positions_at != "stem" or config.positions not in ("none", "learned", "learned2d", "sincos2d"):
        reasons.append(f"{config.positions} positions at {config.positions_at}")
    return reasons
