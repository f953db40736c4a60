"""Exact reference preprocessing for evaluation and few-shot protocols: `decode|resize_small(256)|central_crop(224)`.

1. `parse_ops` converts an op string in big_vision's syntax to functions and arguments.
2. `preprocess` applies them to an image one after the other.
3. Each op reimplements its TensorFlow original in NumPy bit for bit, with the same float32 operations in the same
   order. TensorFlow has three kinds of resizing: `bilinear` combines two source rows into each output row; `area_taps`
   and `triangle_taps` give the source rows and weights of each output row, and `weighted_sum` adds the rows in the
   kernel's order.

Ops that return uint8 truncate, like the original's cast; `resize_float` is vit_jax's and stays in float32. The ops are
tested against arrays of TensorFlow 2.21 on x86-64; builds that fuse multiplication and addition (Arm, `-mfma`) round
differently.

`resize_pillow` and `center_crop` are torchvision's Resize and CenterCrop, with which timm evaluates. Imported weights
are evaluated with them: `resize_pillow(256, "bicubic")|center_crop(224)`.

    an image (500, 375, 3) becomes (341, 256, 3) by resize_small(256), and (224, 224, 3) by central_crop(224)
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import lru_cache
from inspect import signature

import numpy as np

from data.images.decode import BadImage

MAX_PIXELS = 1 << 24  # maximum size of a resized image: 200 MB in float32
EXAMPLE_SIDE = 1024  # large, because central_crop rejects images smaller than the crop
WHITE = 255
MAX_ROUNDING = 2  # maximum change of white by resizing, because float32 sums are truncated

# Ops whose pixels once differed from the original's, and how often each was corrected. 2026-11: sides and sums in
# float32, in TensorFlow's order.
CORRECTIONS = {"resize_small": 1, "antialiased resize": 1}

PILLOW_FILTERS = ("bilinear", "bicubic", "lanczos")

Op = Callable[..., np.ndarray]  # maps an image (H, W, 3) and numbers to an image (h, w, 3)
Taps = tuple[np.ndarray, np.ndarray]  # source rows (K, new) and their weights (K, new): see `weighted_sum`

# H, W: height and width; every image is (H, W, 3); h, w: new height and width


def preprocess(image: np.ndarray, ops: str) -> np.ndarray:
    """Apply an op string to an RGB image (H, W, 3) uint8; raises ValueError for an unknown op."""
    for op, arguments in parse_ops(ops):
        image = op(image, *arguments)
    return image


@lru_cache(maxsize=32)
def parse_ops(ops: str) -> tuple[tuple[Op, tuple[object, ...]], ...]:
    """Return the functions and arguments of an op string; raises ValueError if an op is unknown or malformed."""
    parsed = []
    for part in ops.split("|"):
        text = part.strip()
        if not text:
            continue
        is_whole = text.endswith(")") == ("(" in text)
        if not is_whole:
            raise ValueError(f"preprocessing op {text!r} lacks a bracket; expected something like resize(224)")
        name, _, arguments = text.removesuffix(")").partition("(")
        if name not in OPS:
            raise ValueError(
                f"preprocessing op {name!r} in {ops!r} is unknown; expected one of {', '.join(OPS)}\n"
                "  join ops with |, for example resize_small(256)|central_crop(224)"
            )
        values: tuple[object, ...] = ()
        if arguments:
            # The only argument with a name in the original's strings.
            positional = arguments.replace("antialias=True", "True").replace("antialias=False", "False")
            try:
                values = tuple(ast.literal_eval(f"({positional},)"))
            except (ValueError, SyntaxError):
                raise ValueError(f"preprocessing op {text!r}: arguments must be plain numbers") from None
        parsed.append((OPS[name], values))
    return tuple(parsed)


def corrections(ops: str) -> dict[str, int]:
    """Return {op: number of corrections to its code} for these ops, for the keys of stages and protocols.

    Without this number, results from before and after a correction would have the same key.
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
    """Return the shape (h, w, 3) that the ops produce from an image of 1024 × 1024 pixels.

    Raises ValueError if an op rejects its arguments, or if the ops do not keep white at 255, because evaluation expects
    pixels of 0 … 255.
    """
    image = np.full((EXAMPLE_SIDE, EXAMPLE_SIDE, 3), WHITE, np.uint8)
    for op, arguments in parse_ops(ops):
        text = f"preprocessing op {op.__name__}({', '.join(map(str, arguments))})"
        # Check sizes here: an impossible size would raise an obscure NumPy error, or exhaust the memory.
        if arguments and "size" in signature(op).parameters:
            size = arguments[0]
            sides = size if isinstance(size, tuple) else (size, size)
            if len(sides) != 2:
                raise ValueError(f"{text} has {len(sides)} sides, expected one number or (height, width)")
            pixels = 1
            for side in sides:
                is_number = isinstance(side, int | float) and not isinstance(side, bool)
                if not is_number or side < 1 or side != side // 1:
                    raise ValueError(f"{text} has a side of {side} pixels, expected a whole number of 1 or more")
                pixels *= int(side)
            if pixels > MAX_PIXELS:
                raise ValueError(f"{text} produces {pixels:,} pixels, expected at most {MAX_PIXELS:,}")
        try:
            image = op(image, *arguments)
        except TypeError as error:  # wrong number or type of arguments
            raise ValueError(f"{text}: {error}; expected something like resize(224)") from None
        except BadImage as error:
            raise ValueError(f"{text} of a {EXAMPLE_SIDE}×{EXAMPLE_SIDE} image: {error}") from None
    # Evaluation maps 0 … 255 to −1 … 1 itself: already scaled pixels would nearly all become −1.
    first_row = image[0].astype(np.float32)  # all rows are equal
    stays_white = bool(np.all(abs(first_row - WHITE) <= MAX_ROUNDING))
    if not stays_white:
        raise ValueError(
            f"{ops!r} scales the pixel values, but evaluation scales them itself; remove the op that does so"
        )
    return image.shape


# ----------------------------------------------------------------------------- the ops


def unchanged(image: np.ndarray) -> np.ndarray:
    """Return the image unchanged: images are decoded before the ops are applied."""
    return image


def resize(image: np.ndarray, size: int | tuple[int, int], antialias: bool = False) -> np.ndarray:
    """Resize to a square of `size` or to (h, w): bilinear, half-pixel centres, truncated to uint8."""
    h, w = both_sides(size)
    if antialias:
        rows_resized = weighted_sum(triangle_taps(image.shape[0], h), image, axis=0)
        resized = weighted_sum(triangle_taps(image.shape[1], w), rows_resized, axis=1)
    else:
        resized = bilinear(image, h, w)
    # astype truncates like the original's tf.cast to uint8 (SPEC 2.5).
    return resized.astype(image.dtype)


def resize_float(image: np.ndarray, size: int) -> np.ndarray:
    """Resize to a square as in vit_jax's evaluation: bilinear, float32 in 0 … 255."""
    return bilinear(image, size, size)


def resize_tf1(image: np.ndarray, size: int) -> np.ndarray:
    """Resize like VTAB's task_adaptation: like `resize_float`, but sampled at whole pixels, as in TensorFlow 1."""
    return bilinear(image, size, size, centre=0.0)


def resize_small(image: np.ndarray, size: int) -> np.ndarray:
    """Resize the shorter side to `size` by area averaging, and truncate to uint8.

    Raises BadImage if the image is so narrow that the longer side would become too long.
    """
    H, W = image.shape[:2]
    # In float32, as in the original: 387 · (448 / 384) is 451.5, but 451.49997 in float32, which gives one pixel less.
    factor = np.float32(size) / np.float32(min(H, W))
    h = round(np.float32(H) * factor)
    w = round(np.float32(W) * factor)
    if h * w > MAX_PIXELS:
        raise BadImage("image too narrow")
    # Like "area" of tf.image.resize (resize_area_op.cc): a pixel is the mean of a fractional box of source pixels. The
    # box is summed row by row, and divided by its area at the end.
    rows_summed = weighted_sum(area_taps(W, w), image, axis=1)
    boxes_summed = weighted_sum(area_taps(H, h), rows_summed, axis=0)
    box_area = np.float32(H) / np.float32(h) * (np.float32(W) / np.float32(w))
    # Sums of float32 may exceed 255 by rounding; the original clips them.
    return np.minimum(boxes_summed * np.float32(1 / np.float64(box_area)), WHITE).astype(np.uint8)


def central_crop(image: np.ndarray, size: int | tuple[int, int]) -> np.ndarray:
    """Crop the central h×w pixels, rounding offsets down. Raises ValueError for smaller images."""
    h, w = both_sides(size)
    H, W = image.shape[:2]
    if h > H or w > W:
        raise ValueError(f"central_crop({h}, {w}) is larger than the {H}×{W} image; put a resize before it")
    y = (H - h) // 2
    x = (W - w) // 2
    return image[y : y + h, x : x + w]


def resize_pillow(image: np.ndarray, size: int | tuple[int, int], filter: str) -> np.ndarray:
    """Resize with a Pillow filter, as torchvision does: the shorter side to a number, or both sides to (h, w).

    Raises ValueError for an unknown filter, or BadImage if the longer side would become too long.
    """
    if filter not in PILLOW_FILTERS:
        raise ValueError(
            f"resize_pillow does not support the filter {filter!r}; expected one of {', '.join(PILLOW_FILTERS)}"
        )
    H, W = image.shape[:2]
    h, w = size if isinstance(size, tuple) else (size, size)
    # torchvision truncates the longer side; resize_small rounds it.
    if not isinstance(size, tuple) and W < H:
        h = int(size * H / W)
    elif not isinstance(size, tuple):
        w = int(size * W / H)
    if h * w > MAX_PIXELS:
        raise BadImage("image too narrow")
    from PIL import Image  # takes 50 ms, and recipes are checked without it

    return np.asarray(Image.fromarray(image).resize((w, h), Image.Resampling[filter.upper()]))


def center_crop(image: np.ndarray, size: int | tuple[int, int]) -> np.ndarray:
    """Crop the central h×w pixels, as torchvision does: an offset with half a pixel is rounded to even.

    Raises ValueError for smaller images.
    """
    h, w = both_sides(size)
    H, W = image.shape[:2]
    if h > H or w > W:
        raise ValueError(f"center_crop({h}, {w}) is larger than the {H}×{W} image; put a resize before it")
    y = round((H - h) / 2)
    x = round((W - w) / 2)
    return image[y : y + h, x : x + w]


def both_sides(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return a pair unchanged, and a single number n as (n, n)."""
    return size if isinstance(size, tuple) else (size, size)


def value_range(image: np.ndarray, low: float, high: float) -> np.ndarray:
    """Map 0 … 255 linearly to low … high, as float32."""
    # Divide first, then scale, as in the original: another order would round differently.
    return image.astype(np.float32) / np.float32(255) * np.float32(high - low) + np.float32(low)


def vgg_value_range(image: np.ndarray) -> np.ndarray:
    """Subtract ImageNet's channel means and divide by its standard deviations, in units of 0 … 255."""
    mean = np.asarray([0.485 * 255, 0.456 * 255, 0.406 * 255], np.float32)
    deviation = np.asarray([0.229 * 255, 0.224 * 255, 0.225 * 255], np.float32)
    return (image.astype(np.float32) - mean) / deviation


def vit_jax_eval(image: np.ndarray, size: int) -> np.ndarray:
    """Apply vit_jax's complete evaluation preprocessing: resize to a square, then map to −1 … 1."""
    centre = np.float32(127.5)
    return (resize_float(image, size) - centre) / centre


OPS: dict[str, Op] = {
    "decode": unchanged,
    "resize": resize,
    "resize_float": resize_float,
    "resize_tf1": resize_tf1,
    "resize_small": resize_small,
    "central_crop": central_crop,
    "resize_pillow": resize_pillow,
    "center_crop": center_crop,
    "value_range": value_range,
    "vgg_value_range": vgg_value_range,
    "VIT_JAX_EVAL": vit_jax_eval,
}


# ----------------------------------------------------------------------------- TensorFlow's resizing


def bilinear(image: np.ndarray, h: int, w: int, centre: float = 0.5) -> np.ndarray:
    """Resize like tf.image.resize, bilinear without antialiasing, in float32 and TensorFlow's order of operations.

    `centre` is the position of a pixel's value within the pixel: 0 (its corner) in TensorFlow 1.
    """
    upper, lower, y_weight = two_taps(image.shape[0], h, centre)
    left, right, x_weight = two_taps(image.shape[1], w, centre)
    x_weight = x_weight[None, :, None]
    y_weight = y_weight[:, None, None]
    # Interpolate along the rows first, then between them: another order would round differently.
    top = image[upper].astype(np.float32)
    bottom = image[lower].astype(np.float32)
    top = top[:, left] + (top[:, right] - top[:, left]) * x_weight
    bottom = bottom[:, left] + (bottom[:, right] - bottom[:, left]) * x_weight
    return top + (bottom - top) * y_weight


def two_taps(size: int, new: int, centre: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the two source rows of each output row, and the weight of the second; each array is (new,)."""
    at = (np.arange(new, dtype=np.float32) + np.float32(centre)) * np.float32(size / new) - np.float32(centre)
    first = np.floor(at)
    second = np.ceil(at)
    return np.maximum(first, 0).astype(int), np.minimum(second, size - 1).astype(int), at - first


def weighted_sum(taps: Taps, image: np.ndarray, axis: int) -> np.ndarray:
    """Compute each output row (column for axis 1) as a weighted sum of source rows, in float32.

    rows[k] holds the k-th source row of every output row, factors[k] its weight.
    """
    rows, factors = taps
    along_axis = (-1, 1, 1) if axis == 0 else (1, -1, 1)
    factors = factors.reshape(len(factors), *along_axis)  # (K, new, 1, 1) or (K, 1, new, 1)
    # Add tap by tap: another order would round differently.
    total = np.take(image, rows[0], axis).astype(np.float32) * factors[0]
    for k in range(1, len(rows)):
        total += np.take(image, rows[k], axis).astype(np.float32) * factors[k]
    return total


@lru_cache(maxsize=256)
def area_taps(size: int, new: int) -> Taps:
    """Return the source rows that each output row overlaps, and the overlaps as float32 weights.

    Follows resize_area_op.cc. From 3 rows to 2, the first output row is row 0 and half of row 1; the second is the
    other half and row 2.
    """
    scale = np.float32(size) / np.float32(new)  # source rows per new row, rounded as in TensorFlow
    start = np.arange(new, dtype=np.float32) * scale
    end = np.arange(1, new + 1, dtype=np.float32) * scale
    first = np.floor(start)
    stop = np.ceil(end)  # may be size + 1 if the product was rounded up; the last row then counts twice
    count = int((stop - first).max())  # K, the largest number of source rows per new row
    rows = first + np.arange(count, dtype=np.float32)[:, None]

    # Four cases, in this order for their rounding: a new row inside a single source row has weight `scale`; the first
    # and the last source row may be cut; rows in between have weight 1.
    begins_before = rows < start
    ends_after = rows + 1 > end
    factors = np.ones_like(rows)
    factors = np.where(ends_after, end - rows, factors)
    factors = np.where(begins_before, rows + 1 - start, factors)
    factors = np.where(begins_before & ends_after, scale, factors)
    # Rows beyond the new row's own overlap get weight 0; they may be outside the image.
    factors = np.where(rows < stop, factors, np.float32(0))
    return np.minimum(rows, size - 1).astype(int), factors


@lru_cache(maxsize=256)
def triangle_taps(size: int, new: int) -> Taps:
    """Return the source rows under each output row's triangle, and their weights; see scale_and_translate_op.cc.

    This is tf.image.resize's bilinear with antialiasing: the triangle widens in proportion to the downscaling factor.
    The weights sum to 1 at the borders too.
    """
    old_per_new = np.float32(1 / np.float64(np.float32(new) / np.float32(size)))
    radius = max(old_per_new, np.float32(1))
    half = np.float32(0.5)
    centre = (np.arange(new, dtype=np.float32) + half) * old_per_new
    first = np.clip(np.ceil(centre - radius - half), 0, size - 1)
    last = np.clip(np.floor(centre + radius - half), 0, size - 1)
    count = int((last - first).max()) + 1  # K, the largest number of source rows per new row
    rows = first + np.arange(count, dtype=np.float32)[:, None]

    distance = np.abs((rows + half - centre) * (np.float32(1) / radius))
    factors = np.maximum(np.float32(1) - distance, np.float32(0))
    factors = np.where(rows <= last, factors, np.float32(0))
    # Sum row by row; `np.sum` does not guarantee the order.
    total = np.cumsum(factors, axis=0)[-1]
    factors = factors * (np.float32(1) / total)
    return np.minimum(rows, size - 1).astype(int), factors
