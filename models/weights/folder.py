"""File names in a weights folder, and functions that read its small files without torch.

    weights.safetensors + model.json    our format, passed from stage to stage; optionally with
    classes.json, preprocessing.json    the class names, and the preprocessing used in evaluation
    model.safetensors + config.json     timm, Hugging Face

This module does not import torch, so a recipe can be checked quickly against the folders it names.
"""

from __future__ import annotations

import json
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from models import checks
from models.weights.preprocessing import Preprocessing

WEIGHTS = "weights.safetensors"
CONFIG = "model.json"
CLASSES = "classes.json"  # class names, a list in the order of the outputs; only if they are known
PREPROCESSING = "preprocessing.json"  # how evaluation made the pixels; only if the weights were evaluated
THEIR_WEIGHTS = "model.safetensors"
THEIR_CONFIG = "config.json"
THEIR_PREPROCESSOR = "preprocessor_config.json"  # of transformers; timm stores this in config.json


def foreign() -> Any:
    """Import torch and the module that reads and writes the formats of other projects, and return the module.

    Raises ValueError if the module is not installed.
    """
    name = "models.extras.weights.formats"
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
    if not (folder / CONFIG).is_file() and not file.is_file():
        return load_foreign_preprocessing(folder)
    if not file.is_file():
        return None
    fields: dict[str, Any] = {}
    try:
        # JSON has lists instead of tuples.
        for name, value in json.loads(file.read_text()).items():
            fields[name] = tuple(value) if isinstance(value, list) else value
        return Preprocessing(**fields)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{file} is not a valid preprocessing record: {error}") from None


def load_foreign_preprocessing(folder: Path) -> Preprocessing | None:
    """Return the preprocessing recorded in a timm or transformers folder; warn and return None if no ops match."""
    try:
        if (folder / THEIR_PREPROCESSOR).is_file():
            return Preprocessing.from_hf(json.loads((folder / THEIR_PREPROCESSOR).read_text()))
        if not (folder / THEIR_CONFIG).is_file():
            return None
        described = json.loads((folder / THEIR_CONFIG).read_text())
        evaluated = described.get("pretrained_cfg")
        if not evaluated:
            return None
        size = described.get("model_args", {}).get("img_size") or evaluated["input_size"][1:]
        return Preprocessing.from_timm(evaluated, checks.pair("img_size", size))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"the preprocessing of {folder} is not used: {error}", stacklevel=3)
        return None
