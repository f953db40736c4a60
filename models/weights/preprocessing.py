"""How evaluation makes pixels of an image: what weights were judged with, and how other libraries are told.

1. A stage writes it beside its weights as preprocessing.json, whose digest is sealed with theirs.
2. `for_timm` returns fields of timm's `pretrained_cfg`, `for_hf` the file of an image processor of transformers. Both
   raise ValueError where the library cannot do the same, and warn where its pixels differ by more than a rounding.

    resize_small(256)|central_crop(224)    resize 256, size (224, 224), interpolation "area"
    told to timm                           crop_mode center, crop_pct 0.875, interpolation bilinear
    told to transformers                   size {"shortest_edge": 256}, crop_size 224×224, resample 2
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

# Both libraries resize by Pillow's bilinear filter, which averages where it shrinks. This is how far its pixels, from
# −1 to 1, lie from those of our filters in the mean over a photograph of 640×427 made 224 px wide (docs/models.md).
REMAINING = {
    "bilinear": 0.05,
    "bilinear antialiased": 0.0,  # the same filter; one rounds to whole numbers, the other truncates
    "bilinear of TensorFlow 1": 0.07,
    "area": 0.06,
}
BILINEAR = 2  # Pillow's number


@dataclass(frozen=True)
class Preprocessing:
    """Says how an image becomes a model's pixels: resized, its middle cut out, and normalised."""

    ops: str  # as a recipe has them
    size: tuple[int, int]  # of the result, (height, width)
    resize: int | tuple[int, int] | None = None  # the shorter side; or both, squashed; None: ops that do something else
    interpolation: str = "bilinear"  # a key of REMAINING
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # with std: pixels from −1 to 1
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def for_timm(self) -> dict[str, Any]:
        """Return the fields of `pretrained_cfg` from which timm.data.create_transform makes these pixels."""
        self.check("timm")
        height, width = self.size
        is_squashed = isinstance(self.resize, tuple)
        sides = self.resize if isinstance(self.resize, tuple) else (self.resize or 0, self.resize or 0)
        # timm resizes to floor(size / crop_pct). Where a rounding would make that a pixel less, half a pixel is added.
        crop_pct = height / sides[0]
        if math.floor(height / crop_pct) != sides[0]:
            crop_pct = height / (sides[0] + 0.5)
        resized = (math.floor(height / crop_pct), math.floor(width / crop_pct))
        if resized != sides or (height != width and not is_squashed):
            raise ValueError(
                f"timm has one crop_pct for both sides, and none makes the pixels of {self.ops!r}\n"
                "  save as safetensors, or give ops that squash both sides: --preprocess 'resize(SIZE)'"
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
        """Return the preprocessor_config.json from which transformers' AutoImageProcessor makes these pixels."""
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
            # ViT's own processor knew no crops before transformers 5.
            described["image_processor_type"] = "CLIPImageProcessor"
            described |= {"do_center_crop": True, "crop_size": {"height": height, "width": width}}
        return described

    def check(self, library: str) -> None:
        """Raise ValueError where a library cannot do the same to an image; warn where its pixels will differ."""
        if self.resize is None:
            raise ValueError(
                f"{library} resizes an image once and then cuts out its middle, {self.ops!r} does something else\n"
                "  save as safetensors, or give ops that do so: --preprocess 'resize_small(SIZE)|central_crop(SIZE)'"
            )
        remaining = REMAINING[self.interpolation]
        if remaining:
            warnings.warn(
                f"{library} resizes by another filter than {self.ops!r}: images of that size get the same pixels, "
                f"larger ones others (by {remaining} of −1 … 1 in the mean, of a photograph made 3 times smaller: "
                "docs/models.md)",
                stacklevel=4,
            )
