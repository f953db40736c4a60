"""The kinds of stages that a recipe may have, loaded from a table of texts.

    load_kinds({"pack": "jobs.stages.pack:Pack", …})  →  {"pack": Pack(), …}

The table of all kinds, those of extras too, is in jobs/__main__.py. A kind whose module was removed from the checkout
stays in the table: a recipe that uses it is refused with a message.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from data.errors import ConfigError
from jobs.resolved_recipe import Kinds, Sections, StageKind, StageSection


@dataclass(frozen=True)
class NoConfig:
    """The config of a kind that is missing."""


class MissingKind(StageKind):
    """Stands for a kind of stage whose module is not in this checkout."""

    config = NoConfig

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        self.missing_module = module

    def expand(self, sections: Sections, kinds: Kinds) -> Sections:
        """Raise ConfigError if a section has a key of this name, as `sweep`, which the kind would have expanded.

        A key that is null changes nothing, and is removed.
        """
        expanded = dict(sections)
        for name, section in sections.items():
            if not isinstance(section.values, Mapping) or self.name not in section.values:
                continue
            if section.values[self.name] is not None:
                raise ConfigError(
                    f"{name}.{self.name}: this checkout has no {self.missing_module}, which reads it\n"
                    f"  leave it out, or type {name}.{self.name}=null"
                )
            values = {key: value for key, value in section.values.items() if key != self.name}
            expanded[name] = StageSection(values, section.source)
        return expanded


def load_kinds(names: Mapping[str, str]) -> dict[str, StageKind]:
    """Return an instance of every kind of a table: name → "module:Class", with its extras if it has any.

    An extra whose module was removed is left out.
    """
    kinds: dict[str, StageKind] = {}
    for name, text in names.items():
        place, *extras = text.split()
        try:
            kind_class = resolve_name(place)
            kinds[name] = kind_class(load_extras(*extras)) if extras else kind_class()
        except ModuleNotFoundError as error:
            if not is_removed_extra(error):
                raise
            kinds[name] = MissingKind(name, place.partition(":")[0])
    return kinds


def load_extras(*names: str) -> list[Any]:
    """Return the extras of these names, "module:Class", without those whose module has been removed."""
    extras: list[Any] = []
    for name in names:
        try:
            extras.append(resolve_name(name)())
        except ModuleNotFoundError as error:
            if not is_removed_extra(error):
                raise
    return extras


def is_removed_extra(error: ModuleNotFoundError) -> bool:
    """Return whether an extra is missing: the one that was named, or one that it builds on. A library is no extra."""
    return ".extras" in (error.name or "")
