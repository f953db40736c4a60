"""RandAugment as big_vision applies it (SPEC 2.6; its pp/archive/autoaugment.py), with Pillow's operations.

Sixteen operations, no identity among them; one a layer, always applied, all at the same magnitude. The original
restates Pillow's operations in TensorFlow: where it truncates a smoothed or grey value, Pillow rounds it. Magnitude
0 is not a no-op: it posterises to one bit, solarises everything and takes nine tenths of the colour away.

    randaug(image, layers=2, magnitude=10, draws) draws an operation, ShearX say, then its direction, and shears by
    0.3; then it draws the second operation, Color say, and applies it at 1.9.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from data.draws import Draws

FILL = (128, 128, 128)  # what moves in from outside, and the cut-out square
Operation = Callable[[Image.Image, float, Draws], Image.Image]  # image, level = magnitude / 10, draws


def randaug(image: np.ndarray, layers: int, magnitude: float, draws: Draws) -> np.ndarray:
    """Return (H, W, 3) uint8 after `layers` random operations at `magnitude` (10 is the customary full strength)."""
    # One number picks the operation, the next ones are the operation's own: the order of draws is part of the result.
    operations = tuple(OPERATIONS.values())
    picture = Image.fromarray(image)
    for _ in range(layers):
        operation = operations[draws.below(len(operations))]
        picture = operation(picture, magnitude / 10, draws)
    return np.asarray(picture)


def either_way(amount: float, draws: Draws) -> float:
    """Return `amount` or its negative, evenly."""
    return amount if draws.uniform() < 0.5 else -amount


# ----------------------------------------------------------------------------- operations that move pixels


def affine(picture: Image.Image, *matrix: float) -> Image.Image:
    """Take the pixel at (x, y) from (ax + by + c, dx + ey + f), the nearest pixel, as TensorFlow counts them."""
    a, b, c, d, e, f = matrix
    # TensorFlow counts from the middle of the first pixel, Pillow from its corner.
    pillow_matrix = (a, b, c - (a + b - 1) / 2, d, e, f - (d + e - 1) / 2)
    return picture.transform(picture.size, Image.Transform.AFFINE, pillow_matrix, fillcolor=FILL)


def rotate(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    """Turn by 30 · level degrees, either way."""
    return picture.rotate(either_way(30 * level, draws), fillcolor=FILL)


def shear_x(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    """Move each row sideways by 0.3 · level times its y, either way."""
    return affine(picture, 1, either_way(0.3 * level, draws), 0, 0, 1, 0)


def shear_y(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    """Move each column up or down by 0.3 · level times its x, either way."""
    return affine(picture, 1, 0, 0, either_way(0.3 * level, draws), 1, 0)


def translate_x(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    """Move by 100 · level pixels, either way, whatever the image's size."""
    return affine(picture, 1, 0, either_way(100 * level, draws), 0, 1, 0)


def translate_y(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    """Move by 100 · level pixels, either way, whatever the image's size."""
    return affine(picture, 1, 0, 0, 0, 1, either_way(100 * level, draws))


def cutout(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    """Fill a square of up to 2 · 40 · level pixels a side, its centre anywhere in the image."""
    pad = int(40 * level)
    y = draws.below(picture.height)
    x = draws.below(picture.width)
    box = (max(x - pad, 0), max(y - pad, 0), min(x + pad, picture.width), min(y + pad, picture.height))
    # `paste` works in place, and the image that was given must stay as it is.
    picture = picture.copy()
    picture.paste(FILL, box)
    return picture


# ----------------------------------------------------------------------------- operations on the values of pixels


def autocontrast(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    """Stretch each channel to 0 … 255."""
    return ImageOps.autocontrast(picture)


def equalize(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    """Make all values of each channel equally frequent."""
    return ImageOps.equalize(picture)


def invert(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    """Turn each value v into 255 − v."""
    return ImageOps.invert(picture)


def posterize(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    """Keep 4 · level bits; where the original asks for 0, TensorFlow, which shifts by 7 at most, keeps one."""
    # At magnitudes over 20, 4 · level is more than the 8 bits of a value.
    bits = min(max(int(4 * level), 1), 8)
    return ImageOps.posterize(picture, bits)


def solarize(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    """Invert the values from 256 · level on."""
    return ImageOps.solarize(picture, int(256 * level))


def solarize_add(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    """Add 110 · level to the values below 128."""
    added = int(110 * level)
    table = list(range(256))
    for value in range(128):
        table[value] = min(value + added, 255)
    return picture.point(table * 3)  # the same for each channel


def enhance(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    """Make the operation that leaves 1.8 · level + 0.1 of a property: 0.1 is nearly nothing of it, 1 all."""

    def operation(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
        return kind(picture).enhance(1.8 * level + 0.1)

    return operation


OPERATIONS: dict[str, Operation] = {  # in the original's order, by which they are drawn
    "AutoContrast": autocontrast,
    "Equalize": equalize,
    "Invert": invert,
    "Rotate": rotate,
    "Posterize": posterize,
    "Solarize": solarize,
    "Color": enhance(ImageEnhance.Color),
    "Contrast": enhance(ImageEnhance.Contrast),
    "Brightness": enhance(ImageEnhance.Brightness),
    "Sharpness": enhance(ImageEnhance.Sharpness),
    "ShearX": shear_x,
    "ShearY": shear_y,
    "TranslateX": translate_x,
    "TranslateY": translate_y,
    "Cutout": cutout,
    "SolarizeAdd": solarize_add,
}
