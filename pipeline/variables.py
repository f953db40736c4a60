"""Keeps the values of environment variables out of records: `${oc.env:DATA}/train` is recorded with the name DATA.

    note({"data": {"train": "${oc.env:DATA}/train"}})         DATA is /private/projects
    recorded({"train": "/private/projects/train"})      →  {"train": "${oc.env:DATA}/train (sha256 4be1a02c)"}
    restored({"train": "${oc.env:DATA}/train (sha256 4be1a02c)"})    →  {"train": "/private/projects/train"}

The digest covers the values, so that a change to a value is visible although the value is not. Numbers, single words
and values of fewer than SHORTEST characters are recorded as they are: results depend on numbers, single words are
choices, and short values would match other text by chance. Variables that look like secrets are rejected earlier
(pipeline/recipe.py).
"""

import hashlib
import os
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from data.errors import DataError

SHORTEST = 6  # characters
VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*['\"]?([A-Za-z_][A-Za-z0-9_]*)")
WORD = re.compile(r"[\w.+-]*")
RECORDED = re.compile(r"(.*\$\{oc\.env:.*) \(sha256 ([0-9a-f]{8})\)", re.DOTALL)

Values = TypeVar("Values")  # nested plain values

_values: dict[str, str] = {}  # name → value of the variables that this process's recipe refers to


def note(unresolved: object) -> None:
    """Remember the current values of the environment variables to which a recipe's nested plain values refer."""
    for text in texts_in(unresolved):
        for name in VARIABLE.findall(text):
            note_values({name: os.environ.get(name, "")})


def note_values(values: Mapping[str, str]) -> None:
    """Remember variables whose values must not be recorded; a worker receives them from the driver."""
    for name, value in values.items():
        if len(value) >= SHORTEST and not WORD.fullmatch(value):
            _values[name] = value


def noted() -> dict[str, str]:
    """Return {name: value} of the variables whose values must not be recorded."""
    return dict(_values)


def recorded(values: Values) -> Values:
    """Replace the values of variables in nested plain values with their names; add a digest to each changed string."""
    return replaced(values, record_text)


def record_text(text: str) -> str:
    """Replace the values of variables in a string with the variables' names, and add a digest of the values."""
    used = []
    # The longest first, because a value may contain another.
    for name, value in sorted(_values.items(), key=lambda item: -len(item[1])):
        if value in text:
            text = text.replace(value, f"${{oc.env:{name}}}")
            used.append(value)
    return f"{text} (sha256 {digest_of(used)})" if used else text


def restored(values: Values, source: object) -> Values:
    """Replace variables in recorded values with their current values.

    `source` names the record in error messages. Raises DataError if a variable is not set or has another value.
    """

    def restore_text(text: str) -> str:
        match = RECORDED.fullmatch(text)
        if match is None:
            return text
        used = []
        content = match[1]
        for name in VARIABLE.findall(content):
            value = os.environ.get(name, "")
            used.append(value)
            content = content.replace(f"${{oc.env:{name}}}", value)
        if digest_of(used) != match[2]:
            names = ", ".join(VARIABLE.findall(match[1]))
            raise DataError(
                f"{source} contains {match[1]}, but {names} is not set, or has another value now\n"
                f"  set {names} to the same value as before, then run the same command again"
            )
        return content

    return replaced(values, restore_text)


def digest_of(values: list[str]) -> str:
    """Return the first digits of the sha256 of a set of strings; their order and repetitions have no effect."""
    # A text may use a variable twice, and recording and restoring meet the variables in different orders.
    longest_first = sorted(set(values), key=lambda value: (-len(value), value))
    return hashlib.sha256("\0".join(longest_first).encode()).hexdigest()[:8]


def replaced(values: Any, replace: Any) -> Any:
    """Replace each string in nested plain values with `replace(string)`."""
    if isinstance(values, str):
        return replace(values)
    if isinstance(values, Mapping):
        return {key: replaced(value, replace) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [replaced(value, replace) for value in values]
    return values


def texts_in(values: object) -> list[str]:
    """Return all strings in nested plain values."""
    texts: list[str] = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    replaced(values, collect)
    return texts
