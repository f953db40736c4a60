"""Random crop and flip for training, drawn from a sample's identity: the same pixels whoever decodes it."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

import cv2
import numpy as np

from data.images.decode import Box, Header, decode_crop, decode_whole, read_header
from data.images.draws import Draws
from data.images.preprocess import resize_small


@dataclass(frozen=True)
class AugmentConfig:
    """What happens to a training image between its bytes and the batch."""

    # inception: of random area and aspect; random: resize_small(size · 8/7), then crop; none: the whole image
    crop: Literal["inception", "random", "none"] = "inception"
    reduced: bool = True  # decode JPEGs at 1/2, 1/4, 1/8 scale where the crop still covers the image size
    flip: bool = True  # mirror left to right with probability 1/2
    min_area: float = 0.05  # least share of the image that a crop covers (Szegedy et al. 2015 and big_vision)
    min_aspect: float = 0.75  # least width / height of a crop (TensorFlow's default)
    max_aspect: float = 1.33  # largest width / height of a crop (TensorFlow's default)
    randaug_layers: int = 0  # operations of RandAugment an image; 0 is off (AugReg and the better baselines: 2)
    randaug_magnitude: float = 10.0  # strength of every one of them, 0 to 30; 0 is not a no-op

    def __post_init__(self) -> None:
        if not (0 < self.min_area <= 1 and 0 < self.min_aspect <= self.max_aspect):
            raise ValueError(
                f"augment: min_area {self.min_area} must be in (0, 1] and "
                f"0 < min_aspect {self.min_aspect} ≤ max_aspect {self.max_aspect}"
            )
        if self.randaug_layers < 0 or not 0 <= self.randaug_magnitude <= 30:
            raise ValueError(
                f"augment: randaug_layers {self.randaug_layers} must be 0 (off) or more and "
                f"randaug_magnitude {self.randaug_magnitude} in 0 … 30"
            )


def inception_box(height: int, width: int, draws: Draws, cfg: AugmentConfig) -> Box:
    """(y, x, h, w) as tf.image.sample_distorted_bounding_box draws it: height is uniform, not area.

    The last offset is never drawn, as in the original; after 100 attempts it is the whole image.
    """
    for _ in range(100):
        aspect = cfg.min_aspect + draws.uniform() * (cfg.max_aspect - cfg.min_aspect)
        low = round(sqrt(cfg.min_area * height * width / aspect))
        high = round(sqrt(height * width / aspect))
        if round(high * aspect) > width:  # the tallest box of this aspect that the width allows
            high = int((width + 0.5 - 1e-7) / aspect)
        high = min(high, height)
        h = min(low, high) + draws.below(high - min(low, high) + 1)
        w = round(h * aspect)
        if 0 < h <= height and 0 < w <= width and h * w >= cfg.min_area * height * width:
            return draws.below(height - h), draws.below(width - w), h, w
    return 0, 0, height, width


def draw(header: Header, draws: Draws, cfg: AugmentConfig) -> tuple[Box, bool]:
    """The box of a training crop (all of the image for `crop: none`), and whether to flip it."""
    box = (0, 0, header.height, header.width)
    if cfg.crop == "inception":
        box = inception_box(header.height, header.width, draws, cfg)
    return box, cfg.flip and draws.uniform() < 0.5


def augment(data: bytes, image_size: int, draws: Draws, cfg: AugmentConfig, out: np.ndarray) -> None:
    """Decode, crop, resize, flip and distort into `out` (image_size, image_size, 3) uint8; raises BadImage."""
    header = read_header(data)
    if cfg.crop == "random":
        image = resize_small(decode_whole(data), image_size * 8 // 7)
        y, x = draws.below(image.shape[0] - image_size + 1), draws.below(image.shape[1] - image_size + 1)
        image = image[y : y + image_size, x : x + image_size]
        flip = cfg.flip and draws.uniform() < 0.5
    else:
        box, flip = draw(header, draws, cfg)
        image = decode_crop(data, header, box, image_size if cfg.reduced else 0)
    if image.shape[:2] == out.shape[:2]:
        out[:] = image[:, ::-1] if flip else image
    elif flip:
        cv2.flip(cv2.resize(image, out.shape[1::-1], interpolation=cv2.INTER_LINEAR), 1, dst=out)
    else:
        cv2.resize(image, out.shape[1::-1], dst=out, interpolation=cv2.INTER_LINEAR)
    if cfg.randaug_layers:
        from data.images.randaug import randaug  # Pillow, which nothing else here needs

        out[:] = randaug(out, cfg.randaug_layers, cfg.randaug_magnitude, draws)
