"""Random crop and flip for training, drawn from a sample's id, so that the pixels do not depend on the process.

How an image becomes a row of the batch:

1. Read format and size from the header; nothing is decoded yet.
2. Draw the crop box, then whether to flip. All numbers come from `draws`, whose key the decoder derives from the seed
   and the sample's id.
3. Decode only the box; JPEGs at 1/2, 1/4 or 1/8 scale if that still covers the image size.
4. Resize the pixels to the image size (bilinear, without antialiasing, as the reference does) and flip them.
5. Apply RandAugment, if enabled.

    A JPEG of height 300 and width 400, with Draws(8) and image_size 64:
        the box has y 60, x 88, height 212, width 235, and the image will be flipped
        it is decoded at 1/2 scale, to 106 × 118 pixels; at 1/4, its 53 rows would be fewer than 64
        the pixels are resized to 64 × 64, and mirrored
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar, Literal

import cv2
import numpy as np

from data.checks import at_least, more_than_0
from data.draws import Draws
from data.errors import ConfigError
from data.images.decode import Box, Header, decode_crop, decode_whole, read_header
from data.images.preprocess import resize, resize_small

ATTEMPTS = 100  # maximum attempts to draw a box, as in TensorFlow
RESIZE_BEFORE_RANDOM_CROP = "resize_small(256)"  # as an op string, for crops of 224 pixels


@dataclass(frozen=True)
class AugmentConfig:
    """Augmentation of training images."""

    # inception: random area and aspect; random: resize_small(size · 8/7), then crop; none: the whole image
    crop: Literal["inception", "random", "none"] = "inception"
    squash: int | None = None  # random: first resize to a square of this side (BiT-HyperRule: 512 for 480)
    reduced: bool = True  # decode JPEGs at 1/2, 1/4, 1/8 scale if the crop still covers the image size
    flip: bool = True  # mirror left to right with probability 1/2
    min_area: float = 0.05  # smallest crop, as a fraction of the image (Szegedy et al. 2015 and big_vision)
    min_aspect: float = 0.75  # smallest width / height of a crop (TensorFlow's default)
    max_aspect: float = 1.33  # largest width / height of a crop (TensorFlow's default)
    randaug_layers: int = 0  # RandAugment operations per image; 0 disables it (AugReg and the better baselines: 2)
    randaug_magnitude: float = 10.0  # strength of each operation, 0 to 30; 0 is not a no-op
    # shifts and cut-outs in proportion to the image, as the original's at 224 pixels; without it, shifts are
    # 10 pixels × magnitude in images of any size
    randaug_relative: bool = False

    LATER: ClassVar[tuple[str, ...]] = ("squash", "randaug_relative")  # see `pipeline.config.tagged`

    def __post_init__(self) -> None:
        more_than_0(self, "min_area min_aspect max_aspect", "augment.")
        at_least(self, 0, "randaug_layers randaug_magnitude", "augment.")
        if self.squash is not None and self.crop != "random":
            raise ConfigError(
                f"augment.squash is {self.squash}, expected null, because it has no effect with "
                f"augment.crop={self.crop}; set augment.squash=null, or augment.crop=random"
            )
        if self.min_area > 1:
            raise ConfigError(f"augment.min_area is {self.min_area}, expected at most 1 (the whole image)")
        if self.min_aspect > self.max_aspect:
            raise ConfigError(
                f"augment.min_aspect is {self.min_aspect}, expected at most augment.max_aspect, "
                f"which is {self.max_aspect}"
            )
        if self.randaug_magnitude > 30:
            raise ConfigError(f"augment.randaug_magnitude is {self.randaug_magnitude}, expected 0 to 30")


@dataclass(frozen=True)
class Encoded:
    """A row that begins with a JPEG of `bytes` bytes, which the loader decodes and crops."""

    row: int
    bytes: int
    sides: tuple[int, int]  # (height, width) in pixels
    box: Box
    flip: bool


# ----------------------------------------------------------------------------- random choices


def inception_box(height: int, width: int, draws: Draws, cfg: AugmentConfig) -> Box:
    """Draw a box like tf.image.sample_distorted_bounding_box, with uniformly distributed height, not area.

    As in the original, the last offset is never drawn, and after 100 attempts the box is the whole image.
    """
    min_pixels = cfg.min_area * height * width
    for _ in range(ATTEMPTS):
        aspect = cfg.min_aspect + draws.uniform() * (cfg.max_aspect - cfg.min_aspect)
        # Possible heights of boxes with this aspect: the area must lie between the minimum and that of the image, and
        # the width must not exceed the image's.
        low = round(sqrt(min_pixels / aspect))
        high = round(sqrt(height * width / aspect))
        if round(high * aspect) > width:
            high = int((width + 0.5 - 1e-7) / aspect)
        high = min(high, height)
        low = min(low, high)

        h = low + draws.below(high - low + 1)
        w = round(h * aspect)
        inside = 0 < h <= height and 0 < w <= width
        if inside and h * w >= min_pixels:
            # `height - h`, not one more: like the original, never draw the last offset.
            y = draws.below(height - h)
            x = draws.below(width - w)
            return Box(y, x, h, w)
    return Box(0, 0, height, width)


def draw(header: Header, draws: Draws, cfg: AugmentConfig) -> tuple[Box, bool]:
    """Draw the box of a training crop (the whole image for `crop: none`) and whether to flip it.

    If `flip` is False, no number is drawn for it.
    """
    # Always draw the box first, then the flip: another order would change the pixels for a key.
    box = Box(0, 0, header.height, header.width)
    if cfg.crop == "inception":
        box = inception_box(header.height, header.width, draws, cfg)
    return box, cfg.flip and draws.uniform() < 0.5


# ----------------------------------------------------------------------------- pixels


def augment(data: bytes, image_size: int, draws: Draws, cfg: AugmentConfig, out: np.ndarray) -> None:
    """Decode, crop, resize, flip and distort an image, and write it to `out` (image_size, image_size, 3) uint8.

    Raises BadImage if the image cannot be decoded.
    """
    header = read_header(data)
    if cfg.crop == "random":
        # Crop a square from an image whose shorter side is 8/7 of the square's: 256 for 224. The offsets depend on the
        # resized image, so the whole image must be decoded.
        if cfg.squash is None:
            resized = resize_small(decode_whole(data, header), image_size * 8 // 7)
        else:
            resized = resize(decode_whole(data, header), (cfg.squash, cfg.squash))
        height, width = resized.shape[:2]
        y = draws.below(height - image_size + 1)
        x = draws.below(width - image_size + 1)
        image = resized[y : y + image_size, x : x + image_size]
        flip = cfg.flip and draws.uniform() < 0.5
    else:
        box, flip = draw(header, draws, cfg)
        covering = image_size if cfg.reduced else 0
        image = decode_crop(data, header, box, covering)
    fit(image, flip, out)

    if cfg.randaug_layers:
        from data.optional import load_optional

        randaug = load_optional("data.extras.randaug:randaug", "augment.randaug_layers")
        out[:] = randaug(out, cfg.randaug_layers, cfg.randaug_magnitude, draws, cfg.randaug_relative)


def fit(image: np.ndarray, flip: bool, out: np.ndarray) -> None:
    """Resize `image` (h, w, 3) to the size of `out` and write it to `out`; mirror it if `flip` is True."""
    # Let OpenCV write directly into the row of the batch if possible, which saves a copy.
    height, width = out.shape[:2]
    if image.shape[:2] == (height, width):
        out[:] = image[:, ::-1] if flip else image
    elif flip:
        resized = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
        cv2.flip(resized, 1, dst=out)
    else:
        cv2.resize(image, (width, height), dst=out, interpolation=cv2.INTER_LINEAR)
