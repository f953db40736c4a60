"""Image preprocessing for evaluation in the formats of timm and transformers.

1. `from_timm` and `from_hf` read another library's preprocessing, which an import records with the weights.
2. `for_timm` returns fields for timm's `pretrained_cfg`, `for_hf` a preprocessor_config.json for transformers. Both
   raise ValueError if the library cannot do the same, and warn if its pixels differ by more than rounding.

    resize_small(256)|central_crop(224)    resize 256, size (224, 224), interpolation "area"
    for timm                               crop_mode center, crop_pct 0.875, interpolation bilinear
    for transformers                       size {"shortest_edge": 256}, crop_size 224×224, resample 2

    crop_pct 0.875, interpolation bicubic  resize_pillow(256, 'bicubic')|center_crop(224)
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from models import checks
from models.configs import HALF
from models.weights.folder import THEIR_CONFIG, THEIR_PREPROCESSOR, Preprocessing, named_filter, pillow_ops

# Both libraries resize with Pillow's bilinear filter, which antialiases when it shrinks. These are the mean differences
# of its pixels, from −1 to 1, to ours for a photograph of 640×427 shrunk to a width of 224 (docs/models.md).
REMAINING = {
    "bilinear": 0.05,
    "bilinear antialiased": 0.0,  # the same filter; one rounds to integers, the other truncates
    "bilinear of TensorFlow 1": 0.07,
    "area": 0.06,
    "bicubic": 0.0,  # Pillow's own, as the next
    "lanczos": 0.0,
}
RESAMPLE = {"lanczos": 1, "bilinear": 2, "bicubic": 3}  # Pillow's codes; all other kinds are written as bilinear
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# The values that an image processor of transformers has for fields that its file lacks: kind of the processor without
# "ImageProcessor", mean, std, filter, whether a single number as `size` means both sides, and default size and crop.
HF_PROCESSORS: dict[str, tuple[tuple[float, ...], tuple[float, ...], str, bool, int, int | None]] = {
    "ViT": (HALF, HALF, "bilinear", True, 224, None),
    "CLIP": (CLIP_MEAN, CLIP_STD, "bicubic", False, 224, 224),
    "Bit": (CLIP_MEAN, CLIP_STD, "bicubic", False, 224, 224),  # DINOv2
    "Siglip": (HALF, HALF, "bicubic", True, 224, None),
    "DeiT": (HALF, HALF, "bicubic", True, 256, 224),
    "Beit": (HALF, HALF, "bicubic", True, 224, None),
    "DINOv3ViT": (IMAGENET_MEAN, IMAGENET_STD, "bilinear", True, 224, None),
}


def load(folder: Path) -> Preprocessing | None:
    """Return the preprocessing recorded in a timm or transformers folder; warn and return None if no ops match."""
    try:
        if (folder / THEIR_PREPROCESSOR).is_file():
            return from_hf(json.loads((folder / THEIR_PREPROCESSOR).read_text()))
        if not (folder / THEIR_CONFIG).is_file():
            return None
        described = json.loads((folder / THEIR_CONFIG).read_text())
        evaluated = described.get("pretrained_cfg")
        if not evaluated:
            return None
        size = described.get("model_args", {}).get("img_size") or evaluated["input_size"][1:]
        return from_timm(evaluated, checks.pair("img_size", size))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"the preprocessing of {folder} is not used: {error}", stacklevel=3)
        return None


def from_timm(described: Mapping[str, Any], size: tuple[int, int]) -> Preprocessing:
    """Return the preprocessing that timm.data.create_transform applies for these `pretrained_cfg` fields.

    `size` is the image size. Raises ValueError if we have no ops for this preprocessing.
    """
    # timm's own defaults for missing fields.
    crop_pct = described.get("crop_pct") or 0.875
    mode = described.get("crop_mode") or "center"
    interpolation = described.get("interpolation") or "bicubic"
    if interpolation == "random":
        interpolation = "bilinear"
    sides = (math.floor(size[0] / crop_pct), math.floor(size[1] / crop_pct))
    if interpolation not in RESAMPLE or mode not in ("center", "squash") or crop_pct > 1:
        raise ValueError(
            f"timm evaluates this model with crop_mode {mode}, crop_pct {crop_pct} and {interpolation} "
            "interpolation, expected crop_mode center or squash, crop_pct of at most 1, and one of "
            f"{', '.join(RESAMPLE)}"
        )
    resize: int | tuple[int, int] = sides
    if mode == "center":
        if sides[0] != sides[1]:
            raise ValueError(
                f"timm evaluates this model with a centre crop of {size[0]}×{size[1]}, but only square crops are "
                "supported"
            )
        resize = sides[0]
    mean = described.get("mean") or IMAGENET_MEAN
    std = described.get("std") or IMAGENET_STD
    return by_pillow(resize, interpolation, size, "center_crop", mean, std)


def from_hf(described: Mapping[str, Any]) -> Preprocessing:
    """Return the preprocessing that transformers applies for the contents of a preprocessor_config.json.

    Raises ValueError if we have no ops for this preprocessing.
    """
    kind = described.get("image_processor_type") or described.get("feature_extractor_type") or ""
    name = kind.removesuffix("Fast").removesuffix("Pil").removesuffix("ImageProcessor")
    name = name.removesuffix("FeatureExtractor")
    if name not in HF_PROCESSORS:
        raise ValueError(
            f"{kind or 'an unnamed image processor'} is not supported; expected one of {', '.join(HF_PROCESSORS)}"
        )
    mean, std, interpolation, is_square, default_size, default_crop = HF_PROCESSORS[name]
    if not described.get("do_resize", True) or not described.get("do_rescale", True):
        raise ValueError("do_resize or do_rescale is false, expected true for both")
    if abs(described.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise ValueError(f"rescale_factor is {described['rescale_factor']}, expected 1/255")
    codes = {code: filter for filter, code in RESAMPLE.items()}
    if described.get("resample") is not None:
        code = described["resample"]
        if code not in codes:
            raise ValueError(
                f"resample is {code}, expected the number of one of Pillow's filters {', '.join(RESAMPLE)}"
            )
        interpolation = codes[code]
    resize = hf_size(described.get("size", default_size), is_square)
    crops = described.get("do_center_crop", default_crop is not None)
    size = resize
    if crops:
        size = hf_size(described.get("crop_size", default_crop or default_size), True)
    if not isinstance(size, tuple):
        raise ValueError(
            f"images are resized to a shorter side of {size} without a crop, so their sizes differ; expected a "
            "centre crop"
        )
    smallest = resize if isinstance(resize, tuple) else (resize, resize)
    if smallest[0] < size[0] or smallest[1] < size[1]:
        raise ValueError(
            f"images of {smallest[0]}×{smallest[1]} are padded to {size[0]}×{size[1]}, but padding is not supported"
        )
    mean = described.get("image_mean") or mean
    std = described.get("image_std") or std
    if not described.get("do_normalize", True):
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return by_pillow(resize, interpolation, size, "central_crop", mean, std)


def by_pillow(
    resize: int | tuple[int, int],
    interpolation: str,
    size: tuple[int, int],
    crop: str,
    mean: Iterable[float],
    std: Iterable[float],
) -> Preprocessing:
    """Return the preprocessing that resizes with a Pillow filter, crops to `size` with `crop`, and normalises."""
    ops = pillow_ops(resize, interpolation, size, crop)
    return Preprocessing(ops, size, resize, named_filter(interpolation), tuple(mean), tuple(std))


def for_timm(preprocessing: Preprocessing) -> dict[str, Any]:
    """Return the `pretrained_cfg` fields with which timm.data.create_transform produces the same pixels."""
    check(preprocessing, "timm")
    height, width = preprocessing.size
    resize = preprocessing.resize
    is_squashed = isinstance(resize, tuple)
    sides = resize if isinstance(resize, tuple) else (resize or 0, resize or 0)
    # timm resizes to floor(size / crop_pct). If rounding makes that one pixel too small, add half a pixel.
    crop_pct = height / sides[0]
    if math.floor(height / crop_pct) != sides[0]:
        crop_pct = height / (sides[0] + 0.5)
    resized = (math.floor(height / crop_pct), math.floor(width / crop_pct))
    if resized != sides or (height != width and not is_squashed):
        raise ValueError(
            f"timm uses the same crop_pct for both sides, and no crop_pct reproduces {preprocessing.ops!r}\n"
            "  save as safetensors, or use ops that squash both sides: --preprocess 'resize(SIZE)'"
        )
    return {
        "input_size": [3, height, width],
        "interpolation": preprocessing.filter,
        "crop_mode": "squash" if is_squashed else "center",
        "crop_pct": crop_pct,
        "mean": list(preprocessing.mean),
        "std": list(preprocessing.std),
    }


def for_hf(preprocessing: Preprocessing) -> dict[str, Any]:
    """Return the preprocessor_config.json with which transformers' AutoImageProcessor produces the same pixels."""
    check(preprocessing, "transformers")
    height, width = preprocessing.size
    size = {"shortest_edge": preprocessing.resize}
    if isinstance(preprocessing.resize, tuple):
        size = {"height": preprocessing.resize[0], "width": preprocessing.resize[1]}
    described = {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": size,
        "resample": RESAMPLE[preprocessing.filter],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
    }
    if preprocessing.resize != preprocessing.size:
        # ViTImageProcessor could not crop before transformers 5.
        described["image_processor_type"] = "CLIPImageProcessor"
        described |= {"do_center_crop": True, "crop_size": {"height": height, "width": width}}
    return described


def check(preprocessing: Preprocessing, library: str) -> None:
    """Raise ValueError if a library cannot do the same preprocessing; warn if its output pixels will differ."""
    if preprocessing.resize is None:
        raise ValueError(
            f"{library} resizes an image once and then crops its centre, but {preprocessing.ops!r} does not\n"
            "  save as safetensors, or use ops that do: --preprocess 'resize_small(SIZE)|central_crop(SIZE)'"
        )
    remaining = REMAINING[preprocessing.interpolation]
    if remaining:
        warnings.warn(
            f"{library} resizes with a different filter than {preprocessing.ops!r}: images of that size get the same "
            f"pixels, larger images differ (by {remaining} of −1 … 1 on average for a photograph shrunk 3 times: "
            "docs/models.md)",
            stacklevel=4,
        )


def hf_size(size: Any, is_square: bool) -> int | tuple[int, int]:
    """Return a transformers `size` as a pair, or as a number if it is the length of the shorter side."""
    if isinstance(size, int):
        return (size, size) if is_square else size
    if isinstance(size, list | tuple) and len(size) == 2:
        return (int(size[0]), int(size[1]))
    if isinstance(size, Mapping) and set(size) == {"shortest_edge"}:
        return int(size["shortest_edge"])
    if isinstance(size, Mapping) and set(size) == {"height", "width"}:
        return (int(size["height"]), int(size["width"]))
    raise ValueError(
        f"the image size {size!r} is not supported; expected a number, (height, width), or a shortest_edge"
    )
