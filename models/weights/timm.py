"""timm's `VisionTransformer` and `Eva`: directories for `timm.create_model("local-dir:...")`, and bare files.

How a file is read:
1. reject models that we cannot compute, with the reason: UNSUPPORTED_KEYS, UNSUPPORTED_NAMES, CHANGES;
2. read what shapes do not tell from the architecture's name (FIXED), then from the arguments in config.json (TOLD);
3. turn an unpooled class token into the first register;
4. infer the rest from keys and shapes (`layout.vit_config`), and read every key by the layout of these keys.

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

RENAMES = (
    (r"^embedding\.", "patch_embed.proj."),
    (r"^patch_norm\.", "patch_embed.norm."),
    (r"^prefix\.cls$", "cls_token"),
    (r"^prefix\.registers$", "reg_token"),
    (r"^positions\.0\.table$", "pos_embed"),
    (r"^rotary\.(\d+)\.frequencies$", r"rope.freqs.\1"),
    (r"^pre_norm\.", "norm_pre."),
    (r"^pool_norm\.", "fc_norm."),
    (r"\.attention\.out\.", ".attn.proj."),
    (r"\.attention\.", ".attn."),
    (r"\.scale(\d)\.gamma$", r".ls\1.gamma"),
    (r"^map_head\.probe$", "attn_pool.latent"),
    (r"^map_head\.out\.", "attn_pool.proj."),
    (r"^map_head\.", "attn_pool."),
    (r"^attn_pool\.mlp\.up\.", "attn_pool.mlp.fc1."),
    (r"\bmlp\.down\.", "mlp.fc2."),
)
ARCHITECTURE = "vit_base_patch16_224"  # any plain ViT: model_args override the rest
# Reasons why weights cannot be imported, by a pattern of their keys.
UNSUPPORTED_KEYS = (
    (r"^head_dist\.", "a second head for its distillation token"),
    (r"relative_position_bias_table$", "learned biases of relative positions (BEiT)"),
    (r"\.attn\.lambda_q1$", "differential attention"),
    (r"\.in_proj\.", "attention and MLP in parallel"),
    (r"^patch_embed\.backbone\.", "a convolutional stem with other epsilons than the original's"),
    (r"^embeds\.", "patches of a variable grid (NaFlex)"),
    (r"\.attn\.gate\.", "gated attention"),
)
# The same by a pattern of timm's name, if the keys are those of another model (timm 1.0.31).
UNSUPPORTED_NAMES = (
    (r"eva02_enormous|vit_base_patch16_rpn", "norms after attention and MLP instead of before"),
    (r"vit_.*_sapiens2", "LayerScale on attention only and grouped queries"),
)
SIGLIP_WITH_TANH = r"vit_((base_patch32|so400m_patch16|giantopt_patch16)_siglip|large_patch16_siglip.*_512)"
# Fields given only by timm's names, not by shapes or config.json (timm 1.0.31): name, our field, value. All rows that
# match apply, in this order.
FIXED: tuple[tuple[str, str, object], ...] = (
    (SIGLIP_WITH_TANH, "activation", "gelu_tanh"),
    (r"vit_.*_clip_quickgelu_", "activation", "quick_gelu"),
    (r"vit_(.*_)?(clip|pe|dinov3|lingbot)(_|$)|beit3_|aimv2_", "norm_eps", 1e-5),
    (r"vit_base_patch16_gap_224", "heads", 16),
    (r"vit_giant_patch1[46]_(dinov2|reg4_dinov2|reg1_tipsv2|radio|lingbot)", "heads", 24),
    (r"vit_huge_plus_patch16_dinov3", "heads", 20),
    (r"vit_7b_patch16_dinov3", "heads", 32),
    (r"aimv2_large", "heads", 8),  # 128 channels each
    (r"aimv2_huge", "heads", 12),
    (r"aimv2_1b", "heads", 16),
    (r"aimv2_3b", "heads", 24),
    (r"test_vit2?$", "heads", 2),
    (r"test_vit3", "heads", 3),
    (r"test_vit3|vit_pe_core_", "pool_prefix", True),
    (r"vit_pe_core_", "map_heads", 8),
    (r"eva02_|vit_.*_rope_reg", "rope", "eva02"),
    (r"eva02_|vit_.*_rope_reg", "rope_grid", (16, 16)),
    (r"vit_.*_rope_(ape_)?224", "rope", "axial"),
    (r"vit_.*_rope_mixed_", "rope", "mixed"),
    (r"vit_.*_(dinov3|lingbot)", "rope", "dinov3"),
    (r"vit_pe_", "rope", "pe"),
    (r"vit_pe_", "rope_grid", (32, 32)),
    (r"vit_pe_core_(large|small|tiny)", "rope_grid", (24, 24)),
    (r"vit_pe_core_base", "rope_grid", (14, 14)),
)
# Keys of models whose function depends on the architecture's name.
NEEDS_NAME = r"^norm_pre\.|\.gamma_1$|\.attn\.(q_bias|q_proj\.weight|norm\.weight)$|^rope\.freqs"
POOLS = {"token": "token", "avg": "gap", "map": "map"}  # theirs: ours
THEIR_POOLS = {"token": "token", "gap": "avg", "map": "map"}  # the inverse: ours: theirs
TOLD = (("heads", "num_heads"), ("image_size", "img_size"), ("activation", "act_layer"))  # ours, their argument
CHANGES = ("norm_layer", "mlp_layer", "block_fn", "use_post_norm", "num_kv_heads")  # change the computation


def layout_of(stored: dict[str, Tensor]) -> Layout:
    """Return the layout of these stored tensors: timm has several names for LayerScale, q, k and v, and SwiGLU."""
    renames: tuple[tuple[str, str], ...] = RENAMES
    if "blocks.0.gamma_1" in stored:
        renames = (*renames, (r"\.ls(\d)\.gamma$", r".gamma_\1"))
    packed: list[tuple[str, tuple[str, ...]]] = []
    # 1. The MLP: SwiGLU with two layers or with one layer of twice the width; otherwise the paper's.
    if "blocks.0.mlp.fc1_g.weight" in stored:
        packed.append((".mlp.gate_up.", (".mlp.fc1_g.", ".mlp.fc1_x.")))
    elif "blocks.0.mlp.fc1.weight" in stored:
        wide = stored["blocks.0.mlp.fc1.weight"].shape[0] == 2 * stored["blocks.0.mlp.fc2.weight"].shape[1]
        name = "gate_up" if wide else "up"
        renames = (*renames, (rf"\bmlp\.{name}\.", "mlp.fc1."))
    # 2. The projections: q, k and v in one layer or in three, and a bias of k, or none.
    if "blocks.0.attn.q_bias" in stored:
        packed.append((".attn.qkv.bias", (".attn.q_bias", ".attn.v_bias")))
    elif "blocks.0.attn.q_proj.weight" in stored:
        if "blocks.0.attn.k_proj.bias" not in stored:
            packed.append((".attn.qkv.bias", (".attn.q_proj.bias", ".attn.v_proj.bias")))
        packed.append((".attn.qkv.", (".attn.q_proj.", ".attn.k_proj.", ".attn.v_proj.")))
    return Layout(renames, tuple(packed))


def load(
    stored: dict[str, Tensor], described: ForeignConfig, overrides: ConfigFields
) -> tuple[dict[str, Tensor], ViTConfig]:
    """Return state dict and config; the activation is erf GELU unless timm's config sets another.

    Without a config file, a class token is assumed to be pooled; otherwise pass pool="gap".
    Raises ValueError if we cannot compute the model.
    """
    architecture = described.get("architecture", "")
    refuse_unsupported(stored, architecture)
    arguments = described.get("model_args", {})
    changed = [name for name in CHANGES if arguments.get(name)]
    if changed:
        raise ValueError(f"this timm model has {', '.join(changed)}, which is not supported")
    if not architecture and "rope" not in overrides and any(re.search(NEEDS_NAME, key) for key in stored):
        raise ValueError(
            "the keys of this timm model do not tell its epsilon, activation and rotary positions\n"
            '  put its config.json next to the file, at least {"architecture": "NAME"}'
        )

    # First the fields fixed by timm, then the arguments, which override them as in timm.
    known: ConfigFields = {}
    for pattern, ours, value in FIXED:
        if re.match(pattern, architecture):
            known[ours] = value
    for ours, theirs in TOLD:
        if theirs in arguments:
            known[ours] = arguments[theirs]
    if arguments.get("pool_include_prefix"):
        known["pool_prefix"] = True
    # An argument overrides the top-level entry of config.json, because the model was built with it.
    pooling_name = arguments.get("global_pool") or described.get("global_pool")
    if pooling_name:
        if pooling_name not in POOLS:
            raise ValueError(f"this timm model pools by {pooling_name}, which is not supported")
        known["pool"] = POOLS[pooling_name]
    elif "fc_norm.weight" in stored:
        known["pool"] = "gap"
    known |= overrides
    # timm stores every table, so a missing table means no positions, not sincos2d as in big_vision.
    if "pos_embed" not in stored:
        known.setdefault("positions", "none")
        sides = described.get("pretrained_cfg", {}).get("input_size")
        if sides:
            known.setdefault("image_size", tuple(sides[1:]))
    stored = dict(stored)
    # timm stores the frequencies of all layers in one tensor (2, layers, H, d/2).
    if "rope.freqs" in stored:
        for layer, frequencies in enumerate(stored.pop("rope.freqs").unbind(1)):
            stored[f"rope.freqs.{layer}"] = frequencies
    # timm keeps a class token under mean or MAP pooling too. Other tokens attend to it, so it must stay.
    if "cls_token" in stored and known.get("pool", "token") != "token":
        # It becomes the first register, because an unpooled class token is a register.
        registers = [stored.pop("cls_token")]  # (1, 1, D)
        if "reg_token" in stored:
            registers.append(stored["reg_token"])
        stored["reg_token"] = torch.cat(registers, dim=1)
    layout = layout_of(stored)
    # Without another activation, every model of timm has GELU with erf; SwiGLU shows in the keys.
    if layout.keys("blocks.0.mlp.up.weight")[0] in stored:
        known.setdefault("activation", "gelu")
    config = vit_config(stored, layout, known, infer_switches=True)
    return read(stored, config, layout), config


def refuse_unsupported(stored: dict[str, Tensor], architecture: str) -> None:
    """Raise ValueError with the reason if we cannot compute a model with these keys or of this architecture."""
    reasons = []
    for pattern, reason in UNSUPPORTED_KEYS:
        if any(re.search(pattern, key) for key in stored):
            reasons.append(reason)
    for pattern, reason in UNSUPPORTED_NAMES:
        if re.match(pattern, architecture):
            reasons.append(reason)
    if reasons:
        raise ValueError(f"this timm model has {' and '.join(reasons)}, which is not supported")


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
    return write(state, config, layout_of({})), json.dumps(described, indent=2) + "\n"
