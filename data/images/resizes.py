"""TensorFlow's three resizes in NumPy, bit for bit: the same float32 products and sums in the same order.

1. `two_taps`, `area_taps` or `triangle_taps` says of each new row and column which old ones it is made of, and their
   weights.
2. The image is summed with them along its rows and its columns, in the kernel's order.

    area, from 3 rows to 2: the first new row is row 0 and half of row 1, the second the other half and row 2

Compared with TensorFlow 2.21 on x86-64; a build that fuses products and sums (Arm, `-mfma`) rounds otherwise.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

Taps = tuple[np.ndarray, np.ndarray]  # rows (K, new) of the source and their weights (K, new): see `weighted_sum`

# H, W image sides · every image is (H, W, 3) · h, w new sides


def bilinear(image: np.ndarray, h: int, w: int, centre: float = 0.5) -> np.ndarray:
    """Resize as tf.image.resize does bilinear without antialiasing, in float32 and in TensorFlow's order of operations.

    `centre` is where in a pixel its value lies: TensorFlow 1 took its corner, 0.
    """
    upper, lower, y_weight = two_taps(image.shape[0], h, centre)
    left, right, x_weight = two_taps(image.shape[1], w, centre)
    x_weight = x_weight[None, :, None]
    y_weight = y_weight[:, None, None]
    # First along the rows, then between them: the other way round, float32 would round otherwise.
    top = image[upper].astype(np.float32)
    bottom = image[lower].astype(np.float32)
    top = top[:, left] + (top[:, right] - top[:, left]) * x_weight
    bottom = bottom[:, left] + (bottom[:, right] - bottom[:, left]) * x_weight
    return top + (bottom - top) * y_weight


def two_taps(size: int, new: int, centre: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (new,) each: the two source rows of each new row, and the weight of the second."""
    at = (np.arange(new, dtype=np.float32) + np.float32(centre)) * np.float32(size / new) - np.float32(centre)
    first = np.floor(at)
    second = np.ceil(at)
    return np.maximum(first, 0).astype(int), np.minimum(second, size - 1).astype(int), at - first


def area(image: np.ndarray, h: int, w: int) -> np.ndarray:
    """Resize as tf.image.resize does "area": a pixel is the mean of a fractional box of old pixels.

    The kernel is resize_area_op.cc: it sums a box row by row, and divides by the box's area at the end.
    """
    rows_summed = weighted_sum(area_taps(image.shape[1], w), image, axis=1)
    boxes_summed = weighted_sum(area_taps(image.shape[0], h), rows_summed, axis=0)
    box_area = scale_of(image.shape[0], h) * scale_of(image.shape[1], w)
    return boxes_summed * np.float32(1 / np.float64(box_area))


def scale_of(size: int, new: int) -> np.float32:
    """Return old pixels to a new pixel, rounded to float32 as TensorFlow's resizes take it."""
    return np.float32(size) / np.float32(new)


def triangle(image: np.ndarray, h: int, w: int) -> np.ndarray:
    """Resize as tf.image.resize does bilinear with antialiasing: a triangle as wide as the shrinking."""
    rows_resized = weighted_sum(triangle_taps(image.shape[0], h), image, axis=0)
    return weighted_sum(triangle_taps(image.shape[1], w), rows_resized, axis=1)


def weighted_sum(taps: Taps, image: np.ndarray, axis: int) -> np.ndarray:
    """Make each new row (column for axis 1) as a weighted sum of old ones, in float32.

    rows[k] holds the k-th source row of every new row, factors[k] its weight.
    """
    rows, factors = taps
    along_axis = (-1, 1, 1) if axis == 0 else (1, -1, 1)
    factors = factors.reshape(len(factors), *along_axis)  # (K, new, 1, 1) or (K, 1, new, 1)
    # Added up tap by tap: in another order, float32 would round otherwise.
    total = np.take(image, rows[0], axis).astype(np.float32) * factors[0]
    for k in range(1, len(rows)):
        total += np.take(image, rows[k], axis).astype(np.float32) * factors[k]
    return total


@lru_cache(maxsize=256)
def area_taps(size: int, new: int) -> Taps:
    """Return of each new row the old rows that it overlaps, and how much of each; float32, as in resize_area_op.cc."""
    scale = scale_of(size, new)
    start = np.arange(new, dtype=np.float32) * scale
    end = np.arange(1, new + 1, dtype=np.float32) * scale
    first = np.floor(start)
    stop = np.ceil(end)  # may be size + 1, where the product was rounded up: the last row then counts twice
    count = int((stop - first).max())  # K, the most that a new row overlaps
    rows = first + np.arange(count, dtype=np.float32)[:, None]

    # Four cases, in this order for their rounding: a new row that lies inside an old one takes all of itself, at most
    # its first and its last old row are cut, and what is between them is whole.
    begins_before = rows < start
    ends_after = rows + 1 > end
    factors = np.ones_like(rows)
    factors = np.where(ends_after, end - rows, factors)
    factors = np.where(begins_before, rows + 1 - start, factors)
    factors = np.where(begins_before & ends_after, scale, factors)
    # A new row that overlaps fewer than K old ones has the weight 0 for the rest; those may lie outside the image.
    factors = np.where(rows < stop, factors, np.float32(0))
    return np.minimum(rows, size - 1).astype(int), factors


@lru_cache(maxsize=256)
def triangle_taps(size: int, new: int) -> Taps:
    """Return of each new row the old rows under its triangle, and their weights, as in scale_and_translate_op.cc.

    The weights sum to 1 at the borders too.
    """
    old_per_new = np.float32(1 / np.float64(scale_of(new, size)))
    radius = max(old_per_new, np.float32(1))
    half = np.float32(0.5)
    centre = (np.arange(new, dtype=np.float32) + half) * old_per_new
    first = np.clip(np.ceil(centre - radius - half), 0, size - 1)
    last = np.clip(np.floor(centre + radius - half), 0, size - 1)
    count = int((last - first).max()) + 1  # K
    rows = first + np.arange(count, dtype=np.float32)[:, None]

    distance = np.abs((rows + half - centre) * (np.float32(1) / radius))
    factors = np.maximum(np.float32(1) - distance, np.float32(0))
    factors = np.where(rows <= last, factors, np.float32(0))
    # Added up row by row, as `np.sum` would not promise.
    total = np.cumsum(factors, axis=0)[-1]
    factors = factors * (np.float32(1) / total)
    return np.minimum(rows, size - 1).astype(int), factors
