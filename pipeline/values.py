"""Parses values from recipes, and formats numbers for messages and log lines.

    read_value("30min", float, "pretrain.timeout_s")      1800.0
    read_value("80GB", int, "data.cache.limit_bytes")     80_000_000_000
    read_value("10k", int | None, "pretrain.steps")       10_000
    read_value("soon", float, "pretrain.timeout_s")       ConfigError, which names the key and the unit

    amount(41_234.0)  →  "41.2k"        duration(273_600)  →  "3d04h"        counted(3, "node")  →  "3 nodes"

A key's name ends in its unit: `_s` seconds, `_gb` GiB, `_bytes` bytes. A GB is 10⁹ bytes here, a GiB 2³⁰.
"""

import math
import re
from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from data.errors import ConfigError
from models.checks import did_you_mean

BYTES = {
    **{"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
}
GIB = {unit: size_bytes / 2**30 for unit, size_bytes in BYTES.items()}
SECONDS = {
    **{"ms": 0.001, "s": 1, "sec": 1, "second": 1, "seconds": 1, "m": 60, "min": 60, "minute": 60, "minutes": 60},
    **{"h": 3600, "hour": 3600, "hours": 3600, "d": 86400, "day": 86400, "days": 86400},
}
COUNTS = {"k": 1000, "M": 1_000_000}
NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]+)")
WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
EXPECTED: dict[object, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
PLURALS: dict[object, str] = {int: "whole numbers", float: "numbers", str: "strings", int | str: "numbers or strings"}
# Common number formats that recipes do not accept, such as 10,000, 0,001 and 50%, and their replacements.
OTHER_NUMBERS = {
    int: ((",", ""), ("%", "e-2"), ("_", ""), (" ", "")),
    float: ((",", "."), ("%", "e-2"), ("_", ""), (" ", "")),
}
LONGEST = 80  # characters; longer values are truncated in messages


class Unit(NamedTuple):
    """The unit of a key's values, and the unit names that may follow a number in a recipe."""

    name: str
    factors: Mapping[str, float]
    examples: str


UNITS = {  # ending of a key's name → unit
    "_s": Unit("seconds", SECONDS, "90s, 30min or 2h"),
    "_gb": Unit("GiB", GIB, "80GB or 80GiB"),
    "_bytes": Unit("bytes", BYTES, "500MB, 80GB or 80GiB"),
}


def unit_of(key: str) -> Unit | None:
    """Return the unit implied by the suffix of a key's name; None for other suffixes."""
    for end, unit in UNITS.items():
        if key.endswith(end):
            return unit
    return None


def read_value(value: object, hint: Any, key: str) -> object:
    """Convert a recipe's value to the type of its field, `hint`; values of unknown types are returned unchanged.

    Raises ConfigError, which names the key, the value and what was expected, if the value cannot be converted.
    """
    if hint is Any or value == "???":
        return value
    is_optional = NoneType in get_args(hint)
    if is_optional and value is None:
        return None
    if is_optional and value in ("None", "none"):
        raise ConfigError(f"{key} is {value}, which YAML reads as a string\n  set {key}=null")
    allowed = set(get_args(hint)) - {NoneType}
    if is_optional and len(allowed) == 1:
        (hint,) = allowed
    origin = get_origin(hint)
    if origin is Literal:
        return read_choice(value, get_args(hint), key)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} is {shown(value)}, expected a section\n  set {key}.NAME=…")
        return {name: read_value(entry, get_args(hint)[1], f"{key}.{name}") for name, entry in value.items()}
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            expected = f"expected a list of {PLURALS.get(get_args(hint)[0], 'values')}"
            raise ConfigError(f"{key} is {shown(value)}, {expected}\n  for example, set {key}=[{shown(value)}]")
        entries = []
        for entry in value:
            entries.append(read_value(entry, get_args(hint)[0], key))
        return entries

    # A single value. None of these types can hold None.
    result: object = None
    if hint is bool:
        result = WORDS.get(str(value).lower())
    elif isinstance(value, bool | Mapping | list | tuple):
        result = None
    elif hint in (int, float) and isinstance(value, int | float | str):
        result = read_number(value, key, whole=hint is int)
    else:
        result = value
    if result is not None:
        return result
    expected = f"expected {EXPECTED.get(hint, 'another value')}"
    way_out = ""
    unit = unit_of(key)
    if unit is not None and hint in (int, float):
        expected = f"expected a number of {unit.name}, or one with a unit: {unit.examples}"
    if isinstance(value, str):
        for wrong, right in OTHER_NUMBERS.get(hint, ()):
            number = read_number(value.replace(wrong, right), key, whole=hint is int)
            if wrong in value and number is not None:
                way_out = f"\n  set {key}={number}"
                break
    raise ConfigError(f"{key} is {shown(value)}, {expected}{way_out}")


def read_choice(value: object, choices: tuple[object, ...], key: str) -> object:
    """Return the value if it is one of a field's choices; otherwise raise ConfigError suggesting the nearest choice."""
    if value in choices and not isinstance(value, bool):
        return value
    nearest = did_you_mean(str(value), map(str, choices))
    if not nearest.startswith("; did you"):
        nearest = ""
    raise ConfigError(f"{key} is {shown(value)}{nearest}\n  expected one of {', '.join(map(str, choices))}")


def read_number(value: int | float | str, key: str, *, whole: bool) -> int | float | None:
    """Parse a number, or a string with a number and an optional unit (30min); return None if it is not a number.

    A whole number can be written as 1e4 or 10k.
    """
    number: int | float | None = None
    if not isinstance(value, str):
        number = value
    else:
        unit = unit_of(key)
        factors: Mapping[str, float] = {}
        if unit is not None:
            factors = unit.factors
        elif whole:
            factors = COUNTS
        with_unit = NUMBER.fullmatch(value.strip())
        if with_unit is not None and with_unit[2] in factors:
            number = float(with_unit[1]) * factors[with_unit[2]]
            # In binary, 2.01 · 1000 is not a whole number. 1.1 GiB is none in any base: the nearest byte is meant.
            if whole and math.isfinite(number):
                number = round(number, 0 if factors is BYTES else 6)
        else:
            for kind in (int, float):
                try:
                    number = kind(value)
                    break
                except ValueError:
                    continue
    if not whole or not isinstance(number, float):
        return number
    if number.is_integer():
        return int(number)
    return None


def shown(value: object) -> str:
    """Format a value on one line, as in a recipe, and truncate it if it is long."""
    text = flow_yaml(value)
    if len(text) > LONGEST:
        return f"{text[:LONGEST]}…"
    return text


def flow_yaml(value: object) -> str:
    """Format a value on one line, as in a recipe."""
    if value is None:
        return "null"
    if value == "":
        return '""'
    # In Python a bool is an int; YAML writes it in lower case.
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        entries = []
        for name, entry in value.items():
            entries.append(f"{name}: {flow_yaml(entry)}")
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(flow_yaml, value)) + "]"
    return str(value)


# ------------------------------------------------------------------------ formatting numbers


def amount(value: float) -> str:
    """Format a number with a suffix: 41234.0 → "41.2k"."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{suffix}"
    has_fraction = value % 1 != 0
    if value < 100 and has_fraction:
        return f"{value:.1f}"
    return f"{value:.0f}"


def significant(value: float, digits: int) -> str:
    """Format a number with this many significant digits: 0.4230, 2.841, 12.3k."""
    if 1000 <= value < math.inf:
        return amount(value)
    return f"{value:#.{digits}g}".rstrip(".")


def duration(seconds: float) -> str:
    """Format seconds as "3d04h", "2h05m", "4m10s" or "12s"."""
    total = int(seconds)
    days = total // 86400
    hours = total // 3600 % 24
    minutes = total // 60 % 60
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    if minutes:
        return f"{minutes}m{total % 60:02}s"
    return f"{total}s"


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: "1 node", "3 nodes", "2 stretches", "5 classes"."""
    if number == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number} {noun}{ending}"
