"""Typed configuration: dataclass defaults < YAML differences < key=value, merged by OmegaConf into frozen dataclasses.

Every field of a config carries a resume tag: "free" may change when a stage is resumed, "warn" may change but is
said, "forbid" stops with the diff. Only forbidden fields enter a stage's key.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.errors import ConfigError
from models.checks import did_you_mean

Config = TypeVar("Config")
Tags: TypeAlias = Mapping[str, str]


def tags(**fields: str) -> Mapping[str, str]:
    """Resume tags of a config class: `tags(forbid="lr steps", free="log_every")` → {"lr": "forbid", …}."""
    unknown = set(fields) - {"free", "warn", "forbid"}
    assert not unknown, unknown
    return {name: tag for tag, names in fields.items() for name in names.split()}


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless `condition`; what `__post_init__` checks ranges with."""
    if not condition:
        raise ConfigError(message)


def read_yaml(path: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """A recipe file with `key=value` overrides on top, untyped.

    Raises ConfigError for a file that is missing or no mapping and for an override that is not key=value.
    """
    for item in overrides:
        require(
            "=" in item,
            f"{item!r} is not an override\n  expected key=value, for example pretrain.optim.lr=1e-3",
        )
    try:
        recipe = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"no recipe at {path}\n  recipes that ship: ls jobs/recipes") from None
    except Exception as error:  # whatever the YAML parser raises: the file is not YAML
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    require(isinstance(recipe, DictConfig), f"{path} holds no mapping; a recipe is `key: value` lines")
    try:  # a value like @stage/part is no YAML scalar unless quoted
        dotlist = OmegaConf.from_dotlist([item.replace("=@", "='@", 1) + "'" * ("=@" in item) for item in overrides])
        merged = OmegaConf.merge(recipe, dotlist)
    except Exception as error:  # whatever the YAML parser or the merge raises: the user's text is wrong
        raise ConfigError(f"cannot read the overrides {' '.join(overrides)}: {str(error).splitlines()[0]}") from None
    assert isinstance(merged, DictConfig)
    return merged


def plain_yaml(values: DictConfig) -> dict[str, Any]:
    """Nested plain values with interpolations resolved: environment values are in clear from here on."""
    try:
        return OmegaConf.to_container(values, resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from None


def build(kind: type[Config], values: Any, where: str, defaults: Config | None = None) -> Config:
    """A frozen `kind` from its defaults and plain `values`; `where` is the dotted path used in messages.

    Raises ConfigError naming the key, what was found and what was expected.
    """
    plain = OmegaConf.to_container(values) if isinstance(values, DictConfig) else values
    require(isinstance(plain, Mapping), f"{where} is {plain!r}, expected a mapping of {kind.__name__} fields")
    assert isinstance(plain, Mapping)
    _check_names(kind, plain, where)
    try:
        base = OmegaConf.structured(defaults if defaults is not None else kind)
        merged = OmegaConf.merge(base, values)
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        key = f"{where}.{error.full_key}" if error.full_key else where
        reason = str(error).splitlines()[0]
        if "missing mandatory value" in reason:
            raise ConfigError(f"{key} is missing and has no default") from None
        expected = _expected_type(kind, error.full_key or "")
        raise ConfigError(f"{key}: {reason}{expected}") from None
    except (ConfigError, ValueError) as error:  # a dataclass's own __post_init__
        raise ConfigError(f"{where}: {error}") from None


def _check_names(kind: Any, values: Mapping[Any, Any], where: str) -> None:
    hints = get_type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind)}
    for name, value in values.items():
        require(name in known, f"unknown key {where}.{name}{did_you_mean(str(name), known)}")
        candidates = (hints[name], *get_args(hints[name]))
        inner: Any = next((h for h in candidates if dataclasses.is_dataclass(h)), None)
        if inner is None or value is None:
            continue
        kind_name = inner.__name__
        require(isinstance(value, Mapping), f"{where}.{name} is {value!r}, expected a section of {kind_name} fields")
        named = value.items() if get_origin(hints[name]) is dict else [("", value)]
        for key, section in named:
            if isinstance(section, Mapping):
                _check_names(inner, section, f"{where}.{name}" + (f".{key}" if key else ""))


def _expected_type(kind: Any, key: str) -> str:
    for part in key.split("."):
        hint: Any = get_type_hints(kind).get(part)
        if hint is None:
            return ""
        if not dataclasses.is_dataclass(hint):
            return "" if get_origin(hint) is Literal else f"; expected {getattr(hint, '__name__', hint)}"
        kind = hint
    return ""


def plain(config: Any) -> dict[str, Any]:
    """A config as JSON-able nested dicts."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def digest(value: Any) -> str:
    """sha256 of a JSON-able value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def tagged(config: Any, tag: str, prefix: str = "", outer: str = "forbid") -> dict[str, Any]:
    """Flat {dotted name: value} of the fields of `config` that carry `tag`, inner configs included.

    A class without tags of its own (the data package has none) carries the tag of the field that holds it.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value, own = getattr(config, field.name), getattr(type(config), "RESUME", {}).get(field.name, outer)
        inner = value.items() if isinstance(value, dict) else [("", value)]
        if value and all(dataclasses.is_dataclass(one) for _, one in inner):
            for name, one in inner:
                found |= tagged(one, tag, f"{prefix}{field.name}.{name and name + '.'}", own)
        elif own == tag:
            found[prefix + field.name] = value
    return json.loads(json.dumps(found, default=str))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """ "key: old → new" for every key whose value differs."""
    keys = [*old, *(key for key in new if key not in old)]
    return [
        f"{key}: {old.get(key, 'absent')} → {new.get(key, 'absent')}" for key in keys if old.get(key) != new.get(key)
    ]


def to_yaml(values: Any) -> str:
    """YAML text of nested plain values, interpolations left unresolved."""
    return OmegaConf.to_yaml(OmegaConf.create(values), resolve=False)
