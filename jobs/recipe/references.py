"""Fill in config values determined by another stage, such as `lr: "@finetune.grid/optim.lr"`.

1. Until the other stage has finished, the config has a placeholder (`StageKind.placeholders`), and the field is
   pending. The stage's key contains the placeholder and the other stage's key, so the key never changes.
2. `with_values` replaces the placeholders whose values are known. It is called when a recipe is loaded and when a stage
   starts.

    before  finetune.seed-0: optim.lr is the best of 0.003, 0.01, 0.03 by accuracy, known after finetune.grid
    after   finetune.seed-0: optim.lr is 0.01, the best of … by accuracy (finetune.grid)

`references_in` finds the references in a section of a recipe, a nested dict: {"optim": {"lr": "@grid/optim.lr"}}.
`filled` replaces them with values. Fields have dotted names: "optim.lr".
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from data.errors import DataError
from jobs.recipe.key import with_model
from jobs.resolved_recipe import Campaign, Stage, reference
from pipeline import artifacts, config

Config = TypeVar("Config")  # a dataclass, or a dict of dataclasses


def with_values(campaign: Campaign) -> Campaign:
    """Return a copy of the campaign with placeholders replaced with the values of finished stages.

    Raises DataError if a stage has already run with different values.
    """
    stages: dict[str, Stage] = {}
    is_changed = False
    # Read each record only once: a benchmark of 19 tasks has more than a hundred runs.
    values_of: dict[str, Mapping[str, object]] = {}
    for stage in campaign.stages:
        # 1. Collect the known values.
        known: dict[str, object] = {}
        for field in stage.references:
            name, part = stage.links[field]
            if name not in values_of:
                source = stages[name]  # stages come after those that they read
                folder = campaign.directory(source)
                is_finished = artifacts.read_done(folder) is not None
                values_of[name] = source.kind.values(folder) if is_finished else {}
            # If all runs of a sweep were stopped early, there is no value, and this stage cannot run.
            if part in values_of[name]:
                known[field] = values_of[name][part]

        # 2. Replace the placeholders; raise an error if the stage has already run with other values.
        if known != stage.chosen:
            check_same(campaign, stage, known)
            stage_config = stage.config
            for field, known_value in known.items():
                stage_config = with_field(stage_config, field.split("."), known_value)
            stage = replace(stage, config=stage_config, chosen=known)
            is_changed = True
        # 3. A value may change the model, and the models of later stages that start from it.
        if is_changed and stage.model is not None:
            stage = with_model(stage, stages)
        stages[stage.name] = stage
    return replace(campaign, stages=tuple(stages.values()))


def check_same(campaign: Campaign, stage: Stage, known: Mapping[str, object]) -> None:
    """Raise DataError if a stage has already run with values other than the current ones."""
    path = campaign.directory(stage) / "stage.json"
    if not path.exists():
        return
    changes = config.differences(artifacts.read_record(path).get("chosen", {}), known)
    if changes:
        names = ", ".join(sorted({stage.links[field][0] for field in stage.references}))
        raise DataError(
            f"{path.parent} was run with values that {names} no longer selects: {'; '.join(changes.values())}\n"
            f"  the runs of the sweep may have been repeated, with different results\n"
            f"  restore the previous folder of {names}, or move {path.parent} elsewhere to run {stage.name} with the "
            "current values"
        )


# ------------------------------------------------------------------------ fields by dotted name


def with_field(section: Config, path: Sequence[str], value: object) -> Config:
    """Return a validated copy of a config, or of a dict of configs, with the field at `path` set to `value`."""
    first, *rest = path
    if isinstance(section, dict):
        # Names of data sets may contain dots.
        while rest and first not in section:
            first += f".{rest.pop(0)}"
        if rest:
            value = with_field(section[first], rest, value)
        return {**section, first: value}  # type: ignore[return-value]
    if rest:
        value = with_field(getattr(section, first), rest, value)
    return replace(section, **{first: value})  # type: ignore[type-var]


def references_in(section: object, apart: Sequence[str], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields that refer to another stage's value: ("optim.lr", "@grid/optim.lr").

    Fields that match a pattern in `apart` are skipped.
    """
    if isinstance(section, Mapping):
        for name, value in section.items():
            yield from references_in(value, apart, f"{prefix}.{name}".lstrip("."))
    elif isinstance(section, str) and not any(fnmatchcase(prefix, pattern) for pattern in apart):
        link = reference(section)
        if link is not None and link[1]:
            yield prefix, section


def filled(section: Any, values: Mapping[str, object], prefix: str = "") -> Any:
    """Return a copy of a section with some fields set to `values` (dotted name → value)."""
    if isinstance(section, Mapping):
        return {name: filled(value, values, f"{prefix}.{name}".lstrip(".")) for name, value in section.items()}
    return copy.deepcopy(values.get(prefix, section))
