"""A folder of weights: the names of its files, and those of them that are read without the tensors.

    weights.safetensors + model.json    ours: what passes from stage to stage; beside them, where they are known,
    classes.json, preprocessing.json    what the classes are called, and how evaluation made the pixels
    model.safetensors + config.json     timm, Hugging Face

Nothing here imports torch, so that a recipe is checked against the folders that it names without waiting for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.weights.preprocessing import Preprocessing

WEIGHTS = "weights.safetensors"
CONFIG = "model.json"
CLASSES = "classes.json"  # the names of the classes, a list in the order of the outputs; only where they are known
PREPROCESSING = "preprocessing.json"  # how the pixels were made that they were judged on; only where it is known
THEIR_WEIGHTS = "model.safetensors"
THEIR_CONFIG = "config.json"
THEIR_PREPROCESSOR = "preprocessor_config.json"  # of transformers; in timm's folders it is a part of config.json


def load_class_names(path: str | Path) -> tuple[str, ...]:
    """Return the class names of any supported file or directory, in the order of the outputs; none where it has none.

    They are in classes.json of ours, in `id2label` of Hugging Face's config.json, in `label_names` of timm's. Raises
    ValueError where they are no list of texts.
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
        from models.weights import hf, timm

        described = json.loads((directory / THEIR_CONFIG).read_text())
        names = hf.class_names(described) or timm.class_names(described)
    else:
        names = []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"the class names of {directory} are no list of texts")
    return tuple(names)


def load_preprocessing(path: str | Path) -> Preprocessing | None:
    """Return how the pixels were made that weights of ours were judged on; None where nothing says so.

    Raises ValueError where the file says something else than `save_weights` does.
    """
    path = Path(path)
    file = (path if path.is_dir() else path.parent) / PREPROCESSING
    if ".npz" in path.name or not file.is_file():
        return None
    fields: dict[str, Any] = {}
    try:
        # JSON has lists where the fields are tuples.
        for name, value in json.loads(file.read_text()).items():
            fields[name] = tuple(value) if isinstance(value, list) else value
        return Preprocessing(**fields)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{file} is no record of a preprocessing: {error}") from None
