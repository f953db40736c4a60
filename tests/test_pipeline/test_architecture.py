"""The model of a `model:` section, whether a stage can train it, and its image size."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import models
from data.errors import ConfigError, DataError
from models import Preprocessing
from pipeline.architecture import check_model, check_shape, model_config, preprocessing_of, trained_model
from pipeline.training_config import TrainConfig

pytestmark = pytest.mark.quick


WIDE: Any = SimpleNamespace(image_size=(32, 48), family="vit")


RESNET: Any = SimpleNamespace(image_size=(32, 48), family="bit")


@pytest.mark.parametrize(
    ("ops", "model", "size"),
    [
        (None, WIDE, None),
        ("", WIDE, None),
        ("resize((32, 48))", WIDE, None),
        ("resize(64)|central_crop((32, 48))", WIDE, None),
        ("resize(48)", WIDE, "48×48"),
        ("resize((48, 32))", WIDE, "48×32"),
        (None, RESNET, None),
        ("resize(48)", RESNET, None),
    ],
)
def test_ops_must_produce_images_of_the_models_size(ops, model, size) -> None:
    if size is None:
        check_shape(ops, model, "data.preprocess")
        return
    with pytest.raises(ConfigError, match=f"^data.preprocess: .* produces {size} images, but the model expects 32×48"):
        check_shape(ops, model, "data.preprocess")


@pytest.mark.parametrize(
    ("ops", "size", "resize", "interpolation"),
    [
        (None, (32, 48), (32, 48), "bilinear"),
        ("resize(48)", (48, 48), (48, 48), "bilinear"),
        ("resize(48, antialias=True)", (48, 48), (48, 48), "bilinear antialiased"),
        ("resize(48, antialias=False)", (48, 48), (48, 48), "bilinear"),
        ("decode|resize_tf1(48)", (48, 48), (48, 48), "bilinear of TensorFlow 1"),
        ("resize_small(64)|central_crop((32, 48))", (32, 48), 64, "area"),
        # Preprocessing without an equivalent in other libraries is recorded only as ops.
        ("central_crop(48)", (48, 48), None, "bilinear"),
        ("resize(64)|central_crop(48)|resize(32)", (32, 32), None, "bilinear"),
    ],
)
def test_preprocessing_recorded_with_exported_weights(ops, size, resize, interpolation) -> None:
    expected = Preprocessing(ops or "resize((32, 48))", size, resize, interpolation)
    assert preprocessing_of(ops, WIDE) == expected


# ------------------------------------------------------------------------ models of stages


def test_section_without_a_name_changes_the_model_of_init() -> None:
    described = model_config({"name": "mu/8", "image_size": 32, "classes": 10})
    assert described == models.config_of("mu/8", 32, 10)
    assert model_config({"image_size": 64}, described) == models.config_of("mu/8", 64, 10)
    with pytest.raises(ConfigError, match=r"model\.classes is missing: without init, a model needs"):
        model_config({"name": "mu/8", "image_size": 32})
    with pytest.raises(ConfigError, match=r"name is BiT-R50x1, so .* init \(ViT\) are not used\n  remove model\.name"):
        model_config({"name": "BiT-R50x1"}, described)
    with pytest.raises(ConfigError, match=r"no field 'units'.*\n  the weights of init determine the model, .* a ViT"):
        model_config({"units": [1, 1]}, described)


def test_classification_starts_from_the_vit_inside_a_masked_model() -> None:
    source = models.config_of("Masked-mu/8", 32, 0)
    trained = trained_model(TrainConfig(steps=1, model={"classes": 10}), source)
    assert trained.family == "vit"
    with pytest.raises(ConfigError, match="objective masked cannot train a model of family vit"):
        trained_model(TrainConfig(steps=1, objective="masked", model={"name": "mu/8", "image_size": 32, "classes": 1}))


def test_masked_prediction_starts_from_the_blocks_of_a_classifier() -> None:
    source = models.config_of("mu/8", 32, 10, registers=2, layer_scale=0.1, head_bias=-10.0, representation=12)
    trained = trained_model(TrainConfig(steps=1, objective="masked", model={"target": "pixels"}), source)
    assert trained == models.config_of("Masked-mu/8", 32, 0, registers=2, layer_scale=0.1, target="pixels")
    named = {"name": "Masked-mu/8", "image_size": 48, "registers": 2, "layer_scale": 0.1}
    larger = trained_model(TrainConfig(steps=1, objective="masked", model=named), source)
    assert larger == models.config_of("Masked-mu/8", 48, 0, registers=2, layer_scale=0.1)
    with pytest.raises(ConfigError, match=r"registers: 2 -> 0; layer_scale: 0\.1 -> None\n  remove these keys"):
        trained_model(TrainConfig(steps=1, objective="masked", model={"name": "Masked-mu/8", "image_size": 32}), source)
    with pytest.raises(
        ConfigError, match=r"init: masked prediction cannot start from these weights: models of family bit"
    ):
        trained_model(TrainConfig(steps=1, objective="masked"), models.config_of("BiT-R50x1", 32, 5))


@pytest.mark.parametrize("name", ["mu/8", "Axial-mu/8", "R26+mu/32", "Masked-mu/8", "BiT-R50x1"])
@pytest.mark.parametrize(
    ("options", "section", "bias"),
    [
        ({"new_head": True}, {"classes": 10}, 0.0),
        ({"new_head": True}, {}, 0.0),
        ({"new_head": True}, {"classes": 10, "head_bias": -2.0}, -2.0),
        ({}, {"classes": 10}, 0.0),
        ({}, {}, -10.0),  # the head is kept
    ],
)
def test_new_head_starts_with_zero_weights_and_the_bias_of_its_own_section(name, options, section, bias) -> None:
    sizes = {"units": (1,), "width": 32} if "BiT" in name else {"depth": 1}
    source = models.build(name, 64, 0 if "Masked" in name else 5, head_bias=-10.0, **sizes)
    if "Masked" in name and "classes" not in section:
        return  # a masked model has no head to keep
    weights = source.state_dict()
    if "head.weight" in weights:
        torch.nn.init.ones_(weights["head.weight"])
    cfg = TrainConfig(steps=1, model=section, **options)
    target = trained_model(cfg, source.config)
    started, _ = models.transfer(weights, source.config, target, new_head=cfg.new_head)
    assert started["head.bias"].eq(bias).all()
    assert started["head.weight"].eq(1.0 if bias == -10.0 else 0.0).all()


def test_set_with_more_classes_than_the_head_is_refused_with_the_number_to_set() -> None:
    cfg = TrainConfig(steps=1)
    model = models.config_of("mu/8", 32, 10)
    check_model(cfg, model, {"/shards/train": 10})
    with pytest.raises(
        DataError, match=r"/shards/train has labels up to 10, but the model has only 10 classes\n.*classes=11"
    ):
        check_model(cfg, model, {"/shards/train": 11})
    with pytest.raises(
        ConfigError, match=r"model\.image_size is 32×48, expected equal sides, because training crops are square"
    ):
        check_model(cfg, models.config_of("mu/8", (32, 48), 10), {})
