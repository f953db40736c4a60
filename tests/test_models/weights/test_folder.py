"""Class names and preprocessing of a folder of weights, read from handwritten files."""

import json

import pytest

from models.weights.folder import load_class_names

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"model.json": {}, "classes.json": ["cat", "dog"]}, ("cat", "dog")),
        ({"model.json": {}}, ()),
        ({"config.json": {"id2label": {"1": "dog", "0": "cat"}}}, ("cat", "dog")),
        ({"config.json": {"architecture": "vit_base_patch16_224", "label_names": ["cat", "dog"]}}, ("cat", "dog")),
        ({}, ()),
    ],
)
def test_class_names_are_read_from_the_files_of_each_library(files, names, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_class_names(tmp_path) == names
    assert load_class_names(tmp_path / "weights.safetensors") == names


def test_non_text_names_are_refused(tmp_path):
    (tmp_path / "model.json").write_text("{}")
    (tmp_path / "classes.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"the class names of .* are not a list of strings"):
        load_class_names(tmp_path)


def test_an_npz_has_no_class_names(tmp_path):
    assert load_class_names(tmp_path / "vit_b16.npz") == ()
