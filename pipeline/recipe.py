"""Reads a recipe: YAML with overrides, interpolations and paths, into nested plain values.

`read_recipe` does it once a command: `with_overrides` puts `key=value` overrides on top and resolves interpolations
such as ${oc.env:USER}, `expand_home` paths such as ~/runs. pipeline/config.py makes typed configs of the sections.

In:  recipe.yaml with "pretrain: {optim: {lr: 1e-3}}", and ["pretrain.steps=100"]
Out: Recipe({"pretrain": {"optim": {"lr": 0.001}, "steps": 100}}, "recipe.yaml", "runs/recipe")
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import models
from data.errors import ConfigError
from pipeline.config import MODEL
from pipeline.values import LONGEST

IN_ENVIRONMENT = "env:"  # before the name of a variable that holds a recipe's text
SIZES = ("width", "depth", "mlp", "heads")  # of a model, that its name stands for
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

Values = TypeVar("Values")  # nested and plain: a dict, a list or a single value


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
    return Recipe(expand_home(with_overrides(recipe, overrides)), str(path), f"runs/{path.stem}")


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


def expand_home(values: Values) -> Values:
    """Return nested plain values in which a text `~/…` or `~name/…` is the path that a shell makes of it.

    A shell leaves it as it is in `run=~/runs`, and a folder called `~` would be made. The section `cache` stays: it is
    of folders on every node, which may have other homes.
    """
    if isinstance(values, str):
        return os.path.expanduser(values)  # type: ignore[return-value]
    if isinstance(values, list):
        return list(map(expand_home, values))  # type: ignore[return-value]
    if isinstance(values, dict):
        expanded = dict(values)
        for name, value in values.items():
            if name != "cache":
                expanded[name] = expand_home(value)
        return expanded  # type: ignore[return-value]
    return values


def to_yaml(values: Mapping[str, object]) -> str:
    """Return the YAML text of nested plain values, interpolations left unresolved."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(values)), resolve=False)
