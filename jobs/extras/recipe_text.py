"""A recipe as text, resolved: for golden texts, records and people. And sections of a recipe as nested plain values.

{"optim": {"lr": 0.1}}, "optim.lr" → 0.1
"""

import copy
from collections.abc import Mapping
from typing import TypeAlias

from data.errors import ConfigError
from jobs.recipe.references import source_of, value_at
from jobs.resolved_recipe import Campaign, Stage
from pipeline import config
from pipeline.config import require
from pipeline.recipe import to_yaml

Section: TypeAlias = Mapping[str, object]  # nested, plain, not yet checked


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


def in_words(campaign: Campaign, stage: Stage, field: str) -> str:
    """Return a value that another stage determines in words: the value, or how it will be found."""
    source, part = source_of(campaign, stage.references[field])
    text = source.kind.value_in_words(source.config, part)
    if field in stage.pending:
        return f"{text}, known after {source.name}"
    return f"{value_at(stage.config, field.split('.'))}, {text} ({source.name})"


def flat(fields: Section, where: str, prefix: str = "") -> dict[str, object]:
    """Return nested fields by dotted name, {"optim": {"lr": 1}} → {"optim.lr": 1}; dotted names stay as they are.

    Raises ConfigError for a field that is given both ways.
    """
    values: dict[str, object] = {}
    for name, value in fields.items():
        key = f"{prefix}{name}"
        entries: dict[str, object] = {key: value}
        # An empty section is a value: it takes the place of what stands there.
        if isinstance(value, Mapping) and value:
            entries = flat(value, where, f"{key}.")
        for entry in entries:
            require(entry not in values, f"{where} has {entry} twice, as {entry} and as a section")
        values |= entries
    return values


def with_fields(section: Section, fields: Section, where: str) -> dict[str, object]:
    """Return a copy of a section with fields set by dotted name. Raises ConfigError if one leads into a value."""
    changed = copy.deepcopy(dict(section))
    for key, value in fields.items():
        *path, last = key.split(".")
        place = changed
        # Down to the section in which the field stands; the sections on the way that are missing are made.
        for part in path:
            deeper = place.setdefault(part, {})
            if deeper is None:
                deeper = place[part] = {}
            if not isinstance(deeper, dict):
                raise ConfigError(f"{where} sets {key}, and {part} is {deeper!r}, no section")
            place = deeper
        place[last] = copy.deepcopy(value)
    return changed
