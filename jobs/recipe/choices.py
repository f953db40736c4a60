"""What sweeps have chosen, put into the configs of the stages that wait for it.

A run that takes the best values of a grid has, until the grid's table is made, the first values of the grid in their
place. Its key is computed with these, and with the key of the table: so every key is known before anything has run, and
stays the same afterwards.

    before  finetune.seed-0: optim.lr is the best of 0.003, 0.01, 0.03 by accuracy, known after finetune.grid
    after   finetune.seed-0: optim.lr is 0.01, the best of … by accuracy, of finetune.grid
"""

import dataclasses
from typing import Any

from data.errors import DataError
from jobs.recipe.key import model_of
from jobs.resolved_recipe import Campaign, Stage, reference
from jobs.stages import sweep
from pipeline import artifacts, config


def resolve_sweep(campaign: Campaign) -> Campaign:
    """Return the campaign with every choice that has been made in the configs of the stages that wait for it.

    Raises DataError where a stage was run with other values than its sweep has chosen.
    """
    stages: dict[str, Stage] = {}
    is_changed = False
    # A table is read once for all that wait for it: a benchmark of 19 tasks has a hundred runs and more.
    chosen: dict[str, dict[str, Any] | None] = {}
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


def values_known(campaign: Campaign, stage: Stage, chosen: dict[str, dict[str, Any] | None]) -> dict[str, Any]:
    """Return the fields of a stage that sweeps have chosen a value for; `chosen` remembers what each table says."""
    known = {}
    for field, value in stage.chosen.items():
        if value not in chosen:
            folder = campaign.directory(table_of(campaign, value))
            is_made = artifacts.read_done(folder) is not None
            chosen[value] = sweep.chosen_values(folder) if is_made else None
        values = chosen[value]
        if values is not None:
            known[field] = values[field]
    return known


def check_as_chosen(campaign: Campaign, stage: Stage, known: dict[str, Any]) -> None:
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


def with_field(section: Any, path: list[str], value: Any) -> Any:
    """Return a config with one field changed, which a dotted name leads to; its checks are made again."""
    first, *rest = path
    if isinstance(section, dict):
        return {**section, first: with_field(section[first], rest, value) if rest else value}
    if rest:
        value = with_field(getattr(section, first), rest, value)
    return dataclasses.replace(section, **{first: value})
