"""Exact reference preprocessing for evaluation and few-shot: `decode|resize_small(256)|central_crop(224)`.

The op strings are big_vision's; each op restates its TensorFlow original in NumPy, held to golden arrays.
Ops that return to uint8 truncate, as the original's cast does; `resize_float` is vit_jax's, which does not.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import lru_cache, reduce

import numpy as np

from data.images.decode import BadImage

MOST_PIXELS = 1 << 24  # of a resized image: 200 MB in float32

# H, W image sides · every image is (H, W, 3) · h, w new sides


def preprocess(image: np.ndarray, ops: str) -> np.ndarray:
    """Apply an op string to an RGB image (H, W, 3) uint8; raises ValueError on an op it does not know."""
    for op, args in parse_ops(ops):
        image = op(image, *args)
    return image


@lru_cache(maxsize=32)
def parse_ops(ops: str) -> tuple[tuple[Callable, tuple], ...]:
    """The functions and arguments an op string names."""
    parsed = []
    for text in filter(None, map(str.strip, ops.split("|"))):
        name, _, arguments = text.removesuffix(")").partition("(")
        if name not in OPS:
            raise ValueError(f"preprocessing op {name!r} in {ops!r} is unknown; there are {', '.join(OPS)}")
        arguments = arguments.replace("antialias=True", "True").replace("antialias=False", "False")
        try:
            args = ast.literal_eval(f"({arguments},)") if arguments else ()
        except (ValueError, SyntaxError):
            raise ValueError(f"preprocessing op {text!r}: arguments must be plain numbers") from None
        parsed.append((OPS[name], tuple(args)))
    return tuple(parsed)


def resize(image: np.ndarray, size: int | tuple[int, int], antialias: bool = False) -> np.ndarray:
    """Squash to a square of `size` (or to (h, w)): bilinear, half-pixel centres, truncated to uint8."""
    h, w = size if isinstance(size, tuple) else (size, size)
    return (triangle if antialias else bilinear)(image, h, w).astype(image.dtype)


def resize_float(image: np.ndarray, size: int) -> np.ndarray:
    """vit_jax's evaluation squash: bilinear to a square, staying float32 in 0 … 255."""
    return bilinear(image, size, size)


def resize_tf1(image: np.ndarray, size: int) -> np.ndarray:
    """task_adaptation's squash (VTAB): as `resize_float`, but sampled as in TensorFlow 1, at whole pixels."""
    return bilinear(image, size, size, centre=0.0)


def resize_small(image: np.ndarray, size: int) -> np.ndarray:
    """Shrink or grow the shorter side to `size` by box averages, back to uint8 by truncation.

    Raises BadImage where the other side would be out of all proportion.
    """
    H, W = image.shape[:2]
    factor = size / min(H, W)
    h, w = round(H * factor), round(W * factor)
    if h * w > MOST_PIXELS:
        raise BadImage("image too narrow")
    return area(area(image, h, 0), w, 1).astype(np.uint8)


def central_crop(image: np.ndarray, size: int | tuple[int, int]) -> np.ndarray:
    """The middle h×w pixels; the odd pixel goes to the bottom and right."""
    h, w = size if isinstance(size, tuple) else (size, size)
    H, W = image.shape[:2]
    if h > H or w > W:
        raise ValueError(f"central_crop({h}, {w}) of a {H}×{W} image: put a resize before it")
    y, x = (H - h) // 2, (W - w) // 2
    return image[y : y + h, x : x + w]


def value_range(image: np.ndarray, low: float, high: float) -> np.ndarray:
    """Map 0 … 255 to low … high as float32."""
    return image.astype(np.float32) / np.float32(255) * np.float32(high - low) + np.float32(low)


def vgg_value_range(image: np.ndarray) -> np.ndarray:
    """Subtract the ImageNet channel means and divide by the deviations, in units of 0 … 255."""
    mean = np.asarray([0.485 * 255, 0.456 * 255, 0.406 * 255], np.float32)
    deviation = np.asarray([0.229 * 255, 0.224 * 255, 0.225 * 255], np.float32)
    return (image.astype(np.float32) - mean) / deviation


OPS: dict[str, Callable] = {
    "decode": lambda image: image,
    "resize": resize,
    "resize_float": resize_float,
    "resize_tf1": resize_tf1,
    "resize_small": resize_small,
    "central_crop": central_crop,
    "value_range": value_range,
    "vgg_value_range": vgg_value_range,
    "VIT_JAX_EVAL": lambda image, size: value_range(resize_float(image, size), -1, 1),
}

# ----------------------------------------------------------------------------- TensorFlow's three resizes


def bilinear(image: np.ndarray, h: int, w: int, centre: float = 0.5) -> np.ndarray:
    """tf.image.resize bilinear without antialiasing, in float32 and in TensorFlow's order of operations.

    `centre` is where in a pixel its value lies: TensorFlow 1 took its corner, 0.
    """
    y0, y1, y = taps(image.shape[0], h, centre)
    x0, x1, x = taps(image.shape[1], w, centre)
    x, y = x[None, :, None], y[:, None, None]
    top, bottom = image[y0].astype(np.float32), image[y1].astype(np.float32)
    top = top[:, x0] + (top[:, x1] - top[:, x0]) * x
    bottom = bottom[:, x0] + (bottom[:, x1] - bottom[:, x0]) * x
    return top + (bottom - top) * y


def taps(size: int, new: int, centre: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The two source rows of each new row, and the weight of the second."""
    at = (np.arange(new, dtype=np.float32) + np.float32(centre)) * np.float32(size / new) - np.float32(centre)
    low = np.floor(at)
    return np.maximum(low, 0).astype(int), np.minimum(np.ceil(at), size - 1).astype(int), at - low


def area(image: np.ndarray, new: int, axis: int) -> np.ndarray:
    """tf.image.resize "area" along one axis: each new row is the mean of a fractional run of old rows."""
    size = image.shape[axis]
    if size == new:
        return image
    return apply(area_weights(size, new), image, axis)


def triangle(image: np.ndarray, h: int, w: int) -> np.ndarray:
    """tf.image.resize bilinear with antialiasing: a triangle as wide as the shrinking."""
    return apply(triangle_weights(image.shape[1], w), apply(triangle_weights(image.shape[0], h), image, 0), 1)


def apply(weights: tuple[np.ndarray, np.ndarray], image: np.ndarray, axis: int) -> np.ndarray:
    """Sum over taps: rows[k] holds each new row's k-th source row, factors[k] its weight."""
    shape = (-1, 1, 1) if axis == 0 else (1, -1, 1)
    taps = (
        np.take(image, rows, axis).astype(np.float32) * factors.reshape(shape)
        for rows, factors in zip(*weights, strict=True)
    )
    return reduce(np.add, taps)


@lru_cache(maxsize=256)
def area_weights(size: int, new: int) -> tuple[np.ndarray, np.ndarray]:
    scale = np.float64(size / new)
    start, end = np.arange(new) * scale, (np.arange(new) + 1) * scale
    count = int((np.ceil(end) - np.floor(start)).max())
    rows = np.floor(start).astype(int) + np.arange(count)[:, None]
    overlap = np.minimum(rows + 1, end) - np.maximum(rows, start)
    return np.minimum(rows, size - 1), (np.maximum(overlap, 0) / scale).astype(np.float32)


@lru_cache(maxsize=256)
def triangle_weights(size: int, new: int) -> tuple[np.ndarray, np.ndarray]:
    scale = max(size / new, 1.0)
    centre = (np.arange(new) + 0.5) * size / new
    first = np.floor(centre - scale).astype(int)
    rows = first + np.arange(int(2 * scale) + 3)[:, None]
    factors = np.maximum(1 - np.abs(rows + 0.5 - centre) / scale, 0) * ((rows >= 0) & (rows < size))
    return np.clip(rows, 0, size - 1), (factors / factors.sum(0)).astype(np.float32)
