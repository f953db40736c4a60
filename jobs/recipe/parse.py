"""From the text of a recipe to the typed sections of its stages.

1. `parse` takes out `run`, `cluster` and `trackers`; any other section is a stage, whose kind is its name or
   its `kind:`.
2. A section with `sweep` becomes many (sweeps.py); each becomes the frozen config of its kind: a wrong key stops here.
3. Stages are put in order: a stage that names another's output ("@stage" or "@stage/part") comes after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from data.checks import check_name
from data.errors import ConfigError
from jobs.cluster_config import ClusterConfig
from jobs.context import reference
from jobs.recipe import sweeps
from jobs.resolved_recipe import Stage, StageKind
from jobs.stages.kinds import KINDS
from jobs.trackers_config import TrackersConfig
from models.checks import did_you_mean
from pipeline import config
from pipeline.config import Recipe, require

NOT_STAGES = ("run", "cluster", "trackers")  # keys of a recipe that belong to the whole campaign


@dataclass(frozen=True)
class Parsed:
    """A recipe whose sections are typed."""

    run: str  # a path, or the URL of a run in an object store
    cluster: ClusterConfig
    trackers: TrackersConfig
    stages: Mapping[str, Stage]  # by name, parents first; without inputs, models and keys


def parse(recipe: Recipe) -> Parsed:
    """Return the typed sections of a recipe. Raises ConfigError, which names the key."""
    run = recipe.values.get("run", recipe.default_run)
    # An empty variable of a shell, as in run=$RUN, must not lead into a run that is there.
    require(run not in (None, ""), f"run is empty, expected a folder\n  type run={recipe.default_run}")
    require(isinstance(run, str), f"run is {run!r}, expected a folder\n  type run=./{run}")
    # What is left of a `~` names somebody who has no home here; the folder of this name would be no home either.
    require(not run.startswith("~"), f"run is {run}: no user of this name is known here\n  type the path: run=/…")
    cluster = config.build(ClusterConfig, recipe.values.get("cluster", {}), "cluster")
    trackers = config.build(TrackersConfig, recipe.values.get("trackers", {}), "trackers")

    sections = {name: section for name, section in recipe.values.items() if name not in NOT_STAGES}
    require(bool(sections), f"{recipe.source} names no stage; known kinds: {', '.join(KINDS)}")
    stages = {}
    for name, written in sweeps.expand(sections, read_section).items():
        kind, stage_config = read_section(name, written.values)
        stages[name] = Stage(name, kind, stage_config, written.source, written.chosen)
    return Parsed(run, cluster, trackers, in_order(stages))


def read_section(name: str, section: Any) -> tuple[StageKind, Any]:
    """Return the kind of a stage's section, and its config, an instance of the kind's config."""
    check_name(name, "a stage", "rename it, and what reads it as @stage")
    hint = "" if name in KINDS else did_you_mean(name, KINDS)
    require(
        isinstance(section, Mapping),
        f"{name} is {section!r}, expected a stage's section{hint}\n"
        f"  take {name} out of the recipe, or give it keys: {name}.kind=…",
    )
    values = dict(section)
    kind_name = values.pop("kind", name)
    kinds = ", ".join(KINDS)
    require(isinstance(kind_name, str), f"{name}.kind is {kind_name!r}, expected one of {kinds}")
    if kind_name not in KINDS and "kind" in section:
        raise ConfigError(f"{name}.kind is {kind_name!r}, expected one of {kinds}{did_you_mean(kind_name, KINDS)}")
    if kind_name not in KINDS:
        nearest = did_you_mean(kind_name, [*KINDS, *NOT_STAGES])
        raise ConfigError(f"unknown stage or key {kind_name!r}{nearest}; or give the section a kind: {kinds}")

    # The defaults of a kind name its length in steps or in passes; a recipe may use the other way.
    if "steps" in values:
        values.setdefault("passes", None)
    if "passes" in values:
        values.setdefault("steps", None)
    kind = KINDS[kind_name]
    return kind, config.build(kind.config, values, name, kind.defaults)


def in_order(stages: Mapping[str, Stage]) -> dict[str, Stage]:
    """Return the stages by name: each after the stages that it reads, otherwise in the recipe's order."""
    reads: dict[str, set[str]] = {}
    for name, stage in stages.items():
        reads[name] = set()
        values = {field: value for field, (value, _reads) in stage.kind.inputs_of(stage.config).items()}
        for field, value in {**values, **stage.chosen}.items():
            link = reference(value)
            if link is None:
                continue
            # The sorter would take a name that does not exist for one more stage: refuse it here.
            parent, _ = link
            require(parent in stages, f"{name}.{field} is @{parent}, no such stage{did_you_mean(parent, stages)}")
            reads[name].add(parent)

    sorter = TopologicalSorter(reads)
    try:
        sorter.prepare()
    except CycleError as error:
        raise ConfigError(f"stages read each other in a circle: {' ← '.join(error.args[1])}") from None

    # Of the stages that could come next, take the first in the recipe.
    recipe_order = list(stages)
    ordered: dict[str, Stage] = {}
    ready: set[str] = set()
    while sorter.is_active():
        ready.update(sorter.get_ready())
        first = min(ready, key=recipe_order.index)
        ready.remove(first)
        ordered[first] = stages[first]
        sorter.done(first)
    return ordered
