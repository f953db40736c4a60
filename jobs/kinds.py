"""Load the stage kinds listed in a table of module and class names.

    load_kinds({"pack": "jobs.extras.packing.stage:Pack", …})  →  {"pack": Pack(), …}

The table in jobs/__main__.py lists all kinds, including those of extras. If the extra that defines a kind was deleted
from the checkout, a recipe that uses this kind raises an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from data.errors import ConfigError
from jobs.resolved_recipe import Kinds, Sections, StageKind, StageSection


@dataclass(frozen=True)
class NoConfig:
    """The empty config of a `MissingKind`."""


class MissingKind(StageKind):
    """Placeholder for a stage kind whose module is not in this checkout."""

    config = NoConfig

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        self.missing_module = module

    def expand(self, sections: Sections, kinds: Kinds) -> Sections:
        """Raise ConfigError if a section has a key that only this missing kind can expand, such as `sweep`.

        A key whose value is null has no effect and is removed.
        """
        expanded = dict(sections)
        for name, section in sections.items():
            if not isinstance(section.values, Mapping) or self.name not in section.values:
                continue
            if section.values[self.name] is not None:
                raise ConfigError(
                    f"{name}.{self.name} needs {self.missing_module}, which is not in this checkout\n"
                    f"  remove the key, or set {name}.{self.name}=null"
                )
            values = {key: value for key, value in section.values.items() if key != self.name}
            expanded[name] = StageSection(values, section.source)
        return expanded


def load_kinds(names: Mapping[str, str]) -> dict[str, StageKind]:
    """Return an instance of each stage kind; `names` maps each name to "module:Class" and any extras.

    Extras missing from this checkout are skipped; each missing kind becomes a `MissingKind`.
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
            # The kind itself, or another extra that it imports.
            kinds[name] = MissingKind(name, str(error.name).replace(".", "/"))
    return kinds


def load_extras(*names: str) -> list[Any]:
    """Return instances of these extras ("module:Class"), skipping extras missing from this checkout."""
    extras: list[Any] = []
    for name in names:
        try:
            extras.append(resolve_name(name)())
        except ModuleNotFoundError as error:
            if not is_removed_extra(error):
                raise
    return extras


def is_removed_extra(error: ModuleNotFoundError) -> bool:
    """Return whether a missing module belongs to an extra rather than to a library."""
    return ".extras" in (error.name or "")
