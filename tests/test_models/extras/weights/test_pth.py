""".pth files of DINOv2 and DINOv3: outputs equal those of transformers, and exports equal the original files."""

import re

import pytest
import torch

import models
from models.extras.weights import pth
from tests.support.foreign_vits import images_of, outputs_of, save_timm, transformers_model
from tests.support.weights import assert_logits

IMAGENET = (0.485, 0.456, 0.406)
# Transformers' tensor names → the repositories' names, from its conversion scripts for DINOv2 and DINOv3.
NAMES = (
    (r"^(model\.)?(encoder\.)?layers?\.", "blocks."),
    (r"^embeddings\.patch_embeddings\.(projection\.)?", "patch_embed.proj."),
    (r"^embeddings\.position_embeddings", "pos_embed"),
    (r"^embeddings\.", ""),
    (r"attention\.o_proj\.", "attn.proj."),
    (r"layer_scale([12])\.lambda1", r"ls\1.gamma"),
    (r"^layernorm\.", "norm."),
)


def in_their_repository(theirs, is_dinov3: bool) -> dict[str, torch.Tensor]:
    """Return the state dict that the repository's own module would have, from a model of transformers."""
    state: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in theirs.state_dict().items():
        for pattern, name in NAMES:
            key = re.sub(pattern, name, key)
        if is_dinov3:
            key = key.replace("register_tokens", "storage_tokens")
            key = re.sub(r"mlp\.gate_proj\.", "mlp.w1.", key)
            if any("gate_proj" in name for name in theirs.state_dict()):
                key = key.replace("mlp.up_proj.", "mlp.w2.").replace("mlp.down_proj.", "mlp.w3.")
            key = key.replace("mlp.up_proj.", "mlp.fc1.").replace("mlp.down_proj.", "mlp.fc2.")
        else:
            key = key.replace("mlp.down_proj.", "mlp.w3.")
        packed = re.fullmatch(r"(blocks\.\d+\.)(attention|mlp)\.(q|k|v|gate|up)_proj\.(\w+)", key)
        if packed:
            layer, _, part, kind = packed.groups()
            name = "attn.qkv" if part in "qkv" else "mlp.w12"
            parts.setdefault(f"{layer}{name}.{kind}", {})[part] = tensor
        elif key == "mask_token":
            state[key] = tensor.reshape(1, -1)
        elif tensor.numel():
            state[key] = tensor
    for key, named in parts.items():
        if "attn.qkv" in key and "k" not in named:
            named["k"] = torch.full_like(named["q"], 7.0)  # masked, so that its value does not matter
            ones = torch.ones_like(named["q"])
            state[f"{key}_mask"] = torch.cat([ones, 0 * ones, ones])
        state[key] = torch.cat([named[part] for part in ("q", "k", "v", "gate", "up") if part in named])
    if is_dinov3:
        head_width = 64
        state["rope_embed.periods"] = 100.0 ** (2 * torch.arange(head_width // 4) / (head_width // 2))
    return state


def model_and_file(transformers, name, tmp_path, wrap=lambda state: state):
    # The repositories' models have 64 channels per head.
    theirs = transformers_model(transformers, name, hidden_size=128, num_attention_heads=2)
    path = tmp_path / "theirs.pth"
    torch.save(wrap(in_their_repository(theirs, "dinov3" in name)), path)
    return theirs, path


FAMILIES = ("dinov2", "dinov2 swiglu", "dinov2 registers", "dinov3", "dinov3 swiglu")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_computes_the_outputs_of_transformers_and_is_written_again(name, transformers, tmp_path):
    theirs, path = model_and_file(transformers, name, tmp_path)
    ours = models.load(path, image_size=32)
    assert ours.config.pixel_mean == IMAGENET
    assert_logits(ours, images_of(), outputs_of(theirs, images_of()), 1e-5)
    models.save(ours, tmp_path / "out.pth", "pth")
    before, after = torch.load(path, weights_only=True), torch.load(tmp_path / "out.pth", weights_only=True)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        # The class token takes over its position entry; the biases that the mask removes, and the mask token, are zero.
        is_moved = name == "dinov2 registers" and key in ("cls_token", "pos_embed")
        is_zeroed = key == "mask_token" or (key.endswith("qkv.bias") and "dinov3" in name)
        assert after[key].shape == tensor.shape
        assert is_moved or is_zeroed or torch.allclose(after[key], tensor, atol=0, rtol=1e-6), key
    again = models.load(tmp_path / "out.pth", image_size=32)
    assert_logits(again, images_of(), ours(images_of()), 1e-6)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {
            "teacher": {f"backbone.{key}": tensor for key, tensor in state.items()} | {"dino_head.w": state}
        },
        lambda state: {"model": {f"module.{key}": tensor for key, tensor in state.items()}, "epoch": 3},
        lambda state: {re.sub(r"^blocks\.(\d+)", r"blocks.0.\1", key): tensor for key, tensor in state.items()},
    ],
)
def test_weights_inside_a_training_checkpoint_are_found(wrap, transformers, tmp_path):
    theirs, path = model_and_file(transformers, "dinov2", tmp_path, wrap)
    assert_logits(models.load(path, image_size=32), images_of(), outputs_of(theirs, images_of()), 1e-5)


def test_a_file_with_timm_s_names_is_read_as_timm_s(timm, tmp_path):
    theirs = save_timm(timm, "deit_small_patch16_224", tmp_path)
    torch.save({"model": theirs.state_dict()}, tmp_path / "deit.pth")
    ours = models.load(tmp_path / "deit.pth", heads=4)
    with torch.no_grad():
        assert_logits(ours, images_of(), theirs(images_of()), 1e-5)
    # DeiT and ViT-MAE wrap their weights; timm's own files are bare.
    published = timm.get_pretrained_cfg("deit_small_patch16_224.fb_in1k")
    assert (ours.config.pixel_mean, ours.config.pixel_std) == (published.mean, published.std)
    torch.save(theirs.state_dict(), tmp_path / "timm.pth")
    assert models.load(tmp_path / "timm.pth", heads=4).config.pixel_mean == (0.5, 0.5, 0.5)


def test_satellite_weights_have_their_own_pixel_statistics(transformers, tmp_path):
    _, path = model_and_file(transformers, "dinov3", tmp_path)
    path = path.rename(tmp_path / "dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth")
    assert models.load(path, image_size=32).config.pixel_mean == (0.430, 0.411, 0.296)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_embed.periods": torch.arange(1.0, 17.0)}, "rotary positions with a base other than 100"),
        ({"cls_norm.weight": torch.ones(128)}, "normalises the class token and the patches separately"),
        (
            {"blocks.0.attn.qkv.bias_mask": torch.full((384,), torch.nan)},
            "bias_mask has unsupported values; expected 0 for the keys",
        ),
        ({"blocks.0.norm1.bias": torch.full((128,), torch.inf)}, "NaN or infinity: blocks.0.norm1.bias"),
    ],
)
def test_a_file_that_is_not_that_of_a_published_model_is_refused(changes, reason, transformers, tmp_path):
    _, path = model_and_file(transformers, "dinov3", tmp_path, lambda state: {**state, **changes})
    with pytest.raises(ValueError, match=reason):
        models.load(path)


def test_each_repository_has_its_own_evaluation(transformers, tmp_path):
    ops = {}
    for name in ("dinov2", "dinov3"):
        _, path = model_and_file(transformers, name, tmp_path)
        ops[name] = pth.preprocessing_of(models.load(path, image_size=32).config).ops
    assert ops == {
        "dinov2": "resize_pillow(36, 'bicubic')|center_crop(32)",
        "dinov3": "resize_pillow((32, 32), 'bilinear')",
    }
