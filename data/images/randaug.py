"""RandAugment as big_vision applies it (SPEC 2.6; its pp/archive/autoaugment.py), with Pillow's operations.

Sixteen operations, no identity among them; one a layer, always applied, all at the same magnitude. The original
restates Pillow's operations in TensorFlow: where it truncates a smoothed or grey value, Pillow rounds it. Magnitude
0 is not a no-op: it posterises to one bit, solarises everything and takes nine tenths of the colour away.

    randaug(image, layers=2, magnitude=10, draws) draws an operation, ShearX say, then its direction, and shears by
    0.3; then it draws the second operation, Color say, and applies it at 1.9.
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from data.draws import Draws

FILL = (128, 128, 128)  # what moves in from outside, and the cut-out square
OPERATIONS = (  # in the original's order, by which they are drawn
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


def randaug(image: np.ndarray, layers: int, magnitude: float, draws: Draws) -> np.ndarray:
    """Return (H, W, 3) uint8 after `layers` random operations at `magnitude` (10 is the customary full strength)."""
    # One number picks the operation, the next ones are the operation's own: the order of draws is part of the result.
    picture = Image.fromarray(image)
    for _ in range(layers):
        operation = OPERATIONS[draws.below(len(OPERATIONS))]
        picture = distort(operation, picture, magnitude / 10, draws)
    return np.asarray(picture)


def distort(operation: str, picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    """Return a new picture after one of the OPERATIONS; `level` is magnitude / 10. Most move or turn either way."""
    match operation:
        # ------------------------------------------------------------ operations that move pixels
        case "Rotate":  # by 30 · level degrees
            return picture.rotate(either_way(30 * level, draws), fillcolor=FILL)
        case "ShearX":  # each row moves sideways by 0.3 · level times its y
            return affine(picture, 1, either_way(0.3 * level, draws), 0, 0, 1, 0)
        case "ShearY":  # each column moves up or down by 0.3 · level times its x
            return affine(picture, 1, 0, 0, either_way(0.3 * level, draws), 1, 0)
        case "TranslateX":  # by 100 · level pixels, whatever the image's size
            return affine(picture, 1, 0, either_way(100 * level, draws), 0, 1, 0)
        case "TranslateY":
            return affine(picture, 1, 0, 0, 0, 1, either_way(100 * level, draws))
        case "Cutout":  # a square of up to 2 · 40 · level pixels a side, its centre anywhere in the image, is filled
            pad = int(40 * level)
            y = draws.below(picture.height)
            x = draws.below(picture.width)
            box = (max(x - pad, 0), max(y - pad, 0), min(x + pad, picture.width), min(y + pad, picture.height))
            # `paste` works in place, and the picture that was given must stay as it is.
            picture = picture.copy()
            picture.paste(FILL, box)
            return picture

        # ------------------------------------------------------------ operations on the values of pixels
        case "AutoContrast":  # stretches each channel to 0 … 255
            return ImageOps.autocontrast(picture)
        case "Equalize":  # makes all values of each channel equally frequent
            return ImageOps.equalize(picture)
        case "Invert":
            return ImageOps.invert(picture)
        case "Posterize":
            # 4 · level bits are kept. Where the original asks for 0, TensorFlow, which shifts by 7 at most, keeps one;
            # at magnitudes over 20, 4 · level is more than the 8 bits of a value.
            bits = min(max(int(4 * level), 1), 8)
            return ImageOps.posterize(picture, bits)
        case "Solarize":  # inverts the values from 256 · level on
            return ImageOps.solarize(picture, int(256 * level))
        case "SolarizeAdd":  # adds 110 · level to the values below 128
            added = int(110 * level)
            table = list(range(256))
            for value in range(128):
                table[value] = min(value + added, 255)
            return picture.point(table * 3)  # the same for each channel
        case "Color" | "Contrast" | "Brightness" | "Sharpness":
            # 1.8 · level + 0.1 of the property is left: 0.1 is nearly nothing of it, 1 all.
            return getattr(ImageEnhance, operation)(picture).enhance(1.8 * level + 0.1)
    raise ValueError(f"RandAugment has no operation {operation!r}; there are {', '.join(OPERATIONS)}")


def either_way(amount: float, draws: Draws) -> float:
    """Return `amount` or its negative, evenly."""
    return amount if draws.uniform() < 0.5 else -amount


def affine(picture: Image.Image, *matrix: float) -> Image.Image:
    """Take the pixel at (x, y) from (ax + by + c, dx + ey + f), the nearest pixel, as TensorFlow counts them."""
    a, b, c, d, e, f = matrix
    # TensorFlow counts from the middle of the first pixel, Pillow from its corner.
    pillow_matrix = (a, b, c - (a + b - 1) / 2, d, e, f - (d + e - 1) / 2)
    return picture.transform(picture.size, Image.Transform.AFFINE, pillow_matrix, fillcolor=FILL)
