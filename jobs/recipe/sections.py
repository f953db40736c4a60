"""Sections of a recipe as nested plain values, and fields in them by dotted name.

    {"optim": {"lr": 0.1}}, "optim.lr" → 0.1

A value may be a reference to another stage, as in `lr: "@finetune.grid/optim.lr"`: `references_in` finds these, and
`filled` puts values in their place.
"""

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, TypeVar

from data.errors import ConfigError
from jobs.resolved_recipe import reference
from pipeline.config import require

Section: TypeAlias = Mapping[str, object]  # nested, plain, not yet checked
Config = TypeVar("Config")  # a dataclass, or a dict of some


def flat(fields: Section, where: str, prefix: str = "") -> dict[str, object]:
    """Return nested fields by dotted name, {"optim": {"lr": 1}} → {"optim.lr": 1}; dotted names stay as they are.

    Raises ConfigError for a field that is given both ways.
    """
    values: dict[str, object] = {}
    for name, value in fields.items():
        key = f"{prefix}{name}"
        entries: dict[str, object] = {key: value}
        # An empty section is a value: it takes the place of what stands there.
        if isinstance(value, Mapping) and value:
            entries = flat(value, where, f"{key}.")
        for entry in entries:
            require(entry not in values, f"{where} has {entry} twice, as {entry} and as a section")
        values |= entries
    return values


def with_fields(section: Section, fields: Section, where: str) -> dict[str, object]:
    """Return a copy of a section with fields set by dotted name. Raises ConfigError if one leads into a value."""
    changed = copy.deepcopy(dict(section))
    for key, value in fields.items():
        *path, last = key.split(".")
        place = changed
        # Down to the section in which the field stands; the sections on the way that are missing are made.
        for part in path:
            deeper = place.setdefault(part, {})
            if deeper is None:
                deeper = place[part] = {}
            if not isinstance(deeper, dict):
                raise ConfigError(f"{where} sets {key}, and {part} is {deeper!r}, no section")
            place = deeper
        place[last] = copy.deepcopy(value)
    return changed


def with_field(section: Config, path: Sequence[str], value: object) -> Config:
    """Return a config, or sections by name, with the field changed to which a path leads; checks are made again."""
    first, *rest = path
    if isinstance(section, dict):
        # The name of a set may have dots.
        while rest and first not in section:
            first += f".{rest.pop(0)}"
        if rest:
            value = with_field(section[first], rest, value)
        return {**section, first: value}  # type: ignore[return-value]
    if rest:
        value = with_field(getattr(section, first), rest, value)
    return dataclasses.replace(section, **{first: value})  # type: ignore[type-var]


def value_at(section: Any, path: Sequence[str]) -> Any:
    """Return the value of the field of a config, or of sections by name, to which a path leads."""
    first, *rest = path
    if isinstance(section, dict):
        # The name of a set may have dots.
        while rest and first not in section:
            first += f".{rest.pop(0)}"
        value = section[first]
    else:
        value = getattr(section, first)
    return value_at(value, rest) if rest else value


def references_in(section: object, apart: Sequence[str], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Iterate the fields whose value is a reference to a part of another stage, as ("optim.lr", "@grid/optim.lr").

    Fields that match a pattern of `apart` are excluded.
    """
    if isinstance(section, Mapping):
        for name, value in section.items():
            yield from references_in(value, apart, f"{prefix}.{name}".lstrip("."))
    elif isinstance(section, str) and not any(fnmatchcase(prefix, pattern) for pattern in apart):
        link = reference(section)
        if link is not None and link[1]:
            yield prefix, section


def filled(section: Any, values: Mapping[str, object], prefix: str = "") -> Any:
    """Return a copy of a section with values, by dotted name, in place of the references of these fields."""
    if isinstance(section, Mapping):
        return {name: filled(value, values, f"{prefix}.{name}".lstrip(".")) for name, value in section.items()}
    return copy.deepcopy(values.get(prefix, section))
