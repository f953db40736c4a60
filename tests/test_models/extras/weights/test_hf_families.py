"""Every ViT family of transformers: imports reproduce the original outputs, and exports the original bits."""

import json

import pytest
import torch
from safetensors.torch import load_file

import models
from models.extras.weights.formats import form_of
from models.extras.weights.hf_families import FAMILIES, mlp_ratio
from tests.support.foreign_vits import TRANSFORMERS, images_of, outputs_of, transformers_model
from tests.support.weights import assert_logits

FILE = "model.safetensors"


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_family_computes_its_own_outputs_at_two_sizes(name, transformers, tmp_path):
    sizes: tuple[tuple[int, int], ...] = ((32, 32), (48, 48))
    for size in sizes:
        theirs = transformers_model(transformers, name, image_size=size[0])
        theirs.save_pretrained(tmp_path / str(size[0]))
        ours = models.load(tmp_path / str(size[0]))
        assert ours.config.image_size == size
        images = images_of(size)
        assert_logits(ours, images, outputs_of(theirs, images), 1e-5)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_family_is_written_as_it_came(name, transformers, tmp_path):
    theirs = transformers_model(transformers, name)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = models.load(tmp_path / "theirs")
    models.save(ours, tmp_path / "out", "hf", form=form_of(tmp_path / "theirs"))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    kind = getattr(transformers, written["architectures"][0])
    options = {"mask_ratio": 0.0} if "mae" in name else {}
    again, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True, **options)
    assert not any(info.values()), info
    images = images_of()
    torch.testing.assert_close(outputs_of(again.eval(), images), outputs_of(theirs, images), atol=1e-6, rtol=0)
    assert models.load(tmp_path / "out").config == ours.config
    # Every tensor of the images' model has its own bits; transformers may write a prefix for a bare tower, or none.
    before, after = load_file(tmp_path / "theirs" / FILE), load_file(tmp_path / "out" / FILE)
    for key, tensor in after.items():
        same = next((before[k] for k in (key, key.removeprefix("vision_model."), f"vit.{key}") if k in before), None)
        # The class token of DINOv2 with registers takes over its position entry.
        is_moved = name == "dinov2 registers" and key.endswith(("cls_token", "position_embeddings"))
        if not is_moved and "mask_token" not in key:
            assert same is not None, key
            assert torch.equal(tensor, same), key


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_model_of_non_square_images_is_written_only_if_transformers_computes_it(name, transformers, tmp_path):
    size = (32, 64)
    transformers_model(transformers, name).save_pretrained(tmp_path / "theirs")
    ours = models.load(tmp_path / "theirs")
    target = models.from_dict({**models.to_dict(ours.config), "image_size": size})
    wide = models.from_config(target).eval()
    wide.load_state_dict(models.transfer(ours.state_dict(), ours.config, target)[0])
    try:
        models.save(wide, tmp_path / "out", "hf", form=form_of(tmp_path / "theirs"))
    except ValueError as error:
        assert "non-square image_size=(32, 64)" in str(error)
        assert not name.startswith(("vit", "deit", "dinov3"))
        return
    kind = getattr(transformers, json.loads((tmp_path / "out" / "config.json").read_text())["architectures"][0])
    options = {"mask_ratio": 0.0} if "mae" in name else {}
    again = kind.from_pretrained(tmp_path / "out", **options).eval()
    assert_logits(wide, images_of(size), outputs_of(again, images_of(size)), 1e-5)


@pytest.mark.parametrize(("is_gated", "hidden"), [(False, 64), (False, 256), (True, 48), (True, 88), (True, 176)])
def test_the_mlp_ratio_of_dinov2_gives_the_hidden_width(is_gated, hidden, transformers):
    ratio = mlp_ratio(hidden, 64, is_gated)
    config = transformers.Dinov2Config(hidden_size=64, mlp_ratio=ratio, use_swiglu_ffn=is_gated, num_hidden_layers=1)
    shapes = {name: tuple(tensor.shape) for name, tensor in transformers.Dinov2Model(config).state_dict().items()}
    assert (64, hidden) in [shape for name, shape in shapes.items() if ".mlp." in name]


@pytest.mark.parametrize(("activation", "hidden"), [("gelu", 100), ("swiglu", 96)])
def test_other_hidden_widths_are_not_written_as_dinov2(activation, hidden):
    """transformers would refuse a fractional mlp_ratio."""
    config = models.config_of("mu/8", 16, 0, width=64, mlp=hidden, activation=activation, layer_scale=0.1)
    (reason,) = FAMILIES["dinov2"].differences(config)
    assert f"hidden width {hidden} at width 64 (mlp_ratio must be an integer)" in reason


@pytest.mark.parametrize("size", [(48, 48), (32, 64)])
def test_rotary_positions_of_another_size_are_those_of_transformers(size, transformers, tmp_path):
    theirs = transformers_model(transformers, "dinov3")
    theirs.save_pretrained(tmp_path)
    ours = models.load(tmp_path)
    target = models.from_dict({**models.to_dict(ours.config), "image_size": size})
    state, _ = models.transfer(ours.state_dict(), ours.config, target)
    resized = models.from_config(target).eval()
    resized.load_state_dict(state)
    assert_logits(resized, images_of(size), outputs_of(theirs, images_of(size)), 1e-5)


@pytest.mark.parametrize(
    ("name", "kind", "fields", "reason"),
    [
        ("dinov2", "Dinov2ForImageClassification", {}, "class token and the mean of the patches together"),
        ("deit", "DeiTForImageClassificationWithTeacher", {}, "mean of two heads"),
        ("clip both", "CLIPForImageClassification", {}, "mean of the patches before their last norm"),
        ("beit", "BeitForImageClassification", {"use_relative_position_bias": True}, "relative position biases"),
    ],
)
def test_unsupported_model_is_refused_with_the_reason(name, kind, fields, reason, transformers, tmp_path):
    config = transformers_model(transformers, name).config
    config.update({**fields, "num_labels": 5})
    getattr(transformers, kind)(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=reason):
        models.load(tmp_path)


@pytest.mark.parametrize("name", ["dinov2", "deit"])
def test_unsupported_head_can_be_dropped(name, transformers, tmp_path):
    kind = {"dinov2": "Dinov2ForImageClassification", "deit": "DeiTForImageClassificationWithTeacher"}[name]
    theirs = getattr(transformers, kind)(transformers_model(transformers, name).config).eval()
    theirs.save_pretrained(tmp_path)
    backbone = getattr(theirs, name)
    with torch.no_grad():
        expected = backbone(images_of()).last_hidden_state[:, 0]
    assert_logits(models.load(tmp_path, classes=0), images_of(), expected, 1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "swin"}, "type swin of transformers is not supported; expected one of vit, dinov2"),
        (
            {"model_type": "siglip2_vision_model"},
            r"only models for images of a fixed size \(siglip\) are supported, not NaFlex",
        ),
        ({"model_type": "dinov3_vit", "rope_theta": 10.0}, "rope_theta is 10.0, expected 100"),
        ({"model_type": "dinov3_vit", "use_gated_mlp": True}, "hidden_act is .gelu., expected silu"),
        ({"model_type": "dinov3_vit", "query_bias": False}, r"query_bias, key_bias and value_bias are \(False, "),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', expected one of gelu"),
    ],
)
def test_a_config_that_is_not_our_vit_is_refused_with_the_reason(changes, reason, transformers, tmp_path):
    transformers_model(transformers, "vit").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ValueError, match=reason):
        models.load(tmp_path)
