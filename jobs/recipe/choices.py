"""What sweeps have chosen, put into the configs of the stages that wait for it.

A run that takes the best values of a grid has, until the grid's table is made, the first values of the grid in their
place. Its key is computed with these, and with the key of the table: so every key is known before anything has run, and
stays the same afterwards.

    before  finetune.seed-0: optim.lr is the best of 0.003, 0.01, 0.03 by accuracy, known after finetune.grid
    after   finetune.seed-0: optim.lr is 0.01, the best of … by accuracy, of finetune.grid
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from data.errors import DataError
from jobs.recipe.key import model_of
from jobs.resolved_recipe import Campaign, Stage, reference
from jobs.stages import sweep
from pipeline import artifacts, config

Config = TypeVar("Config")  # a dataclass, or a dict of some


def resolve_sweep(campaign: Campaign) -> Campaign:
    """Return the campaign with every choice that has been made in the configs of the stages that wait for it.

    Raises DataError where a stage was run with other values than its sweep has chosen.
    """
    stages: dict[str, Stage] = {}
    is_changed = False
    # A table is read once for all that wait for it: a benchmark of 19 tasks has a hundred runs and more.
    chosen: dict[str, Mapping[str, object] | None] = {}
    for stage in campaign.stages:
        known = values_known(campaign, stage, chosen)
        if known != stage.known:
            check_as_chosen(campaign, stage, known)
            stage_config = stage.config
            for field, value in known.items():
                stage_config = with_field(stage_config, field.split("."), value)
            stage = dataclasses.replace(stage, config=stage_config, known=known)
            is_changed = True
        # A choice may be of the model, which the stages after this one go on with.
        if is_changed and stage.model is not None:
            stage = dataclasses.replace(stage, model=model_of(stage, stages, []))
        stages[stage.name] = stage
    return dataclasses.replace(campaign, stages=tuple(stages.values()))


def values_known(campaign: Campaign, stage: Stage, chosen: dict[str, Mapping[str, object] | None]) -> dict[str, object]:
    """Return the fields of a stage that sweeps have chosen a value for; `chosen` holds the tables that were read."""
    known: dict[str, object] = {}
    for field, value in stage.chosen.items():
        if value not in chosen:
            folder = campaign.directory(table_of(campaign, value))
            chosen[value] = None
            if artifacts.read_done(folder) is not None:
                chosen[value] = sweep.chosen_values(folder)
        values = chosen[value]
        if values is not None:
            known[field] = values[field]
    return known


def check_as_chosen(campaign: Campaign, stage: Stage, known: Mapping[str, object]) -> None:
    """Raise DataError where the stage's folder is of other values than those that its sweep has chosen."""
    folder = campaign.directory(stage)
    if not (folder / "stage.json").exists():
        return
    changes = config.differences(artifacts.read_record(folder / "stage.json").get("chosen", {}), known)
    if changes:
        tables = ", ".join(sorted({value[1:] for value in stage.chosen.values()}))
        raise DataError(
            f"{folder} was run with other values than {tables} has chosen: {'; '.join(changes)}\n"
            "  expected the same: was the table made again, of runs that came to something else?\n"
            f"  bring the folder of {tables} back, or move {folder} away to run {stage.name} with what is chosen now"
        )


def table_of(campaign: Campaign, value: str) -> Stage:
    """Return the table that chooses, of "@stage"."""
    link = reference(value)
    assert link is not None, "jobs/recipe/sweeps.py writes nothing but references"
    return campaign.stage(link[0])


def with_field(section: Config, path: Sequence[str], value: object) -> Config:
    """Return a config, or sections by name, with the field changed to which a path leads; checks are made again."""
    first, *rest = path
    if isinstance(section, dict):
        if rest:
            value = with_field(section[first], rest, value)
        return {**section, first: value}  # type: ignore[return-value]
    if rest:
        value = with_field(getattr(section, first), rest, value)
    return dataclasses.replace(section, **{first: value})  # type: ignore[type-var]
