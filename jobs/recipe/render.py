"""A recipe as text: resolved, for golden texts, records and people; and portable, for a job that takes it along.

A submitted job's recipe comes from the submitter's folder, wherever that is, to the cluster's head (`portable`):
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
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from data.errors import ConfigError
from jobs.cluster_config import SECRET_VALUE
from jobs.extras.studies import expand
from jobs.kinds import KINDS
from jobs.recipe.campaign import NOT_STAGES
from jobs.resolved_recipe import Campaign, Stage
from pipeline import config
from pipeline.config import Recipe

VARIABLE = "PATCHLINE_RECIPE"  # of the environment in which a recipe travels


def resolved(campaign: Campaign) -> str:
    """Return the campaign as YAML with every default written out.

    Of the runs of a sweep the first is written out; of the others, what is different.
    """
    sections: dict[str, object] = {
        "cluster": config.plain(campaign.cluster),
        "trackers": config.plain(campaign.trackers),
    }
    first_runs: dict[tuple[str, str], Stage] = {}  # by the sweep and the kind
    for stage in campaign.stages:
        first = first_runs.setdefault((stage.source, stage.kind.name), stage)
        values = config_as_known(campaign, stage)
        if first is stage or not stage.is_run or stage.kind.name == expand.TABLE:
            sections[stage.name] = {"kind": stage.kind.name, **values}
            continue
        before = expand.flat(config_as_known(campaign, first), stage.name)
        after = expand.flat(values, stage.name)
        changed = {}
        for field in {**before, **after}:
            value = after.get(field, "absent")
            if before.get(field, "absent") != value:
                changed[field] = value
        sections[stage.name] = {"as": first.name, "but": changed}
    return config.to_yaml(sections)


def config_as_known(campaign: Campaign, stage: Stage) -> dict[str, object]:
    """Return a stage's config as nested plain values, with a text for what is still to be chosen."""
    values = config.plain(stage.config)
    for field in stage.chosen:
        if field not in stage.known:
            values = expand.with_fields(values, {field: choice_text(campaign, stage, field)}, stage.name)
    return values


def choice_text(campaign: Campaign, stage: Stage, field: str) -> str:
    """Return a chosen field of a stage in words: a value, or the best of several that is not known yet."""
    table = expand.table_of(campaign, stage.chosen[field])
    values = []
    for run in table.config.runs.values():
        value = str(run.values[field])
        if value not in values:
            values.append(value)
    best = f"the best of {', '.join(values)} by {table.config.best}"
    if field in stage.known:
        return f"{stage.known[field]}, {best} ({table.name})"
    return f"{best}, known after {table.name}"


# ------------------------------------------------------------------------ for a submitted job


def portable(recipe: Recipe, run: str, folder: Path) -> tuple[str, list[str]]:
    """Return the text of a valid recipe as it travels, and the keys whose relative paths were taken from `folder`.

    `run` is where the run goes. Raises ConfigError where the recipe holds a secret.
    """
    values = {**copy.deepcopy(dict(recipe.values)), "run": run}
    changed: list[str] = []
    for name, section in values.items():
        if name in NOT_STAGES:
            continue
        kind = KINDS[section.get("kind", name)]
        patterns = (*kind.inputs, *kind.files)
        for pattern in patterns:
            make_absolute(section, pattern.split("."), name, folder, changed)
        # What varies may be a path too: at any depth of these three, with and without dots in a key.
        for part in ("each", "grid", "held_out"):
            fields = (section.get("sweep") or {}).get(part)
            if fields:
                section["sweep"][part] = absolute_fields(fields, patterns, f"{name}.sweep.{part}", folder, changed)
    text = config.to_yaml(values)
    # An environment variable of the recipe stands there in clear now.
    if SECRET_VALUE.search(text):
        raise ConfigError(
            f"{recipe.source} holds what looks like a secret: a key, a token, or a password in an address\n"
            "  it would travel with the job, in clear to whoever lists the jobs\n"
            "  leave it out: secrets belong to the nodes, their environment, instance role or mounted files"
        )
    return text, changed


def make_absolute(section: object, parts: list[str], where: str, folder: Path, changed: list[str]) -> None:
    """Make the paths absolute that a pattern names in a section, where it has them; append their keys to `changed`."""
    # What the section leaves to its defaults is no path.
    if not isinstance(section, dict):
        return
    names = [parts[0]]
    if names == ["*"]:
        names = list(section)
    for name in names:
        value = section.get(name)
        if len(parts) > 1:
            make_absolute(value, parts[1:], f"{where}.{name}", folder, changed)
        elif isinstance(value, str) and is_relative(value):
            section[name] = os.path.abspath(folder / value)
            changed.append(f"{where}.{name}")


def absolute_fields(
    fields: Mapping[str, object], patterns: Sequence[str], where: str, folder: Path, changed: list[str]
) -> dict[str, object]:
    """Return fields of a sweep, or lists of their values, with the paths among them made absolute."""
    values = expand.flat(fields, where)
    for key, value in values.items():
        # Below `each` a field stands under a name, and may stand under held_out.
        is_path = any(fnmatchcase(key, pattern) or fnmatchcase(key, f"*.{pattern}") for pattern in patterns)
        if not is_path:
            continue
        # A field of `each` has a path, a field of `grid` a list of them.
        paths = [value]
        if isinstance(value, list):
            paths = list(value)
        for number, path in enumerate(paths):
            if isinstance(path, str) and is_relative(path):
                paths[number] = os.path.abspath(folder / path)
                changed.append(f"{where}.{key}")
        values[key] = paths[0]
        if isinstance(value, list):
            values[key] = paths
    return expand.with_fields({}, values, where)


def is_relative(value: str) -> bool:
    """Return whether a value is a path that depends on the folder in which a command is typed."""
    is_elsewhere = value.startswith(("@", "/")) or "://" in value
    return not is_elsewhere
