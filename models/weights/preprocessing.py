"""The preprocessing with which weights were evaluated, and its translation for other libraries.

1. A stage writes it to preprocessing.json next to its weights; one digest seals both.
2. `for_timm` returns fields of timm's `pretrained_cfg`, `for_hf` the preprocessor_config.json of transformers. Both
   raise ValueError if the library cannot do the same, and warn if its pixels differ by more than rounding.

    resize_small(256)|central_crop(224)    resize 256, size (224, 224), interpolation "area"
    for timm                               crop_mode center, crop_pct 0.875, interpolation bilinear
    for transformers                       size {"shortest_edge": 256}, crop_size 224×224, resample 2
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

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
