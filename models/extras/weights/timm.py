"""Read and write timm's `VisionTransformer` and `Eva`: folders for `timm.create_model("local-dir:...")`, and files.

How a file is read:
1. reject unsupported models, with the reason: UNSUPPORTED_KEYS, UNSUPPORTED_NAMES, CHANGES;
2. read fields that shapes do not determine from the architecture's name (FIXED), then from the arguments in config.json
   (ARGUMENTS);
3. turn an unpooled class token into the first register;
4. infer the other fields from keys and shapes (`layout.vit_config`), and read every key according to their layout.

    {"architecture": "vit_base_patch16_224", "model_args": {"num_heads": 12, "act_layer": "gelu"}, ...}
    gives heads=12, activation="gelu"; blocks.0.attn.qkv.weight becomes blocks.0.attention.qkv.weight
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from models.configs import ROPES, ConfigFields, ModelConfig, ViTConfig
from models.extras.weights.layout import (
    ForeignConfig,
    Layout,
    differing_fields,
    read,
    unlearnable_positions,
    vit_config,
    with_learned_positions,
    write,
)
from models.extras.weights.preprocessing import for_timm
from models.weights.folder import Preprocessing

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
    # The stem of a hybrid: the first name if it has stages, the others count stages and units from 0.
    (r"^stem\.(conv|gn)_root\.", r"patch_embed.backbone.stem.\1."),
    *(
        (rf"^stem\.stages\.block{stage + 1}\.unit", f"patch_embed.backbone.stages.{stage}.blocks.unit")
        for stage in range(4)
    ),
    *((rf"\.blocks\.unit{unit + 1}\.", f".blocks.{unit}.") for unit in range(9)),
    (r"^(patch_embed\.backbone\..*\.)(conv|gn)_proj\.", r"\1downsample.\2."),
    (r"^(patch_embed\.backbone\..*\.)gn(\d?)\.", r"\1norm\2."),
)
ARCHITECTURE = "vit_base_patch16_224"  # any plain ViT: model_args override the rest
ROOT = "patch_embed.backbone.conv."  # the convolution of a stem without stages
# Reasons why weights cannot be imported, by a pattern of their keys.
UNSUPPORTED_KEYS = (
    (r"^head_dist\.", "a second head for its distillation token"),
    (r"relative_position_bias_table$", "learned biases of relative positions (BEiT)"),
    (r"\.attn\.lambda_q1$", "differential attention"),
    (r"\.in_proj\.", "attention and MLP in parallel"),
    (r"^patch_embed\.backbone\.\d", "a convolutional stem with BatchNorm (MobileCLIP)"),
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
# Rotary positions: Eva's arguments with their defaults, and its names of the values in ROPES.
ROPE_ARGUMENTS = {
    "rope_type": "cat",
    "rope_temperature": 10_000.0,
    "rope_grid_indexing": "ij",
    "rope_grid_offset": 0.0,
    "rope_rotate_half": False,
}
ROPE_TYPES = {"index": "cat", "learned": "mixed", "centred": "dinov3"}
GRID_INDEXING = {"yx": "ij", "xy": "xy"}
ARGUMENTS = (("heads", "num_heads"), ("image_size", "img_size"), ("activation", "act_layer"))  # ours, their argument
CHANGES = ("norm_layer", "mlp_layer", "block_fn", "use_post_norm", "num_kv_heads")  # change the computation


def layout_of(stored: dict[str, Tensor]) -> Layout:
    """Return the layout of these stored tensors: timm has several names for LayerScale, q, k and v, and SwiGLU."""
    return layout_of_names(names_of(stored))


def names_of(stored: Mapping[str, Tensor]) -> set[str]:
    """Return the parameter names of the first transformer block in a weights file.

    Also contains "mlp.up" or "mlp.gate_up", depending on the MLP's first layer.
    """
    names = {key.removeprefix("blocks.0.") for key in stored if key.startswith(("blocks.0.", ROOT))}
    # One layer of twice the hidden width is SwiGLU too.
    if "mlp.fc1.weight" in names:
        outputs = stored["blocks.0.mlp.fc1.weight"].shape[0]
        names.add("mlp.gate_up" if outputs == 2 * stored["blocks.0.mlp.fc2.weight"].shape[1] else "mlp.up")
    return names


def layout_of_names(names: Container[str]) -> Layout:
    """Return the layout of a file whose first block contains these names, as returned by `names_of`."""
    renames: tuple[tuple[str, str], ...] = RENAMES
    if f"{ROOT}weight" in names:
        renames = (*renames, (r"^patch_embed\.backbone\.stem\.", "patch_embed.backbone."))
    if "gamma_1" in names:
        renames = (*renames, (r"\.ls(\d)\.gamma$", r".gamma_\1"))
    packed: list[tuple[str, tuple[str, ...]]] = []
    # 1. The MLP: the paper's, or SwiGLU with two layers or with one layer of twice the width.
    for ours in ("up", "gate_up"):
        if f"mlp.{ours}" in names:
            renames = (*renames, (rf"\bmlp\.{ours}\.", "mlp.fc1."))
    if "mlp.fc1_g.weight" in names:
        packed.append((".mlp.gate_up.", (".mlp.fc1_g.", ".mlp.fc1_x.")))
    # 2. The projections: q, k and v in one layer or in three, and a bias of k, or none.
    if "attn.q_bias" in names:
        packed.append((".attn.qkv.bias", (".attn.q_bias", ".attn.v_bias")))
    elif "attn.q_proj.weight" in names:
        if "attn.k_proj.bias" not in names:
            packed.append((".attn.qkv.bias", (".attn.q_proj.bias", ".attn.v_proj.bias")))
        packed.append((".attn.qkv.", (".attn.q_proj.", ".attn.k_proj.", ".attn.v_proj.")))
    return Layout(renames, tuple(packed))


def load(
    stored: dict[str, Tensor], described: ForeignConfig, overrides: ConfigFields
) -> tuple[dict[str, Tensor], ViTConfig]:
    """Return the state dict and config; the activation is erf GELU unless timm's config sets another.

    Without a config file, a class token is assumed to be pooled; otherwise pass pool="gap". Raises ValueError if the
    model is not supported.
    """
    architecture = described.get("architecture", "")
    refuse_unsupported(stored, architecture)
    arguments = described.get("model_args", {})
    changed = [name for name in CHANGES if arguments.get(name)]
    if changed:
        raise ValueError(f"this timm model has {', '.join(changed)}, which is not supported")
    if not architecture and "rope" not in overrides and any(re.search(NEEDS_NAME, key) for key in stored):
        raise ValueError(
            "the keys of this timm model do not determine its epsilon, activation and rotary positions\n"
            '  put its config.json next to the file; it must contain at least {"architecture": "NAME"}'
        )

    # First the fields fixed by timm, then the arguments, which override them as in timm.
    known: ConfigFields = {}
    for pattern, ours, value in FIXED:
        if re.match(pattern, architecture):
            known[ours] = value
    for ours, theirs in ARGUMENTS:
        if theirs in arguments:
            known[ours] = arguments[theirs]
    if "pool_include_prefix" in arguments:
        known["pool_prefix"] = arguments["pool_include_prefix"]
    known |= eva_fields(arguments)
    # An argument overrides the top-level entry of config.json, because the model was built with it.
    pooling_name = arguments.get("global_pool") or described.get("global_pool")
    if pooling_name:
        if pooling_name not in POOLS:
            raise ValueError(f"this timm model uses {pooling_name} pooling, which is not supported")
        known["pool"] = POOLS[pooling_name]
    elif "fc_norm.weight" in stored:
        known["pool"] = "gap"
    known |= overrides
    if known.get("pool", "token") == "token":
        known.pop("pool_prefix", None)  # timm ignores it then
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
    if any(key.startswith("patch_embed.backbone.") for key in stored):
        known |= {"stem": stem_of(stored), "stem_epsilons": "timm"}
    layout = layout_of(stored)
    # Without another activation, every model of timm has GELU with erf; SwiGLU shows in the keys.
    if layout.keys("blocks.0.mlp.up.weight")[0] in stored:
        known.setdefault("activation", "gelu")
    else:
        known["activation"] = "swiglu"
    config = vit_config(stored, layout, known, infer_switches=True)
    return read(stored, config, layout), config


def stem_of(stored: dict[str, Tensor]) -> tuple[int, ...]:
    """Return the number of units of each stage of a hybrid's stem, from keys such as stages.0.blocks.2.conv1.weight."""
    units: dict[int, int] = {}
    for key in stored:
        match = re.match(r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\.", key)
        if match:
            units[int(match[1])] = max(units.get(int(match[1]), 0), int(match[2]) + 1)
    return tuple(units[stage] for stage in sorted(units))


def eva_fields(arguments: ForeignConfig) -> ConfigFields:
    """Return the fields determined by Eva's arguments; raises ValueError if its rotary positions are not supported."""
    known: ConfigFields = {}
    if "attn_pool_num_heads" in arguments:
        known["map_heads"] = arguments["attn_pool_num_heads"]
        known["pool_prefix"] = bool(arguments.get("class_token", True) or arguments.get("num_reg_tokens"))
    if "use_rot_pos_emb" in arguments and not arguments["use_rot_pos_emb"]:
        known["rope"] = "none"
        known["rope_grid"] = None
    elif "use_rot_pos_emb" in arguments:
        theirs = tuple(arguments.get(name, default) for name, default in ROPE_ARGUMENTS.items())
        rows = {}
        for name, (kind, base, axes, offset, pairs) in ROPES.items():
            grid_offset = offset if kind == "index" else 0.0
            rows[(ROPE_TYPES[kind], base, GRID_INDEXING[axes], grid_offset, pairs == "halves")] = name
        if theirs not in rows:
            raise ValueError(f"this timm model has rotary positions {theirs}, which is not supported")
        known["rope"] = rows[theirs]
        known["rope_grid"] = arguments.get("ref_feat_shape")
    return known


def refuse_unsupported(stored: dict[str, Tensor], architecture: str) -> None:
    """Raise ValueError with the reason if a model with these keys or of this architecture is not supported."""
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
    """Return the class names of a config.json, in the order of the outputs; an empty list if their order is unknown."""
    names = described.get("label_names") or described.get("pretrained_cfg", {}).get("label_names") or []
    # timm writes a dict if class numbers are missing; the position of a name then means nothing.
    return list(names) if isinstance(names, list) else []


def form_of(stored: Mapping[str, Tensor], described: ForeignConfig) -> ForeignConfig:
    """Return the architecture and arguments with which `save` writes the same model again.

    The result is empty if `described` names no architecture.
    """
    if not described.get("architecture"):
        return {}
    return {
        "architecture": described["architecture"],
        "model_args": described.get("model_args", {}),
        "names": sorted(names_of(stored)),
        "class_token": "cls_token" in stored,
    }


def save(
    state: dict[str, Tensor],
    config: ModelConfig,
    class_names: Sequence[str],
    preprocessing: Preprocessing,
    form: ForeignConfig | None = None,
) -> tuple[dict[str, Tensor], str]:
    """Return tensors and config.json for timm; a fixed sincos table becomes a learned one with equal values.

    `form`, from `form_of`, is the architecture from which the weights were imported. The same architecture is written
    unless a stage has changed fields that it fixes; all other models are written as an equivalent architecture.
    """
    if form and isinstance(config, ViTConfig) and config.family == "vit":
        as_imported = save_as(form, state, config, class_names, preprocessing)
        if as_imported is not None:
            return as_imported
    # Collect the reasons why timm cannot compute this model.
    reasons = []
    if not isinstance(config, ViTConfig) or config.family != "vit":
        reasons.append(f"family {config.family}")
    else:
        if config.stem is not None:
            reasons.append(f"hybrid with the stem {config.stem} and {config.stem_epsilons} epsilons")
        if config.representation:
            reasons.append("representation layer")
        reasons += unlearnable_positions(config)
        if config.pre_norm and config.patch_bias:
            reasons.append("bias of the patch embedding before a norm")
    if reasons:
        raise ValueError(f"timm's VisionTransformer has no {', no '.join(reasons)}; save as npz or safetensors")
    assert isinstance(config, ViTConfig)
    if config.norm_eps not in (1e-5, 1e-6):
        warnings.warn(f"timm computes norm_eps 1e-6, not {config.norm_eps}: logits will differ", stacklevel=3)
    # Only Eva has rotary positions, SwiGLU with LayerNorm, and projections in which only the keys have no bias.
    arguments_of = vit_arguments
    if config.rope != "none" or config.qkv_bias == "qv" or (config.activation == "swiglu" and config.norm == "layer"):
        arguments_of = eva_arguments
    architecture, arguments = arguments_of(config)
    described = {
        "architecture": architecture,
        "num_classes": config.classes,
        "num_features": config.width,
        "global_pool": THEIR_POOLS[config.pool],
        # Arguments that make timm's module compute this model.
        "model_args": {
            "img_size": list(config.image_size),
            "patch_size": list(config.patch),
            "embed_dim": config.width,
            "depth": config.depth,
            "num_heads": config.heads,
            "mlp_ratio": (config.mlp + 0.5) / config.width,  # timm truncates the product
            "global_pool": THEIR_POOLS[config.pool],
            "class_token": config.pool == "token",
            "no_embed_class": not config.position_slots,
            "num_classes": config.classes,
            "init_values": config.layer_scale,
            "qk_norm": config.qk_norm,
            **arguments,
        },
        "pretrained_cfg": {
            "num_classes": config.classes,
            **for_timm(preprocessing),
            "fixed_input_size": True,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    add_names(described, class_names, config.classes)
    # The number of entries does not change: timm's no_embed_class tells whether prefix tokens have entries.
    state, config = with_learned_positions(state, config, config.position_slots)
    if not config.patch_bias and not config.pre_norm:
        # timm has no patch embedding without a bias here; zeros change nothing.
        config = replace(config, patch_bias=True)
        state = {**state, "embedding.bias": torch.zeros(config.width)}
    stored = write(state, config, layout_for(config, architecture))
    pack_frequencies(stored, config)
    return stored, json.dumps(described, indent=2) + "\n"


def pack_frequencies(stored: dict[str, Tensor], config: ViTConfig) -> None:
    """Replace the learned frequencies of all layers with timm's single tensor (2, layers, H, d/2)."""
    frequencies = [stored.pop(f"rope.freqs.{layer}") for layer in range(config.depth) if config.rope == "mixed"]
    if frequencies:
        stored["rope.freqs"] = torch.stack(frequencies, dim=1)


def add_names(described: ForeignConfig, class_names: Sequence[str], classes: int) -> None:
    """Add the class names at the top level of a config.json, like timm's `save_for_hf`, if every class has a name."""
    if classes and len(class_names) >= classes:
        described["label_names"] = list(class_names[:classes])


def save_as(
    form: ForeignConfig,
    state: dict[str, Tensor],
    config: ViTConfig,
    class_names: Sequence[str],
    preprocessing: Preprocessing,
) -> tuple[dict[str, Tensor], str] | None:
    """Return the tensors and config.json for the architecture from which the weights were imported.

    Returns None if this architecture no longer computes the model.
    """
    described: ForeignConfig = {
        "architecture": form["architecture"],
        "num_classes": config.classes,
        "num_features": config.width,
        "global_pool": THEIR_POOLS[config.pool],
        "model_args": {**form["model_args"], "img_size": list(config.image_size), "num_classes": config.classes},
        "pretrained_cfg": {"num_classes": config.classes, **for_timm(preprocessing)},
    }
    add_names(described, class_names, config.classes)
    # An unpooled class token is our first register.
    tensors = dict(state)
    written = config
    if form["class_token"] and config.pool != "token":
        registers = tensors["prefix.registers"]
        tensors["prefix.registers"] = registers[:, 1:]
        written = replace(config, registers=config.registers - 1)
    stored = write(tensors, written, layout_of_names(form["names"]))
    if written is not config:
        stored["cls_token"] = registers[:, :1].contiguous()
    pack_frequencies(stored, config)
    # Read it again: the architecture's name fixes fields that a stage may have changed, such as the pooling.
    try:
        again = load(stored, described, {})[1]
    except ValueError:
        return None
    if differing_fields(again, config):
        return None
    return stored, json.dumps(described, indent=2) + "\n"


def refuse(reasons: dict[str, bool]) -> None:
    """Raise ValueError naming the parts of a model that timm's module does not have."""
    wrong = [reason for reason, applies in reasons.items() if applies]
    if wrong:
        raise ValueError(f"timm's version of this model has no {', no '.join(wrong)}; save as safetensors")


def vit_arguments(config: ViTConfig) -> tuple[str, ConfigFields]:
    """Return an architecture with the right kind and epsilon of norms, and the arguments of VisionTransformer."""
    architecture = ARCHITECTURE
    if config.norm == "rms":
        architecture = "aimv2_large_patch14_224"
    elif config.norm_eps == 1e-5:
        architecture = "vit_base_patch16_clip_224"
    is_aim = config.norm == "rms"
    refuse(
        {
            "separate width of a MAP head": config.map_heads is not None or config.map_mlp is not None,
            "norm of patches": config.patch_norm != is_aim,
            "missing biases": config.block_bias == is_aim,
            "GELU": is_aim and config.activation != "swiglu",
            "RMSNorm with this epsilon": is_aim and config.norm_eps != 1e-5,
        }
    )
    return architecture, {
        "reg_tokens": config.registers,
        "pos_embed": "none" if config.positions == "none" else "learn",
        "pre_norm": config.pre_norm,
        "final_norm": config.last_norm != "none",
        "fc_norm": config.last_norm == "pooled",
        "pool_include_prefix": config.pool_prefix,
        "qkv_bias": config.qkv_bias == "all",
        "proj_bias": config.block_bias,
        "scale_attn_norm": config.attention_norm,
        "scale_mlp_norm": config.mlp_norm,
        "act_layer": "silu" if config.activation == "swiglu" else config.activation,
    }


def eva_arguments(config: ViTConfig) -> tuple[str, ConfigFields]:
    """Return an architecture with the right epsilon of norms, and the arguments of Eva."""
    kind, base, axes, offset, pairs = ROPES.get(config.rope, ROPES["eva02"])
    has_prefix_pooled = config.pool == "map" and config.prefix_tokens > 0
    refuse(
        {
            "RMSNorm": config.norm == "rms",
            "norm of patches": config.patch_norm,
            "missing biases": not config.block_bias,
            f"{config.activation}": config.activation not in ("gelu", "swiglu"),
            "pooling of the other tokens": config.pool_prefix != has_prefix_pooled,
        }
    )
    arguments: ConfigFields = {
        "num_reg_tokens": config.registers,
        "use_abs_pos_emb": config.positions != "none",
        "use_pre_transformer_norm": config.pre_norm,
        "use_post_transformer_norm": config.last_norm == "tokens",
        "use_fc_norm": config.last_norm == "pooled",
        "attn_type": "rope" if config.qkv_bias == "all" else "eva",
        "qkv_fused": True,
        "qkv_bias": config.qkv_bias != "none",
        "scale_attn_inner": config.attention_norm,
        "scale_mlp": config.mlp_norm,
        "swiglu_mlp": config.activation == "swiglu",
        "swiglu_align_to": 0,
        "use_rot_pos_emb": config.rope != "none",
        "rope_type": ROPE_TYPES[kind],
        "rope_temperature": base,
        "rope_grid_indexing": GRID_INDEXING[axes],
        "rope_grid_offset": offset if kind == "index" else 0.0,
        "rope_rotate_half": pairs == "halves",
        "ref_feat_shape": config.rope_grid,
        "dynamic_img_size": False,
    }
    if config.pool == "map":
        arguments["attn_pool_num_heads"] = config.map_heads or config.heads
        arguments["attn_pool_mlp_ratio"] = ((config.map_mlp or config.mlp) + 0.5) / config.width
    architecture = "vit_base_patch16_dinov3" if config.norm_eps == 1e-5 else "eva02_base_patch14_224"
    return architecture, arguments


def layout_for(config: ViTConfig, architecture: str) -> Layout:
    """Return the layout of timm's module for this architecture and config."""
    names = []
    is_eva = not architecture.startswith(("vit_base_patch16_224", "vit_base_patch16_clip", "aimv2"))
    if is_eva and config.layer_scale is not None:
        names.append("gamma_1")
    if config.activation != "swiglu":
        names.append("mlp.up")
    elif config.mlp_norm or not is_eva:
        names.append("mlp.fc1_g.weight")
    else:
        names.append("mlp.gate_up")
    if config.qkv_bias == "qv":
        names.append("attn.q_bias")
    return layout_of_names(names)
