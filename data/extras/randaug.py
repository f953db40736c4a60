"""RandAugment as in big_vision (SPEC 2.6; its pp/archive/autoaugment.py), with Pillow's operations.

Identity is not among the sixteen operations. Each layer always applies one of them; all use the same magnitude.
The original reimplements Pillow's operations in TensorFlow; it truncates smoothed and grey values, which Pillow rounds.
Magnitude 0 is not a no-op: it posterises to one bit, solarises everything and removes nine tenths of the colour.

The original shifts and cuts out by pixels, for any image size: at magnitude 10, a shift by 100 pixels leaves nothing of
an image of 32. With `relative`, both are in proportion to the image, and equal to the original's at 224 pixels, where
the shift is 0.45 of the image, as in timm.

    randaug(image, layers=2, magnitude=10, draws) draws an operation, such as ShearX, then its direction, and shears by
    0.3; then it draws the second operation, such as Color, and applies it at 1.9.
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from data.draws import Draws

ORIGINAL_SIZE = 224  # height and width of the original's training images
FILL = (128, 128, 128)  # colour of pixels from outside the image, and of the cut-out square
OPERATIONS = (  # in the original's order, on which the random choice depends
    "AutoContrast",
    "Equalize",
    "Invert",
    "Rotate",
    "Posterize",
    "Solarize",
    "Color",
    "Contrast",
    "Brightness",
    "Sharpness",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Cutout",
    "SolarizeAdd",
)


def randaug(image: np.ndarray, layers: int, magnitude: float, draws: Draws, relative: bool = False) -> np.ndarray:
    """Apply `layers` random operations at `magnitude` (10 is the usual full strength); return (H, W, 3) uint8."""
    scale = 1.0
    if relative:
        scale = min(image.shape[:2]) / ORIGINAL_SIZE
    # One random number selects the operation; its own numbers follow. The order of draws determines the result.
    picture = Image.fromarray(image)
    for _ in range(layers):
        operation = OPERATIONS[draws.below(len(OPERATIONS))]
        picture = distort(operation, picture, magnitude / 10, draws, scale)
    return np.asarray(picture)


def distort(operation: str, picture: Image.Image, level: float, draws: Draws, scale: float = 1.0) -> Image.Image:
    """Apply one of OPERATIONS and return a new picture; `level` is magnitude / 10. Directions are drawn at random.

    `scale` multiplies the sizes that are in pixels, those of shifts and of the cut-out square.
    """
    match operation:
        # ------------------------------------------------------------ geometric operations
        case "Rotate":  # by 30 · level degrees
            return picture.rotate(either_way(30 * level, draws), fillcolor=FILL)
        case "ShearX":  # each row moves sideways by 0.3 · level times its y
            return affine(picture, 1, either_way(0.3 * level, draws), 0, 0, 1, 0)
        case "ShearY":  # each column moves up or down by 0.3 · level times its x
            return affine(picture, 1, 0, 0, either_way(0.3 * level, draws), 1, 0)
        case "TranslateX":  # by 100 · level pixels
            return affine(picture, 1, 0, either_way(100 * level * scale, draws), 0, 1, 0)
        case "TranslateY":
            return affine(picture, 1, 0, 0, 0, 1, either_way(100 * level * scale, draws))
        case "Cutout":  # fills a square of up to 2 · 40 · level pixels a side, centred anywhere in the image
            pad = int(40 * level * scale)
            y = draws.below(picture.height)
            x = draws.below(picture.width)
            box = (max(x - pad, 0), max(y - pad, 0), min(x + pad, picture.width), min(y + pad, picture.height))
            # `paste` works in place, but the argument must not change.
            picture = picture.copy()
            picture.paste(FILL, box)
            return picture

        # ------------------------------------------------------------ operations on pixel values
        case "AutoContrast":  # stretches each channel to 0 … 255
            return ImageOps.autocontrast(picture)
        case "Equalize":  # equalises the histogram of each channel
            return ImageOps.equalize(picture)
        case "Invert":
            return ImageOps.invert(picture)
        case "Posterize":
            # Keep 4 · level bits. For 0 bits, TensorFlow keeps one, because it shifts by at most 7. For magnitudes over
            # 20, 4 · level exceeds the 8 bits of a value.
            bits = min(max(int(4 * level), 1), 8)
            return ImageOps.posterize(picture, bits)
        case "Solarize":  # inverts values of 256 · level or more
            return ImageOps.solarize(picture, int(256 * level))
        case "SolarizeAdd":  # adds 110 · level to the values below 128
            added = int(110 * level)
            table = list(range(256))
            for value in range(128):
                table[value] = min(value + added, 255)
            return picture.point(table * 3)  # the same table for each channel
        case "Color" | "Contrast" | "Brightness" | "Sharpness":
            # Scale the property by 1.8 · level + 0.1: 0.1 removes nearly all of it, 1 leaves it unchanged.
            return getattr(ImageEnhance, operation)(picture).enhance(1.8 * level + 0.1)
    raise ValueError(f"unknown RandAugment operation {operation!r}; expected one of {', '.join(OPERATIONS)}")


def either_way(amount: float, draws: Draws) -> float:
    """Return `amount` or its negative, with equal probability."""
    return amount if draws.uniform() < 0.5 else -amount


def affine(picture: Image.Image, *matrix: float) -> Image.Image:
    """Apply the affine transform that takes the pixel at (x, y) from (ax + by + c, dx + ey + f).

    Sampling is nearest-neighbour, with TensorFlow's coordinates.
    """
    a, b, c, d, e, f = matrix
    # TensorFlow's origin is the centre of the first pixel, Pillow's is its corner.
    pillow_matrix = (a, b, c - (a + b - 1) / 2, d, e, f - (d + e - 1) / 2)
    return picture.transform(picture.size, Image.Transform.AFFINE, pillow_matrix, fillcolor=FILL)
