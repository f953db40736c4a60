"""The ViT families of transformers: their parameter names, and our equivalent ViT for each of their models.

A family is a class, because each reads and writes its config.json in its own way:

1. `known` returns the fields of our config that a config.json determines, or raises ValueError with the reason why none
   of our ViTs computes the model;
2. `layout` maps our names to the keys of its files;
3. `adapt` converts tensors stored in a different form from ours, and `restore` converts them back;
4. `describe` returns the config.json for our config. The family supports a config only if `known` recovers it from this
   config.json (`differences`).

    {"model_type": "dinov2", "layerscale_value": 1.0, "layer_norm_eps": 1e-6, ...}
    gives layer_scale=1.0, norm_eps=1e-6; encoder.layer.0.layer_scale1.lambda1 is blocks.0.scale1.gamma
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from models.catalog import Shape
from models.configs import HALF, ConfigFields, ModelConfig, ViTConfig, checked
from models.extras.weights.layout import ForeignConfig, Layout, differing_fields, unlearnable_positions
from models.extras.weights.preprocessing import CLIP_MEAN, CLIP_STD, IMAGENET_MEAN, IMAGENET_STD

Rules = tuple[tuple[str, str], ...]
Packed = tuple[tuple[str, tuple[str, ...]], ...]

ACTIVATIONS = {  # theirs: ours
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
THEIR_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu"}  # ours: theirs


def packed(name: str, parts: tuple[str, str, str], has_key_bias: bool = True) -> Packed:
    """Return the rules that split the packed projection `name` into three stored tensors, whose names are `parts`."""
    rows: Packed = ((name, parts),)
    if not has_key_bias:
        queries, _, values = parts
        rows = ((f"{name}bias", (f"{queries}bias", f"{values}bias")), *rows)
    return rows


class Family:
    """Base class of all families; the base class itself is the family ViT."""

    model_type = "vit"
    title = "ViT"
    bare = "ViTModel"  # the class of transformers without a head
    classifier: str | None = "ViTForImageClassification"
    prefix = "vit."  # of the backbone's keys in a file with a head
    bare_prefix = ""  # and in a file without one
    head = "classifier."
    slots = 1  # prefix tokens with an entry in the position table
    pixels = (HALF, HALF)  # mean and std of the published weights, if no preprocessor_config.json gives them
    # transformers' values for fields missing from a config.json.
    defaults: ClassVar[Mapping[str, object]] = {
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "num_attention_heads": 12,
        "image_size": 224,
    }
    # Names in files; transformers 5 keeps them although it renames the parameters in memory.
    rules: Rules = (
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
    pooler = True  # whether a bare model has a tanh layer, our representation
    parts = (".query.", ".key.", ".value.")
    unread: tuple[str, ...] = ()  # keys, as regular expressions, that take no part in the features of an image
    undescribed: tuple[str, ...] = ()  # fields of ViT's config.json that this family's does not have
    square: tuple[str, ...] = ()  # fields whose two sides must be equal in transformers

    def known(self, described: ForeignConfig) -> ConfigFields:
        """Return the config fields that a config.json determines. Raises ValueError if the model is not supported."""
        values = {**self.defaults, **described} if described else dict(self.defaults)
        activation = values["hidden_act"]
        if activation not in ACTIVATIONS:
            raise ValueError(f"hidden_act is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
        if values.get("pooler_act", "tanh") != "tanh":
            raise ValueError(
                f"pooler_act is {values['pooler_act']!r}, expected tanh; other activations are not supported"
            )
        known: ConfigFields = {"activation": ACTIVATIONS[activation], "norm_eps": values["layer_norm_eps"]}
        # Without a config.json, shapes and the table of sizes determine these.
        if described:
            known |= {"heads": values["num_attention_heads"], "image_size": values["image_size"]}
        return known

    def layout(self, prefix: str, known: ConfigFields) -> Layout:
        """Return the layout of a file in which the backbone's keys begin with `prefix`."""
        names = list(self.rules)
        # Only a bare model has a pooler.
        if not prefix and self.pooler:
            names.append((r"^pre_logits\.", "pooler.dense."))
        names.append((r"^head\.", self.head))
        # An empty match: prepend the prefix to all names but the head's.
        names.append((rf"^(?!{self.head})", prefix))
        return Layout(tuple(names), self.packed(known), shape_of=self.stored_shape)

    def packed(self, known: ConfigFields) -> Packed:
        """Return the rules that split packed parameters into several stored tensors."""
        return packed(".qkv.", self.parts)

    def stored_shape(self, key: str, shape: Shape, config: ModelConfig) -> Shape:
        """Return the stored shape of a parameter whose shape in our model is `shape`."""
        return shape

    def adapt(self, stored: dict[str, Tensor], prefix: str, known: ConfigFields) -> dict[str, Tensor]:
        """Convert stored tensors to the form that the layout expects. Raises ValueError for an unsupported head."""
        return stored

    def restore(self, tensors: dict[str, Tensor], prefix: str, config: ViTConfig) -> dict[str, Tensor]:
        """Convert tensors to the form in which the family stores them: the inverse of `adapt`."""
        return tensors

    def describe(self, config: ViTConfig) -> ForeignConfig:
        """Return the config.json fields with which transformers computes this model."""
        described = {
            "model_type": self.model_type,
            "hidden_size": config.width,
            "num_hidden_layers": config.depth,
            "num_attention_heads": config.heads,
            "intermediate_size": config.mlp,
            "hidden_act": THEIR_ACTIVATIONS.get(config.activation, config.activation),
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
        }
        return {name: value for name, value in described.items() if name not in self.undescribed}

    def in_full(self, described: ForeignConfig) -> ForeignConfig:
        """Return the complete config.json of a model; `described` is its part for the image model."""
        return described

    def fixed(self, config: ViTConfig) -> ConfigFields:
        """Return the fields that the family fixes, or that an optional parameter in its files determines."""
        # A bare model of a family with a pooler has one, a classifier has none.
        return {"representation": None if config.classes else config.representation} if self.pooler else {}

    def as_stored(self, config: ViTConfig) -> ViTConfig:
        """Return the equivalent config for this family's files, which store positions as one learned table."""
        if config.positions == "none":
            return config
        return replace(config, positions="learned", class_slot=self.slots > 0)

    def differences(self, config: ViTConfig) -> list[str]:
        """Return the parts of a model that transformers' model of this family does not support."""
        reasons = unlearnable_positions(config)
        for name in self.square:
            size = getattr(config, name)
            if size[0] != size[1]:
                reasons.append(f"non-square {name}={size}")
        config = self.as_stored(config)
        sizes = ("image_size", "patch", "classes", "width", "depth", "mlp", "heads")
        values: ConfigFields = {name: getattr(config, name) for name in sizes}
        try:
            values |= self.known(self.describe(config)) | self.fixed(config)
            theirs = checked(ViTConfig, values)
        except ValueError as error:
            return [*reasons, str(error)]
        for name in differing_fields(theirs, config):
            # Such positions have been named.
            if not (reasons and name in ("positions", "positions_at")):
                reasons.append(named(name, getattr(config, name)))
        return reasons


def named(field: str, value: object) -> str:
    """Describe a config field and its value for an error message."""
    if field == "pool":
        return f"pooling by {value}"
    if field == "registers":
        return f"{value} registers"
    if field == "representation":
        return "representation layer before a classifier (it has one with classes=0)"
    if field == "stem":
        return "ResNet stem"
    return f"{field}={value!r}"


def square(size: tuple[int, int]) -> int | list[int]:
    """Return a size as a single number if it is square, as most readers expect, and as a list otherwise."""
    height, width = size
    return height if height == width else [height, width]


class DeiT(Family):
    """DeiT: a second prefix token, trained by distillation and ignored by a plain classifier."""

    model_type = "deit"
    title = "DeiT"
    bare = "DeiTModel"
    classifier = "DeiTForImageClassification"
    prefix = "deit."
    slots = 2
    pixels = (IMAGENET_MEAN, IMAGENET_STD)
    rules: Rules = (*Family.rules, (r"^prefix\.registers$", "embeddings.distillation_token"))

    def adapt(self, stored: dict[str, Tensor], prefix: str, known: ConfigFields) -> dict[str, Tensor]:
        if "distillation_classifier.weight" in stored:
            raise ValueError(
                "the logits of this DeiT are the mean of two heads, one of the class token and one of the distillation "
                "token, which is not supported\n  to import it without its heads, set classes=0"
            )
        return stored

    def fixed(self, config: ViTConfig) -> ConfigFields:
        return {**super().fixed(config), "registers": 1}


class MaskedAutoencoder(Family):
    """The encoder of ViT-MAE; in transformers, its forward pass masks patches unless mask_ratio is 0."""

    model_type = "vit_mae"
    title = "ViT-MAE"
    pooler = False
    bare = "ViTMAEModel"
    classifier = None
    pixels = (IMAGENET_MEAN, IMAGENET_STD)
    unread = (r"^decoder\.", r"mask_token$")


class DINOv2(Family):
    """DINOv2: LayerScale, and SwiGLU in the largest model."""

    model_type = "dinov2"
    title = "DINOv2"
    pooler = False
    bare = "Dinov2Model"
    classifier = None  # reads the class token and the mean of the patches together
    prefix = "dinov2."
    pixels = (IMAGENET_MEAN, IMAGENET_STD)
    defaults: ClassVar[Mapping[str, object]] = {**Family.defaults, "layer_norm_eps": 1e-6, "layerscale_value": 1.0}
    rules: Rules = (
        *((pattern, name) for pattern, name in Family.rules if "norm" not in pattern and "mlp" not in pattern),
        (r"\.scale([12])\.gamma$", r".layer_scale\1.lambda1"),
        (r"\.mlp\.up\.", ".mlp.fc1."),
        (r"^norm\.", "layernorm."),
    )
    unread = (r"mask_token$",)
    undescribed = ("intermediate_size",)
    square = ("image_size",)

    def layout(self, prefix: str, known: ConfigFields) -> Layout:
        layout = super().layout(prefix, known)
        down = ".mlp.fc2."
        if known["activation"] == "swiglu":
            down = ".mlp.weights_out."
        renames = ((r"\.mlp\.down\.", down), (r"\.mlp\.gate_up\.", ".mlp.weights_in."), *layout.renames)
        return replace(layout, renames=renames)

    def known(self, described: ForeignConfig) -> ConfigFields:
        known = super().known(described)
        known["layer_scale"] = float(described.get("layerscale_value", 1.0))
        if described.get("use_swiglu_ffn"):
            known["activation"] = "swiglu"
        return known

    def adapt(self, stored: dict[str, Tensor], prefix: str, known: ConfigFields) -> dict[str, Tensor]:
        if "classifier.weight" in stored:
            raise ValueError(
                f"the head of a {self.title} classifier reads the class token and the mean of the patches together, "
                "which is not supported\n  to import it without its head, set classes=0"
            )
        return stored

    def restore(self, tensors: dict[str, Tensor], prefix: str, config: ViTConfig) -> dict[str, Tensor]:
        # Only pretraining reads it; the original starts with zeros.
        return {**tensors, f"{prefix}embeddings.mask_token": torch.zeros(1, config.width)}

    def describe(self, config: ViTConfig) -> ForeignConfig:
        is_gated = config.activation == "swiglu"
        described = super().describe(config)
        return {
            **described,
            "hidden_act": "gelu" if is_gated else described["hidden_act"],
            "mlp_ratio": mlp_ratio(config.mlp, config.width, is_gated),
            "use_swiglu_ffn": is_gated,
            "layerscale_value": config.layer_scale or 1.0,
            "use_mask_token": True,
        }


def mlp_ratio(hidden: int, width: int, is_gated: bool) -> int:
    """Return DINOv2's mlp_ratio for an MLP of this hidden width; raises ValueError if no integer ratio matches."""
    # transformers accepts only whole numbers.
    for ratio in range(1, 17):
        result = width * ratio
        if is_gated:
            result = (int(result * 2 / 3) + 7) // 8 * 8
        if result == hidden:
            return ratio
    kind = "SwiGLU" if is_gated else "MLP"
    raise ValueError(f"{kind} of hidden width {hidden} at width {width} (mlp_ratio must be an integer)")


class DINOv2WithRegisters(DINOv2):
    """DINOv2 with registers; its position table has an entry for the class token, but none for the registers."""

    model_type = "dinov2_with_registers"
    title = "DINOv2 with registers"
    bare = "Dinov2WithRegistersModel"
    prefix = "dinov2_with_registers."
    slots = 0
    rules: Rules = (*DINOv2.rules, (r"^prefix\.registers$", "embeddings.register_tokens"))

    def adapt(self, stored: dict[str, Tensor], prefix: str, known: ConfigFields) -> dict[str, Tensor]:
        stored = super().adapt(stored, prefix, known)
        # In our table all prefix tokens have an entry, or none has: add the entry to the class token itself.
        token, table = f"{prefix}embeddings.cls_token", f"{prefix}embeddings.position_embeddings"
        if token not in stored or table not in stored:
            return stored
        return {**stored, token: stored[token] + stored[table][:, :1], table: stored[table][:, 1:]}

    def restore(self, tensors: dict[str, Tensor], prefix: str, config: ViTConfig) -> dict[str, Tensor]:
        table = f"{prefix}embeddings.position_embeddings"
        tensors = {**tensors, table: F.pad(tensors[table], (0, 0, 1, 0))}
        return super().restore(tensors, prefix, config)

    def describe(self, config: ViTConfig) -> ForeignConfig:
        return {**super().describe(config), "num_register_tokens": config.registers}

    def fixed(self, config: ViTConfig) -> ConfigFields:
        return {"registers": max(config.registers, 1), "class_slot": False}


class DINOv3(Family):
    """DINOv3: rotary positions, registers, no key bias, and SwiGLU in the larger models."""

    model_type = "dinov3_vit"
    title = "DINOv3"
    pooler = False
    bare = "DINOv3ViTModel"
    classifier = None
    prefix = ""
    slots = 0
    pixels = (IMAGENET_MEAN, IMAGENET_STD)
    defaults: ClassVar[Mapping[str, object]] = {
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "num_attention_heads": 6,
        "image_size": 224,
        "rope_theta": 100.0,
        "layerscale_value": 1.0,
        "use_gated_mlp": False,
        "query_bias": True,
        "key_bias": False,
        "value_bias": True,
        "proj_bias": True,
        "mlp_bias": True,
    }
    rules: Rules = (
        (r"^embedding\.", "embeddings.patch_embeddings."),
        (r"^prefix\.cls$", "embeddings.cls_token"),
        (r"^prefix\.registers$", "embeddings.register_tokens"),
        (r"^blocks\.", "layer."),
        (r"\.scale([12])\.gamma$", r".layer_scale\1.lambda1"),
        (r"\.attention\.out\.", ".attention.o_proj."),
        (r"\.mlp\.up\.", ".mlp.up_proj."),
        (r"\.mlp\.down\.", ".mlp.down_proj."),
    )
    parts = (".q_proj.", ".k_proj.", ".v_proj.")
    unread = (r"mask_token$",)
    undescribed = ("hidden_dropout_prob", "attention_probs_dropout_prob", "qkv_bias", "pooler_act")

    def known(self, described: ForeignConfig) -> ConfigFields:
        values = {**self.defaults, **described}
        is_gated = values["use_gated_mlp"]
        if is_gated and values["hidden_act"] != "silu":
            raise ValueError(
                f"hidden_act is {values['hidden_act']!r}, expected silu; other gated MLPs are not supported"
            )
        known = super().known({**values, "hidden_act": "gelu"} if is_gated else values)
        if is_gated:
            known["activation"] = "swiglu"
        if values["rope_theta"] != 100.0:
            raise ValueError(
                f"rope_theta is {values['rope_theta']}, expected 100; rotary positions with another base are not "
                "supported"
            )
        biases = (values["query_bias"], values["key_bias"], values["value_bias"])
        if biases not in QKV_BIASES:
            raise ValueError(
                f"query_bias, key_bias and value_bias are {biases}, expected all true, all false, or only key_bias "
                "false; other combinations are not supported"
            )
        if values["proj_bias"] != values["mlp_bias"]:
            raise ValueError(
                f"proj_bias is {values['proj_bias']} and mlp_bias is {values['mlp_bias']}, expected equal values; "
                "other models are not supported"
            )
        return {
            **known,
            "qkv_bias": QKV_BIASES[biases],
            "block_bias": values["mlp_bias"],
            "layer_scale": float(values["layerscale_value"]),
            "positions": "none",
            "rope": "dinov3",
        }

    def packed(self, known: ConfigFields) -> Packed:
        gated: Packed = ((".gate_up.", (".gate_proj.", ".up_proj.")),)
        return (*gated, *packed(".qkv.", self.parts, has_key_bias=known["qkv_bias"] != "qv"))

    def adapt(self, stored: dict[str, Tensor], prefix: str, known: ConfigFields) -> dict[str, Tensor]:
        # A model without registers stores an empty tensor.
        return {key: tensor for key, tensor in stored.items() if tensor.numel()}

    def restore(self, tensors: dict[str, Tensor], prefix: str, config: ViTConfig) -> dict[str, Tensor]:
        empty = {f"{prefix}embeddings.register_tokens": torch.zeros(1, 0, config.width)}
        # Only pretraining reads the mask token; the original starts with zeros.
        return {**empty, **tensors, f"{prefix}embeddings.mask_token": torch.zeros(1, 1, config.width)}

    def describe(self, config: ViTConfig) -> ForeignConfig:
        is_gated = config.activation == "swiglu"
        biases = {ours: theirs for theirs, ours in QKV_BIASES.items()}[config.qkv_bias]
        described = super().describe(config)
        return {
            **described,
            "hidden_act": "silu" if is_gated else described["hidden_act"],
            "use_gated_mlp": is_gated,
            **dict(zip(("query_bias", "key_bias", "value_bias"), biases, strict=True)),
            "proj_bias": config.block_bias,
            "mlp_bias": config.block_bias,
            "layerscale_value": config.layer_scale or 1.0,
            "rope_theta": 100.0,
            "num_register_tokens": config.registers,
        }

    def fixed(self, config: ViTConfig) -> ConfigFields:
        return {"registers": config.registers, "class_slot": config.class_slot}


QKV_BIASES = {(True, True, True): "all", (True, False, True): "qv", (False, False, False): "none"}


class CLIP(Family):
    """The vision tower of CLIP; the projection to the joint image-text space becomes a head with zero bias."""

    model_type = "clip_vision_model"
    title = "CLIP vision tower"
    pooler = False
    bare = "CLIPVisionModel"
    classifier = "CLIPVisionModelWithProjection"
    prefix = "vision_model."
    bare_prefix = "vision_model."
    head = "visual_projection."
    pixels = (CLIP_MEAN, CLIP_STD)
    defaults: ClassVar[Mapping[str, object]] = {
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
        "num_attention_heads": 12,
        "image_size": 224,
    }
    rules: Rules = (
        (r"^embedding\.", "embeddings.patch_embedding."),
        (r"^prefix\.cls$", "embeddings.class_embedding"),
        (r"^positions\.0\.table$", "embeddings.position_embedding.weight"),
        (r"^blocks\.", "encoder.layers."),
        (r"\.norm([12])\.", r".layer_norm\1."),
        (r"\.attention\.out\.", ".self_attn.out_proj."),
        (r"\.attention\.qkv\.", ".self_attn.qkv."),
        (r"\bmlp\.up\.", "mlp.fc1."),
        (r"\bmlp\.down\.", "mlp.fc2."),
        (r"^pre_norm\.", "pre_layrnorm."),  # spelt so in transformers
        (r"^norm\.", "post_layernorm."),
    )
    parts = (".q_proj.", ".k_proj.", ".v_proj.")
    unread = (r"^text_model\.", r"^text_projection\.", r"^logit_(scale|bias)$", r"position_ids$")
    undescribed = (*DINOv3.undescribed, "pooler_output_size")
    square = ("image_size", "patch")

    def known(self, described: ForeignConfig) -> ConfigFields:
        return {**super().known(described), "pre_norm": True, "patch_bias": False}

    def stored_shape(self, key: str, shape: Shape, config: ModelConfig) -> Shape:
        if key.endswith("class_embedding"):
            return shape[2:]
        if key.endswith("position_embedding.weight"):
            return shape[1:]
        return shape

    def adapt(self, stored: dict[str, Tensor], prefix: str, known: ConfigFields) -> dict[str, Tensor]:
        if "classifier.weight" in stored:
            raise ValueError(
                "the head of a CLIP classifier reads the mean of the patches before their last norm, which is not "
                "supported\n  to import it without its head, set classes=0"
            )
        weight = stored.get("visual_projection.weight")
        table = stored.get(f"{prefix}embeddings.position_embedding.weight")
        token = stored.get(f"{prefix}embeddings.class_embedding")
        stored = dict(stored)
        if weight is not None:
            stored["visual_projection.bias"] = weight.new_zeros(len(weight))
        if table is not None:
            stored[f"{prefix}embeddings.position_embedding.weight"] = table[None]
        if token is not None:
            stored[f"{prefix}embeddings.class_embedding"] = token[None, None]
        return stored

    def restore(self, tensors: dict[str, Tensor], prefix: str, config: ViTConfig) -> dict[str, Tensor]:
        tensors = dict(tensors)
        bias = tensors.pop("visual_projection.bias", None)
        if bias is not None and bool(bias.any()):
            raise ValueError(
                "the projection of CLIP in transformers has no bias, but this model's has; save as timm or "
                "safetensors, or export the weights from before the head was trained"
            )
        return tensors

    def describe(self, config: ViTConfig) -> ForeignConfig:
        return {
            **super().describe(config),
            "attention_dropout": 0.0,
            "projection_dim": config.classes or config.width,
        }


class SigLIP(CLIP):
    """The vision tower of SigLIP and of SigLIP 2 with a fixed size: attention pooling, no class token."""

    model_type = "siglip_vision_model"
    title = "SigLIP vision tower"
    bare = "SiglipVisionModel"
    classifier = "SiglipForImageClassification"
    head = "classifier."
    slots = 0
    pixels = (HALF, HALF)
    defaults: ClassVar[Mapping[str, object]] = {
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "num_attention_heads": 12,
        "image_size": 224,
        "vision_use_head": True,
    }
    rules: Rules = (
        (r"^map_head\.probe$", "head.probe"),
        (r"^map_head\.(q|kv)\.", r"head.attention.\1."),
        (r"^map_head\.out\.", "head.attention.out_proj."),
        (r"^map_head\.norm\.", "head.layernorm."),
        (r"^map_head\.", "head."),
        *CLIP.rules,
    )

    def layout(self, prefix: str, known: ConfigFields) -> Layout:
        # Their `head.` is the attention pooling; our head must not get its name.
        renames = ((r"^head\.", self.head), *self.rules, (rf"^(?!{self.head})", prefix))
        return Layout(renames, packed(".qkv.", self.parts), shape_of=self.stored_shape)

    def known(self, described: ForeignConfig) -> ConfigFields:
        known = Family.known(self, described)
        if described.get("vision_use_head", True) and described.get("architectures") != [self.classifier]:
            return {**known, "pool": "map"}
        return {**known, "pool": "gap"}

    def adapt(self, stored: dict[str, Tensor], prefix: str, known: ConfigFields) -> dict[str, Tensor]:
        adapted: dict[str, Tensor] = {}
        for key, tensor in stored.items():
            if key == f"{prefix}embeddings.position_embedding.weight":
                tensor = tensor[None]
            is_pooling = key.startswith(f"{prefix}head.")
            # A classifier reads the mean of the patches, although its file has the attention pooling too.
            if is_pooling and known["pool"] == "gap":
                continue
            name, packs, kind = key.rpartition("in_proj_")  # in_proj_weight, in_proj_bias
            if is_pooling and packs:
                q, k, v = tensor.chunk(3)
                adapted[f"{name}q.{kind}"] = q
                adapted[f"{name}kv.{kind}"] = torch.cat([k, v])
                continue
            adapted[key] = tensor
        return adapted

    def restore(self, tensors: dict[str, Tensor], prefix: str, config: ViTConfig) -> dict[str, Tensor]:
        restored = dict(tensors)
        if config.pool == "map":
            attention = f"{prefix}head.attention."
            for kind in ("weight", "bias"):
                q = restored.pop(f"{attention}q.{kind}")
                kv = restored.pop(f"{attention}kv.{kind}")
                restored[f"{attention}in_proj_{kind}"] = torch.cat([q, kv])
        return restored

    def describe(self, config: ViTConfig) -> ForeignConfig:
        described = super().describe(config)
        del described["projection_dim"]
        if config.classes:
            described["architectures"] = [self.classifier]
        return {**described, "vision_use_head": config.pool == "map"}

    def in_full(self, described: ForeignConfig) -> ForeignConfig:
        if described["architectures"] != [self.classifier]:
            return described
        # A classifier has the config of a model of images and texts.
        names = ("architectures", "dtype", "id2label", "label2id", "problem_type")
        outer = {name: described[name] for name in names if name in described}
        inner = {name: value for name, value in described.items() if name not in names}
        return {**outer, "model_type": "siglip", "vision_config": inner}


class BEiT(Family):
    """BEiT with absolute positions; published models have relative position biases, which are not supported."""

    model_type = "beit"
    title = "BEiT"
    pooler = False
    bare = "BeitModel"
    classifier = "BeitForImageClassification"
    prefix = "beit."
    pixels = (HALF, HALF)
    rules: Rules = (
        *Family.rules,
        (r"\.scale([12])\.gamma$", r".lambda_\1"),
        (r"^pool_norm\.", "pooler.layernorm."),
        (r"^prefix\.registers$", "embeddings.cls_token"),  # an unpooled class token is a register
    )
    unread = (r"mask_token$", r"relative_position_index$")
    undescribed = ("qkv_bias", "pooler_act", "pooler_output_size")
    square = ("image_size",)

    def known(self, described: ForeignConfig) -> ConfigFields:
        if described.get("use_relative_position_bias") or described.get("use_shared_relative_position_bias"):
            raise ValueError("BEiT's relative position biases are not supported")
        known = super().known(described)
        known |= {"qkv_bias": "qv", "positions": "none"}
        if described.get("use_absolute_position_embeddings"):
            known["positions"] = "learned"
        scale = described.get("layer_scale_init_value", 0.1)
        if scale > 0:
            known["layer_scale"] = float(scale)
        if described.get("use_mean_pooling", True):
            return {**known, "pool": "gap", "registers": 1, "last_norm": "pooled"}
        return {**known, "registers": 0}

    def packed(self, known: ConfigFields) -> Packed:
        return packed(".qkv.", self.parts, has_key_bias=False)

    def describe(self, config: ViTConfig) -> ForeignConfig:
        return {
            **super().describe(config),
            "use_absolute_position_embeddings": config.positions != "none",
            "use_relative_position_bias": False,
            "use_shared_relative_position_bias": False,
            "use_mask_token": False,
            "use_mean_pooling": config.pool == "gap",
            "layer_scale_init_value": config.layer_scale or 0.0,
            "drop_path_rate": config.drop_path,
        }


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(Family(), DINOv2(), DINOv2WithRegisters(), DINOv3(), CLIP(), SigLIP(), DeiT(), BEiT()),
        MaskedAutoencoder(),  # the last, because it computes the same as a ViT
    )
}
# Models of images and texts, whose config.json describes the vision tower in `vision_config`.
TWO_TOWERS = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}
