"""Hugging Face `ViTForImageClassification` and `ViTModel`: directories of `from_pretrained` (SPEC 6.2)."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from models.vit import ViTConfig
from models.weights import infer as weights_infer
from models.weights import layout as weights_map

MODEL = (  # names on disk, which transformers 5 keeps although it renames them in memory
    (r"^embedding\.", "embeddings.patch_embeddings.projection."),
    (r"^prefix\.cls$", "embeddings.cls_token"),
    (r"^positions\.0\.table$", "embeddings.position_embeddings"),
    (r"^blocks\.", "encoder.layer."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"\.attention\.out\.", ".attention.output.dense."),
    (r"\.attention\.qkv\.", ".attention.attention.qkv."),
    (r"\.mlp\.up\.", ".intermediate.dense."),
    (r"\.mlp\.down\.", ".output.dense."),
    (r"^norm\.", "layernorm."),
)
BARE = (*MODEL, (r"^pre_logits\.", "pooler.dense."))
CLASSIFIER = (
    *MODEL,
    (r"^(?=embeddings|encoder|layernorm)", "vit."),
    (r"^head\.", "classifier."),
)  # knows no pooler
QKV = ((".qkv.", (".query.", ".key.", ".value.")),)
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}  # theirs: ours


def layout(classifier: bool) -> weights_map.Layout:
    return weights_map.Layout(CLASSIFIER if classifier else BARE, QKV)


def load(stored: dict[str, Tensor], described: dict[str, Any], overrides: dict[str, Any]) -> tuple[dict, ViTConfig]:
    """State dict and config; without a config.json beside the file, the defaults of transformers hold."""
    activation = described.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"hidden_act {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if described.get("pooler_act", "tanh") != "tanh" and "pooler.dense.weight" in stored:
        raise ValueError(f"pooler_act {described['pooler_act']!r} is not tanh, as the representation layer is")
    known = {"activation": ACTIVATIONS[activation], "norm_eps": described.get("layer_norm_eps", 1e-12)}
    for ours, theirs in (("heads", "num_attention_heads"), ("image_size", "image_size")):
        if theirs in described:
            known[ours] = described[theirs]
    found = layout(any(key.startswith("vit.") for key in stored))
    config = weights_infer.vit_config(stored, found, known | overrides)
    return weights_map.read(stored, config, found), config


def save(state: dict[str, Tensor], config: ViTConfig) -> tuple[dict[str, Tensor], str]:
    """Tensors and config.json for transformers: a classifier, or without classes a ViTModel."""
    reasons = obstacles(config)
    if reasons:
        raise ValueError(f"transformers' ViT has no {', no '.join(reasons)}; save as npz or safetensors")
    labels = [f"LABEL_{i}" for i in range(config.classes)]
    activation = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}[config.activation]
    described = {
        "architectures": ["ViTForImageClassification" if config.classes else "ViTModel"],
        "model_type": "vit",
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp,
        "hidden_act": activation,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": config.norm_eps,
        "image_size": square(config.image_size),
        "patch_size": square(config.patch),
        "num_channels": 3,
        "qkv_bias": True,
        "pooler_output_size": config.representation or config.width,
        "pooler_act": "tanh",
        "id2label": dict(enumerate(labels)),
        "label2id": {label: i for i, label in enumerate(labels)},
        "dtype": "float32",
    }
    state, config = weights_map.with_learned_positions(state, config, slots=1)
    return weights_map.write(state, config, layout(bool(config.classes))), json.dumps(described, indent=2) + "\n"


def square(size: tuple[int, int]) -> int | list[int]:
    """One number where the two are equal, as most readers expect."""
    return size[0] if size[0] == size[1] else list(size)


def obstacles(config: Any) -> list[str]:
    """What of this model transformers' ViT cannot compute."""
    if config.family != "vit":
        return [f"family {config.family}"]
    reasons = [] if config.stem is None else ["ResNet stem"]
    if config.pool != "token":
        reasons.append(f"pooling by {config.pool}")
    if config.registers:
        reasons.append("registers")
    if config.representation and config.classes:
        reasons.append("representation layer before a classifier (it has one with classes=0)")
    if config.positions_at != "stem" or config.positions not in ("learned", "learned2d", "sincos2d"):
        reasons.append(f"{config.positions} positions at {config.positions_at}")
    return reasons
