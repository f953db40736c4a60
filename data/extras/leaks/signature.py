"""What an image is recognised by: a small grey picture of it, and low frequencies of the whole and of its crops.

How bytes become a signature, in order:
1. the image is decoded upright and grey, a JPEG at a reduced scale; borders of one colour are cut off (`trimmed`), and
   what is left is squashed to SIDE × SIDE pixels;
2. of the whole, and of each of BOXES crops, the cosine transform's first 55 coefficients but the mean are taken,
   weighted by their frequency (photographs have about as much of each then), and brought to length 1;
3. the inner product of two such vectors says how alike two crops are, whatever their brightness and contrast.

The crops are squares of 100 to 77.5 % of each side, 6 % apart at most, so that a crop of 60 % of the area or more that
keeps the image's proportions is near one of them; and the two that evaluation makes: the square in the middle of the
image, and 87.5 % of that. A mirrored image has the same coefficients, the odd ones with the other sign.
"""

from __future__ import annotations

import math
from hashlib import sha256
from typing import NamedTuple

import cv2
import numpy as np

from data.images.decode import decode, opencv_decode, read_header, reduction

# K crops of an image, D coefficients of a crop, F frequencies a side

SIDE = 128  # pixels that an image is squashed to
PICTURE = 64  # pixels a side of the picture that is kept, by which two images are laid over each other
FREQUENCIES = 8
SCALES = (1.0, 0.94, 0.88, 0.82, 0.775)  # of each side of the crops
STEP = 0.06  # of the side, between neighbouring crops
EVALUATED = 0.875  # of the square in the middle: 224 of 256 pixels
FLAT = 2.0  # grey levels: an image whose pixels deviate less has nothing to be recognised by
OF_ONE_COLOUR = 8  # grey levels that a border's pixels deviate from its middle one, but for SPECKS
SPECKS = 0.02  # share of a border's pixels that may deviate by more: noise of encoding beside the picture
LEAST_LEFT = 0.25  # of each side: of what would be cut to less, all is kept
FLOOR = 1.0  # length of a vector before it is brought to 1: that of less is noise, and becomes shorter than 1


class Crop(NamedTuple):
    """A crop, in shares of the image's sides."""

    y: float
    x: float
    height: float
    width: float


class Signature(NamedTuple):
    """What is kept of an image."""

    crops: np.ndarray  # (K, D) float16; the first is of the whole image
    picture: np.ndarray  # (PICTURE, PICTURE) uint8, grey
    proportion: float  # width / height, which the last two crops follow from
    is_flat: bool


def signature(data: bytes) -> Signature:
    """Return the signature of an encoded image; raises BadImage."""
    grey = trimmed(grey_of(data))
    height, width = grey.shape
    square = squashed(grey, SIDE).astype(np.float32)
    proportion = width / height
    return Signature(
        transformed(square, proportion).astype(np.float16),
        squashed(grey, PICTURE),
        proportion,
        bool(square.std() < FLAT),
    )


def grey_of(data: bytes) -> np.ndarray:
    """Decode the image (H, W), grey and upright, at SIDE pixels a side or more if it has them; raises BadImage."""
    header = read_header(data)
    reduced = {
        1: cv2.IMREAD_GRAYSCALE,
        2: cv2.IMREAD_REDUCED_GRAYSCALE_2,
        4: cv2.IMREAD_REDUCED_GRAYSCALE_4,
        8: cv2.IMREAD_REDUCED_GRAYSCALE_8,
    }
    # Upright, unlike in training: a copy that was encoded again has often been turned as its EXIF tag says.
    return opencv_decode(data, reduced[reduction(min(header.height, header.width), SIDE)])


def trimmed(grey: np.ndarray) -> np.ndarray:
    """Return the image (H, W) without its borders of one colour, as copies get that are padded, framed or letterboxed.

    A frame within a frame goes too. An image that would hardly be left is returned whole.
    """
    top = 0
    left = 0
    bottom, right = grey.shape
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for axis in (0, 1):
            inner = grey[top:bottom, left:right]
            lines = inner if axis == 0 else inner.T
            first = border_lines(lines)
            last = len(lines) - border_lines(lines[::-1])
            if first > 0 or last < len(lines):
                if last - first < LEAST_LEFT * grey.shape[axis]:
                    return grey
                is_smaller = True
            if axis == 0:
                bottom = top + last
                top += first
            else:
                right = left + last
                left += first
    return np.ascontiguousarray(grey[top:bottom, left:right])


def border_lines(lines: np.ndarray) -> int:
    """Return how many lines of (lines, pixels) have the colour of the first one: 0 where that has several."""
    colour = int(np.median(lines[0]))
    for number, line in enumerate(lines):
        is_other = np.abs(line.astype(np.int16) - colour) > OF_ONE_COLOUR
        if is_other.mean() > SPECKS:
            return number
    return len(lines)


def squashed(grey: np.ndarray, side: int) -> np.ndarray:
    """Return the image at side × side pixels; each is the mean of those that it covers."""
    is_larger = min(grey.shape) >= side
    return cv2.resize(grey, (side, side), interpolation=cv2.INTER_AREA if is_larger else cv2.INTER_LINEAR)


def pixel_digest(data: bytes) -> bytes:
    """Return the sha256 of an image's sides and pixels, as training decodes them; raises BadImage."""
    pixels = decode(data)
    return sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()


# ------------------------------------------------------------------------------------------------- crops


def intervals(scale: float) -> list[tuple[float, float]]:
    """Return (start, length) of the crops of one scale along one side: equally far from each other, STEP at most."""
    steps = math.ceil((1 - scale) / STEP - 1e-9)
    if steps == 0:
        return [(0.0, scale)]
    return [(number * (1 - scale) / steps, scale) for number in range(steps + 1)]


def evaluation_boxes(proportion: float) -> list[Crop]:
    """Return the square in the middle of an image of a width / height, and EVALUATED of it."""
    height = min(1.0, proportion)
    width = min(1.0, 1 / proportion)
    boxes = []
    for scale in (1.0, EVALUATED):
        boxes.append(Crop((1 - scale * height) / 2, (1 - scale * width) / 2, scale * height, scale * width))
    return boxes


def boxes_of(proportion: float) -> list[Crop]:
    """Return the crops of an image, in the order of the rows of its signature."""
    return [*GRID, *evaluation_boxes(proportion)]


def basis(start: float, length: float) -> np.ndarray:
    """Return (F, SIDE) cosines over one side of a crop; pixels that the crop covers in part count in part."""
    middles = (np.arange(SIDE) + 0.5) / SIDE
    inside = np.minimum(middles + 0.5 / SIDE, start + length) - np.maximum(middles - 0.5 / SIDE, start)
    weights = np.clip(inside, 0, None) / length
    place = np.clip((middles - start) / length, 0, 1)
    cosines = np.cos(np.pi * np.arange(FREQUENCIES)[:, None] * place)
    return (cosines * weights).astype(np.float32)


def transformed(square: np.ndarray, proportion: float) -> np.ndarray:
    """Return (SIDE, SIDE) → (K, D) float32: the coefficients of every crop, each row of length 1."""
    rows = []
    for bases in GRID_BASES:  # (n · F, SIDE): of the n intervals of one scale
        n = len(bases) // FREQUENCIES
        product = (bases @ square @ bases.T).reshape(n, FREQUENCIES, n, FREQUENCIES)
        rows.append(product.transpose(0, 2, 1, 3).reshape(n * n, FREQUENCIES, FREQUENCIES))
    for y, x, height, width in evaluation_boxes(proportion):
        rows.append((basis(y, height) @ square @ basis(x, width).T)[None])
    coefficients = np.concatenate(rows)[:, USED] * WEIGHTS
    length = np.linalg.norm(coefficients, axis=1, keepdims=True)
    return coefficients / np.maximum(length, FLOOR)


_ROW = np.arange(FREQUENCIES)[:, None]
_COLUMN = np.arange(FREQUENCIES)[None, :]
_FREQUENCY = np.hypot(_ROW, _COLUMN)
USED = (_FREQUENCY > 0) & (_FREQUENCY < FREQUENCIES)
WEIGHTS = _FREQUENCY[USED].astype(np.float32)
# (D,) of a mirror image
MIRRORED = np.where(_COLUMN % 2 == 1, -1.0, 1.0).astype(np.float32).repeat(FREQUENCIES, 0)[USED]
# The crops that all images have, in the order of their rows, and the cosines over them, scale by scale.
GRID: list[Crop] = []
GRID_BASES = []
for _scale in SCALES:
    for _y, _height in intervals(_scale):
        for _x, _width in intervals(_scale):
            GRID.append(Crop(_y, _x, _height, _width))
    GRID_BASES.append(np.concatenate([basis(start, length) for start, length in intervals(_scale)]))
BOXES = len(GRID) + 2  # K
COEFFICIENTS = int(USED.sum())  # D
