"""File names in a weights folder, and functions that read its small files without torch.

    weights.safetensors + model.json    our format, passed from stage to stage; optionally with
    classes.json, preprocessing.json    the class names, and the preprocessing used in evaluation
    model.safetensors + config.json     timm, Hugging Face

This module does not import torch, so a recipe can be checked quickly against the folders it names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from models.configs import HALF

WEIGHTS = "weights.safetensors"
CONFIG = "model.json"
CLASSES = "classes.json"  # class names, a list in the order of the outputs; only if they are known
PREPROCESSING = "preprocessing.json"  # how evaluation made the pixels; only if the weights were evaluated
THEIR_WEIGHTS = "model.safetensors"
THEIR_CONFIG = "config.json"
THEIR_PREPROCESSOR = "preprocessor_config.json"  # of transformers; timm stores this in config.json

FILTERS = ("lanczos", "bilinear", "bicubic")  # of Pillow


@dataclass(frozen=True)
class Preprocessing:
    """The steps that turn an image into a model's input: resize, centre crop and normalisation."""

    ops: str  # as in a recipe
    size: tuple[int, int]  # of the result, (height, width)
    resize: int | tuple[int, int] | None = None  # the shorter side; a pair squashes; None: the ops do something else
    interpolation: str = "bilinear"  # one of Pillow's filters, or a key of REMAINING in the extra
    mean: tuple[float, ...] = HALF  # of pixels from 0 to 1; with std: pixels from −1 to 1
    std: tuple[float, ...] = HALF

    def at_size(self, size: tuple[int, int]) -> Preprocessing:
        """Return the same preprocessing for another model size, keeping the same fraction of the image.

        Raises ValueError if the ops are not those written by an import.
        """
        if size == self.size:
            return self
        if self.resize is None or not self.ops.startswith("resize_pillow"):
            raise ValueError(
                f"{self.ops!r} produces images of {self.size[0]}×{self.size[1]}, expected {size[0]}×{size[1]}"
            )
        resize: int | tuple[int, int]
        if isinstance(self.resize, tuple):
            resize = (
                round(self.resize[0] * size[0] / self.size[0]),
                round(self.resize[1] * size[1] / self.size[1]),
            )
        else:
            resize = max(round(self.resize * max(size) / max(self.size)), *size)
        crop = "center_crop" if "center_crop" in self.ops else "central_crop"
        return replace(self, ops=pillow_ops(resize, self.filter, size, crop), size=size, resize=resize)

    @property
    def filter(self) -> str:
        """Return the name of the Pillow filter that is most similar to the interpolation."""
        return self.interpolation if self.interpolation in FILTERS else "bilinear"


def pillow_ops(resize: int | tuple[int, int], interpolation: str, size: tuple[int, int], crop: str) -> str:
    """Return evaluation ops with a Pillow filter and the op `crop`, because libraries round half pixels differently."""
    ops = f"resize_pillow({resize}, '{interpolation}')"
    if resize == size:
        return ops
    height, width = size
    return f"{ops}|{crop}({height if height == width else size})"


def named_filter(interpolation: str) -> str:
    """Return the name that `Preprocessing.interpolation` has for a Pillow filter, which antialiases."""
    return "bilinear antialiased" if interpolation == "bilinear" else interpolation


def foreign(module: str = "formats") -> Any:
    """Import a module for the formats of other projects, and return it; "formats" reads weights, and imports torch.

    Raises ValueError if the module is not installed.
    """
    name = f"models.extras.weights.{module}"
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(error.name or name + "."):
            raise
        raise ValueError(
            "the file is in the format of another project, and models/extras/weights, which reads it, is not in this "
            "checkout"
        ) from None


def load_class_names(path: str | Path) -> tuple[str, ...]:
    """Return the class names from any supported file or directory, in the order of the outputs; () if it has none.

    Reads our classes.json, `id2label` in a Hugging Face config.json, or `label_names` in a timm config.json. Raises
    ValueError if the names are not a list of strings.
    """
    path = Path(path)
    directory = path if path.is_dir() else path.parent
    if ".npz" in path.name:
        return ()
    if (directory / CONFIG).is_file():
        names = []
        if (directory / CLASSES).is_file():
            names = json.loads((directory / CLASSES).read_text())
    elif (directory / THEIR_CONFIG).is_file():
        names = foreign().class_names(json.loads((directory / THEIR_CONFIG).read_text()))
    else:
        names = []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"the class names of {directory} are not a list of strings")
    return tuple(names)


def load_preprocessing(path: str | Path) -> Preprocessing | None:
    """Return the preprocessing to use when weights are evaluated; None if it was not recorded.

    Reads our preprocessing.json, timm's config.json, or transformers' preprocessor_config.json; the image size is the
    size in that file. Warns if we have no ops for another library's preprocessing. Raises ValueError if our file has
    fields that `save_weights` does not write.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    if ".npz" in path.name:
        return None
    file = folder / PREPROCESSING
    if not file.is_file():
        has_their_files = (folder / THEIR_PREPROCESSOR).is_file() or (folder / THEIR_CONFIG).is_file()
        if (folder / CONFIG).is_file() or not has_their_files:
            return None
        their_preprocessing: Preprocessing | None = foreign("preprocessing").load(folder)
        return their_preprocessing
    fields: dict[str, Any] = {}
    try:
        # JSON has lists instead of tuples.
        for name, value in json.loads(file.read_text()).items():
            fields[name] = tuple(value) if isinstance(value, list) else value
        return Preprocessing(**fields)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{file} is not a valid preprocessing record: {error}") from None
