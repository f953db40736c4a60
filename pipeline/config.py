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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import models
from data.checks import few
from data.errors import ConfigError
from models.checks import did_you_mean
from pipeline.values import LONGEST, read_number, read_value, shown

Tags: TypeAlias = Mapping[str, str]  # field → "free", "warn" or "forbid"


class ConfigDataclass(Protocol):
    """Any frozen dataclass that holds a section of a recipe."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


IN_ENVIRONMENT = "env:"  # before the name of a variable that holds a recipe's text
MODEL = "model"  # the section that may be written as the model's name alone
SIZES = ("width", "depth", "mlp", "heads")  # of a model, that its name stands for
MOST_NAMES = 12  # of keys that a message lists
# What PyYAML finds wrong, and what would be right.
YAML_REMEDIES = {
    "tab character": "spaces before a key, no tab",
    "duplicate key": "each key once in its section: take one of them out",
    "mapping values": "the keys of a section in the same column; a text with a colon and a space in quotes",
    "could not find expected ':'": "`key: value`, with a space behind the colon",
    "cannot start any token": 'quotes around a text that begins with @ or another sign: "@shards/train"',
    "escape character": "single quotes around a text with backslashes",
    "end of stream": "a quote that closes what a quote has opened",
    "expected ','": "a bracket or brace that closes what one has opened, commas between, and quotes around ${…}",
    "unacceptable character": "text without control characters",
}
# Our keys, and what people who come from other libraries call them.
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
    variable = str(path).removeprefix(IN_ENVIRONMENT)
    is_in_environment = variable != str(path)
    if is_in_environment and variable not in os.environ:
        raise ConfigError(f"no recipe in the environment variable {variable}, which is not set")
    try:
        text = os.environ[variable] if is_in_environment else path.read_text("utf-8-sig")
        recipe = OmegaConf.create(text)
    except FileNotFoundError:
        raise ConfigError(f"no recipe at {path}\n  recipes that ship: ls jobs/recipes") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder\n  expected a recipe, a YAML file: ls {path}/*.yaml") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path} is not UTF-8 text: byte {error.start}, in line {line}\n"
            "  expected a recipe, a YAML file; an editor saves it as UTF-8"
        ) from None
    except YAMLError as error:
        raise not_yaml(path, text, error) from None
    # An interpolation that is torn, a key that OmegaConf takes no value of, a text that is one number.
    except (OmegaConfBaseException, ValueError, AssertionError) as error:
        reason = str(error).partition("\n")[0] or "no mapping; expected `key: value` lines"
        raise ConfigError(f"{path}: {reason}") from None
    # A text without any `key:` becomes keys without values.
    is_mapping = isinstance(recipe, DictConfig) and (":" in text or not recipe)
    if not isinstance(recipe, DictConfig) or not is_mapping:
        raise ConfigError(f"{path} holds no mapping\n  expected `key: value` lines: sections, and keys below them")
    return Recipe(with_home(with_overrides(recipe, overrides)), str(path), f"runs/{path.stem}")


def not_yaml(path: Path, text: str, error: YAMLError) -> ConfigError:
    """Return the error of a recipe that is not YAML: which line, the line itself, and what would be right."""
    mark = getattr(error, "problem_mark", None)
    problem = str(getattr(error, "problem", None) or str(error).splitlines()[0])
    expected = "the keys of a section in the same column, as `key: value`"
    for sign, remedy in YAML_REMEDIES.items():
        if sign in problem:
            expected = remedy
    # What has no colon, or no end, is noticed on a later line than the one it begins on.
    if "could not find" in problem or "end of stream" in problem or "expected ','" in problem:
        mark = getattr(error, "context_mark", None) or mark
    if mark is None:
        return ConfigError(f"{path} is not YAML: {problem}\n  expected {expected}")
    line = ""
    if mark.line < len(text.splitlines()):
        line = text.splitlines()[mark.line].strip()
    return ConfigError(
        f"{path} is not YAML: line {mark.line + 1}: {problem}\n    {line[:LONGEST]}\n  expected {expected}"
    )


def with_overrides(values: DictConfig | Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """Return nested plain values with `key=value` overrides on top, and interpolations resolved.

    Environment values are in clear from here on. Raises ConfigError for an override that cannot be read, and for an
    interpolation of nothing.
    """
    if not isinstance(values, DictConfig):
        values = OmegaConf.create(dict(values))
    base = OmegaConf.to_container(values)
    assert isinstance(base, dict)
    # `model: S/16` is a section's name alone, so that an override may add to it.
    for section in base.values():
        if isinstance(section, dict) and isinstance(section.get(MODEL), str):
            section[MODEL] = {"name": section[MODEL]}
    changes = []
    for position, override in enumerate(overrides):
        key, equals, value = override.partition("=")
        # OmegaConf takes a word without "=" for a key with no value, and a forgotten "=" would set it to null.
        if not equals or not key:
            likely = "pretrain.optim.lr=1e-3"
            # steps = 100, or steps: 100: the value is a word behind this one.
            following = ""
            for word in overrides[position + 1 :]:
                if word not in ("=", ":"):
                    following = word
                    break
            if key and following and "=" not in following:
                likely = f"{key.rstrip(':')}={following}"
            raise ConfigError(
                f"{override} is not an override\n  expected key=value without spaces, for example {likely}"
            )
        # key='@stage/part': bare, a value that begins with @ is not YAML.
        if value.startswith("@"):
            value = f"'{value}'"
        try:
            change: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}={value}"]))
        except YAMLError:
            raise ConfigError(
                f"cannot read the override {override}\n"
                "  expected a value, a [list,of,them] or a {key: value}\n"
                f"  one with spaces, brackets or commas needs quotes of the shell around all of it: '{key}=…'"
            ) from None
        stage, _, field = key.partition(".")
        if field == MODEL:
            change[stage][MODEL] = other_model(base.get(stage), change[stage][MODEL])
        elif field == f"{MODEL}.name":
            check_model_name(base.get(stage), stage, value, overrides)
        changes.append(change)
    try:
        merged = OmegaConf.merge(base, *changes)
    except Exception as error:  # whatever the merge raises: the user's text is wrong
        raise ConfigError(f"cannot put {' '.join(overrides)} over the recipe: {str(error).splitlines()[0]}") from None
    try:
        return OmegaConf.to_container(merged, resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0].rpartition("raised while resolving interpolation: ")[2].strip('"')
        way_out = ""
        if error.full_key:
            way_out = f"\n  in {error.full_key}"
        if "Environment variable" in reason:
            way_out += "\n  set it, or give the recipe a value for where it is not set: ${oc.env:NAME,VALUE}"
        raise ConfigError(f"{reason}{way_out}") from None


def other_model(section: object, value: object) -> object:
    """Return the section that `STAGE.model=` asks for, and take out of the recipe's what does not stay beside it.

    A name, or a section with one, is another model for the same data: of the recipe's it keeps image_size and classes.
    A section without a name changes the recipe's model.
    """
    if value is not None and not isinstance(value, dict):
        value = {"name": value}
    if isinstance(value, dict) and "name" in value and isinstance(section, dict):
        for name in list(section.get(MODEL) or {}):
            if name not in ("image_size", "classes"):
                del section[MODEL][name]
    return value


def check_model_name(section: object, stage: str, name: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError where the recipe's widths would win over the model that `STAGE.model.name=` asks for."""
    if not isinstance(section, dict) or not isinstance(section.get(MODEL), dict):
        return
    model = section[MODEL]
    wins = []
    for size in SIZES:
        if size in model and not any(override.startswith(f"{stage}.{MODEL}.{size}=") for override in overrides):
            wins.append(f"{size}: {model[size]}")
    # The same size with another patch keeps them.
    if wins and str(model.get("name")).partition("/")[0] != name.partition("/")[0]:
        try:
            models.config_of(name, 224, 2)
        except ValueError as error:  # no model is called so, and what follows would be no help
            raise ConfigError(f"{stage}.{MODEL}.name: {error}") from None
        raise ConfigError(
            f"{stage}.{MODEL}.name is {name}, and the recipe's model has {', '.join(wins)}, which would win over the "
            f"name\n  type {stage}.{MODEL}={name}: of the recipe's model it keeps image_size and classes alone"
        )


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


def build(kind: type[Config], section: object, where: str, defaults: Config | DictConfig | None = None) -> Config:
    """Build a frozen `kind` from its defaults and a plain section; `where` is the dotted path used in messages.

    `defaults` are an instance, or a `structured` one where many are built of it. Raises ConfigError naming the key,
    what was found and what was expected.
    """
    # OmegaConf's own messages speak of Python's types and suggest no other name, so names and values are read first.
    read_values = _read_section(kind, section, where, (kind, where))
    try:
        merged = OmegaConf.merge(kind if defaults is None else defaults, read_values)
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        key = where
        if error.full_key:
            key = f"{where}.{error.full_key}"
        reason = str(error).splitlines()[0]
        if "missing mandatory value" in reason:
            raise ConfigError(f"{key} is missing and has no default\n  type {key}=…") from None
        raise ConfigError(f"{key}: {reason}") from None
    except (ConfigError, ValueError) as error:  # a dataclass's own __post_init__
        raise ConfigError(f"{where}: {error}") from None


def build_recorded(kind: type[Config], values: Mapping[str, Any], where: str) -> Config:
    """Build a config from the plain values of a record, which an earlier version may have written.

    Keys of that version that have gone and held null are dropped. Raises as `build`.
    """
    known = {field.name for field in dataclasses.fields(kind)}
    kept = {name: value for name, value in values.items() if name in known or value is not None}
    return build(kind, kept, where)


def with_defaults(config: Config, names: str) -> Config:
    """Return the config with these fields at their defaults; fields that its class does not have are ignored."""
    defaults = {}
    for field in dataclasses.fields(config):
        if field.name in names.split():
            defaults[field.name] = default_of(field)
    return dataclasses.replace(config, **defaults)  # type: ignore[type-var]


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """Return the default of a field that has one."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def structured(defaults: ConfigDataclass | type[ConfigDataclass]) -> DictConfig:
    """Return the defaults of a config class, or an instance that holds them, for `build`."""
    return OmegaConf.structured(defaults)


def _read_section(
    kind: type[ConfigDataclass], section: object, where: str, stage: tuple[type[ConfigDataclass], str]
) -> dict[str, object]:
    """Return the values of a section as the fields of `kind` hold them; sections inside it too.

    `stage` is the config of the whole stage, and where it stands: a wrong key may be one of another of its sections.
    Raises ConfigError for a key without a field, a value of another type, and a value where a section belongs.
    """
    known = [field.name for field in ordered_fields(kind)]
    if not isinstance(section, Mapping):
        listed = few(known, MOST_NAMES, ", …")
        example = ""
        for name, hint in get_type_hints(kind).items():
            # The key that was meant is likely the first that takes the value: data=shards is data.train=shards.
            with suppress(ConfigError):
                if name in known and section_kind(hint) is None and section not in (None, ""):
                    read_value(section, hint, name)
                    example = f"\n  type for example {where}.{name}={shown(section)}"
                    break
        raise ConfigError(f"{where} is {shown(section)}, expected a section with the keys {listed}{example}")
    hints = get_type_hints(kind)
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
                if "".join(word[0] for word in key.split("_")) == name:  # bs of batch_size
                    hint = f"; did you mean {key!r}?"
            if "known:" in hint and len(known) > MOST_NAMES:
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
            # Under `mixture` the keys are names that the user chose, and only what stands below them can be wrong.
            sections: dict[str, object] = {}
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path} is {shown(value)}, expected sections by name\n  type {path}.NAME.…")
            for key, entry in value.items():
                sections[key] = entry
                if entry is not None:
                    sections[key] = _read_section(inner, entry, f"{path}.{key}", stage)
            read_values[name] = sections
    return read_values


def find_key(word: str, kind: type[ConfigDataclass]) -> str | None:
    """Return the dotted key of a config that a word means, at any depth: "optim.lr" of lr; None where there is none.

    The word may be the one that other libraries have for it: epochs, num_classes.
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
    """Iterate the dotted keys of a config, its own before those of its sections."""
    inside = []
    for name, hint in get_type_hints(kind).items():
        inner = section_kind(hint)
        if name not in kind.__dataclass_fields__:
            continue
        yield name
        if inner is not None and not is_named(hint):
            for key in keys_of(inner):
                inside.append(f"{name}.{key}")
        # What fields a model has is known where its name has been read; these every model has.
        elif name == MODEL:
            inside += [f"{name}.name", f"{name}.image_size", f"{name}.classes"]
    yield from inside


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
    later = later_fields(type(config))
    tag_of_field = resume_tags(type(config))
    values: dict[str, object] = {}
    for field in dataclasses.fields(config):
        name = field.name
        value = getattr(config, name)
        if name in later:
            default = default_of(field)
            # In kind too: a seed of 0 is not a missing seed. And to Python 0 and False are equal, and a recipe's digest
            # tells them apart.
            if type(value) is type(default) and value == default:
                continue
        own = tag_of_field.get(name, outer)
        # The configs that the field holds: {"optim": …}, or {"mixture.a": …, "mixture.b": …}.
        sections: dict[str, object] = {}
        if isinstance(value, dict):
            for key, entry in value.items():
                sections[f"{name}.{key}"] = entry
        else:
            sections[name] = value
        if sections and all(dataclasses.is_dataclass(entry) for entry in sections.values()):
            for path, section in sections.items():
                values |= tagged(section, tag, f"{prefix}{path}.", own)  # type: ignore[arg-type]  # a dataclass
        # An empty mapping holds no section and stands for itself; a later entry in it is a change.
        elif own == tag:
            values[prefix + name] = value
    return as_json(values)


def ordered_fields(kind: type[ConfigDataclass]) -> list["dataclasses.Field[Any]"]:
    """Return the fields of a config in the order for people: those of its main class, then those around it.

    A composed config inherits from several classes, of which the one that declares the most fields is the main one.
    """
    declared = {base: set(vars(base).get("__annotations__", ())) for base in kind.__mro__}
    main = max(declared.values(), key=len)
    return sorted(dataclasses.fields(kind), key=lambda field: field.name not in main)


def resume_tags(kind: type) -> Tags:
    """Return the tag of each field of a config class, which may inherit fields with their tags."""
    tag_of_field: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        tag_of_field |= vars(base).get("RESUME", {})
    return tag_of_field


def later_fields(kind: type) -> set[str]:
    """Return the fields of a config class that came after keys had been computed without them."""
    fields: set[str] = set()
    for base in kind.__mro__:
        fields |= set(vars(base).get("LATER", ()))
    return fields


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
