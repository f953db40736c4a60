"""Checks shared by the configs of all model families; errors state the value found, what was expected, and a remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, TypeGuard

MAX_NAMED = 5  # maximum number of tensors that an error lists


def pair(name: str, value: object) -> tuple[int, int]:
    """Return a single number n as (n, n), and a pair as Python integers.

    Raises ValueError unless the value is a positive integer or a pair of positive integers.
    """
    # JSON and YAML contain lists, a command line a single number; `json.dumps` later fails on NumPy integers.
    values: tuple[Any, ...] = (value, value)
    if isinstance(value, list | tuple):
        values = tuple(value)
    if len(values) != 2 or not all(map(is_integer, values)):
        raise ValueError(f"{name} must be one or two positive integers, found {value!r}")
    return int(values[0]), int(values[1])


def is_integer(value: Any, least: int = 1) -> TypeGuard[int]:
    """Return whether a value is an integer (Python's or NumPy's) of at least `least`."""
    # Python treats True and False as integers, but as a size or a number of layers they are mistakes.
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def choices(config: object, table: dict[str, tuple[str, ...]]) -> None:
    """Raise ValueError if a field's value is not among the values that `table` allows for it."""
    for name, allowed in table.items():
        value = getattr(config, name)
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}; found {value!r}")


def at_least(config: object, least: int, names: tuple[str, ...]) -> None:
    """Raise ValueError if any of these fields is not an integer of at least `least`."""
    for name in names:
        value = getattr(config, name)
        if not is_integer(value, least):
            raise ValueError(f"{name} must be a whole number of at least {least}, found {value!r}")


def multiple(name: str, value: int, step: int, divisor: str, nearest: str = "nearest") -> None:
    """Raise ValueError if `value` is not a multiple of `step`, described in the message as `divisor` ("12 heads")."""
    if value % step == 0:
        return
    below = value // step * step
    alternatives = f"{below} or {below + step}"
    # Zero is a multiple, but not a valid size.
    if below == 0:
        alternatives = str(step)
    raise ValueError(f"{name} {value} is not a multiple of {divisor}; {nearest}: {alternatives}")


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the closest known name, or a list of all known names if none is close."""
    names = sorted(known)
    # difflib counts a difference in capitals as an error: without lower case, "b" would not be close to "B".
    by_lower_case: dict[str, list[str]] = {}  # names that differ only in capitals share an entry: the sizes G and g
    for name in names:
        by_lower_case.setdefault(name.lower(), []).append(name)
    # difflib compares letters; a cutoff of one half finds typing errors and excludes other words.
    close = difflib.get_close_matches(wrong.lower(), by_lower_case, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(map(repr, by_lower_case[close[0]]))}?"
    return f"; known: {', '.join(names)}"


def refuse_not_finite(counts: Mapping[str, tuple[int, int]], tensors: int) -> None:
    """Raise ValueError if a tensor has non-finite values; `counts` has their number and the number of all values."""
    if not counts:
        return
    wrong = [f"{name} ({bad:,} of {values:,} values)" for name, (bad, values) in counts.items()]
    named = ", ".join(wrong[:MAX_NAMED])
    if len(wrong) > MAX_NAMED:
        named += f" and {len(wrong) - MAX_NAMED:,} more"
    raise ValueError(
        f"{len(wrong):,} of {tensors:,} tensors contain NaN or infinity: {named}\n"
        "  expected finite values only; copy or download the file again, or use the weights of an earlier step"
    )
