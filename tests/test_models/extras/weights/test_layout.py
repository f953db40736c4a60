"""Names and shapes of stored tensors: mismatches are listed and refused."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import models
from models.extras.weights.layout import with_learned_positions, without_slots
from tests.support.weights import random_model


def test_error_lists_every_key_that_does_not_fit(tmp_path):
    models.save(random_model(), tmp_path / "good.npz", format="npz")
    arrays = dict(np.load(tmp_path / "good.npz"))
    del arrays["Transformer/encoder_norm/bias"]
    arrays["extra/kernel"] = np.zeros((2, 3), np.float32)
    arrays["head/kernel"] = np.zeros((5, 32), np.float32)  # transposed
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError) as refused:
        models.load(tmp_path / "bad.npz")
    for part in (
        "wrong keys: 3",
        "missing Transformer/encoder_norm/bias 32",
        "unknown extra/kernel 2x3",
        "head/kernel is 5x32, expected 32x5",
    ):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"imagesize": 24}, r"no field 'imagesize'; did you mean 'image_size'\?"),
        ({"image_size": 24}, r"needs 10 position entries \(9 patches, 1 prefix tokens\), but the file has 5"),
        ({"heads": 4}, r"query/kernel is 32x2x16, expected 32x4x8"),
    ],
)
def test_given_settings_must_match_the_file(told, message, tmp_path):
    models.save(random_model(), tmp_path / "good.npz", format="npz")
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path / "good.npz", **told)


@pytest.mark.parametrize(
    ("format", "extra", "described", "message"),
    [
        ("timm", {"fc_norm.weight": torch.ones(32)}, {}, r"wrong keys: 1\): unknown fc_norm.weight 32"),
        ("timm", {"blocks.0.ls1.gamma": torch.ones(32)}, {}, "missing blocks.1.ls1.gamma 32; missing blocks.1.ls2"),
        ("timm", {"norm_pre.weight": torch.ones(32)}, {}, r"wrong keys: 1\): missing norm_pre.bias 32"),
        ("timm", {}, {"model_args": {"global_pool": "avgmax"}}, "uses avgmax pooling, which is not supported"),
        ("timm", {}, {"model_args": {"use_post_norm": True}}, "has use_post_norm"),
        ("hf", {"vit.pooler.dense.bias": torch.ones(32)}, {}, r"wrong keys: 1\): unknown vit.pooler.dense.bias 32"),
        ("hf", {}, {"hidden_act": "relu"}, "hidden_act is 'relu', expected one of gelu"),
    ],
)
def test_unsupported_parts_of_a_foreign_file_are_refused(format, extra, described, message, tmp_path):
    models.save(random_model(), tmp_path, format=format)
    save_file({**load_file(tmp_path / "model.safetensors"), **extra}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **described}))
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path)


@pytest.mark.parametrize(
    ("form", "convert", "entries"),
    [
        # Four patches, and an entry for each prefix token.
        ({"class_slot": False}, lambda state, config: with_learned_positions(state, config, 1), 5),
        ({"positions": "sincos2d"}, lambda state, config: with_learned_positions(state, config, 1), 5),
        ({}, without_slots, 4),
        ({"registers": 2}, without_slots, 4),
    ],
)
def test_models_with_and_without_position_entries_of_prefix_tokens_agree(form, convert, entries):
    model = random_model(**form)
    state, config = convert(model.state_dict(), model.config)
    assert state["positions.0.table"].shape == (1, entries, 32)
    converted = models.from_config(config).eval()
    converted.load_state_dict(state)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(converted(images), model(images))
