"""A recipe as it travels with a submitted job, from the submitter's folder to the cluster's head.

1. The recipe goes as it was read where `submit` was typed, with its overrides on top: environment variables and `~`
   are the submitter's, as they were when the recipe was checked.
2. Relative paths are taken from the submitter's folder, as `run` would take them. Left as they are they would point
   into the folder into which Ray unpacks the checkout. The folder of the cache is none: it is absolute, or in the home
   of each node.
3. The text goes along in the job's environment, and its command reads it from there: `jobs run env:PATCHLINE_RECIPE`.

A stage's key is the same as if the recipe had been run here: of inputs it holds the content and not the path. Only
what a `pack` stage reads is in its key by path.
"""

import copy
import os
from pathlib import Path

from data.errors import ConfigError
from jobs.cluster_config import SECRET_VALUE
from jobs.recipe.campaign import NOT_STAGES
from jobs.resolved_recipe import Kinds, MakeAbsolute
from pipeline.recipe import Recipe, to_yaml

VARIABLE = "PATCHLINE_RECIPE"  # of the environment in which a recipe travels


def portable(recipe: Recipe, run: str, folder: Path, kinds: Kinds) -> tuple[str, list[str]]:
    """Return the text of a valid recipe as it travels, and the keys whose relative paths were taken from `folder`.

    `run` is where the run goes. Raises ConfigError if the recipe holds a secret.
    """
    values = {**copy.deepcopy(dict(recipe.values)), "run": run}
    changed: list[str] = []

    def absolute(key: str, path: str) -> str:
        if path.startswith(("@", "/")) or "://" in path:
            return path
        changed.append(key)
        return os.path.abspath(folder / path)

    for name, section in values.items():
        if name in NOT_STAGES:
            continue
        kind = kinds[section.get("kind", name)]
        patterns = (*kind.inputs, *kind.files)
        for pattern in patterns:
            make_absolute(section, pattern.split("."), name, absolute)
        for other in kinds.values():
            other.make_absolute(name, section, patterns, absolute)
    text = to_yaml(values)
    # An environment variable of the recipe stands there in clear now.
    if SECRET_VALUE.search(text):
        raise ConfigError(
            f"{recipe.source} holds what looks like a secret: a key, a token, or a password in an address\n"
            "  it would travel with the job, in clear to whoever lists the jobs\n"
            "  leave it out: secrets belong to the nodes, their environment, instance role or mounted files"
        )
    return text, changed


def make_absolute(section: object, parts: list[str], where: str, absolute: MakeAbsolute) -> None:
    """Make the paths absolute that a pattern names in a section, as far as the section has them."""
    # What the section leaves to its defaults is no path.
    if not isinstance(section, dict):
        return
    names = [parts[0]]
    if names == ["*"]:
        names = list(section)
    for name in names:
        value = section.get(name)
        if len(parts) > 1:
            make_absolute(value, parts[1:], f"{where}.{name}", absolute)
        elif isinstance(value, str):
            section[name] = absolute(f"{where}.{name}", value)
