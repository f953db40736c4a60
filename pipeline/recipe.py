"""Reads a recipe (YAML with overrides, interpolations and paths) into nested plain values.

Each command calls `read_recipe` once. `with_overrides` applies `key=value` overrides and resolves interpolations, for
example ${oc.env:USER}; `expand_home` expands paths like ~/runs. pipeline/config.py turns sections into typed configs.

In:  recipe.yaml with "pretrain: {optim: {lr: 1e-3}}", and ["pretrain.steps=100"]
Out: Recipe({"pretrain": {"optim": {"lr": 0.001}, "steps": 100}}, "recipe.yaml", "runs/recipe")
"""

import dataclasses
import os
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import models
from data.checks import SECRET_NAME, SECRET_VALUE
from data.errors import ConfigError
from pipeline import variables
from pipeline.config import MODEL
from pipeline.values import LONGEST

IN_ENVIRONMENT = "env:"  # prefix of the name of an environment variable that holds a recipe
SIZES = ("width", "depth", "mlp", "heads")  # keys of a model that its name already determines
# Text that occurs in PyYAML's error messages → what Patchline's message says was expected.
YAML_REMEDIES = {
    "tab character": "spaces before a key, not tabs",
    "duplicate key": "each key once per section: remove one of the duplicates",
    "mapping values": "the keys of a section in the same column, and quotes around text with a colon and a space",
    "could not find expected ':'": "`key: value`, with a space after the colon",
    "cannot start any token": 'quotes around text that begins with @ or another special character: "@shards/train"',
    "escape character": "single quotes around text with backslashes",
    "end of stream": "a closing quote for every opening quote",
    "expected ','": "matching brackets and braces, commas between entries, and quotes around ${…}",
    "unacceptable character": "text without control characters",
    "undefined alias": "quotes around text that begins with *, or a value marked with the same &name above",
    "second occurrence": "another &name: each one marks a single value",
}

Values = TypeVar("Values")  # nested plain values: a dict, a list or a single value


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe after its overrides have been applied."""

    values: Mapping[str, Any]  # nested plain values, with environment variables and `~` already expanded
    source: str  # the recipe's name in messages
    default_run: str  # the run directory if the recipe does not set one


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a file, or from the environment variable NAME if `path` is env:NAME; apply the overrides.

    Raises ConfigError if the file is missing or does not contain a mapping, or if an override is not key=value.
    """
    variable = str(path).removeprefix(IN_ENVIRONMENT)
    is_in_environment = variable != str(path)
    if is_in_environment and variable not in os.environ:
        raise ConfigError(f"expected a recipe in the environment variable {variable}, but the variable is not set")
    try:
        text = os.environ[variable] if is_in_environment else path.read_text("utf-8-sig")
        recipe = OmegaConf.create(text)
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe at {path}\n  to list Patchline's recipes, run ls jobs/recipes") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder\n  expected a recipe (a YAML file); run ls {path}/*.yaml") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        problem = f"is not UTF-8 text: invalid byte at {error.start}, in line {line}"
        if error.object.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            problem = f"is UTF-16 text; to convert it, run iconv -f UTF-16 -t UTF-8 {path} > NEW.yaml"
        raise ConfigError(f"{path} {problem}\n  expected a recipe (a YAML file) saved as UTF-8") from None
    except YAMLError as error:
        raise not_yaml(path, text, error) from None
    # Possible causes: a broken interpolation, a key with an invalid value, or a text that is a single number.
    except (OmegaConfBaseException, ValueError, AssertionError) as error:
        reason = str(error).partition("\n")[0] or "not a mapping; expected `key: value` lines"
        raise ConfigError(f"{path}: {reason}") from None
    # YAML parses text without any `key:` as keys without values.
    is_mapping = isinstance(recipe, DictConfig) and (":" in text or not recipe)
    if not isinstance(recipe, DictConfig) or not is_mapping:
        raise ConfigError(
            f"{path} does not contain a mapping\n  expected lines such as `key: value`, grouped in sections"
        )
    return Recipe(expand_home(with_overrides(recipe, overrides)), str(path), f"runs/{path.stem}")


def not_yaml(path: Path, text: str, error: YAMLError) -> ConfigError:
    """Build the error for invalid YAML in a recipe, with the line number, the line and what was expected."""
    mark = getattr(error, "problem_mark", None)
    problem = str(getattr(error, "problem", None) or str(error).splitlines()[0])
    expected = "the keys of a section in the same column, as `key: value`"
    # For a tab in the indentation, libyaml's message is the same as for other characters.
    if "cannot start" in problem and mark is not None and text.splitlines()[mark.line][mark.column :].startswith("\t"):
        problem = "found a tab character"
    for sign, remedy in YAML_REMEDIES.items():
        if sign in problem:
            expected = remedy
    # PyYAML notices a missing colon or closing quote only on a later line.
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
    """Apply `key=value` overrides to nested plain values, and resolve interpolations.

    Environment variables are replaced with their values. Raises ConfigError if an override is invalid, an interpolation
    refers to a missing key, or an environment variable looks like a secret.
    """
    if not isinstance(values, DictConfig):
        values = OmegaConf.create(dict(values))
    base = OmegaConf.to_container(values)
    assert isinstance(base, dict)
    # `model: S/16` is short for a section with only a name. Expand it, so that overrides can add keys to it.
    for section in base.values():
        if isinstance(section, dict) and isinstance(section.get(MODEL), str):
            section[MODEL] = {"name": section[MODEL]}
    changes = []
    for position, override in enumerate(overrides):
        key, equals, value = override.partition("=")
        # OmegaConf would take a word without "=" as a key and set it to null.
        if not equals or not key:
            likely = "pretrain.optim.lr=1e-3"
            # For "steps = 100" or "steps: 100", the value is one of the following words.
            following = ""
            for word in overrides[position + 1 :]:
                if word not in ("=", ":"):
                    following = word
                    break
            if key and following and "=" not in following:
                likely = f"{key.rstrip(':')}={following}"
            raise ConfigError(f"invalid override {override}\n  expected key=value without spaces, for example {likely}")
        # Quote the value in key=@stage/part: in YAML an unquoted value must not begin with @.
        if value.startswith("@"):
            value = f"'{value}'"
        try:
            change: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}={value}"]))
        except YAMLError:
            raise ConfigError(
                f"invalid override {override}\n"
                "  expected a value, a list [a,b] or a mapping {key: value}\n"
                f"  if it contains spaces, brackets or commas, quote the whole override: '{key}=…'"
            ) from None
        stage, _, field = key.partition(".")
        if field == MODEL:
            change[stage][MODEL] = other_model(base.get(stage), change[stage][MODEL])
        elif field == f"{MODEL}.name":
            check_model_name(base.get(stage), stage, value, overrides)
        changes.append(change)
    try:
        merged = OmegaConf.merge(base, *changes)
    except Exception as error:  # OmegaConf raises many types here, all caused by the user's text
        raise ConfigError(f"cannot apply {' '.join(overrides)} to the recipe: {str(error).splitlines()[0]}") from None
    unresolved = OmegaConf.to_container(merged)
    refuse_secret_variables(unresolved)
    try:
        resolved = OmegaConf.to_container(merged, resolve=True)
        refuse_secret_values(unresolved, resolved)
        variables.note(unresolved)
        return resolved  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0].rpartition("raised while resolving interpolation: ")[2].strip('"')
        way_out = ""
        if error.full_key:
            way_out = f"\n  in {error.full_key}"
        if "Environment variable" in reason:
            way_out += "\n  set it, or give a default value in the recipe: ${oc.env:NAME,VALUE}"
        raise ConfigError(f"{reason}{way_out}") from None


def refuse_secret_variables(values: object, key: str = "") -> None:
    """Raise ConfigError if any value refers to an environment variable whose name suggests a secret.

    The secret would become part of the config, which is saved with a run's records, checkpoints and weights, shown by
    commands and on pages, and sent to trackers.
    """
    for name, part in entries(values):
        refuse_secret_variables(part, f"{key}.{name}".lstrip("."))
    if isinstance(values, str):
        for variable in variables.VARIABLE.findall(values):
            # The path of a file with a secret is not secret.
            if SECRET_NAME.search(variable) and not variable.upper().endswith(("_FILE", "_PATH", "_DIR", "_FOLDER")):
                raise secret_in_recipe(key, f"refers to {variable}, which looks like the name of a secret")


def refuse_secret_values(unresolved: object, resolved: object, key: str = "") -> None:
    """Raise ConfigError if an interpolation resolved to a value that looks like a secret."""
    parts = dict(entries(resolved))
    for name, part in entries(unresolved):
        # An interpolation may resolve to a whole section, which is checked under its own key.
        if name in parts:
            refuse_secret_values(part, parts[name], f"{key}.{name}".lstrip("."))
    is_interpolation = isinstance(unresolved, str) and "${" in unresolved
    # Paths are exempt: a part such as hf-vit-base-patch16-224 resembles a token.
    is_path = isinstance(resolved, str) and resolved.startswith(("/", ".", "~"))
    if is_interpolation and not is_path and isinstance(resolved, str) and SECRET_VALUE.search(resolved):
        raise secret_in_recipe(key, f"contains {unresolved}, whose value looks like a secret")


def entries(values: object) -> Iterable[tuple[object, object]]:
    """Return the (key, value) pairs of a mapping or list; an empty list for a single value."""
    if isinstance(values, dict):
        return values.items()
    return enumerate(values) if isinstance(values, list) else []


def secret_in_recipe(key: str, problem: str) -> ConfigError:
    """Build the error for a secret in a recipe; the message omits the secret's value, because messages are stored."""
    return ConfigError(
        f"{key} {problem}\n"
        "  expected no secrets in a recipe: commands, logs and pages show its values\n"
        "  remove it: the clients of object stores and trackers read their secrets from each node's environment"
    )


def other_model(section: object, value: object) -> object:
    """Return the model section for an override `STAGE.model=…`; remove conflicting keys from the recipe's section.

    A name, or a section with a name, selects another model for the same data: only image_size and classes are kept from
    the recipe's model. A section without a name modifies the recipe's model.
    """
    if value is not None and not isinstance(value, dict):
        value = {"name": value}
    if isinstance(value, dict) and "name" in value and isinstance(section, dict):
        for name in list(section.get(MODEL) or {}):
            if name not in ("image_size", "classes"):
                del section[MODEL][name]
    return value


def check_model_name(section: object, stage: str, name: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError if sizes in the recipe would override the sizes of the model named by `STAGE.model.name=…`."""
    if not isinstance(section, dict) or not isinstance(section.get(MODEL), dict):
        return
    model = section[MODEL]
    wins = []
    for size in SIZES:
        if size in model and not any(override.startswith(f"{stage}.{MODEL}.{size}=") for override in overrides):
            wins.append(f"{size}: {model[size]}")
    # These sizes remain valid if only the patch size in the name differs.
    if wins and str(model.get("name")).partition("/")[0] != name.partition("/")[0]:
        try:
            models.config_of(name, 224, 2)
        except ValueError as error:  # unknown model name: the message below would not help
            raise ConfigError(f"{stage}.{MODEL}.name: {error}") from None
        raise ConfigError(
            f"{stage}.{MODEL}.name is {name}, but the recipe's model also sets {', '.join(wins)}, which would override "
            f"the name\n  set {stage}.{MODEL}={name}, which keeps only image_size and classes of the recipe's model"
        )


def expand_home(values: Values) -> Values:
    """Expand `~/…` and `~name/…` in nested plain values to absolute paths, as a shell does.

    Shells do not expand `run=~/runs`, so a folder named `~` would be created otherwise. The section `cache` is left
    unchanged, because its paths apply to every node, and home folders may differ between nodes.
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
    """Return nested plain values as YAML text, with interpolations unresolved."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(values)), resolve=False)
