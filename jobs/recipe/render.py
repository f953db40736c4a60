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
from pathlib import Path

from data.errors import ConfigError
from jobs.cluster_config import SECRET_VALUE
from jobs.recipe.campaign import NOT_STAGES
from jobs.recipe.references import in_words
from jobs.recipe.sections import flat, with_fields
from jobs.resolved_recipe import Campaign, Kinds, MakeAbsolute, Stage
from pipeline import config
from pipeline.recipe import Recipe, to_yaml

VARIABLE = "PATCHLINE_RECIPE"  # of the environment in which a recipe travels


def resolved(campaign: Campaign) -> str:
    """Return the campaign as YAML with every default written out.

    If a section has become several stages, the first is written out; the others show what is different.
    """
    sections: dict[str, object] = {
        "cluster": config.plain(campaign.cluster),
        "trackers": config.plain(campaign.trackers),
    }
    first_runs: dict[tuple[str, str], Stage] = {}  # by the section and the kind
    for stage in campaign.stages:
        first = first_runs.setdefault((stage.source, stage.kind.name), stage)
        values = config_as_known(campaign, stage)
        if first is stage or not stage.is_run or stage.kind.reads_outcomes:
            sections[stage.name] = {"kind": stage.kind.name, **values}
            continue
        before = flat(config_as_known(campaign, first), stage.name)
        after = flat(values, stage.name)
        changed = {}
        for field in {**before, **after}:
            value = after.get(field, "absent")
            if before.get(field, "absent") != value:
                changed[field] = value
        sections[stage.name] = {"as": first.name, "but": changed}
    return to_yaml(sections)


def config_as_known(campaign: Campaign, stage: Stage) -> dict[str, object]:
    """Return a stage's config as nested plain values, with a text in place of values that are not known yet."""
    values = config.plain(stage.config)
    for field in stage.pending:
        values = with_fields(values, {field: in_words(campaign, stage, field)}, stage.name)
    return values


# ------------------------------------------------------------------------ for a submitted job


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
