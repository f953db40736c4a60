"""Exact reference preprocessing for evaluation and few-shot: `decode|resize_small(256)|central_crop(224)`.

1. `parse_ops` turns the op string, which is big_vision's, into functions and their arguments.
2. `preprocess` applies them to the image one after the other.
3. Each op restates its TensorFlow original in NumPy, bit for bit: the same float32 products and sums in the same order.
   Of TensorFlow's three resizes, `bilinear` takes two old rows for each new one; `area_taps` and `triangle_taps` say
   which old rows a new one is made of, with which weights, and `weighted_sum` adds them up in the kernel's order.

Ops that return to uint8 truncate, as the original's cast does; `resize_float` is vit_jax's, which does not. They are
held to golden arrays of TensorFlow 2.21 on x86-64; a build that fuses products and sums (Arm, `-mfma`) rounds
otherwise.

    an image (500, 375, 3) becomes (341, 256, 3) by resize_small(256), and (224, 224, 3) by central_crop(224)
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import lru_cache
from inspect import signature

import numpy as np

from data.images.decode import BadImage

MOST_PIXELS = 1 << 24  # of a resized image: 200 MB in float32
EXAMPLE_SIDE = 1024  # large, because central_crop refuses an image that is smaller than the crop
WHITE = 255
MOST_ROUNDING = 2  # that resizing may change white by: truncated sums of float32

# Ops that once gave other pixels than the original's, and how often each was corrected. 2026-11: sides and sums in
# float32, in TensorFlow's order.
CORRECTIONS = {"resize_small": 1, "antialiased resize": 1}

Op = Callable[..., np.ndarray]  # an image (H, W, 3) and numbers to an image (h, w, 3)
Taps = tuple[np.ndarray, np.ndarray]  # rows (K, new) of the source and their weights (K, new): see `weighted_sum`

# H, W image sides · every image is (H, W, 3) · h, w new sides


def preprocess(image: np.ndarray, ops: str) -> np.ndarray:
    """Apply an op string to an RGB image (H, W, 3) uint8; raises ValueError on an op it does not know."""
    for op, arguments in parse_ops(ops):
        image = op(image, *arguments)
    return image


@lru_cache(maxsize=32)
def parse_ops(ops: str) -> tuple[tuple[Op, tuple[object, ...]], ...]:
    """Return the functions and arguments that an op string names; raises ValueError where an op is unknown."""
    parsed = []
    for part in ops.split("|"):
        text = part.strip()
        if not text:
            continue
        is_whole = text.endswith(")") == ("(" in text)
        if not is_whole:
            raise ValueError(f"preprocessing op {text!r} lacks a bracket; expected for example resize(224)")
        name, _, arguments = text.removesuffix(")").partition("(")
        if name not in OPS:
            raise ValueError(
                f"preprocessing op {name!r} in {ops!r} is unknown; there are {', '.join(OPS)}\n"
                "  expected some of these joined by |, for example resize_small(256)|central_crop(224)"
            )
        values: tuple[object, ...] = ()
        if arguments:
            # The one argument that the original's strings name.
            positional = arguments.replace("antialias=True", "True").replace("antialias=False", "False")
            try:
                values = tuple(ast.literal_eval(f"({positional},)"))
            except (ValueError, SyntaxError):
                raise ValueError(f"preprocessing op {text!r}: arguments must be plain numbers") from None
        parsed.append((OPS[name], values))
    return tuple(parsed)


def corrections(ops: str) -> dict[str, int]:
    """Return the corrections that changed what these ops give; keys of stages and protocols name them beside the ops.

    Without them, one key would stand for the pixels from before a correction and for those from after it.
    """
    corrected = {}
    for op, arguments in parse_ops(ops):
        name = op.__name__
        if op is resize and True in arguments[1:]:
            name = "antialiased resize"
        if name in CORRECTIONS:
            corrected[name] = CORRECTIONS[name]
    return corrected


@lru_cache(maxsize=32)
def shape_of(ops: str) -> tuple[int, ...]:
    """Return the shape (h, w, 3) that the ops make of a white image of 1024 × 1024.

    Raises ValueError where an op cannot do with its arguments, or where black and white do not stay 0 and 255, as
    which evaluation takes them.
    """
    image = np.full((EXAMPLE_SIDE, EXAMPLE_SIDE, 3), WHITE, np.uint8)
    for op, arguments in parse_ops(ops):
        text = f"preprocessing op {op.__name__}({', '.join(map(str, arguments))})"
        # A size that no image can have would end in an error of NumPy's, or fill the memory.
        if arguments and "size" in signature(op).parameters:
            size = arguments[0]
            sides = size if isinstance(size, tuple) else (size, size)
            if len(sides) != 2:
                raise ValueError(f"{text}: {len(sides)} sides, expected one number or (height, width)")
            pixels = 1
            for side in sides:
                is_number = isinstance(side, int | float) and not isinstance(side, bool)
                if not is_number or side < 1 or side != side // 1:
                    raise ValueError(f"{text}: a side of {side} pixels, expected a whole number from 1 on")
                pixels *= int(side)
            if pixels > MOST_PIXELS:
                raise ValueError(f"{text}: {pixels:,} pixels, expected {MOST_PIXELS:,} at most")
        try:
            image = op(image, *arguments)
        except TypeError as error:  # too few arguments, too many, or none that it can compute with
            raise ValueError(f"{text}: {error}; expected for example resize(224)") from None
        except BadImage as error:
            raise ValueError(f"{text} of a {EXAMPLE_SIDE}×{EXAMPLE_SIDE} image: {error}") from None
    # Evaluation brings 0 … 255 to −1 … 1 itself: what has been scaled before would nearly all become −1.
    first_row = image[0].astype(np.float32)  # all rows are alike
    stays_white = bool(np.all(abs(first_row - WHITE) <= MOST_ROUNDING))
    if not stays_white:
        raise ValueError(f"{ops!r} scales the pixels, which evaluation does itself; leave that op out")
    return image.shape


# ----------------------------------------------------------------------------- the ops


def unchanged(image: np.ndarray) -> np.ndarray:
    """Return the image itself: it is decoded before the ops are applied."""
    return image


def resize(image: np.ndarray, size: int | tuple[int, int], antialias: bool = False) -> np.ndarray:
    """Squash to a square of `size` (or to (h, w)): bilinear, half-pixel centres, truncated to uint8."""
    h, w = both_sides(size)
    if antialias:
        rows_resized = weighted_sum(triangle_taps(image.shape[0], h), image, axis=0)
        resized = weighted_sum(triangle_taps(image.shape[1], w), rows_resized, axis=1)
    else:
        resized = bilinear(image, h, w)
    # astype truncates, as the original's tf.cast to uint8 does (SPEC 2.5).
    return resized.astype(image.dtype)


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
    # In float32, as the original computes it: 387 · (448 / 384) is 451.5, but 451.49997 there, one pixel less.
    factor = np.float32(size) / np.float32(min(H, W))
    h = round(np.float32(H) * factor)
    w = round(np.float32(W) * factor)
    if h * w > MOST_PIXELS:
        raise BadImage("image too narrow")
    # As tf.image.resize does "area" (resize_area_op.cc): a pixel is the mean of a fractional box of old pixels, which
    # is summed row by row, and divided by its area at the end.
    rows_summed = weighted_sum(area_taps(W, w), image, axis=1)
    boxes_summed = weighted_sum(area_taps(H, h), rows_summed, axis=0)
    box_area = np.float32(H) / np.float32(h) * (np.float32(W) / np.float32(w))
    # Sums of float32 may exceed 255 by a rounding, which the original clips.
    return np.minimum(boxes_summed * np.float32(1 / np.float64(box_area)), WHITE).astype(np.uint8)


def central_crop(image: np.ndarray, size: int | tuple[int, int]) -> np.ndarray:
    """Cut the middle h×w pixels; the odd pixel goes to bottom and right. Raises ValueError where there are fewer."""
    h, w = both_sides(size)
    H, W = image.shape[:2]
    if h > H or w > W:
        raise ValueError(f"central_crop({h}, {w}) of a {H}×{W} image: put a resize before it")
    y = (H - h) // 2
    x = (W - w) // 2
    return image[y : y + h, x : x + w]


def both_sides(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (h, w) as they are, and 224 as (224, 224)."""
    return size if isinstance(size, tuple) else (size, size)


def value_range(image: np.ndarray, low: float, high: float) -> np.ndarray:
    """Map 0 … 255 to low … high as float32."""
    # First divided, then scaled, as in the original: float32 would round otherwise.
    return image.astype(np.float32) / np.float32(255) * np.float32(high - low) + np.float32(low)


def vgg_value_range(image: np.ndarray) -> np.ndarray:
    """Subtract the ImageNet channel means and divide by the deviations, in units of 0 … 255."""
    mean = np.asarray([0.485 * 255, 0.456 * 255, 0.406 * 255], np.float32)
    deviation = np.asarray([0.229 * 255, 0.224 * 255, 0.225 * 255], np.float32)
    return (image.astype(np.float32) - mean) / deviation


def vit_jax_eval(image: np.ndarray, size: int) -> np.ndarray:
    """Return all that vit_jax does to an evaluation image: squash to a square, then −1 … 1."""
    centre = np.float32(127.5)
    return (resize_float(image, size) - centre) / centre


OPS: dict[str, Op] = {
    "decode": unchanged,
    "resize": resize,
    "resize_float": resize_float,
    "resize_tf1": resize_tf1,
    "resize_small": resize_small,
    "central_crop": central_crop,
    "value_range": value_range,
    "vgg_value_range": vgg_value_range,
    "VIT_JAX_EVAL": vit_jax_eval,
}


# ----------------------------------------------------------------------------- TensorFlow's resizes


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
    """Return of each new row the old rows that it overlaps, and how much of each; float32, as in resize_area_op.cc.

    From 3 rows to 2, the first new row is row 0 and half of row 1, the second the other half and row 2.
    """
    scale = np.float32(size) / np.float32(new)  # old pixels to a new one, rounded as TensorFlow takes it
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

    This is tf.image.resize's bilinear with antialiasing: a triangle as wide as the shrinking. The weights sum to 1 at
    the borders too.
    """
    old_per_new = np.float32(1 / np.float64(np.float32(new) / np.float32(size)))
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
