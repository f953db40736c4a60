"""Typed configuration: turns a recipe's section into a frozen dataclass, and compares configs when a stage resumes.

1. pipeline/recipe.py reads the recipe into nested plain values, once per command.
2. `build` creates one frozen dataclass from a section: defaults < the recipe's values < overrides.
3. `tagged` selects the fields that must not change on a resume; their `digest` is part of the stage's key.

    recipe.yaml  pretrain: {optim: {lr: 1e-3}}        override  pretrain.steps=100
    build(TrainConfig, {"optim": {"lr": 0.001}, "steps": 100}, "pretrain")  →  TrainConfig(steps=100, …)

Each config field has a resume tag: a "free" field may change when a stage resumes; a change to a "warn" field is
logged; a change to a "forbid" field stops the command and shows the difference. Only "forbid" fields are part of the
stage's key.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from types import NoneType
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from data.checks import few
from data.errors import ConfigError
from models.checks import did_you_mean
from pipeline.values import read_number, read_value, shown

Tags: TypeAlias = Mapping[str, str]  # field → "free", "warn" or "forbid"


class ConfigDataclass(Protocol):
    """Any frozen dataclass that holds a section of a recipe."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


MODEL = "model"  # this section may also be just the model's name
MAX_NAMES = 12  # keys listed in a message
# Names that other libraries use for our recipe keys; the error for an unknown key suggests ours.
OTHER_WORDS = {
    "passes": "epochs epoch num_epochs max_epochs num_train_epochs",
    "steps": "max_steps num_steps iterations total_steps",
    "optim": "optimizer",
    "optim.lr": "learning_rate base_lr peak_lr",
    "optim.weight_decay": "wd decay",
    "optim.clip": "grad_clip clip_grad max_grad_norm gradient_clip_val",
    "optim.schedule.warmup_steps": "warmup num_warmup_steps warm_up",
    "optim.schedule.decay": "lr_scheduler scheduler",
    "model.classes": "num_classes nb_classes n_classes num_labels",
    "model.image_size": "img_size input_size resolution",
    "data.augment": "augmentation augmentations aug transforms",
    "data.train": "dataset train_data data_path data_dir path",
    "data.evaluate": "val val_data validation test eval",
    "data.processes": "num_workers",
    "micro_batch": "accumulation gradient_accumulation_steps accum_steps micro_batch_size",
    "init": "pretrained weights checkpoint finetune_from",
    "precision": "dtype amp fp16 bf16",
    "save_every": "save_steps checkpoint_every",
    "evaluate_every": "eval_every eval_steps",
    "gpus_per_worker": "gpus num_gpus gpu devices",
    "workers": "nodes num_nodes world_size",
}

Config = TypeVar("Config", bound=ConfigDataclass)


def tags(**fields: str) -> Mapping[str, str]:
    """Return {field: resume tag}: `tags(forbid="lr steps", free="log_every")` → {"lr": "forbid", …}."""
    tag_of_field: dict[str, str] = {}
    for tag, names in fields.items():
        assert tag in ("free", "warn", "forbid"), tag
        for name in names.split():
            tag_of_field[name] = tag
    return tag_of_field


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless `condition` holds; used by `__post_init__` methods to check ranges."""
    if not condition:
        raise ConfigError(message)


# ------------------------------------------------------------------------------------------------ typed sections


def build(kind: type[Config], section: object, where: str, defaults: Config | None = None) -> Config:
    """Build a frozen config of class `kind` from its defaults and a plain section; `where` is its path in messages.

    `defaults` is an instance of `kind`. If a key or value is invalid, raises ConfigError, which names the key, its
    value and what was expected.
    """
    return _filled(kind, _read_section(kind, section, where, (kind, where)), where, where, defaults)


def _filled(
    kind: type[Config], values: Mapping[str, object], path: str, stage_path: str, defaults: object = None
) -> Config:
    """Return an instance of `kind` with these values, read by `_read_section`, and defaults for all other fields.

    Raises ConfigError for a missing value, for null in place of a section, or for values that the class rejects.
    """
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        key = f"{path}.{field.name}"
        default = getattr(defaults, field.name) if isinstance(defaults, kind) else default_of(field)
        value = values.get(field.name, default)
        hint = type_hints(kind)[field.name]
        inner = section_kind(hint)
        if field.name not in values:
            pass
        elif isinstance(value, Mapping) and inner is not None and not is_named(hint):
            value = _filled(inner, value, key, stage_path, default)
        elif isinstance(value, Mapping) and inner is not None:
            value = {name: _filled(inner, entry or {}, f"{key}.{name}", stage_path) for name, entry in value.items()}
        elif value is None and NoneType not in get_args(hint) and hint is not Any:
            raise ConfigError(f"{key} is null, expected a value\n  remove the key to use its default")
        else:
            value = as_declared(value, hint)
            if isinstance(value, Mapping) and isinstance(default, Mapping):
                value = {**default, **value}
        if isinstance(value, str) and value == "???":
            raise ConfigError(f"{key} is missing and has no default\n  set {key}=…")
        fields[field.name] = value
    try:
        return kind(**fields)
    except (ConfigError, ValueError) as error:  # from __post_init__
        raise ConfigError(f"{stage_path}: {error}") from None


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """Return the default value of a dataclass field, which must have a default."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


@cache
def type_hints(kind: type[ConfigDataclass]) -> Mapping[str, Any]:
    """Return the type of each field of a config class."""
    return get_type_hints(kind)


def as_declared(value: object, hint: Any) -> Any:
    """Convert a parsed value to the type of its field: integers become floats or strings, also inside lists."""
    allowed = [part for part in get_args(hint) if part is not NoneType]
    if NoneType in get_args(hint) and len(allowed) == 1:
        (hint,) = allowed
    if isinstance(value, list | tuple) and get_args(hint):
        entries = [as_declared(entry, get_args(hint)[0]) for entry in value]
        return tuple(entries) if get_origin(hint) is tuple else entries
    if isinstance(value, Mapping) and len(get_args(hint)) == 2:
        return {str(name): as_declared(entry, get_args(hint)[1]) for name, entry in value.items()}
    if hint in (float, str) and isinstance(value, int | float) and not isinstance(value, bool):
        return hint(value)
    return value


def _read_section(
    kind: type[ConfigDataclass], section: object, where: str, stage: tuple[type[ConfigDataclass], str]
) -> dict[str, object]:
    """Convert a plain section and its subsections to values of the types declared by `kind`.

    `stage` is the config class of the whole stage and its path in messages: an unknown key may belong to another of
    its sections. Raises ConfigError for an unknown key, a value of the wrong type, or a value in place of a section.
    """
    known = [field.name for field in ordered_fields(kind)]
    if not isinstance(section, Mapping):
        listed = few(known, MAX_NAMES, ", …")
        example = ""
        for name, hint in type_hints(kind).items():
            # Suggest the first key that accepts the value, for example data.train=shards for data=shards.
            with suppress(ConfigError):
                if name in known and section_kind(hint) is None and section not in (None, ""):
                    read_value(section, hint, name)
                    example = f"\n  for example, set {where}.{name}={shown(section)}"
                    break
        raise ConfigError(f"{where} is {shown(section)}, expected a section with the keys {listed}{example}")
    hints = type_hints(kind)
    read_values: dict[str, object] = {}
    for name, value in section.items():
        path = f"{where}.{name}"
        if name not in known:
            stage_kind, stage_path = stage
            other = find_key(str(name), stage_kind)
            if other is not None:
                raise ConfigError(f"unknown key {path}; did you mean {stage_path}.{other}?")
            hint = did_you_mean(str(name), known)
            for key in known:
                if "".join(word[0] for word in key.split("_")) == name:  # an abbreviation, such as bs for batch_size
                    hint = f"; did you mean {key!r}?"
            if "known:" in hint and len(known) > MAX_NAMES:
                hint = "\n  all keys: docs/configuration.md, or python -m jobs plan RECIPE --resolved"
            raise ConfigError(f"unknown key {path}{hint}")
        hint = hints[name]
        inner = section_kind(hint)
        if inner is not None and is_number_or_section(hint) and not isinstance(value, Mapping):
            number = None
            if isinstance(value, int | float | str) and not isinstance(value, bool):
                number = read_number(value, path, whole=True)
            if number is None:
                keys = ", ".join(field.name for field in dataclasses.fields(inner))
                raise ConfigError(
                    f"{path} is {shown(value)}, expected a whole number, or a section with the keys {keys}"
                )
            read_values[name] = number
        elif name == MODEL and isinstance(value, str):
            read_values[name] = {"name": value}
        elif inner is None:
            read_values[name] = read_value(value, hint, path)
        elif value is None:
            read_values[name] = value
        elif not is_named(hint):
            read_values[name] = _read_section(inner, value, path, stage)
        else:
            # Users choose the keys below `mixture`, so only their entries can be checked.
            sections: dict[str, object] = {}
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path} is {shown(value)}, expected named sections\n  set {path}.NAME.…")
            for key, entry in value.items():
                sections[key] = entry
                if entry is not None:
                    sections[key] = _read_section(inner, entry, f"{path}.{key}", stage)
            read_values[name] = sections
    return read_values


def find_key(word: str, kind: type[ConfigDataclass]) -> str | None:
    """Find the dotted config key, at any depth, for a word typed by a user: "optim.lr" for "lr"; None if unknown.

    The word may be another library's name for the key, such as epochs or num_classes.
    """
    meant = word
    for key, others in OTHER_WORDS.items():
        if word.lower() in others.split():
            meant = key
    plain_word = meant.lower().replace("_", "").replace("-", "")
    for key in keys_of(kind):
        plain_key = key.replace("_", "")
        if plain_key == plain_word or plain_key.endswith(f".{plain_word}"):
            return key
    return None


def keys_of(kind: type[ConfigDataclass]) -> Iterator[str]:
    """Iterate over the dotted keys of a config class: its own keys first, then the keys of its sections."""
    inside = []
    for name, hint in type_hints(kind).items():
        inner = section_kind(hint)
        if name not in kind.__dataclass_fields__:
            continue
        yield name
        if inner is not None and not is_named(hint):
            for key in keys_of(inner):
                inside.append(f"{name}.{key}")
        # Every model has these fields; the others depend on its name.
        elif name == MODEL:
            inside += [f"{name}.name", f"{name}.image_size", f"{name}.classes"]
    yield from inside


def section_kind(hint: object) -> type[ConfigDataclass] | None:
    """Return the dataclass `Inner` in a type `Inner`, `Inner | None` or `dict[str, Inner]`; None for other types."""
    for candidate in (hint, *get_args(hint)):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
    return None


def is_number_or_section(hint: object) -> bool:
    """Return whether a field can hold either an integer or a section: `int | Inner`."""
    return int in get_args(hint) and section_kind(hint) is not None


def is_named(hint: object) -> bool:
    """Return whether a field holds sections with user-defined names: `dict[str, Inner]`."""
    return get_origin(hint) is dict


# ------------------------------------------------------------------------------------------------ configs as data


def plain(config: ConfigDataclass) -> dict[str, object]:
    """Convert a config to nested dicts of JSON values."""
    return as_json(dataclasses.asdict(config))


def digest(value: object) -> str:
    """Return the sha256 of a JSON-serialisable value, independent of the order of keys."""
    # The order of keys in a recipe has no meaning.
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def tagged(config: ConfigDataclass, tag: str, prefix: str = "", outer: str = "forbid") -> dict[str, object]:
    """Return the fields with this resume tag in a config and its inner configs, as a flat {dotted name: value}.

    A class without tags (such as the classes in the data package) inherits `outer`, the tag of the field that contains
    it. Fields listed in a class's LATER are omitted if they have their default values: they were added after stage keys
    had been computed, and these keys must not change.
    """
    later = later_fields(type(config))
    tag_of_field = resume_tags(type(config))
    values: dict[str, object] = {}
    for field in dataclasses.fields(config):
        name = field.name
        value = getattr(config, name)
        if name in later:
            default = default_of(field)
            # Compare types too: in Python 0 == False, but their digests differ.
            if type(value) is type(default) and value == default:
                continue
        own = tag_of_field.get(name, outer)
        # The configs inside the field: {"optim": …}, or {"mixture.a": …, "mixture.b": …}.
        sections: dict[str, object] = {}
        if isinstance(value, dict):
            for key, entry in value.items():
                sections[f"{name}.{key}"] = entry
        else:
            sections[name] = value
        if sections and all(dataclasses.is_dataclass(entry) for entry in sections.values()):
            for path, section in sections.items():
                values |= tagged(section, tag, f"{prefix}{path}.", own)  # type: ignore[arg-type]  # a dataclass
        # Record an empty mapping itself, so that adding an entry counts as a change.
        elif own == tag:
            values[prefix + name] = value
    return as_json(values)


def ordered_fields(kind: type[ConfigDataclass]) -> list["dataclasses.Field[Any]"]:
    """Return a config's fields in documentation order: first the fields of its main class, then the fields of extras.

    A composed config inherits from several classes; the main class is the class with the most fields.
    """
    declared = {base: set(vars(base).get("__annotations__", ())) for base in kind.__mro__}
    main = max(declared.values(), key=len)
    return sorted(dataclasses.fields(kind), key=lambda field: field.name not in main)


def resume_tags(kind: type) -> Tags:
    """Return the resume tag of each field of a config class, including inherited fields."""
    tag_of_field: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        tag_of_field |= vars(base).get("RESUME", {})
    return tag_of_field


def later_fields(kind: type) -> set[str]:
    """Return the fields of a config class that were added after its first stage keys had been computed."""
    fields: set[str] = set()
    for base in kind.__mro__:
        fields |= set(vars(base).get("LATER", ()))
    return fields


def as_json(values: object) -> dict[str, object]:
    """Round-trip values through JSON: tuples become lists, and paths become strings."""
    # Manifests are read from JSON, so without this a tuple would seem to have changed at every resume.
    return json.loads(json.dumps(values, default=str))


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, str]:
    """Return "key: old → new" for every key whose value differs, by key, in the order of `old`, then `new`."""
    changes = {}
    # A dict, unlike a set, keeps the order of its keys.
    for key in {**old, **new}:
        before = old.get(key)
        after = new.get(key)
        if before != after:
            changes[key] = f"{key}: {old.get(key, 'absent')} → {new.get(key, 'absent')}"
    return changes
