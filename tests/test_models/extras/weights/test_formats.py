"""Files of other projects are recognised by name; errors about unreadable files suggest a remedy."""

import pytest
import torch

import models
from models.extras.weights.formats import class_names, load
from tests.support.weights import random_model

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", ["weights.bin", "weights.pt", "empty"])
def test_unsupported_files_are_refused_with_a_remedy(tmp_path, name) -> None:
    with pytest.raises(
        ValueError, match=r"and not a \.safetensors, \.npz or \.pth file\n  convert other files to safetensors"
    ):
        load(tmp_path / name, {})


def test_an_unknown_format_is_refused_before_anything_is_written(tmp_path) -> None:
    with pytest.raises(ValueError, match="format is 'onnx', expected one of safetensors, npz, timm, hf, pth"):
        models.save(random_model(), tmp_path / "out", "onnx")
    assert list(tmp_path.iterdir()) == []


def test_non_finite_values_are_reported_by_the_names_of_the_file(tmp_path) -> None:
    from safetensors.torch import save_file

    save_file({"cls_token": torch.tensor([[[float("nan")]]])}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="cls_token"):
        load(tmp_path, {})


def test_class_names_are_those_of_either_library() -> None:
    assert class_names({"id2label": {"1": "dog", "0": "cat"}}) == ["cat", "dog"]
    assert class_names({"label_names": ["cat", "dog"]}) == ["cat", "dog"]
    assert class_names({"id2label": {"0": "LABEL_0"}}) == []
