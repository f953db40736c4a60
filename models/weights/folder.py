"""File names in a folder of weights, and readers of the small files, which need no torch.

    weights.safetensors + model.json    our format, passed from stage to stage; optionally with
    classes.json, preprocessing.json    the class names, and the preprocessing used in evaluation
    model.safetensors + config.json     timm, Hugging Face

`Preprocessing` is the preprocessing with which weights were evaluated; one digest seals its file and the weights.
`for_timm` returns fields of timm's `pretrained_cfg`, `for_hf` the preprocessor_config.json of transformers. Both raise
ValueError if the library cannot do the same, and warn if its pixels differ by more than rounding.

    resize_small(256)|central_crop(224)    resize 256, size (224, 224), interpolation "area"
    for timm                               crop_mode center, crop_pct 0.875, interpolation bilinear
    for transformers                       size {"shortest_edge": 256}, crop_size 224×224, resample 2

This module does not import torch, so a recipe can be checked quickly against the folders it names.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WEIGHTS = "weights.safetensors"
CONFIG = "model.json"
CLASSES = "classes.json"  # class names, a list in the order of the outputs; only if they are known
PREPROCESSING = "preprocessing.json"  # how evaluation made the pixels; only if the weights were evaluated
THEIR_WEIGHTS = "model.safetensors"
THEIR_CONFIG = "config.json"
UNNAMED = "LABEL_{}"  # how transformers names a class without a name
THEIR_PREPROCESSOR = "preprocessor_config.json"  # of transformers; timm stores this in config.json

# Both libraries resize with Pillow's bilinear filter, which antialiases when it shrinks. These are the mean differences
# of its pixels, from −1 to 1, to ours for a photograph of 640×427 shrunk to a width of 224 (docs/models.md).
REMAINING = {
    "bilinear": 0.05,
    "bilinear antialiased": 0.0,  # the same filter; one rounds to integers, the other truncates
    "bilinear of TensorFlow 1": 0.07,
    "area": 0.06,
}
BILINEAR = 2  # Pillow's code


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes a model's input: resized, cropped at its centre, and normalised."""

    ops: str  # as in a recipe
    size: tuple[int, int]  # of the result, (height, width)
    resize: int | tuple[int, int] | None = None  # the shorter side; a pair squashes; None: the ops do something else
    interpolation: str = "bilinear"  # a key of REMAINING
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # with std: pixels from −1 to 1
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def for_timm(self) -> dict[str, Any]:
        """Return the fields of `pretrained_cfg` with which timm.data.create_transform makes the same pixels."""
        self.check("timm")
        height, width = self.size
        is_squashed = isinstance(self.resize, tuple)
        sides = self.resize if isinstance(self.resize, tuple) else (self.resize or 0, self.resize or 0)
        # timm resizes to floor(size / crop_pct). If rounding makes that one pixel too small, add half a pixel.
        crop_pct = height / sides[0]
        if math.floor(height / crop_pct) != sides[0]:
            crop_pct = height / (sides[0] + 0.5)
        resized = (math.floor(height / crop_pct), math.floor(width / crop_pct))
        if resized != sides or (height != width and not is_squashed):
            raise ValueError(
                f"timm has one crop_pct for both sides, and no value gives the pixels of {self.ops!r}\n"
                "  save as safetensors, or use ops that squash both sides: --preprocess 'resize(SIZE)'"
            )
        return {
            "input_size": [3, height, width],
            "interpolation": "bilinear",
            "crop_mode": "squash" if is_squashed else "center",
            "crop_pct": crop_pct,
            "mean": list(self.mean),
            "std": list(self.std),
        }

    def for_hf(self) -> dict[str, Any]:
        """Return the preprocessor_config.json with which transformers' AutoImageProcessor makes the same pixels."""
        self.check("transformers")
        height, width = self.size
        size = {"shortest_edge": self.resize}
        if isinstance(self.resize, tuple):
            size = {"height": self.resize[0], "width": self.resize[1]}
        described = {
            "image_processor_type": "ViTImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": size,
            "resample": BILINEAR,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }
        if self.resize != self.size:
            # ViTImageProcessor could not crop before transformers 5.
            described["image_processor_type"] = "CLIPImageProcessor"
            described |= {"do_center_crop": True, "crop_size": {"height": height, "width": width}}
        return described

    def check(self, library: str) -> None:
        """Raise ValueError if a library cannot do the same preprocessing; warn if its pixels will differ."""
        if self.resize is None:
            raise ValueError(
                f"{library} resizes an image once and then crops its centre, but {self.ops!r} does something else\n"
                "  save as safetensors, or use such ops: --preprocess 'resize_small(SIZE)|central_crop(SIZE)'"
            )
        remaining = REMAINING[self.interpolation]
        if remaining:
            warnings.warn(
                f"{library} resizes with another filter than {self.ops!r}: images of that size get the same pixels, "
                f"larger images differ (by {remaining} of −1 … 1 on average for a photograph shrunk 3 times: "
                "docs/models.md)",
                stacklevel=4,
            )


def load_class_names(path: str | Path) -> tuple[str, ...]:
    """Return the class names of any supported file or directory, in the order of the outputs; () if it has none.

    Reads our classes.json, `id2label` of Hugging Face's config.json, or `label_names` of timm's. Raises ValueError if
    they are not a list of strings.
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
        described = json.loads((directory / THEIR_CONFIG).read_text())
        names = class_names_of_hf(described) or class_names_of_timm(described)
    else:
        names = []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"the class names of {directory} are not a list of strings")
    return tuple(names)


def class_names_of_hf(described: dict[str, Any]) -> list[str]:
    """Return the class names of transformers' config.json in the order of the outputs, [] if they are placeholders."""
    names: list[str] = []
    try:
        # JSON keys are strings; a complete table is numbered from 0 without gaps.
        for number, name in sorted((int(number), name) for number, name in described.get("id2label", {}).items()):
            if number != len(names) or name == UNNAMED.format(number):
                break
            names.append(name)
    except (ValueError, AttributeError, TypeError):
        return []
    return names


def class_names_of_timm(described: dict[str, Any]) -> list[str]:
    """Return the class names of timm's config.json, in the order of the outputs, if timm itself would use them."""
    names = described.get("label_names") or described.get("pretrained_cfg", {}).get("label_names") or []
    # timm writes a dict if class numbers are missing; the position of a name then means nothing.
    return list(names) if isinstance(names, list) else []


def load_preprocessing(path: str | Path) -> Preprocessing | None:
    """Return the preprocessing with which weights in our format were evaluated; None if it was not recorded.

    Raises ValueError if the file has other fields than `save_weights` writes.
    """
    path = Path(path)
    file = (path if path.is_dir() else path.parent) / PREPROCESSING
    if ".npz" in path.name or not file.is_file():
        return None
    fields: dict[str, Any] = {}
    try:
        # JSON has lists instead of tuples.
        for name, value in json.loads(file.read_text()).items():
            fields[name] = tuple(value) if isinstance(value, list) else value
        return Preprocessing(**fields)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{file} is not a valid record of a preprocessing: {error}") from None
