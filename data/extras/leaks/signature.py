"""Compute perceptual signatures, which identify copies of an image: a thumbnail, and the low frequencies of its crops.

An encoded image becomes a signature in these steps:
1. Decode the image upright and in grey, JPEGs at a reduced scale. Trim borders of uniform colour (`trimmed`), and
   squash the rest to SIDE × SIDE pixels.
2. For the whole image and each crop (BOXES in total), compute the first 55 coefficients of the cosine transform without
   the mean. Weight them by frequency, which equalises their size in photographs, and normalise them to length 1.
3. The inner product of two of these vectors measures the similarity of two crops, independent of brightness and
   contrast.

The crops cover 100 to 77.5 % of each side in steps of at most 6 %, so that any crop with the image's aspect ratio and
at least 60 % of its area is close to one of them. Two more crops are those of evaluation: the central square, and
87.5 % of its side. Mirroring an image only changes the sign of the odd coefficients.
"""

from __future__ import annotations

import math
from hashlib import sha256
from typing import NamedTuple

import cv2
import numpy as np

from data.images.decode import decode, opencv_decode, read_header, reduction

# K: crops per image, D: coefficients per crop, F: frequencies per side

SIDE = 128  # side in pixels of the squashed image
PICTURE = 64  # side in pixels of the stored thumbnail, which is used to register two images
FREQUENCIES = 8
SCALES = (1.0, 0.94, 0.88, 0.82, 0.775)  # sides of the crops, relative to those of the image
STEP = 0.06  # largest distance between neighbouring crops, relative to the side
EVALUATED = 0.875  # side of evaluation's crop relative to the central square: 224 of 256 pixels
FLAT = 2.0  # grey levels; an image with a smaller standard deviation cannot be recognised by its structure
OF_ONE_COLOUR = 8  # grey levels by which the pixels of a uniform border may deviate from their median
SPECKS = 0.02  # share of a border's pixels that may deviate more, because of compression noise
MIN_REMAINING = 0.25  # relative to each side; if trimming would leave less, the image is not trimmed
FLOOR = 1.0  # shorter vectors are noise: they are divided by this length, and so stay shorter than 1


class Crop(NamedTuple):
    """A crop, relative to the sides of the image."""

    y: float
    x: float
    height: float
    width: float


class Signature(NamedTuple):
    """An image's perceptual signature."""

    crops: np.ndarray  # (K, D) float16 coefficients; row 0 is the whole image
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
    """Decode an image upright to greyscale (H, W), at a reduced scale with at least SIDE pixels.

    Raises BadImage if the image cannot be decoded.
    """
    header = read_header(data)
    reduced = {
        1: cv2.IMREAD_GRAYSCALE,
        2: cv2.IMREAD_REDUCED_GRAYSCALE_2,
        4: cv2.IMREAD_REDUCED_GRAYSCALE_4,
        8: cv2.IMREAD_REDUCED_GRAYSCALE_8,
    }
    # Apply the EXIF orientation, unlike in training: re-encoded copies have often been rotated accordingly.
    return opencv_decode(data, reduced[reduction(min(header.height, header.width), SIDE)])


def trimmed(grey: np.ndarray) -> np.ndarray:
    """Trim borders of uniform colour, such as padding, frames and letterboxes, from an image (H, W).

    Nested frames are trimmed too. If little of the image would remain, the image is returned unchanged.
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
                if last - first < MIN_REMAINING * grey.shape[axis]:
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
    """Return the number of leading lines in an array (lines, pixels) that share one uniform colour; may be 0."""
    colour = int(np.median(lines[0]))
    for number, line in enumerate(lines):
        is_other = np.abs(line.astype(np.int16) - colour) > OF_ONE_COLOUR
        if is_other.mean() > SPECKS:
            return number
    return len(lines)


def squashed(grey: np.ndarray, side: int) -> np.ndarray:
    """Resize an image to side × side pixels; use area averaging if the image becomes smaller."""
    is_larger = min(grey.shape) >= side
    return cv2.resize(grey, (side, side), interpolation=cv2.INTER_AREA if is_larger else cv2.INTER_LINEAR)


def pixel_digest(data: bytes) -> bytes:
    """Return the sha256 of an image's shape and pixels, decoded as in training; raises BadImage if that fails."""
    pixels = decode(data)
    return sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()


# ------------------------------------------------------------------------------------------------- crops


def intervals(scale: float) -> list[tuple[float, float]]:
    """Return (start, length) along one side for the crops at one scale, equally spaced by at most STEP."""
    steps = math.ceil((1 - scale) / STEP - 1e-9)
    if steps == 0:
        return [(0.0, scale)]
    return [(number * (1 - scale) / steps, scale) for number in range(steps + 1)]


def evaluation_boxes(proportion: float) -> list[Crop]:
    """Return the evaluation crops for an aspect ratio (width / height): the central square, and 87.5 % of its side."""
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
    """Return the cosines (F, SIDE) over one side of a crop, weighted by the share of each pixel inside the crop."""
    middles = (np.arange(SIDE) + 0.5) / SIDE
    inside = np.minimum(middles + 0.5 / SIDE, start + length) - np.maximum(middles - 0.5 / SIDE, start)
    weights = np.clip(inside, 0, None) / length
    place = np.clip((middles - start) / length, 0, 1)
    cosines = np.cos(np.pi * np.arange(FREQUENCIES)[:, None] * place)
    return (cosines * weights).astype(np.float32)


def transformed(square: np.ndarray, proportion: float) -> np.ndarray:
    """Return the normalised cosine coefficients, (K, D) float32, of the crops of a square image (SIDE, SIDE)."""
    rows = []
    for bases in GRID_BASES:  # (n · F, SIDE): the cosines of the n intervals of one scale
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
# (D,) factors that turn the coefficients of an image into those of its mirror image
MIRRORED = np.where(_COLUMN % 2 == 1, -1.0, 1.0).astype(np.float32).repeat(FREQUENCIES, 0)[USED]
# The crops that do not depend on the aspect ratio, in the order of their rows, and their cosines for each scale.
GRID: list[Crop] = []
GRID_BASES = []
for _scale in SCALES:
    for _y, _height in intervals(_scale):
        for _x, _width in intervals(_scale):
            GRID.append(Crop(_y, _x, _height, _width))
    GRID_BASES.append(np.concatenate([basis(start, length) for start, length in intervals(_scale)]))
BOXES = len(GRID) + 2  # K, the number of crops
COEFFICIENTS = int(USED.sum())  # D, the number of coefficients
