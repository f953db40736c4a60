"""RandAugment as big_vision applies it (SPEC 2.6; its pp/archive/autoaugment.py), with Pillow's operations.

Sixteen operations, no identity among them; one a layer, always applied, all at the same magnitude. The original
restates Pillow's operations in TensorFlow: where it truncates a smoothed or grey value, Pillow rounds it. Magnitude
0 is not a no-op: it posterises to one bit, solarises everything and takes nine tenths of the colour away.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from data.images.draws import Draws

FILL = (128, 128, 128)  # what moves in from outside, and the cut-out square
Operation = Callable[[Image.Image, float, Draws], Image.Image]  # image, magnitude / 10, draws


def randaug(image: np.ndarray, layers: int, magnitude: float, draws: Draws) -> np.ndarray:
    """(H, W, 3) uint8 after `layers` random operations at `magnitude` (10 is the customary full strength)."""
    picture, operations = Image.fromarray(image), tuple(OPERATIONS.values())
    for _ in range(layers):
        picture = operations[draws.below(len(operations))](picture, magnitude / 10, draws)
    return np.asarray(picture)


def either_way(amount: float, draws: Draws) -> float:
    """`amount` or its negative, evenly."""
    return amount if draws.uniform() < 0.5 else -amount


def affine(picture: Image.Image, *matrix: float) -> Image.Image:
    """The pixel at (x, y) comes from (ax + by + c, dx + ey + f), the nearest one, as TensorFlow counts pixels."""
    a, b, c, d, e, f = matrix
    centred = (a, b, c - (a + b - 1) / 2, d, e, f - (d + e - 1) / 2)  # Pillow counts from the pixels' corners
    return picture.transform(picture.size, Image.Transform.AFFINE, centred, fillcolor=FILL)


def rotate(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    return picture.rotate(either_way(30 * level, draws), fillcolor=FILL)


def shear_x(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    return affine(picture, 1, either_way(0.3 * level, draws), 0, 0, 1, 0)


def shear_y(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    return affine(picture, 1, 0, 0, either_way(0.3 * level, draws), 1, 0)


def translate_x(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    return affine(picture, 1, 0, either_way(100 * level, draws), 0, 1, 0)


def translate_y(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    return affine(picture, 1, 0, 0, 0, 1, either_way(100 * level, draws))


def posterize(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    """Keep so many bits; where the original asks for 0, TensorFlow, which shifts by 7 at most, keeps one."""
    return ImageOps.posterize(picture, min(max(int(4 * level), 1), 8))


def solarize(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    return ImageOps.solarize(picture, int(256 * level))


def solarize_add(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    added = int(110 * level)
    return picture.point([min(value + added, 255) if value < 128 else value for value in range(256)] * 3)


def cutout(picture: Image.Image, level: float, draws: Draws) -> Image.Image:
    """A square of up to 2 · 40 · level pixels a side, its centre anywhere in the image."""
    pad, y, x = int(40 * level), draws.below(picture.height), draws.below(picture.width)
    box = (max(x - pad, 0), max(y - pad, 0), min(x + pad, picture.width), min(y + pad, picture.height))
    picture = picture.copy()
    picture.paste(FILL, box)
    return picture


def enhanced(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    """Between 0.1 (nearly nothing) and beyond 1 (the image itself) of a property."""
    return lambda picture, level, draws: kind(picture).enhance(1.8 * level + 0.1)


OPERATIONS: dict[str, Operation] = {  # in the original's order
    "AutoContrast": lambda picture, level, draws: ImageOps.autocontrast(picture),
    "Equalize": lambda picture, level, draws: ImageOps.equalize(picture),
    "Invert": lambda picture, level, draws: ImageOps.invert(picture),
    "Rotate": rotate,
    "Posterize": posterize,
    "Solarize": solarize,
    "Color": enhanced(ImageEnhance.Color),
    "Contrast": enhanced(ImageEnhance.Contrast),
    "Brightness": enhanced(ImageEnhance.Brightness),
    "Sharpness": enhanced(ImageEnhance.Sharpness),
    "ShearX": shear_x,
    "ShearY": shear_y,
    "TranslateX": translate_x,
    "TranslateY": translate_y,
    "Cutout": cutout,
    "SolarizeAdd": solarize_add,
}
