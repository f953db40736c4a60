"""Hugging Face `ViTForImageClassification` and `ViTModel`: directories for `from_pretrained` (SPEC 6.2).

How a file is read:
1. read from config.json, if it exists, what shapes do not tell: activation, epsilon of the norms, heads, image size;
2. keys that start with "vit." belong to a classifier, other keys to a bare ViTModel;
3. infer the rest from shapes (`layout.vit_config`), and read every key by the layout.

    {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "num_attention_heads": 12, "image_size": 224, ...}
    gives activation="gelu", norm_eps=1e-12, heads=12, image_size=(224, 224)
    vit.encoder.layer.0.attention.attention.query.weight is the first third of blocks.0.attention.qkv.weight
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch import Tensor

from models.configs import ConfigFields, ModelConfig, ViTConfig
from models.weights.layout import ForeignConfig, Layout, read, vit_config, with_learned_positions, write

MODEL = (  # names in files; transformers 5 keeps them although it renames the parameters in memory
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
# Their files store q, k and v separately; the rules above give one name, and this part of it expands to three.
QKV = ((".qkv.", (".query.", ".key.", ".value.")),)
BARE = Layout((*MODEL, (r"^pre_logits\.", "pooler.dense.")), QKV)
CLASSIFIER = Layout(  # has no pooler
    (
        *MODEL,
        # The look-ahead matches an empty string: it prepends "vit." to these names and skips the head's.
        (r"^(?=embeddings|encoder|layernorm)", "vit."),
        (r"^head\.", "classifier."),
    ),
    QKV,
)
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}  # theirs: ours
THEIR_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}  # the inverse: ours: theirs
TOLD = (("heads", "num_attention_heads"), ("image_size", "image_size"))  # ours, their field
UNNAMED = "LABEL_{}"  # how transformers names a class without a name
# problem_type selects sigmoid or softmax in transformers' pipeline, and the loss if labels are passed.
PROBLEM_TYPES = {"sigmoid": "multi_label_classification", "softmax": "single_label_classification"}  # by our loss
DEFAULT_NORM_EPS = 1e-12  # of transformers.ViTConfig


def load(
    stored: dict[str, Tensor], described: ForeignConfig, overrides: ConfigFields
) -> tuple[dict[str, Tensor], ViTConfig]:
    """Return state dict and config; without a config.json, use transformers' default activation and epsilon.

    Raises ValueError if we cannot compute the model.
    """
    # Their defaults differ from ours: erf GELU and epsilon 1e-12 change the logits by 4.6e-4 (SPEC 6.2).
    activation = described.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"hidden_act {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if described.get("pooler_act", "tanh") != "tanh" and "pooler.dense.weight" in stored:
        raise ValueError(f"pooler_act {described['pooler_act']!r} is not tanh, as the representation layer is")
    known: ConfigFields = {
        "activation": ACTIVATIONS[activation],
        "norm_eps": described.get("layer_norm_eps", DEFAULT_NORM_EPS),
    }
    for ours, theirs in TOLD:
        if theirs in described:
            known[ours] = described[theirs]
    # Names of ViTModel have no "vit." prefix, and only ViTModel has the pooler.
    layout = BARE
    if any(key.startswith("vit.") for key in stored):
        layout = CLASSIFIER
    config = vit_config(stored, layout, known | overrides)
    return read(stored, config, layout), config


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
    state: dict[str, Tensor], config: ModelConfig, class_names: Sequence[str] = (), loss: str | None = None
) -> tuple[dict[str, Tensor], str]:
    """Return tensors and config.json for transformers: a classifier, or a ViTModel if there are no classes.

    `loss` is the one that trained the head, sigmoid or softmax; None if it is unknown.
    """
    # Collect the reasons why transformers' ViT cannot compute this model.
    reasons = []
    if not isinstance(config, ViTConfig) or config.family != "vit":
        reasons.append(f"family {config.family}")
    else:
        if config.stem is not None:
            reasons.append("ResNet stem")
        if config.pool != "token":
            reasons.append(f"pooling by {config.pool}")
        if config.registers:
            reasons.append("registers")
        if config.representation and config.classes:
            reasons.append("representation layer before a classifier (it has one with classes=0)")
        if config.classes == 1 and loss == "softmax":
            reasons.append("softmax over a single class, which is always 1 (train a single class with sigmoid)")
        if config.positions_at != "stem" or config.positions not in ("learned", "learned2d", "sincos2d"):
            reasons.append(f"{config.positions} positions at {config.positions_at}")
    if reasons:
        raise ValueError(f"transformers' ViT has no {', no '.join(reasons)}; save as npz or safetensors")
    assert isinstance(config, ViTConfig)
    names: dict[int, str] = {}
    numbers: dict[str, int] = {}
    for number in range(config.classes):
        names[number] = class_names[number] if number < len(class_names) else UNNAMED.format(number)
        # ImageNet has two classes called crane: the name maps to the first.
        numbers.setdefault(names[number], number)
    # Fields that make transformers' ViT compute this model.
    described: ForeignConfig = {
        "architectures": ["ViTForImageClassification" if config.classes else "ViTModel"],
        "model_type": "vit",
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp,
        "hidden_act": THEIR_ACTIVATIONS[config.activation],
        "hidden_dropout_prob": config.dropout,
        # The original never drops attention weights: every config sets this rate to zero (SPEC 1.3).
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": config.norm_eps,
        "image_size": square(config.image_size),
        "patch_size": square(config.patch),
        "num_channels": 3,
        "qkv_bias": True,
        "pooler_output_size": config.representation or config.width,
        "pooler_act": "tanh",
        "id2label": names,
        "label2id": numbers,
        "dtype": "float32",
    }
    # Without a problem_type, transformers treats several classes as softmax, and a single class as a regression.
    if config.classes and (loss is not None or config.classes == 1):
        described["problem_type"] = PROBLEM_TYPES[loss or "sigmoid"]
    # transformers always has a learned table with an entry for the class token: slots=1.
    state, config = with_learned_positions(state, config, slots=1)
    tensors = write(state, config, CLASSIFIER if config.classes else BARE)
    return tensors, json.dumps(described, indent=2) + "\n"


def square(size: tuple[int, int]) -> int | list[int]:
    """Return a single number if both sides are equal, as most readers expect."""
    height, width = size
    if height == width:
        return height
    return [height, width]
