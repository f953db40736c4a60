"""timm's `VisionTransformer`: directories of `timm.create_model("local-dir:...")`, and bare files.

How a file is read:
1. what no model here computes is refused: normalisation after pooling, and arguments that change the blocks;
2. config.json, where there is one, tells what shapes do not: heads, image size, activation, pooling;
3. a class token that is there and not pooled becomes the first register;
4. shapes tell the rest (`layout.vit_config`), and LAYOUT reads every key.

    {"architecture": "vit_base_patch16_224", "model_args": {"num_heads": 12, "act_layer": "gelu"}, ...}
    tells heads=12, activation="gelu"; blocks.0.attn.qkv.weight becomes blocks.0.attention.qkv.weight
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
ARCHITECTURE = "vit_base_patch16_224"  # any plain ViT: model_args say the rest
SIGLIP_WITH_TANH = r"vit_((base_patch32|so400m_patch16|giantopt_patch16)_siglip|large_patch16_siglip.*_512)"
# Fields that only timm's own names tell, neither shapes nor config.json (timm 1.0.22): name, our field, value.
FIXED: tuple[tuple[str, str, object], ...] = (
    (SIGLIP_WITH_TANH, "activation", "gelu_tanh"),
    (r"vit_base_patch16_gap_224", "heads", 16),
)
POOLS = {"token": "token", "avg": "gap", "map": "map"}  # theirs: ours
THEIR_POOLS = {"token": "token", "gap": "avg", "map": "map"}  # the inverse: ours: theirs
TOLD = (("heads", "num_heads"), ("image_size", "img_size"), ("activation", "act_layer"))  # ours, their argument
CHANGES = ("pool_include_prefix", "norm_layer", "mlp_layer", "block_fn")  # arguments that change what is computed


def load(
    stored: dict[str, Tensor], described: ForeignConfig, overrides: ConfigFields
) -> tuple[dict[str, Tensor], ViTConfig]:
    """Return state dict and config; timm computes erf GELU unless its config says otherwise.

    Without a config beside it, a class token counts as pooled: pass pool="gap" where it is not.
    Raises ValueError where the model computes what none here does.
    """
    # A norm after pooling is another function than one before it. `read` would list the key; this says what it means.
    if any(key.startswith("fc_norm.") for key in stored):
        raise ValueError("this timm model normalises after pooling (fc_norm), which no model here does")
    arguments = described.get("model_args", {})
    changed = [name for name in CHANGES if arguments.get(name)]
    if changed:
        raise ValueError(f"this timm model has {', '.join(changed)}, which no model here does")

    # The fields that timm itself fixes come first, then the arguments, which win over them as they do in timm.
    known: ConfigFields = {"activation": "gelu"}
    for pattern, ours, value in FIXED:
        if re.match(pattern, described.get("architecture", "")):
            known[ours] = value
    for ours, theirs in TOLD:
        if theirs in arguments:
            known[ours] = arguments[theirs]
    # An argument wins over the entry at the top of config.json: the model was made with it.
    pooling_name = arguments.get("global_pool") or described.get("global_pool")
    if pooling_name:
        if pooling_name not in POOLS:
            raise ValueError(f"this timm model pools by {pooling_name}, which no model here does")
        known["pool"] = POOLS[pooling_name]
    known |= overrides
    # timm stores every table it has, so that no table means no positions, not sincos2d as in big_vision.
    if "pos_embed" not in stored:
        known.setdefault("positions", "none")
    # timm keeps a class token under mean or MAP pooling too. Tokens attend to it all the same, so that it cannot go.
    if "cls_token" in stored and known.get("pool", "token") != "token":
        # It becomes the first register: unpooled, it is one of them.
        stored = dict(stored)
        registers = [stored.pop("cls_token")]  # (1, 1, D)
        if "reg_token" in stored:
            registers.append(stored["reg_token"])
        stored["reg_token"] = torch.cat(registers, dim=1)
    config = vit_config(stored, LAYOUT, known)
    return read(stored, config, LAYOUT), config


def class_names(described: ForeignConfig) -> list[str]:
    """Return the class names of a config.json, in the order of the outputs: those that timm itself would take."""
    names = described.get("label_names") or described.get("pretrained_cfg", {}).get("label_names") or []
    # timm writes a dict where numbers are missing, and then the place of a name in it says nothing.
    return list(names) if isinstance(names, list) else []


def save(
    state: dict[str, Tensor], config: ModelConfig, class_names: Sequence[str], preprocessing: Preprocessing
) -> tuple[dict[str, Tensor], str]:
    """Return tensors and config.json for timm; a fixed sincos table becomes a learned one of the same values."""
    # Some models cannot be computed by timm.
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
        # The arguments of timm's VisionTransformer that make it this model.
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
    # Beside the others and not in `pretrained_cfg`, as timm's own `save_for_hf` writes it; for all classes or for none.
    if config.classes and len(class_names) >= config.classes:
        described["label_names"] = list(class_names[: config.classes])
    # The number of entries stays: timm's no_embed_class says whether prefix tokens have any.
    state, config = with_learned_positions(state, config, config.position_slots)
    return write(state, config, LAYOUT), json.dumps(described, indent=2) + "\n"
