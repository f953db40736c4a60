"""Names of models, their configs, and rejected config values."""

import json

import pytest

import models
from models.configs import ViTConfig, config_of, stem_stride, to_dict

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("name", "width", "depth", "mlp", "heads"),
    [("B/16", 768, 12, 3072, 12), ("L/16", 1024, 24, 4096, 16), ("H/14", 1280, 32, 5120, 16)],
)
def test_sizes_are_those_of_table_1_of_the_paper(name, width, depth, mlp, heads):
    config = config_of(name)
    assert (config.width, config.depth, config.mlp, config.heads) == (width, depth, mlp, heads)
    assert config.patch == (int(name[2:]),) * 2


@pytest.mark.parametrize(("units", "stride"), [(None, 1), ((), 4), ((3,), 4), ((3, 4, 9), 16), ((3, 4, 6, 3), 32)])
def test_a_stem_halves_twice_and_once_for_each_stage_after_the_first(units, stride):
    assert stem_stride(units) == stride


def test_fields_of_the_caller_win_over_the_name():
    config = config_of("B/16", image_size=(96, 64), classes=7, width=192, heads=3, depth=2)
    assert (config.image_size, config.classes) == ((96, 64), 7)
    assert (config.width, config.heads, config.depth, config.mlp) == (192, 3, 2, 3072)


@pytest.mark.parametrize("name", ["B/16", "R50+L/32", "BiT-R50x1", "Axial-mu/8"])
def test_a_config_survives_json(name):
    config = config_of(name, classes=5)
    assert models.from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": 225}, "225"),
        ({"width": 770}, "770 is not a multiple"),
        ({"pool": "cls"}, "pool must be one of token, gap, map; found 'cls'"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), found 1.0"),
        ({"depth": 0}, "depth must be a whole number of at least 1, found 0"),
    ],
)
def test_impossible_model_config_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ViTConfig(**fields)


@pytest.mark.parametrize("name", ["Q/16", "B16", "B/", "R51+B/16"])
def test_unknown_name_is_refused_with_the_known_names(name):
    with pytest.raises(ValueError, match=r"did you mean|known|expected|SIZE"):
        config_of(name)
