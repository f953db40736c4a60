"""Exact reference preprocessing for evaluation and few-shot: `decode|resize_small(256)|central_crop(224)`.

1. `parse_ops` turns the op string, which is big_vision's, into functions and their arguments.
2. `preprocess` applies them to the image one after the other.
3. Each op restates its TensorFlow original in NumPy, bit for bit: the same float32 sums in the same order. It is held
   to golden arrays.

Ops that return to uint8 truncate, as the original's cast does; `resize_float` is vit_jax's, which does not.

    an image (500, 375, 3) becomes (341, 256, 3) by resize_small(256), and (224, 224, 3) by central_crop(224)
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import lru_cache
from inspect import signature

import numpy as np

from data.images.decode import BadImage
from data.images.resizes import area, bilinear, triangle

MOST_PIXELS = 1 << 24  # of a resized image: 200 MB in float32
EXAMPLE_SIDE = 1024  # large, because central_crop refuses an image that is smaller than the crop
WHITE = 255
MOST_ROUNDING = 2  # that resizing may change white by: truncated sums of float32

# Ops that once gave other pixels than the original's, and how often each was corrected. 2026-11: sides and sums in
# float32, in TensorFlow's order.
CORRECTIONS = {"resize_small": 1, "antialiased resize": 1}

Op = Callable[..., np.ndarray]  # an image (H, W, 3) and numbers to an image (h, w, 3)

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
            raise ValueError(f"preprocessing op {name!r} in {ops!r} is unknown; there are {', '.join(OPS)}")
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
        check_sides(op, arguments, text)
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


def check_sides(op: Op, arguments: tuple[object, ...], text: str) -> None:
    """Raise ValueError where an op that takes a size is given one that no image can have; `text` is the op's."""
    takes_size = "size" in signature(op).parameters
    if not takes_size or not arguments:
        return
    size = arguments[0]
    sides = size if isinstance(size, tuple) else (size, size)
    if len(sides) != 2:
        raise ValueError(f"{text}: {len(sides)} sides, expected one number or (height, width)")
    pixels = 1
    for side in sides:
        is_side = isinstance(side, int | float) and not isinstance(side, bool) and side >= 1 and side == side // 1
        if not is_side:
            raise ValueError(f"{text}: a side of {side} pixels, expected a whole number from 1 on")
        pixels *= int(side)
    if pixels > MOST_PIXELS:
        raise ValueError(f"{text}: {pixels:,} pixels, expected {MOST_PIXELS:,} at most")


# ----------------------------------------------------------------------------- the ops


def unchanged(image: np.ndarray) -> np.ndarray:
    """Return the image itself: it is decoded before the ops are applied."""
    return image


def resize(image: np.ndarray, size: int | tuple[int, int], antialias: bool = False) -> np.ndarray:
    """Squash to a square of `size` (or to (h, w)): bilinear, half-pixel centres, truncated to uint8."""
    h, w = both_sides(size)
    resized = triangle(image, h, w) if antialias else bilinear(image, h, w)
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
    # Sums of float32 may exceed 255 by a rounding, which the original clips.
    return np.minimum(area(image, h, w), WHITE).astype(np.uint8)


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
    """Return 224 → (224, 224)."""
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
