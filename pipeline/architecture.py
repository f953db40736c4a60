"""Turns a recipe's `model:` section into a model config, and checks that a stage can train it on the given data.

In:  {"name": "S/16", "image_size": 224, "classes": 10}, or only the keys that differ from the model of `init`
Out: a ModelConfig of the models package; ConfigError or DataError if the section is invalid
"""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import models
from data.errors import ConfigError, DataError
from data.images.preprocess import both_sides, parse_ops, shape_of
from models import ModelConfig, Preprocessing
from models.configs import MaskedConfig, ViTConfig
from models.weights.folder import named_filter
from pipeline.config import require
from pipeline.training_config import TrainConfig
from pipeline.values import shown


def model_config(values: Mapping[str, Any], source: ModelConfig | None = None) -> ModelConfig:
    """Build the model config for a recipe's `model:` section.

    A section without a name only overrides keys of `source`, the config of the initial weights. Raises ConfigError if
    the models package rejects the section or if a number is not finite.
    """
    options = dict(values)
    try:
        if "name" not in options and source is not None:
            model = models.from_dict({**models.to_dict(source), **options})
        else:
            # A masked model has no classification head and ignores the number of classes.
            if str(options.get("name")).startswith("Masked-"):
                options["classes"] = 0
            name = options.pop("name")
            require(isinstance(name, str), f"model.name is {shown(name)}, expected a name like S/16, B/16 or R50+B/16")
            image_size = options.pop("image_size")
            classes = options.pop("classes")
            model = models.config_of(name, image_size, classes, **options)
    except KeyError as error:
        if source is not None:
            raise ConfigError(
                f"model.{error.args[0]} is missing: model.name is {shown(values['name'])}, so the keys of the weights "
                f"of init ({source.label}) are not used\n"
                "  remove model.name, because the weights of init determine the model"
            ) from None
        raise ConfigError(
            f"model.{error.args[0]} is missing: without init, a model needs name, image_size and classes\n"
            "  for example model={name: S/16, image_size: 224, classes: 10}"
        ) from None
    except ValueError as error:
        text = f"model: {error}"
        if "has no field" in text and "name" not in values and source is not None:
            text += f"\n  the weights of init determine the model, which is a {source.label}"
        raise ConfigError(text) from None
    # A `model:` section is untyped, and YAML parses `nan` as a string, so no earlier check rejects it.
    for part in fields(model):
        if isinstance(part.default, float):
            value = getattr(model, part.name)
            is_number = isinstance(value, int | float) and math.isfinite(value)
            require(is_number, f"model.{part.name} is {value}, expected a finite number")
    return model


def trained_model(cfg: TrainConfig, source: ModelConfig | None = None) -> ModelConfig:
    """Return the config of the model that a stage trains, given the config of its initial weights (`source`).

    A classifier initialised from a masked model uses that model's ViT, and a masked model may start from a plain ViT.
    A new head starts with zero bias (SPEC 1.5) unless the stage's own `model` section sets `head_bias`.

    Raises ConfigError if the stage's objective cannot train this model.
    """
    is_masked = cfg.objective == "masked"
    if isinstance(source, MaskedConfig) and not is_masked:
        # A classifier has no patch predictor: use the config of the ViT inside the masked model.
        source = source.vit
    if source is not None and cfg.new_head:
        source = source.with_new_head()
    base = source
    if source is not None and is_masked:
        try:
            base = MaskedConfig.around(source)
        except ValueError as error:
            raise ConfigError(f"init: {error}\n  set init to weights of such a model, or remove it") from None
    model = model_config(cfg.model, base)
    require(
        (model.family == "masked") == is_masked,
        f"objective {cfg.objective} cannot train a model of family {model.family}\n"
        "  objective=masked requires a masked model, such as model.name=Masked-B/16; other objectives require another "
        "model",
    )
    if source is not None:
        try:
            models.check_architecture(source, model)
        except ValueError as error:
            raise ConfigError(
                f"model: {error}\n"
                "  remove these keys and the name from `model`, because the weights of init determine them"
            ) from None
        # The bias of the initial weights, for example −10, only suits their classes and loss.
        if "head_bias" not in cfg.model and not models.keeps_head(source, model, cfg.new_head):
            model = replace(model, head_bias=0.0)
    return model


def check_model(cfg: TrainConfig, model: ModelConfig, classes: Mapping[str, int], key: str = "model") -> None:
    """Raise DataError if a data set has more classes than the model's head; raise ConfigError for non-square images.

    `classes` maps the path of each existing labelled data set to its number of classes. `key` is the dotted path of
    the model's section, used in messages.
    """
    height, width = model.image_size
    require(
        height == width,
        f"{key}.image_size is {height}×{width}, expected equal sides, because training crops are square",
    )
    squash = cfg.data.augment.squash
    require(
        squash is None or squash >= height,
        f"data.augment.squash is {squash}, which is less than the crop size of {height} pixels\n"
        f"  expected {height} or more",
    )
    cfg.check_architecture(model, key.removesuffix("model"))
    if cfg.objective == "masked":  # this objective ignores labels
        return
    for path, number in classes.items():
        if number > model.classes:
            raise DataError(
                f"{path} has labels up to {number - 1}, but the model has only {model.classes} classes\n"
                f"  set {key}.classes={number}"
            )


# ------------------------------------------------------------------------ the model's input images


def check_shape(ops: str | None, model: ModelConfig, key: str) -> None:
    """Raise ConfigError unless the preprocessing `ops` produce images of the model's size; `key` is the config key."""
    if not ops or model.family == "bit":  # a ResNet accepts any size
        return
    height, width, _ = shape_of(ops)
    expected_height, expected_width = model.image_size
    require(
        (height, width) == (expected_height, expected_width),
        f"{key}: {ops!r} produces {height}×{width} images, but the model expects {expected_height}×{expected_width}\n"
        f"  set '{key}=resize(({expected_height}, {expected_width}))', or {key}=null, which does the same",
    )


# Resize ops with an equivalent in other libraries, and its name in models/extras/weights/preprocessing.py.
INTERPOLATIONS = {
    "resize": "bilinear",
    "resize_float": "bilinear",
    "resize_tf1": "bilinear of TensorFlow 1",
    "resize_small": "area",
}


def preprocessing_of(ops: str | None, model: ModelConfig) -> Preprocessing:
    """Return the preprocessing to record with exported weights: `ops`, or by default a resize to the model's size."""
    ops = ops or f"resize({model.image_size})"
    height, width, _ = shape_of(ops)
    steps: list[tuple[str, Any]] = []
    for op, arguments in parse_ops(ops):
        if op.__name__ != "unchanged":
            steps.append((op.__name__, arguments))
    names = [name for name, _ in steps]
    # Other libraries resize once and then crop the centre.
    is_first_known = names[:1] == ["resize_pillow"] or (names[:1] != [] and names[0] in INTERPOLATIONS)
    is_translatable = is_first_known and names[1:] in ([], ["central_crop"], ["center_crop"])
    recorded = Preprocessing(ops, (height, width))
    if is_translatable:
        name, (size, *options) = steps[0]
        is_pillow = name == "resize_pillow"
        interpolation = named_filter(str(options[0])) if is_pillow else INTERPOLATIONS[name]
        if True in options:
            interpolation += " antialiased"
        keeps_aspect = name == "resize_small" or (is_pillow and not isinstance(size, tuple))
        resize = int(size) if keeps_aspect else both_sides(size)
        recorded = replace(recorded, resize=resize, interpolation=interpolation)
    if isinstance(model, ViTConfig):
        recorded = replace(recorded, mean=model.pixel_mean, std=model.pixel_std)
    return recorded
