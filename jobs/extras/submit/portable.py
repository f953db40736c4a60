"""Convert a recipe to a string that can be sent to a cluster as part of a submitted job.

1. Overrides, environment variables and `~` have already been resolved on the submitter's machine.
2. Relative paths are resolved against the submitter's working directory; on the cluster, they would refer to the folder
   where Ray unpacks the checkout. The cache directory is kept: it is absolute, or in each node's home directory.
3. The string is passed in an environment variable of the job, whose command is `jobs run env:PATCHLINE_RECIPE`.

Stage keys do not change, because they contain the digests of inputs instead of their paths, except for the sources of
`pack` stages.
"""

import copy
import os
from pathlib import Path

from data.checks import SECRET_VALUE
from data.errors import ConfigError
from jobs.recipe.campaign import NOT_STAGES
from jobs.resolved_recipe import Kinds, MakeAbsolute
from pipeline.recipe import Recipe, to_yaml

VARIABLE = "PATCHLINE_RECIPE"  # environment variable with the recipe of a submitted job


def portable(recipe: Recipe, run: str, folder: Path, kinds: Kinds) -> tuple[str, list[str]]:
    """Return a validated recipe as a string, and the keys whose relative paths were resolved against `folder`.

    `run` is the run directory or URL. Raises ConfigError if the recipe contains a secret.
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
    # Environment variables have been replaced by their values, so secrets in them would be readable.
    if SECRET_VALUE.search(text):
        raise ConfigError(
            f"{recipe.source} seems to contain a secret: a key, a token, or a password in a URL\n"
            "  everybody who can list the jobs of the cluster could read it\n"
            "  remove it from the recipe; secrets belong on the nodes: in their environment, instance role or mounted "
            "files"
        )
    return text, changed


def make_absolute(section: object, parts: list[str], where: str, absolute: MakeAbsolute) -> None:
    """Make paths absolute in those fields of a section that match a pattern; `where` is the section's dotted name."""
    # A missing section has only default values, which contain no paths.
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
