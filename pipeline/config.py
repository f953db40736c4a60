"""Typed configuration: how a recipe becomes frozen dataclasses, and the effect of a change on a resume.

1. `read_recipe` reads the recipe, once a command: `read_yaml` puts the `key=value` overrides on top, `plain_yaml`
   resolves interpolations such as ${oc.env:USER}, `with_home` paths such as ~/runs.
2. `build` makes one frozen dataclass of a section: its defaults < the recipe's differences < the overrides.
3. `tagged` separates the fields that a resume may change from those that it may not; `digest` makes a stage's key of
   the latter.

    recipe.yaml  pretrain: {optim: {lr: 1e-3}}        override  pretrain.steps=100
    build(TrainConfig, {"optim": {"lr": 0.001}, "steps": 100}, "pretrain")  →  TrainConfig(steps=100, …)

Every field of a config carries a resume tag: "free" may change when a stage is resumed, "warn" may change but is
logged, "forbid" stops with the diff. Only forbidden fields enter a stage's key.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.errors import ConfigError

Tags: TypeAlias = Mapping[str, str]  # field → "free", "warn" or "forbid"


class ConfigDataclass(Protocol):
    """Any frozen dataclass that holds a section of a recipe."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


IN_ENVIRONMENT = "env:"  # before the name of a variable that holds a recipe's text

Config = TypeVar("Config", bound=ConfigDataclass)
Values = TypeVar("Values")  # nested and plain: a dict, a list or a single value


def tags(**fields: str) -> Mapping[str, str]:
    """Return the resume tags of a config class: `tags(forbid="lr steps", free="log_every")` → {"lr": "forbid", …}."""
    tag_of_field: dict[str, str] = {}
    for tag, names in fields.items():
        assert tag in ("free", "warn", "forbid"), tag
        for name in names.split():
            tag_of_field[name] = tag
    return tag_of_field


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless `condition` holds; `__post_init__` methods check their ranges with it."""
    if not condition:
        raise ConfigError(message)


# ------------------------------------------------------------------------------------------------ reading a recipe


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe as it was read, with its overrides: all that a command goes on with."""

    values: Mapping[str, Any]  # nested and plain; environment variables and `~` are the reader's
    source: str  # what it is called in messages
    default_run: str  # the run directory, where it names none


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, or env:NAME, with `key=value` overrides on top. Raises ConfigError as `read_yaml`."""
    values = with_home(plain_yaml(read_yaml(path, overrides)))
    return Recipe(values, str(path), f"runs/{path.stem}")


def read_yaml(path: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Read a recipe file, or env:NAME, and put `key=value` overrides on top; the values are not typed yet.

    Raises ConfigError for a file that is missing or no mapping and for an override that is not key=value.
    """
    # OmegaConf takes a word without "=" for a key with no value, and a forgotten "=" would set it to null.
    for override in overrides:
        require(
            "=" in override,
            f"{override!r} is not an override\n  expected key=value, for example pretrain.optim.lr=1e-3",
        )
    try:
        recipe = _load(path)
    except FileNotFoundError:
        raise ConfigError(f"no recipe at {path}\n  recipes that ship: ls jobs/recipes") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder\n  expected a recipe, a YAML file: ls {path}/*.yaml") from None
    except Exception as error:  # whatever the YAML parser raises: the file is not YAML
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    require(isinstance(recipe, DictConfig), f"{path} holds no mapping; a recipe is `key: value` lines")
    assert isinstance(recipe, DictConfig)
    return _merged(recipe, overrides)


def with_overrides(values: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """Return nested plain values with `key=value` overrides on top. Raises ConfigError for one that cannot be read."""
    return plain_yaml(_merged(OmegaConf.create(dict(values)), overrides))


def _merged(recipe: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return the values with `key=value` overrides on top."""
    try:
        # key='@stage/part': bare, a value that begins with @ is not YAML.
        quoted = []
        for override in overrides:
            key, reference_follows, rest = override.partition("=@")
            if reference_follows:
                override = f"{key}='@{rest}'"
            quoted.append(override)
        dotlist = OmegaConf.from_dotlist(quoted)
        merged = OmegaConf.merge(recipe, dotlist)
    except Exception as error:  # whatever the YAML parser or the merge raises: the user's text is wrong
        raise ConfigError(f"cannot read the overrides {' '.join(overrides)}: {str(error).splitlines()[0]}") from None
    assert isinstance(merged, DictConfig)
    return merged


def _load(path: Path) -> Any:
    """Return the values of a YAML file; of "env:NAME" they are the text of an environment variable."""
    variable = str(path).removeprefix(IN_ENVIRONMENT)
    if variable == str(path):
        return OmegaConf.load(path)
    require(variable in os.environ, f"no recipe in the environment variable {variable}, which is not set")
    return OmegaConf.create(os.environ[variable])


def plain_yaml(values: DictConfig) -> dict[str, object]:
    """Return nested plain values with interpolations resolved: environment values are in clear from here on."""
    try:
        return OmegaConf.to_container(values, resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from None


def with_home(values: Values) -> Values:
    """Return nested plain values in which a text `~/…` or `~name/…` is the path that a shell makes of it.

    A shell leaves it as it is in `run=~/runs`, and a folder called `~` would be made. The section `cache` stays: it is
    of folders on every node, which may have other homes.
    """
    if isinstance(values, str):
        return os.path.expanduser(values)  # type: ignore[return-value]
    if isinstance(values, list):
        return list(map(with_home, values))  # type: ignore[return-value]
    if isinstance(values, dict):
        expanded = dict(values)
        for name, value in values.items():
            if name != "cache":
                expanded[name] = with_home(value)
        return expanded  # type: ignore[return-value]
    return values


def to_yaml(values: Mapping[str, object]) -> str:
    """Return the YAML text of nested plain values, interpolations left unresolved."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(values)), resolve=False)


# ------------------------------------------------------------------------------------------------ typed sections


def build(kind: type[Config], values: object, where: str, defaults: Config | None = None) -> Config:
    """Build a frozen `kind` from its defaults and plain `values`; `where` is the dotted path used in messages.

    Raises ConfigError naming the key, what was found and what was expected.
    """
    require(isinstance(values, Mapping), f"{where} is {values!r}, expected a mapping of {kind.__name__} fields")
    assert isinstance(values, Mapping)
    # OmegaConf's own message for an unknown key suggests no other name, so names are checked first.
    _check_names(kind, values, where)
    values = _with_numbers(kind, values)
    try:
        base = OmegaConf.structured(defaults or kind)
        merged = OmegaConf.merge(base, values)
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        key = where
        if error.full_key:
            key = f"{where}.{error.full_key}"
        reason = str(error).splitlines()[0]
        if "missing mandatory value" in reason:
            raise ConfigError(f"{key} is missing and has no default") from None
        expected = _expected_type(kind, error.full_key or "")
        raise ConfigError(f"{key}: {reason}{expected}") from None
    except (ConfigError, ValueError) as error:  # a dataclass's own __post_init__
        raise ConfigError(f"{where}: {error}") from None


def _check_names(kind: type[ConfigDataclass], values: Mapping[Any, Any], where: str) -> None:
    """Raise ConfigError for a key that `kind` has no field for, at any depth, or a value where a section belongs."""
    hints = get_type_hints(kind)
    known = []
    for field in dataclasses.fields(kind):
        known.append(field.name)
    for name, value in values.items():
        if name not in known:
            from models.checks import did_you_mean  # with it comes torch, which reading a recipe does not need

            raise ConfigError(f"unknown key {where}.{name}{did_you_mean(str(name), known)}")
        path = f"{where}.{name}"
        if holds_whole_numbers(hints[name]) and value is not None:
            _check_whole_numbers(value, path)
        inner = section_kind(hints[name])
        if inner is not None and is_number_or_section(hints[name]) and not isinstance(value, Mapping):
            names = []
            for field in dataclasses.fields(inner):
                names.append(field.name)
            expected = f"expected a whole number, or a section with the keys {', '.join(names)}"
            require(_is_whole_number(value), f"{path} is {value!r}, {expected}")
            continue
        if inner is None or value is None:
            continue
        require(isinstance(value, Mapping), f"{path} is {value!r}, expected a section of {inner.__name__} fields")
        # Under `mixture` the keys are names that the user chose, and only what stands below them can be wrong.
        if not is_named(hints[name]):
            _check_names(inner, value, path)
            continue
        for key, section in value.items():
            if isinstance(section, Mapping):
                _check_names(inner, section, f"{path}.{key}")


def section_kind(hint: object) -> type[ConfigDataclass] | None:
    """Return the dataclass in a field's type, `Inner`, `Inner | None` or `dict[str, Inner]`; None for other types."""
    for candidate in (hint, *get_args(hint)):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
    return None


def is_number_or_section(hint: object) -> bool:
    """Return whether a field of this type is a whole number or a section: `int | Inner`."""
    return int in get_args(hint) and section_kind(hint) is not None


def holds_whole_numbers(hint: object) -> bool:
    """Return whether a field of this type is a list of whole numbers: `tuple[int, ...]`, `list[int] | None`."""
    for candidate in (hint, *get_args(hint)):
        if get_origin(candidate) in (list, tuple) and get_args(candidate)[0] is int:
            return True
    return False


def _check_whole_numbers(value: object, path: str) -> None:
    """Raise ConfigError unless a value is a list of whole numbers: of an entry that is none, OmegaConf names no key."""
    is_right = isinstance(value, list | tuple)
    if isinstance(value, list | tuple):
        is_right = all(map(_is_whole_number, value))
    require(is_right, f"{path} is {value}, expected whole numbers\n  type for example {path}=[1,5]")


def _is_whole_number(value: object) -> bool:
    """Return whether a value is a whole number; a text of digits is taken for one, as everywhere in a recipe."""
    is_number = isinstance(value, int | str) and not isinstance(value, bool)
    return is_number and str(value).strip().lstrip("+-").isdecimal()


def _with_numbers(kind: type[ConfigDataclass], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with numbers for texts of digits where a number or a section is expected.

    OmegaConf makes a number of a text where only a number is expected.
    """
    hints = get_type_hints(kind)
    converted = dict(values)
    for name, value in values.items():
        if is_number_or_section(hints[name]) and isinstance(value, str):
            converted[name] = int(value)
    return converted


def is_named(hint: object) -> bool:
    """Return whether a field of this type holds sections under names that the user chooses: `dict[str, Inner]`."""
    return get_origin(hint) is dict


def _expected_type(kind: type[ConfigDataclass], key: str) -> str:
    """Return "; expected int" for a dotted key; "" where OmegaConf's message already says what is allowed."""
    for part in key.split("."):
        hint: Any = get_type_hints(kind).get(part)
        if hint is None or get_origin(hint) is Literal:
            return ""
        if not dataclasses.is_dataclass(hint):
            return f"; expected {getattr(hint, '__name__', hint)}"
        assert isinstance(hint, type)
        kind = hint
    return ""


# ------------------------------------------------------------------------------------------------ configs as data


def plain(config: ConfigDataclass) -> dict[str, object]:
    """Return a config as nested dicts that JSON can hold."""
    return as_json(dataclasses.asdict(config))


def digest(value: object) -> str:
    """Return the sha256 of a JSON-able value, independent of key order."""
    # Sorted, because two recipes that write the same keys in another order are one stage.
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def tagged(config: ConfigDataclass, tag: str, prefix: str = "", outer: str = "forbid") -> dict[str, object]:
    """Return flat {dotted name: value} of the fields of `config` that carry `tag`, inner configs included.

    A class without tags of its own (the data package has none) carries `outer`, the tag of the field that holds it.
    Fields in a class's LATER are left out while they have their defaults: they came after keys had been computed
    without them.
    """
    later: tuple[str, ...] = getattr(type(config), "LATER", ())
    tag_of_field: Tags = getattr(type(config), "RESUME", {})
    values: dict[str, object] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in later and has_default(field, value):
            continue
        own = tag_of_field.get(field.name, outer)
        sections = _sections(field.name, value)
        for path, section in sections.items():
            values |= tagged(section, tag, f"{prefix}{path}.", own)
        # An empty mapping holds no section and stands for itself; a later entry in it is a change.
        if not sections and own == tag:
            values[prefix + field.name] = value
    return as_json(values)


def has_default(field: dataclasses.Field[object], value: object) -> bool:
    """Return whether a value is its field's default, in kind too: a seed of 0 is not a missing seed."""
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    # To Python 0 and False are equal, and a recipe's digest tells them apart.
    return type(value) is type(default) and value == default


def _sections(name: str, value: object) -> dict[str, ConfigDataclass]:
    """Return the configs that a field holds: {"optim": …}, {"mixture.a": …, "mixture.b": …}, or {} for a value."""
    entries: dict[str, object] = {name: value}
    if isinstance(value, dict):
        entries = {}
        for key, entry in value.items():
            entries[f"{name}.{key}"] = entry
    sections: dict[str, ConfigDataclass] = {}
    for path, entry in entries.items():
        if not dataclasses.is_dataclass(entry) or isinstance(entry, type):
            return {}
        sections[path] = entry
    return sections


def as_json(values: object) -> dict[str, object]:
    """Return `values` after a trip through JSON: tuples are lists, paths are texts."""
    # A manifest is read back from JSON: without the trip a tuple would differ from its own list at every resume.
    return json.loads(json.dumps(values, default=str))


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Return "key: old → new" for every key whose value differs, the keys of `old` first."""
    changes = []
    # A dict keeps the order of keys; a set of them would print the differences in another order each time.
    for key in {**old, **new}:
        before = old.get(key)
        after = new.get(key)
        if before != after:
            changes.append(f"{key}: {old.get(key, 'absent')} → {new.get(key, 'absent')}")
    return changes
