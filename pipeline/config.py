"""Typed configuration: how a recipe becomes frozen dataclasses, and the effect of a change on a resume.

1. `read_recipe` reads the recipe, once a command: `with_overrides` puts `key=value` overrides on top and resolves
   interpolations such as ${oc.env:USER}, `with_home` paths such as ~/runs.
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
    """Read a recipe file, or env:NAME, whose text is that of a variable, with `key=value` overrides on top.

    Raises ConfigError for a file that is missing or no mapping and for an override that is not key=value.
    """
    # OmegaConf takes a word without "=" for a key with no value, and a forgotten "=" would set it to null.
    for override in overrides:
        require(
            "=" in override,
            f"{override!r} is not an override\n  expected key=value, for example pretrain.optim.lr=1e-3",
        )
    variable = str(path).removeprefix(IN_ENVIRONMENT)
    is_in_environment = variable != str(path)
    require(
        not is_in_environment or variable in os.environ,
        f"no recipe in the environment variable {variable}, which is not set",
    )
    try:
        recipe = OmegaConf.create(os.environ[variable]) if is_in_environment else OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"no recipe at {path}\n  recipes that ship: ls jobs/recipes") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder\n  expected a recipe, a YAML file: ls {path}/*.yaml") from None
    except Exception as error:  # whatever the YAML parser raises: the file is not YAML
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    require(isinstance(recipe, DictConfig), f"{path} holds no mapping; a recipe is `key: value` lines")
    assert isinstance(recipe, DictConfig)
    return Recipe(with_home(with_overrides(recipe, overrides)), str(path), f"runs/{path.stem}")


def with_overrides(values: DictConfig | Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """Return nested plain values with `key=value` overrides on top, and interpolations resolved.

    Environment values are in clear from here on. Raises ConfigError for an override that cannot be read, and for an
    interpolation of nothing.
    """
    base = values if isinstance(values, DictConfig) else OmegaConf.create(dict(values))
    quoted = []
    for override in overrides:
        # key='@stage/part': bare, a value that begins with @ is not YAML.
        key, reference_follows, rest = override.partition("=@")
        if reference_follows:
            override = f"{key}='@{rest}'"
        quoted.append(override)
    try:
        merged = OmegaConf.merge(base, OmegaConf.from_dotlist(quoted))
    except Exception as error:  # whatever the YAML parser or the merge raises: the user's text is wrong
        raise ConfigError(f"cannot read the overrides {' '.join(overrides)}: {str(error).splitlines()[0]}") from None
    try:
        return OmegaConf.to_container(merged, resolve=True)  # type: ignore[return-value]
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
    # OmegaConf makes a number of a text of digits only where nothing else than a number is expected.
    hints = get_type_hints(kind)
    converted = dict(values)
    for name, value in values.items():
        if is_number_or_section(hints[name]) and isinstance(value, str):
            converted[name] = int(value)
    try:
        base = OmegaConf.structured(defaults or kind)
        merged = OmegaConf.merge(base, converted)
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        key = where
        if error.full_key:
            key = f"{where}.{error.full_key}"
        reason = str(error).splitlines()[0]
        if "missing mandatory value" in reason:
            raise ConfigError(f"{key} is missing and has no default") from None
        hint: Any = kind
        for part in (error.full_key or "").split("."):
            if dataclasses.is_dataclass(hint):
                hint = get_type_hints(hint).get(part)
        # Of a Literal OmegaConf's message already says what is allowed.
        expected = ""
        if hint is not None and get_origin(hint) is not Literal and not dataclasses.is_dataclass(hint):
            expected = f"; expected {getattr(hint, '__name__', hint)}"
        raise ConfigError(f"{key}: {reason}{expected}") from None
    except (ConfigError, ValueError) as error:  # a dataclass's own __post_init__
        raise ConfigError(f"{where}: {error}") from None


def _check_names(kind: type[ConfigDataclass], values: Mapping[Any, Any], where: str) -> None:
    """Raise ConfigError for a key that `kind` has no field for, at any depth, or a value where a section belongs."""
    hints = get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]
    for name, value in values.items():
        if name not in known:
            from models.checks import did_you_mean  # with it comes torch, which reading a recipe does not need

            raise ConfigError(f"unknown key {where}.{name}{did_you_mean(str(name), known)}")
        path = f"{where}.{name}"
        hint = hints[name]
        # `tuple[int, ...]`, `list[int] | None`: of an entry that is no whole number, OmegaConf names no key.
        for candidate in (hint, *get_args(hint)):
            if value is None or get_origin(candidate) not in (list, tuple) or get_args(candidate)[0] is not int:
                continue
            is_right = isinstance(value, list | tuple) and all(map(_is_whole_number, value))
            require(is_right, f"{path} is {value}, expected whole numbers\n  type for example {path}=[1,5]")
        inner = section_kind(hint)
        if inner is not None and is_number_or_section(hint) and not isinstance(value, Mapping):
            names = ", ".join(field.name for field in dataclasses.fields(inner))
            expected = f"expected a whole number, or a section with the keys {names}"
            require(_is_whole_number(value), f"{path} is {value!r}, {expected}")
            continue
        if inner is None or value is None:
            continue
        require(isinstance(value, Mapping), f"{path} is {value!r}, expected a section of {inner.__name__} fields")
        # Under `mixture` the keys are names that the user chose, and only what stands below them can be wrong.
        if not is_named(hint):
            _check_names(inner, value, path)
            continue
        for key, section in value.items():
            if isinstance(section, Mapping):
                _check_names(inner, section, f"{path}.{key}")


def _is_whole_number(value: object) -> bool:
    """Return whether a value is a whole number; a text of digits is taken for one, as everywhere in a recipe."""
    is_number = isinstance(value, int | str) and not isinstance(value, bool)
    return is_number and str(value).strip().lstrip("+-").isdecimal()


def section_kind(hint: object) -> type[ConfigDataclass] | None:
    """Return the dataclass in a field's type, `Inner`, `Inner | None` or `dict[str, Inner]`; None for other types."""
    for candidate in (hint, *get_args(hint)):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
    return None


def is_number_or_section(hint: object) -> bool:
    """Return whether a field of this type is a whole number or a section: `int | Inner`."""
    return int in get_args(hint) and section_kind(hint) is not None


def is_named(hint: object) -> bool:
    """Return whether a field of this type holds sections under names that the user chooses: `dict[str, Inner]`."""
    return get_origin(hint) is dict


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
        name = field.name
        value = getattr(config, name)
        if name in later:
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            # In kind too: a seed of 0 is not a missing seed. And to Python 0 and False are equal, and a recipe's digest
            # tells them apart.
            if type(value) is type(default) and value == default:
                continue
        own = tag_of_field.get(name, outer)
        # The configs that the field holds: {"optim": …}, or {"mixture.a": …, "mixture.b": …}.
        sections: dict[str, object] = {name: value}
        if isinstance(value, dict):
            sections = {f"{name}.{key}": entry for key, entry in value.items()}
        if sections and all(dataclasses.is_dataclass(entry) for entry in sections.values()):
            for path, section in sections.items():
                values |= tagged(section, tag, f"{prefix}{path}.", own)  # type: ignore[arg-type]  # a dataclass
        # An empty mapping holds no section and stands for itself; a later entry in it is a change.
        elif own == tag:
            values[prefix + name] = value
    return as_json(values)


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
