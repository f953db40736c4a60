"""Class names and preprocessing of a folder of weights, read from handwritten files."""

import json

import pytest

from models.weights.folder import Preprocessing, load_class_names

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


def test_a_preprocessing_of_another_size_keeps_its_fraction_of_the_image():
    dinov2 = Preprocessing("resize_pillow(256, 'bicubic')|center_crop(224)", (224, 224), 256, "bicubic")
    assert dinov2.at_size((518, 518)).ops == "resize_pillow(592, 'bicubic')|center_crop(518)"
    squashed = Preprocessing("resize_pillow((224, 224), 'bicubic')", (224, 224), (224, 224), "bicubic")
    assert squashed.at_size((32, 48)).ops == "resize_pillow((32, 48), 'bicubic')"
    with pytest.raises(ValueError, match="produces images of 16×16, expected 32×32"):
        Preprocessing("resize(16)", (16, 16), (16, 16)).at_size((32, 32))
