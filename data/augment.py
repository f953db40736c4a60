"""Random crop and flip for training, drawn from a sample's identity: the same pixels whoever decodes it."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

import cv2
import numpy as np

from data.decode import Box, decode_crop, decode_whole, read_header
from data.preprocess import resize_small

MASK = (1 << 64) - 1


@dataclass(frozen=True)
class AugmentConfig:
    """What happens to a training image between its bytes and the batch."""

    crop: Literal["inception", "random", "none"] = "inception"  # random: resize_small(size · 8/7), then crop
    reduced: bool = True  # decode JPEGs at 1/2, 1/4, 1/8 scale where the crop still covers the image size
    flip: bool = True  # left to right, with probability 1/2
    min_area: float = 0.05  # of the image; Szegedy et al. 2015 and big_vision
    min_aspect: float = 0.75  # width / height, TensorFlow's defaults
    max_aspect: float = 1.33

    def __post_init__(self) -> None:
        if not (0 < self.min_area <= 1 and 0 < self.min_aspect <= self.max_aspect):
            raise ValueError(
                f"augment: min_area {self.min_area} must be in (0, 1] and "
                f"0 < min_aspect {self.min_aspect} ≤ max_aspect {self.max_aspect}"
            )


class Draws:
    """Random numbers by counter from a key (SplitMix64), the same on every machine and version."""

    def __init__(self, key: int):
        self.state = key

    def uniform(self) -> float:
        """A number in [0, 1)."""
        self.state = x = (self.state + 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return ((x ^ (x >> 31)) >> 11) * 2.0**-53

    def below(self, n: int) -> int:
        """A whole number in 0 … n−1 (0 where n is 0)."""
        return int(self.uniform() * n)


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


def augment(data: bytes, image_size: int, draws: Draws, cfg: AugmentConfig, out: np.ndarray) -> None:
    """Decode, crop, resize and flip into `out` (image_size, image_size, 3) uint8; raises BadImage."""
    header = read_header(data)
    if cfg.crop == "random":
        image = resize_small(decode_whole(data), image_size * 8 // 7)
        y, x = draws.below(image.shape[0] - image_size + 1), draws.below(image.shape[1] - image_size + 1)
        image = image[y : y + image_size, x : x + image_size]
    else:
        box = (0, 0, header.height, header.width)
        if cfg.crop == "inception":
            box = inception_box(header.height, header.width, draws, cfg)
        image = decode_crop(data, header, box, image_size if cfg.reduced else 0)
    flip = cfg.flip and draws.uniform() < 0.5
    if image.shape[:2] == out.shape[:2]:
        out[:] = image[:, ::-1] if flip else image
    elif flip:
        cv2.flip(cv2.resize(image, out.shape[1::-1], interpolation=cv2.INTER_LINEAR), 1, dst=out)
    else:
        cv2.resize(image, out.shape[1::-1], dst=out, interpolation=cv2.INTER_LINEAR)
