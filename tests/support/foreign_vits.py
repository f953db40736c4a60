"""Tiny transformers and timm models with random weights, at least one for each supported family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SIZE = 32  # pixels of a side
PATCH = 8
WIDTH = 64
CLASSES = 5
TINY = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": SIZE,
    "patch_size": PATCH,
}
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def two_towers(vision: Any, **fields: Any) -> dict[str, Any]:
    return {"vision_config": vision.to_dict(), "text_config": TEXT, **fields}


# Families of transformers: (class, config class, fields of the config).
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", {"num_labels": CLASSES}),
    "vit bare": ("ViTModel", "ViTConfig", {}),
    "dinov2": ("Dinov2Model", "Dinov2Config", {"mlp_ratio": 2}),
    "dinov2 swiglu": ("Dinov2Model", "Dinov2Config", {"use_swiglu_ffn": True}),
    "dinov2 registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {"mlp_ratio": 2}),
    "dinov3": ("DINOv3ViTModel", "DINOv3ViTConfig", {"num_register_tokens": 4}),
    "dinov3 swiglu": ("DINOv3ViTModel", "DINOv3ViTConfig", {"use_gated_mlp": True, "hidden_act": "silu"}),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", {}),
    "clip projection": ("CLIPVisionModelWithProjection", "CLIPVisionConfig", {"projection_dim": 16}),
    "clip both": ("CLIPModel", "CLIPConfig", {"projection_dim": 16}),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", {}),
    "siglip both": ("SiglipModel", "SiglipConfig", {}),
    "siglip classifier": ("SiglipForImageClassification", "SiglipConfig", {"num_labels": CLASSES}),
    "deit": ("DeiTForImageClassification", "DeiTConfig", {"num_labels": CLASSES}),
    "deit bare": ("DeiTModel", "DeiTConfig", {}),
    "beit": (
        "BeitForImageClassification",
        "BeitConfig",
        {"num_labels": CLASSES, "use_absolute_position_embeddings": True},
    ),
    "beit token": ("BeitModel", "BeitConfig", {"use_mean_pooling": False}),
    "mae": ("ViTMAEModel", "ViTMAEConfig", {"mask_ratio": 0.0}),
    "mae pretraining": (
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        {
            "mask_ratio": 0.0,
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
        },
    ),
}
# Families of timm, by architecture: arguments besides the tiny ones.
TIMM: dict[str, dict[str, Any]] = {
    "vit_base_patch16_224": {},
    "deit_small_patch16_224": {},
    "deit3_small_patch16_224": {},
    "vit_medium_patch16_reg4_gap_256": {},
    "vit_base_patch14_dinov2": {},
    "vit_base_patch14_reg4_dinov2": {},
    "vit_small_patch16_dinov3": {},
    "vit_small_plus_patch16_dinov3": {},
    "vit_base_patch16_clip_224": {},
    "vit_base_patch16_clip_quickgelu_224": {},
    "vit_base_patch16_siglip_224": {},
    "eva02_tiny_patch14_224": {},
    "vit_pe_core_base_patch16_224": {},
    "vit_small_patch16_rope_mixed_224": {},
    "beit3_base_patch16_224": {},
    "aimv2_large_patch14_224": {},
}


def randomise(model: torch.nn.Module) -> Any:
    """Move every parameter away from its initial value, so that a lost one shows; return the model in eval mode."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def transformers_model(transformers: Any, name: str, **changes: Any) -> Any:
    """Return a tiny random model of a family in TRANSFORMERS; `changes` are fields of its images' config."""
    kind, config_kind, fields = TRANSFORMERS[name]
    torch.manual_seed(0)
    tiny = {**TINY, **changes}
    if name.endswith("both") or name == "siglip classifier":
        tower = {"CLIPConfig": "CLIPVisionConfig", "SiglipConfig": "SiglipVisionConfig"}[config_kind]
        fields = two_towers(getattr(transformers, tower)(**tiny), **fields)
    else:
        fields = {**tiny, **fields}
    return randomise(getattr(transformers, kind)(getattr(transformers, config_kind)(**fields)))


def outputs_of(theirs: Any, images: torch.Tensor) -> torch.Tensor:
    """Return the logits of a transformers model, or its projection or its features if it has no head."""
    kind = type(theirs).__name__
    with torch.no_grad():
        if kind == "CLIPModel":
            return theirs.visual_projection(theirs.vision_model(images).pooler_output)
        if kind == "SiglipModel":
            return theirs.vision_model(images).pooler_output
        if kind.startswith("ViTMAE"):
            encoder = getattr(theirs, "vit", theirs)
            patches = (images.shape[2] // PATCH) * (images.shape[3] // PATCH)
            # Increasing noise keeps the patches in their order.
            noise = torch.arange(float(patches)).expand(len(images), -1)
            return encoder(images, noise=noise).last_hidden_state[:, 0]
        out = theirs(images)
    for name in ("logits", "image_embeds", "pooler_output"):
        if getattr(out, name, None) is not None:
            return getattr(out, name)
    raise AssertionError(f"{kind} has no outputs to compare")


def timm_model(timm: Any, architecture: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """Return a tiny random model of timm and its arguments."""
    arguments = {
        "img_size": SIZE,
        "patch_size": PATCH,
        "embed_dim": WIDTH,
        "depth": 2,
        "num_heads": 4,
        "num_classes": CLASSES,
        **TIMM[architecture],
        **changes,
    }
    torch.manual_seed(0)
    return randomise(timm.create_model(architecture, **arguments)), arguments


def save_timm(timm: Any, architecture: str, folder: Path, **changes: Any) -> Any:
    """Write a tiny random model as timm's own `save_for_hf` does, and return it."""
    theirs, arguments = timm_model(timm, architecture, **changes)
    timm.models.save_for_hf(theirs, folder, model_args=arguments, safe_serialization=True)
    return theirs


def images_of(size: tuple[int, int] = (SIZE, SIZE)) -> torch.Tensor:
    generator: Callable[[int], torch.Generator] = torch.Generator().manual_seed
    return torch.randn(2, 3, *size, generator=generator(3))
