"""Refusals shared by the configs of all families: what was found, what was expected, what would work."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral
from typing import Any


def pair(name: str, value: Any) -> tuple[int, int]:
    """One number or two, NumPy's too, as two positive integers."""
    values = tuple(value) if isinstance(value, list | tuple) else (value, value)
    if len(values) != 2 or not all(isinstance(v, Integral) and int(v) > 0 for v in values):
        raise ValueError(f"{name} must be one positive whole number or two, found {value!r}")
    return int(values[0]), int(values[1])


def choices(config: Any, table: dict[str, tuple[str, ...]]) -> None:
    for name, allowed in table.items():
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}; found {getattr(config, name)!r}")


def at_least(config: Any, least: int, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, found {value!r}")


def rates(config: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if not 0.0 <= getattr(config, name) < 1.0:
            raise ValueError(f"{name} must be in [0, 1), found {getattr(config, name)!r}")


def nearest_multiples(value: int, step: int) -> str:
    """'208 or 224': the closest multiples of step below and above value."""
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)


def multiple(name: str, value: int, step: int, what: str) -> None:
    if value % step:
        nearest = nearest_multiples(value, step)
        raise ValueError(f"{name} {value} is not a multiple of {step} {what}; nearest: {nearest}")


def image_size(size: tuple[int, int], stride: tuple[int, int]) -> None:
    for side, pixels, step in zip(("height", "width"), size, stride, strict=True):
        if pixels % step:
            raise ValueError(
                f"image {side} {pixels} is not a multiple of the patch stride {step}; "
                f"nearest image_size: {nearest_multiples(pixels, step)}"
            )


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" with the closest known name, whatever its case, or "; known: …" with all of them."""
    names = sorted(known)
    by_lower_case = {name.lower(): name for name in names}
    close = difflib.get_close_matches(wrong.lower(), by_lower_case, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {by_lower_case[close[0]]!r}?"
    return f"; known: {', '.join(names)}"
