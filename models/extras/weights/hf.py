"""Read and write directories for transformers' `from_pretrained`, in the families of hf_families.py (SPEC 6.2).

How a file is read:
1. `model_type` in config.json names the family; a file without config.json is a ViT;
2. the family reads fields that shapes do not determine from config.json: activation, epsilon of the norms, heads, image
   size;
3. the key of the patch embedding shows the prefix of the backbone's keys; keys without an effect on image features are
   dropped: the keys of a text tower or a decoder, and the mask token of pretraining;
4. the remaining fields are inferred from shapes (`layout.vit_config`), and every key is read according to the layout.

    {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "num_attention_heads": 12, "image_size": 224, ...}
    gives activation="gelu", norm_eps=1e-12, heads=12, image_size=(224, 224)
    vit.encoder.layer.0.attention.attention.query.weight is the first third of blocks.0.attention.qkv.weight

A model is written as the first family whose model in transformers computes the same (`Family.differences`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from torch import Tensor

from models.configs import ConfigFields, ModelConfig, ViTConfig
from models.extras.weights.hf_families import FAMILIES, TWO_TOWERS, Family
from models.extras.weights.layout import (
    ForeignConfig,
    read,
    vit_config,
    with_learned_positions,
    write,
)

UNNAMED = "LABEL_{}"  # how transformers names a class without a name
# problem_type selects sigmoid or softmax in transformers' pipeline, and the loss if labels are passed.
PROBLEM_TYPES = {"sigmoid": "multi_label_classification", "softmax": "single_label_classification"}  # by our loss


def is_hf(stored: dict[str, Tensor], described: ForeignConfig) -> bool:
    """Return whether weights come from transformers, rather than from timm."""
    # Every ViT of transformers has this key, with and without a classifier; no model of timm has it.
    return "model_type" in described or any("embeddings.patch_embeddings.projection." in key for key in stored)


def family_of(described: ForeignConfig) -> tuple[Family, ForeignConfig]:
    """Return the family of a config.json, and the part of the config.json that describes the image model.

    Raises ValueError if the family is unknown.
    """
    name = described.get("model_type", "vit")
    if name in TWO_TOWERS:
        name = TWO_TOWERS[name]
        described = {**described.get("vision_config", {}), "architectures": described.get("architectures")}
    if name not in FAMILIES:
        reason = ""
        if name.startswith("siglip2"):
            reason = "; of SigLIP 2, only models for images of a fixed size (siglip) are supported, not NaFlex"
        known = ", ".join((*FAMILIES, *TWO_TOWERS))
        raise ValueError(f"the model type {name} of transformers is not supported; expected one of {known}{reason}")
    return FAMILIES[name], described


def load(
    stored: dict[str, Tensor], described: ForeignConfig, overrides: ConfigFields
) -> tuple[dict[str, Tensor], ViTConfig]:
    """Return the state dict and config; without a config.json, use the defaults of transformers' ViT.

    These defaults are the activation and the epsilon of the norms. classes=0 in `overrides` drops the head. Raises
    ValueError if none of our models computes the same.
    """
    family, described = family_of(described)
    known = family.known(described)
    # The prefix of the backbone, found by the weight of the patch embedding.
    (embedding,) = family.layout("", known).keys("embedding.weight")
    prefixes = [key.removesuffix(embedding) for key in stored if key.endswith(embedding)]
    if len(prefixes) != 1:
        raise ValueError(
            f"expected exactly one {embedding} among the {len(stored)} keys of the file, found {len(prefixes)}"
        )
    (prefix,) = prefixes
    dropped = list(family.unread)
    if overrides.get("classes") == 0:
        dropped += [re.escape(family.head), r"^\w*classifier\."]
    kept: dict[str, Tensor] = {}
    for key, tensor in stored.items():
        if not any(re.search(pattern, key) for pattern in dropped):
            kept[key] = tensor
    kept = family.adapt(kept, prefix, known)
    layout = family.layout(prefix, known)
    config = vit_config(kept, layout, known | overrides, infer_switches=True)
    return read(kept, config, layout), config


def pixels_of(described: ForeignConfig) -> ConfigFields:
    """Return pixel_mean and pixel_std of a family's published weights, for folders without an image processor."""
    family, _ = family_of(described)
    mean, std = family.pixels
    return {"pixel_mean": mean, "pixel_std": std}


def class_names(described: ForeignConfig) -> list[str]:
    """Return the class names of a config.json, in the order of the outputs; empty if they are placeholders."""
    names: list[str] = []
    try:
        # JSON keys are strings; a complete table is numbered from 0 without gaps.
        for number, name in sorted((int(number), name) for number, name in described.get("id2label", {}).items()):
            if number != len(names) or name == UNNAMED.format(number):
                break
            names.append(name)
    except (ValueError, AttributeError, TypeError):
        return []
    return names


def loss_of(described: ForeignConfig) -> str | None:
    """Return the loss, sigmoid or softmax, that a config.json names as its problem_type; None if it names neither."""
    for loss, problem_type in PROBLEM_TYPES.items():
        if described.get("problem_type") == problem_type:
            return loss
    return None


def save(
    state: dict[str, Tensor],
    config: ModelConfig,
    class_names: Sequence[str] = (),
    loss: str | None = None,
    model_type: str | None = None,
) -> tuple[dict[str, Tensor], str]:
    """Return tensors and config.json for transformers: a classifier, or a bare model if there are no classes.

    `loss` is the head's training loss, sigmoid or softmax; None if it is unknown. `model_type` is the family from which
    the weights were imported; it is preferred if it can compute this model. Raises ValueError if no family can.
    """
    if not isinstance(config, ViTConfig) or config.family != "vit":
        raise ValueError(f"transformers has no model of family {config.family}; save as npz or safetensors")
    if config.classes == 1 and loss == "softmax":
        raise ValueError(
            "transformers does not support softmax over a single class, whose probability is always 1; save as npz or "
            "safetensors, or train a single class with sigmoid"
        )
    # The families to try: that of the import, then the order of the table.
    families = list(FAMILIES.values())
    model_type = TWO_TOWERS.get(model_type or "", model_type)
    if model_type in FAMILIES:
        families.insert(0, FAMILIES[model_type])
    nearest: tuple[int, str] | None = None
    for family in families:
        reasons = reasons_against(family, config)
        if not reasons:
            return tensors_of(family, state, config, class_names, loss)
        if nearest is None or len(reasons) < nearest[0]:
            nearest = (len(reasons), f"{family.title} in transformers has no {', no '.join(reasons)}")
    assert nearest is not None
    raise ValueError(f"{nearest[1]}; save as npz or safetensors")


def reasons_against(family: Family, config: ViTConfig) -> list[str]:
    """Return the parts of a model that a family does not support; an empty list if it supports the model."""
    reasons = []
    if config.classes and family.classifier is None:
        reasons.append("classifier with such a head (it has none with classes=0)")
    return reasons + family.differences(config)


def tensors_of(
    family: Family,
    state: dict[str, Tensor],
    config: ViTConfig,
    class_names: Sequence[str],
    loss: str | None,
) -> tuple[dict[str, Tensor], str]:
    """Return the tensors and config.json of a model for a family that supports it (see `reasons_against`)."""
    described = {
        "architectures": [family.classifier if config.classes else family.bare],
        **family.describe(family.as_stored(config)),
    }
    described["dtype"] = "float32"
    is_projection = family.head == "visual_projection."
    if config.classes and not is_projection:
        names: dict[int, str] = {}
        numbers: dict[str, int] = {}
        for number in range(config.classes):
            names[number] = class_names[number] if number < len(class_names) else UNNAMED.format(number)
            # ImageNet has two classes called crane: the name maps to the first.
            numbers.setdefault(names[number], number)
        described |= {"id2label": names, "label2id": numbers}
        # Without a problem_type, transformers treats several classes as softmax, and a single class as a regression.
        if loss is not None or config.classes == 1:
            described["problem_type"] = PROBLEM_TYPES[loss or "sigmoid"]
    described = family.in_full(described)
    state, learned = with_learned_positions(state, config, family.slots)
    prefix = family.prefix if config.classes else family.bare_prefix
    known = family.known(family.describe(learned))
    tensors = family.restore(write(state, learned, family.layout(prefix, known)), prefix, learned)
    return tensors, json.dumps(described, indent=2) + "\n"
