"""Write resolved recipes as YAML, for golden tests, records and people; convert between nested and dotted fields.

{"optim": {"lr": 0.1}}, "optim.lr" → 0.1
"""

import copy
from collections.abc import Mapping
from typing import TypeAlias

from data.errors import ConfigError
from jobs.resolved_recipe import Campaign, Stage
from pipeline import config
from pipeline.config import require
from pipeline.recipe import to_yaml

Section: TypeAlias = Mapping[str, object]  # nested plain values, not yet validated


def resolved(campaign: Campaign) -> str:
    """Return a campaign as YAML, with all defaults included.

    If a section expands to several stages, the first stage is written in full, and the others only with their
    differences from it.
    """
    sections: dict[str, object] = {"cluster": config.plain(campaign.cluster)}
    if campaign.trackers is not None:
        sections["trackers"] = config.plain(campaign.trackers)
    first_runs: dict[tuple[str, str], Stage] = {}  # by section and kind
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
    """Return a stage's config as nested plain values; replace unknown values with a description."""
    values = config.plain(stage.config)
    for field in stage.pending:
        values = with_fields(values, {field: describe_value(campaign, stage, field)}, stage.name)
    return values


def describe_value(campaign: Campaign, stage: Stage, field: str) -> str:
    """Describe a value determined by another stage: the value, if known, and its source."""
    name, part = stage.links[field]
    source = campaign.stage(name)
    text = source.kind.value_in_words(source.config, part)
    if field not in stage.chosen:
        return f"{text}, known after {source.name}"
    return f"{stage.chosen[field]}, {text} ({source.name})"


def flat(fields: Section, where: str, prefix: str = "") -> dict[str, object]:
    """Flatten nested fields to dotted names, {"optim": {"lr": 1}} → {"optim.lr": 1}; dotted names stay unchanged.

    Raises ConfigError if a field is given in both forms.
    """
    values: dict[str, object] = {}
    for name, value in fields.items():
        key = f"{prefix}{name}"
        entries: dict[str, object] = {key: value}
        # An empty section is a value: it replaces the previous value.
        if isinstance(value, Mapping) and value:
            entries = flat(value, where, f"{key}.")
        for entry in entries:
            require(
                entry not in values,
                f"{where} sets {entry} twice, as a dotted key and in a section; remove one of the two",
            )
        values |= entries
    return values


def with_fields(section: Section, fields: Section, where: str) -> dict[str, object]:
    """Return a copy of a section with fields set by dotted name. Raises ConfigError if a parent is not a section."""
    changed = copy.deepcopy(dict(section))
    for key, value in fields.items():
        *path, last = key.split(".")
        place = changed
        # Descend to the section that contains the field, creating missing sections.
        for part in path:
            deeper = place.setdefault(part, {})
            if deeper is None:
                deeper = place[part] = {}
            if not isinstance(deeper, dict):
                raise ConfigError(f"{where} sets {key}, but {part} is {deeper!r}, expected a section")
            place = deeper
        place[last] = copy.deepcopy(value)
    return changed
