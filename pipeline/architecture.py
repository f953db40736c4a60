"""The architecture that a `model:` section describes, whether a stage can train it, and the images that it takes.

In:  {"name": "S/16", "image_size": 224, "classes": 10}, or what differs from the model of `init`
Out: a ModelConfig of the models package; ConfigError or DataError with what to type
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import models
from data.errors import ConfigError, DataError
from data.images.preprocess import both_sides, parse_ops, shape_of
from models import ModelConfig, Preprocessing
from models.configs import MaskedConfig
from pipeline.config import require
from pipeline.training_config import TrainConfig
from pipeline.values import shown


def model_config(values: Mapping[str, Any], source: ModelConfig | None = None) -> ModelConfig:
    """Return the architecture that a `model:` section describes.

    A section without a name holds only what it changes of `source`, the model of the weights that it starts from.
    Raises ConfigError with what the models package found, and where a number is none.
    """
    options = dict(values)
    try:
        if "name" not in options and source is not None:
            model = models.from_dict({**models.to_dict(source), **options})
        else:
            # A masked model has no head, whatever number of classes the set has.
            if str(options.get("name")).startswith("Masked-"):
                options["classes"] = 0
            name = options.pop("name")
            require(isinstance(name, str), f"model.name is {shown(name)}, expected one such as S/16, B/16 or R50+B/16")
            image_size = options.pop("image_size")
            classes = options.pop("classes")
            model = models.config_of(name, image_size, classes, **options)
    except KeyError as error:
        raise ConfigError(
            f"model.{error.args[0]} is missing: a model without init needs name, image_size and classes\n"
            "  for example model={name: S/16, image_size: 224, classes: 10}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"model: {error}") from None
    # A `model:` section is not typed, and YAML reads `nan` as a text, so that nothing before this would notice.
    for part in fields(model):
        if isinstance(part.default, float):
            value = getattr(model, part.name)
            is_number = isinstance(value, int | float) and math.isfinite(value)
            require(is_number, f"model.{part.name} is {value}, expected a finite number")
    return model


def trained_model(cfg: TrainConfig, source: ModelConfig | None = None) -> ModelConfig:
    """Return the architecture a stage trains; classification starts from the ViT inside a masked model.

    Raises ConfigError where it cannot have the stage's objective.
    """
    is_masked = cfg.objective == "masked"
    if isinstance(source, MaskedConfig) and not is_masked:
        # What predicts patches is no part of a classifier; the ViT inside goes on with its own config.
        source = source.vit
    if source is not None and cfg.new_head:
        source = source.with_new_head()
    model = model_config(cfg.model, source)
    require(
        (model.family == "masked") == is_masked,
        f"objective {cfg.objective} cannot train a model of family {model.family}\n"
        "  write objective: masked with model.name: Masked-B/16, or neither",
    )
    if source is not None:
        try:
            models.check_architecture(source, model)
        except ValueError as error:
            raise ConfigError(
                f"model: {error}\n  leave these keys, and the name, out of `model`: the weights of init have their own"
            ) from None
    return model


def check_model(cfg: TrainConfig, model: ModelConfig, classes: Mapping[str, int], key: str = "model") -> None:
    """Raise DataError where a set has labels that the head has no output for; training images are square.

    `classes` is the number of classes of every labelled set that is there, by its path; `key` is what a user types to
    reach the model's section.
    """
    height, width = model.image_size
    require(height == width, f"{key}.image_size is {height}×{width}, expected a square: training crops are")
    squash = cfg.data.augment.squash
    require(
        squash is None or squash >= height,
        f"data.augment.squash is {squash}, out of which {height} pixels are to be cropped\n  expected {height} or more",
    )
    cfg.check_architecture(model, key.removesuffix("model"))
    if cfg.objective == "masked":  # labels are not used
        return
    for path, number in classes.items():
        if number > model.classes:
            raise DataError(
                f"{path} has labels up to {number - 1}, the model has {model.classes} classes\n"
                f"  set {key}.classes={number}"
            )


# ------------------------------------------------------------------------ the images that a model takes


def check_shape(ops: str | None, model: ModelConfig, key: str) -> None:
    """Raise ConfigError where `ops` make images of another size than the model takes; `key` is what holds the ops."""
    if not ops or model.family == "bit":  # a ResNet takes any size
        return
    height, width, _ = shape_of(ops)
    expected_height, expected_width = model.image_size
    require(
        (height, width) == (expected_height, expected_width),
        f"{key}: {ops!r} makes images of {height}×{width}, expected the model's {expected_height}×{expected_width}\n"
        f"  type '{key}=resize(({expected_height}, {expected_width}))', or {key}=null, which is the same",
    )


# The first op of those that exports can tell other libraries of, and what models/weights/preprocessing.py calls it.
INTERPOLATIONS = {
    "resize": "bilinear",
    "resize_float": "bilinear",
    "resize_tf1": "bilinear of TensorFlow 1",
    "resize_small": "area",
}


def preprocessing_of(ops: str | None, model: ModelConfig) -> Preprocessing:
    """Return what `ops`, or evaluation's own squash where there are none, do to an image; exports tell others of it."""
    ops = ops or f"resize({model.image_size})"
    height, width, _ = shape_of(ops)
    steps: list[tuple[str, Any]] = []
    for op, arguments in parse_ops(ops):
        if op.__name__ != "unchanged":
            steps.append((op.__name__, arguments))
    names = [name for name, _ in steps]
    # Others resize once, and then cut out the middle.
    is_translatable = names[:1] != [] and names[0] in INTERPOLATIONS and names[1:] in ([], ["central_crop"])
    if not is_translatable:
        return Preprocessing(ops, (height, width))
    name, (size, *options) = steps[0]
    interpolation = INTERPOLATIONS[name]
    if True in options:
        interpolation += " antialiased"
    resize = int(size) if name == "resize_small" else both_sides(size)
    return Preprocessing(ops, (height, width), resize, interpolation)
