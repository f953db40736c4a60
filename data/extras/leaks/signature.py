"""Compute an image's perceptual signature: a small grey picture, and low frequencies of the image and of its crops.

The signature of an encoded image is computed in this order:
1. decode the image upright in grey, a JPEG at a reduced scale; cut off borders of uniform colour (`trimmed`), and
   resize the rest to SIDE × SIDE pixels, ignoring the aspect ratio;
2. for the full image and each of its crops (BOXES in all), take the first 55 coefficients of the cosine transform
   without the mean, weight them by frequency (which makes them about equally large for photographs), and normalise the
   vector to length 1;
3. the inner product of two such vectors is the similarity of two crops, independent of brightness and contrast.

The crops are 100 to 77.5 % of each side, at most 6 % apart, so that any crop with 60 % or more of the area and the
aspect ratio of the image is close to one of them. Two more crops are those of evaluation: the central square, and
87.5 % of it. Mirroring an image flips the sign of its horizontally odd coefficients.
"""

from __future__ import annotations

import math
from hashlib import sha256
from typing import NamedTuple

import cv2
import numpy as np

from data.images.decode import decode_whole, decoded, read_header, reduction

# K crops of an image, D coefficients of a crop, F frequencies a side

SIDE = 128  # pixels; an image is resized to this square
PICTURE = 64  # pixels; side of the stored picture that `likeness` compares
FREQUENCIES = 8
SCALES = (1.0, 0.94, 0.88, 0.82, 0.775)  # of each side of the crops
STEP = 0.06  # largest distance between neighbouring crops, as a share of the side
EVALUATED = 0.875  # of the central square: 224 of 256 pixels
FLAT = 2.0  # grey levels; an image with a smaller standard deviation has no recognisable structure
OF_ONE_COLOUR = 8  # grey levels; largest deviation from the median in a border line, except for SPECKS
SPECKS = 0.02  # share of a border line's pixels that may deviate more, because of encoding noise next to the picture
LEAST_LEFT = 0.25  # of each side; an image that trimming would make smaller is not trimmed at all
FLOOR = 1.0  # vectors shorter than this before normalisation are noise, and stay shorter than 1


class Crop(NamedTuple):
    """A crop in relative coordinates, 0 to 1."""

    y: float
    x: float
    height: float
    width: float


class Signature(NamedTuple):
    """An image's perceptual signature."""

    crops: np.ndarray  # (K, D) float16; the first row is for the full image
    picture: np.ndarray  # (PICTURE, PICTURE) uint8, grey
    proportion: float  # width / height, which determines the last two crops
    is_flat: bool


def signature(data: bytes) -> Signature:
    """Return the signature of an encoded image; raises BadImage if it cannot be decoded."""
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
    """Decode an image to grey (H, W), upright, with at least SIDE pixels per side if available; raises BadImage."""
    header = read_header(data)
    reduced = {
        1: cv2.IMREAD_GRAYSCALE,
        2: cv2.IMREAD_REDUCED_GRAYSCALE_2,
        4: cv2.IMREAD_REDUCED_GRAYSCALE_4,
        8: cv2.IMREAD_REDUCED_GRAYSCALE_8,
    }
    # Upright, unlike in training: tools that re-encode an image often apply the rotation of its EXIF tag.
    return decoded(data, reduced[reduction(min(header.height, header.width), SIDE)])


def trimmed(grey: np.ndarray) -> np.ndarray:
    """Remove borders of uniform colour, which padded, framed or letterboxed copies have, from an image (H, W).

    Nested frames are removed too. If less than LEAST_LEFT of a side would remain, the image is returned unchanged.
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
    """Return the number of leading lines of (lines, pixels) in one uniform colour; 0 if the first line has several."""
    colour = int(np.median(lines[0]))
    for number, line in enumerate(lines):
        is_other = np.abs(line.astype(np.int16) - colour) > OF_ONE_COLOUR
        if is_other.mean() > SPECKS:
            return number
    return len(lines)


def squashed(grey: np.ndarray, side: int) -> np.ndarray:
    """Resize an image to side × side pixels, by area averaging if it is larger."""
    is_larger = min(grey.shape) >= side
    return cv2.resize(grey, (side, side), interpolation=cv2.INTER_AREA if is_larger else cv2.INTER_LINEAR)


def pixel_digest(data: bytes) -> bytes:
    """Return the sha256 of an image's shape and pixels, decoded as in training; raises BadImage."""
    read_header(data)
    pixels = decode_whole(data)
    return sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()


# ------------------------------------------------------------------------------------------------- crops


def intervals(scale: float) -> list[tuple[float, float]]:
    """Return (start, length) of the crops of one scale along one side, equally spaced and at most STEP apart."""
    steps = math.ceil((1 - scale) / STEP - 1e-9)
    if steps == 0:
        return [(0.0, scale)]
    return [(number * (1 - scale) / steps, scale) for number in range(steps + 1)]


def evaluation_boxes(proportion: float) -> list[Crop]:
    """Return the crops of evaluation for an image with this width / height: central square, and EVALUATED of it."""
    height = min(1.0, proportion)
    width = min(1.0, 1 / proportion)
    boxes = []
    for scale in (1.0, EVALUATED):
        boxes.append(Crop((1 - scale * height) / 2, (1 - scale * width) / 2, scale * height, scale * width))
    return boxes


def boxes_of(proportion: float) -> list[Crop]:
    """Return the crops of an image with this width / height, in the order of the rows of its signature."""
    return [*GRID, *evaluation_boxes(proportion)]


def basis(start: float, length: float) -> np.ndarray:
    """Return cosines (F, SIDE) along one side of a crop; a partly covered pixel has a proportional weight."""
    middles = (np.arange(SIDE) + 0.5) / SIDE
    inside = np.minimum(middles + 0.5 / SIDE, start + length) - np.maximum(middles - 0.5 / SIDE, start)
    weights = np.clip(inside, 0, None) / length
    place = np.clip((middles - start) / length, 0, 1)
    cosines = np.cos(np.pi * np.arange(FREQUENCIES)[:, None] * place)
    return (cosines * weights).astype(np.float32)


def transformed(square: np.ndarray, proportion: float) -> np.ndarray:
    """Return the normalised coefficients (K, D) float32 of all crops of an image (SIDE, SIDE)."""
    rows = []
    for bases in GRID_BASES:  # (n · F, SIDE), for the n intervals of one scale
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
# Signs (D,) that mirroring applies to the coefficients.
MIRRORED = np.where(_COLUMN % 2 == 1, -1.0, 1.0).astype(np.float32).repeat(FREQUENCIES, 0)[USED]
# The crops that do not depend on the aspect ratio, in the order of their rows, and their cosines for each scale.
GRID: list[Crop] = []
GRID_BASES = []
for _scale in SCALES:
    for _y, _height in intervals(_scale):
        for _x, _width in intervals(_scale):
            GRID.append(Crop(_y, _x, _height, _width))
    GRID_BASES.append(np.concatenate([basis(start, length) for start, length in intervals(_scale)]))
BOXES = len(GRID) + 2  # K
COEFFICIENTS = int(USED.sum())  # D
