"""transformers' folders: its own models compute the same from ours, and ours from its."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import models
from tests.support.golden import GOLDEN, needs_golden
from tests.support.weights import IMAGES, assert_logits, random_model


@needs_golden
def test_hugging_face_directory_gives_its_logits():
    arrays = np.load(GOLDEN / "hf_vit_cls/io.npz")
    model = models.load(GOLDEN / "hf_vit_cls")
    assert (model.config.activation, model.config.norm_eps, model.config.heads) == ("gelu", 1e-12, 3)
    assert_logits(model, torch.from_numpy(arrays["images_nchw"]), arrays["logits"], 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "gelu", "norm_eps": 1e-12, "image_size": (16, 24)},
        {"positions": "sincos2d"},
        {"class_slot": False},
        {"classes": 0, "representation": 8},
    ],
)
def test_transformers_opens_our_directory_and_agrees(options, transformers, tmp_path):
    model = random_model(**options)
    images = torch.linspace(-1, 1, 6 * math.prod(model.config.image_size)).view(2, 3, *model.config.image_size)
    models.save(model, tmp_path / "hf", format="hf")
    kind = transformers.ViTForImageClassification if model.config.classes else transformers.ViTModel
    theirs, info = kind.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    with torch.no_grad():
        out = theirs.eval()(images)
        assert_logits(model, images, out.logits if model.config.classes else out.pooler_output, 1e-5)
        assert_logits(models.load(tmp_path / "hf"), images, model(images), 1e-6, rtol=2e-6)


def test_weights_saved_by_transformers_load(transformers, tmp_path):
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=8,
    )
    for kind in (transformers.ViTForImageClassification, transformers.ViTModel):
        theirs = kind(config).eval()
        theirs.save_pretrained(tmp_path / kind.__name__)
        ours = models.load(tmp_path / kind.__name__)
        with torch.no_grad():
            out = theirs(IMAGES)
            expected = out.logits if hasattr(out, "logits") else out.pooler_output
            assert_logits(ours, IMAGES, expected, 1e-5)
        models.save(ours, tmp_path / "again", format="hf")
        name = "model.safetensors"
        before, after = load_file(tmp_path / kind.__name__ / name), load_file(tmp_path / "again" / name)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("loss", ["sigmoid", "softmax", None])
@pytest.mark.parametrize("classes", [1, 2, 5])
def test_scores_of_transformers_are_those_of_the_loss(loss, classes, transformers, tmp_path):
    model = random_model(classes=classes)
    if loss == "softmax" and classes == 1:
        with pytest.raises(ValueError, match="transformers does not support softmax over a single class"):
            models.save(model, tmp_path, format="hf", loss=loss)
        return
    models.save(model, tmp_path, format="hf", loss=loss)
    image = Image.new("RGB", (16, 16), "gray")
    classifier = transformers.pipeline("image-classification", model=str(tmp_path), device="cpu")
    scores = {entry["label"]: entry["score"] for entry in classifier(image, top_k=classes)}
    with torch.no_grad():
        (logits,) = model(torch.full((1, 3, 16, 16), 128 / 127.5 - 1))
    expected = logits.sigmoid() if loss == "sigmoid" or classes == 1 else logits.softmax(0)
    for number in range(classes):
        assert scores[f"LABEL_{number}"] == pytest.approx(float(expected[number]), abs=1e-4)
    # A single class is not treated as a regression.
    labels = torch.ones(1, classes) if loss == "sigmoid" or (loss is None and classes == 1) else torch.tensor([0])
    with torch.no_grad():
        trained = classifier.model(torch.zeros(1, 3, 16, 16), labels=labels)
    if loss == "sigmoid":
        assert trained.loss == pytest.approx(float(-trained.logits.sigmoid().log().mean()), abs=1e-5)
    elif loss == "softmax":
        assert trained.loss == pytest.approx(float(-trained.logits.softmax(1)[0, 0].log()), abs=1e-5)


def test_model_without_classes_has_no_problem_type(tmp_path):
    models.save(random_model(classes=0), tmp_path, format="hf", loss="sigmoid")
    assert "problem_type" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions_at": "shared"}, "^ViT in transformers has no learned positions shared by all layers; save"),
        ({"positions_at": "every"}, "^ViT in transformers has no learned positions in every layer; save"),
        ({"positions": "relative"}, "^ViT in transformers has no relative positions; save"),
    ],
)
def test_positions_after_the_stem_are_not_written(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        models.save(random_model(**options), tmp_path / "hf", format="hf")
    assert not list(tmp_path.rglob("*.safetensors"))
