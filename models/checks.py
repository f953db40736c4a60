"""Checks that the configs of all families share; each error names what was found, what was expected, what would do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral
from typing import Any, TypeGuard


def pair(name: str, value: object) -> tuple[int, int]:
    """Return one number as a pair of equal ones, and two as they are; NumPy's integers become Python's.

    Raises ValueError unless there are one or two positive whole numbers.
    """
    # JSON and YAML give lists, a command line one number; integers of NumPy would later stop `json.dumps`.
    values: tuple[Any, ...] = (value, value)
    if isinstance(value, list | tuple):
        values = tuple(value)
    if len(values) != 2 or not all(map(is_integer, values)):
        raise ValueError(f"{name} must be one positive whole number or two, found {value!r}")
    return int(values[0]), int(values[1])


def is_integer(value: Any, least: int = 1) -> TypeGuard[int]:
    """Tell whether a value is a whole number of at least `least`, one of NumPy's too."""
    # True and False count as integers in Python; as a size or a number of layers they are a slip.
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def choices(config: object, table: dict[str, tuple[str, ...]]) -> None:
    """Raise ValueError where a field named in `table` has none of the values allowed there."""
    for name, allowed in table.items():
        value = getattr(config, name)
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}; found {value!r}")


def at_least(config: object, least: int, names: tuple[str, ...]) -> None:
    """Raise ValueError where one of these fields is no whole number, or a smaller one."""
    for name in names:
        value = getattr(config, name)
        if not is_integer(value, least):
            raise ValueError(f"{name} must be a whole number of at least {least}, found {value!r}")


def multiple(name: str, value: int, step: int, divisor: str, nearest: str = "nearest") -> None:
    """Raise ValueError where `value` is not a multiple of `step`, which the message calls `divisor`: "12 heads" say."""
    if value % step == 0:
        return
    below = value // step * step
    way_out = f"{below} or {below + step}"
    # Zero is a multiple too, but no size.
    if below == 0:
        way_out = str(step)
    raise ValueError(f"{name} {value} is not a multiple of {divisor}; {nearest}: {way_out}")


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the closest known name, or "; known: …" with all where none is close."""
    names = sorted(known)
    # Capitals count as one slip each to difflib: without this, "b" would not be close to "B".
    by_lower_case: dict[str, list[str]] = {}  # names that differ in capitals alone share an entry: the sizes G and g
    for name in names:
        by_lower_case.setdefault(name.lower(), []).append(name)
    # difflib compares letter by letter; half of them in common finds a slip and leaves out other words.
    close = difflib.get_close_matches(wrong.lower(), by_lower_case, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(map(repr, by_lower_case[close[0]]))}?"
    return f"; known: {', '.join(names)}"
