"""timm's `VisionTransformer`: directories for `timm.create_model("local-dir:...")`, and bare files.

How a file is read:
1. reject models that we cannot compute: normalisation after pooling, and arguments that change the blocks;
2. read from config.json, if it exists, what shapes do not tell: heads, image size, activation, pooling;
3. turn an unpooled class token into the first register;
4. infer the rest from shapes (`layout.vit_config`), and read every key by LAYOUT.

    {"architecture": "vit_base_patch16_224", "model_args": {"num_heads": 12, "act_layer": "gelu"}, ...}
    gives heads=12, activation="gelu"; blocks.0.attn.qkv.weight becomes blocks.0.attention.qkv.weight
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from models.configs import ConfigFields, ModelConfig, ViTConfig
from models.weights.layout import ForeignConfig, Layout, read, vit_config, with_learned_positions, write
from models.weights.preprocessing import Preprocessing

LAYOUT = Layout(
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
ARCHITECTURE = "vit_base_patch16_224"  # any plain ViT: model_args override the rest
SIGLIP_WITH_TANH = r"vit_((base_patch32|so400m_patch16|giantopt_patch16)_siglip|large_patch16_siglip.*_512)"
# Fields given only by timm's names, not by shapes or config.json (timm 1.0.22): name, our field, value.
FIXED: tuple[tuple[str, str, object], ...] = (
    (SIGLIP_WITH_TANH, "activation", "gelu_tanh"),
    (r"vit_base_patch16_gap_224", "heads", 16),
)
POOLS = {"token": "token", "avg": "gap", "map": "map"}  # theirs: ours
THEIR_POOLS = {"token": "token", "gap": "avg", "map": "map"}  # the inverse: ours: theirs
TOLD = (("heads", "num_heads"), ("image_size", "img_size"), ("activation", "act_layer"))  # ours, their argument
CHANGES = ("pool_include_prefix", "norm_layer", "mlp_layer", "block_fn")  # arguments that change the computation


def load(
    stored: dict[str, Tensor], described: ForeignConfig, overrides: ConfigFields
) -> tuple[dict[str, Tensor], ViTConfig]:
    """Return state dict and config; the activation is erf GELU unless timm's config sets another.

    Without a config file, a class token is assumed to be pooled; otherwise pass pool="gap".
    Raises ValueError if we cannot compute the model.
    """
    # A norm after pooling is a different function. `read` would only list the key; this error explains it.
    if any(key.startswith("fc_norm.") for key in stored):
        raise ValueError("this timm model normalises after pooling (fc_norm), which is not supported")
    arguments = described.get("model_args", {})
    changed = [name for name in CHANGES if arguments.get(name)]
    if changed:
        raise ValueError(f"this timm model has {', '.join(changed)}, which is not supported")

    # First the fields fixed by timm, then the arguments, which override them as in timm.
    known: ConfigFields = {"activation": "gelu"}
    for pattern, ours, value in FIXED:
        if re.match(pattern, described.get("architecture", "")):
            known[ours] = value
    for ours, theirs in TOLD:
        if theirs in arguments:
            known[ours] = arguments[theirs]
    # An argument overrides the top-level entry of config.json, because the model was built with it.
    pooling_name = arguments.get("global_pool") or described.get("global_pool")
    if pooling_name:
        if pooling_name not in POOLS:
            raise ValueError(f"this timm model pools by {pooling_name}, which is not supported")
        known["pool"] = POOLS[pooling_name]
    known |= overrides
    # timm stores every table, so a missing table means no positions, not sincos2d as in big_vision.
    if "pos_embed" not in stored:
        known.setdefault("positions", "none")
    # timm keeps a class token under mean or MAP pooling too. Other tokens attend to it, so it must stay.
    if "cls_token" in stored and known.get("pool", "token") != "token":
        # It becomes the first register, because an unpooled class token is a register.
        stored = dict(stored)
        registers = [stored.pop("cls_token")]  # (1, 1, D)
        if "reg_token" in stored:
            registers.append(stored["reg_token"])
        stored["reg_token"] = torch.cat(registers, dim=1)
    config = vit_config(stored, LAYOUT, known)
    return read(stored, config, LAYOUT), config


def class_names(described: ForeignConfig) -> list[str]:
    """Return the class names of a config.json, in the order of the outputs, if timm itself would use them."""
    names = described.get("label_names") or described.get("pretrained_cfg", {}).get("label_names") or []
    # timm writes a dict if class numbers are missing; the position of a name then means nothing.
    return list(names) if isinstance(names, list) else []


def save(
    state: dict[str, Tensor], config: ModelConfig, class_names: Sequence[str], preprocessing: Preprocessing
) -> tuple[dict[str, Tensor], str]:
    """Return tensors and config.json for timm; a fixed sincos table becomes a learned one with equal values."""
    # Collect the reasons why timm cannot compute this model.
    reasons = []
    if not isinstance(config, ViTConfig) or config.family != "vit":
        reasons.append(f"family {config.family}")
    else:
        if config.stem is not None:
            reasons.append("stem with GroupNorm eps 1e-6")
        if config.representation:
            reasons.append("representation layer")
        if config.positions_at != "stem" or config.positions not in ("none", "learned", "learned2d", "sincos2d"):
            reasons.append(f"{config.positions} positions at {config.positions_at}")
    if reasons:
        raise ValueError(f"timm's VisionTransformer has no {', no '.join(reasons)}; save as npz or safetensors")
    assert isinstance(config, ViTConfig)
    if config.norm_eps != 1e-6:
        warnings.warn(f"timm computes norm_eps 1e-6, not {config.norm_eps}: logits will differ", stacklevel=3)
    described = {
        "architecture": ARCHITECTURE,
        "num_classes": config.classes,
        "num_features": config.width,
        "global_pool": THEIR_POOLS[config.pool],
        # Arguments that make timm's VisionTransformer compute this model.
        "model_args": {
            "img_size": list(config.image_size),
            "patch_size": list(config.patch),
            "embed_dim": config.width,
            "depth": config.depth,
            "num_heads": config.heads,
            "mlp_ratio": (config.mlp + 0.5) / config.width,  # timm truncates the product
            "global_pool": THEIR_POOLS[config.pool],
            "class_token": config.pool == "token",
            "reg_tokens": config.registers,
            "no_embed_class": not config.position_slots,
            "pos_embed": "none" if config.positions == "none" else "learn",
            "fc_norm": False,
            "act_layer": config.activation,
            "num_classes": config.classes,
        },
        "pretrained_cfg": {
            "num_classes": config.classes,
            **preprocessing.for_timm(),
            "fixed_input_size": True,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    # At the top level, not in `pretrained_cfg`, as timm's own `save_for_hf` does; for all classes or for none.
    if config.classes and len(class_names) >= config.classes:
        described["label_names"] = list(class_names[: config.classes])
    # The number of entries does not change: timm's no_embed_class tells whether prefix tokens have entries.
    state, config = with_learned_positions(state, config, config.position_slots)
    return write(state, config, LAYOUT), json.dumps(described, indent=2) + "\n"
