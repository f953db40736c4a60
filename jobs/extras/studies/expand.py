"""Expand sweeps: one section of a recipe becomes many stages and a table of their results.

`sweep:` in a section names the fields that vary; `expand` writes one section for each run:
1. `each`: one run per name, with the fields under that name, for example the tasks of a benchmark;
2. `grid`: one run for every combination of the fields' values;
3. `seeds`: every run is repeated once per seed;
4. with `held_out`, the grid is trained on one part of the training data and evaluated on the rest; the runs over the
   seeds then use the best values, which the stage `<section>.grid` selects after all runs of the grid.

    finetune:                                     finetune.lr-0.01    grid run, with the fields of held_out
      init: "@resize"                             finetune.lr-0.03    grid run
      data: {train: all, evaluate: test}     →    finetune.grid       table of the grid: chooses the best lr
      sweep:                                      finetune.seed-0     uses the chosen optim.lr
        grid: {optim: {lr: [0.01, 0.03]}}         finetune.seed-1
        held_out: {data: {train: most, …}}        finetune            table of the runs: mean ± sd
        seeds: [0, 1]

All of them are ordinary stages: each has its own key, and is skipped if finished and resumed if not. All runs share the
stages that they read. `expand` only rewrites sections; it does not deal with keys or folders.

A section that reads "@pretrain.*" becomes one stage for every run of the sweep `pretrain`, with the same suffix, row
and seed. If the section also has a sweep, that sweep is applied to each of these stages:

    pretrain: {sweep: {each: {small: …, large: …}}}       pretrain.small   pretrain.large   pretrain
    resize:   {init: "@pretrain.*"}                    →  resize.small     resize.large     resize
    finetune: {init: "@resize.*", sweep: {seeds: [0]}}    finetune.small.seed-0 …           finetune

A run that uses the best values of a grid refers to the grid's table: `optim: {lr: "@finetune.grid/optim.lr"}`. Until
the table exists, the first values of the grid serve as placeholders (jobs/recipe/references.py).
"""

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

from data.errors import ConfigError
from jobs.extras.recipe_text import Section, flat, with_fields
from jobs.resolved_recipe import Kinds, MakeAbsolute, Sections, StageSection, reference
from models.checks import did_you_mean
from pipeline import config
from pipeline.config import Tags, require, tags

MEAN = "mean"  # name of the row with the mean of all runs, in a table with groups
TABLE = "sweep"  # kind of the stage that builds the table (jobs/extras/studies/table.py)
GRID = "grid"  # last part of the name of a grid's table
FINAL = "final"  # last part of the name of the run with the best values if there are no seeds
# Fields that a branch does not inherit from its trunk: the length, and fields that its weights determine.
NOT_INHERITED = ("steps", "passes", "begin", "law", "model", "new_head")
EACH_RUN = re.compile(r"@(?P<sweep>[^/*]+)\.\*(?P<part>(/.*)?)")  # "@pretrain.*", "@shards.*/train"
NO_NAME = re.compile(r"[^A-Za-z0-9._-]")  # a character not allowed in a stage's name


@dataclass(frozen=True)
class SweepConfig:
    """The settings that vary between a sweep's runs; the sweep ends with a table of all runs (docs/studies.md)."""

    each: dict[str, Any] = field(default_factory=dict)  # runs by name, with the fields that differ for each
    # lists of values; one run for every combination. Names of `each` may override grid and held_out
    grid: dict[str, Any] = field(default_factory=dict)
    held_out: dict[str, Any] = field(default_factory=dict)  # fields for grid runs only; the best values run again
    seeds: list[int] = field(default_factory=list)  # every run once per seed; with `held_out` only the best
    best: str = "accuracy"  # the metric whose highest mean wins; if equal, the first in the recipe
    # which evaluation of each run counts: its last, or its best
    evaluation: Literal["last", "best"] = "last"
    groups: dict[str, list[str]] = field(default_factory=dict)  # groups of names of `each`, each with a mean
    chosen_on_test: bool = False  # allow held_out to share samples with the final evaluation; noted in the table

    RESUME: ClassVar[Tags] = tags(forbid="each grid held_out seeds best evaluation groups chosen_on_test")

    def __post_init__(self) -> None:
        require(
            bool(self.grid) or not self.held_out,
            "held_out needs a grid, but grid is not set; add grid, or remove held_out",
        )
        lowest = min(self.seeds, default=0)
        require(lowest >= 0, f"seeds are {self.seeds}, expected 0 or more")
        check_twice("seeds", self.seeds)
        for name, fields in self.each.items():
            require(
                fields is None or isinstance(fields, Mapping),
                f"each.{name} is {fields!r}, expected a section of fields",
            )
            for part in ("grid", "held_out"):
                values = (fields or {}).get(part, {})
                require(isinstance(values, Mapping), f"each.{name}.{part} is {values!r}, expected a section of fields")
        for group, names in self.groups.items():
            require(group != MEAN, f"groups.{MEAN} has the name of the mean of all runs\n  rename the group")
            check_twice(f"groups.{group}", names)
            for name in names:
                require(
                    name in self.each,
                    f"groups.{group} contains {name!r}, which is not in each{did_you_mean(name, self.each)}",
                )


@dataclass(frozen=True)
class Run:
    """A run of a sweep: a section of the recipe and a row in the table."""

    section: Section
    row: str  # runs in the same row differ only by seed
    seed: int | None
    values: Section  # the run's values from the grid, by dotted name

    def after(self, parent: "Run", name: str) -> "Run":
        """Return this run combined with `parent`, a run of another sweep; `name` is this run's section."""
        row = parent.row
        if self.row != name:
            row = f"{parent.row}, {self.row}"
        seed = parent.seed if self.seed is None else self.seed
        return Run(self.section, row, seed, {**parent.values, **self.values})


def expand(recipe: Sections, kinds: Kinds, check: Callable[[str, Section], object]) -> Sections:
    """Return a recipe's sections by stage name; expand each section with a `sweep` to several sections.

    `check` is called once for every sweep, with the section and the first values of every varying field, so that error
    messages name the keys that the user wrote.
    """
    sections: dict[str, StageSection] = {}
    tables_above: dict[str, dict[str, Run]] = {}  # section → runs of its table by name
    for name, typed in recipe.items():
        section = typed.values
        stars = set(starred(section))
        # `finetune.sweep=null` disables a sweep.
        if isinstance(section, Mapping) and section.get("sweep") is None:
            section = {key: value for key, value in section.items() if key != "sweep"}
        if not isinstance(section, Mapping) or ("sweep" not in section and not stars):
            sections[name] = StageSection(with_trunk(section, sections, kinds), typed.source)
            continue
        where = f"{name}.sweep"
        # 1. Add one section for every run of the sweeps that this section reads, or a single one if it reads none.
        parents: dict[str, Run | None] = {"": None}
        if stars:
            parents = dict(parents_of(name, stars, tables_above))
        stages: dict[str, StageSection] = {}
        runs: dict[str, Run] = {}
        groups: dict[str, list[str]] = {}  # groups of table rows, each with a mean
        for suffix, parent in parents.items():
            base = with_trunk({"kind": name, **starred_as(section, suffix)}, sections, kinds)
            sweep = config.build(SweepConfig, base.pop("sweep", None) or {}, where)
            varies = bool(sweep.each or sweep.grid or sweep.seeds)
            require(
                varies or parent is not None,
                f"{where} has neither each, nor grid, nor seeds, so it would run only once\n  add one of them",
            )
            if parent is not None:
                has_seeds = parent.seed is not None and bool(sweep.seeds)
                require(
                    not has_seeds,
                    f"{where}.seeds is set, but the runs that {name} reads already have seeds\n"
                    "  remove one of the two lists",
                )
                # Use the parent run's seed, unless the section sets one.
                kind = kinds.get(str(base["kind"]))
                if parent.seed is not None and kind is not None and "seed" in kind.config.__dataclass_fields__:
                    base.setdefault("seed", parent.seed)
            if not stages:
                check(name, first_section(base, sweep, where))
            more_stages, more_runs = stages_of(name, f"{name}.{suffix}".rstrip("."), base, sweep, kinds)
            stages |= more_stages
            for run_name, run in more_runs.items():
                runs[run_name] = run if parent is None else run.after(parent, name)
            # If the runs have parents, define the groups separately for each parent row.
            before = "" if parent is None else f"{parent.row}, "
            if sweep.groups:
                for group, members in {**sweep.groups, MEAN: list(sweep.each)}.items():
                    groups[before + group] = [before + member for member in members]

        # 2. Add the table of all runs last, under the section's name. Without held_out, the best row of a grid is
        # selected on the samples of the final result.
        is_choice = bool(sweep.grid) and not sweep.held_out and not sweep.each and not stars
        table = table_section(runs, sweep, chooses=is_choice, on_test=is_choice)
        table["groups"] = groups
        stages[name] = StageSection(table, name)
        for run_name, written in stages.items():
            require(
                run_name == name or run_name not in recipe,
                f"{run_name} is both a stage of the recipe and a run of {where}\n  rename the stage",
            )
            sections[run_name] = written
        tables_above[name] = runs
    return sections


def with_trunk(section: Any, above: Sections, kinds: Kinds) -> Any:
    """Return a branch's section, completed with the values of its trunk; return other sections unchanged.

    `above` contains the expanded sections of all earlier stages.
    """
    if not isinstance(section, Mapping):
        return section
    # `begin` may also be a field of the section's sweep.
    candidates: list[object] = [section]
    sweep = section.get("sweep")
    if isinstance(sweep, Mapping):
        candidates.append(sweep.get("grid"))
        if isinstance(sweep.get("each"), Mapping):
            candidates += sweep["each"].values()
    begins = any(isinstance(fields, Mapping) and fields.get("begin") for fields in candidates)
    link = reference(str(section.get("init")))
    if not begins or link is None or link[0] not in above:
        return dict(section)
    trunk: Any = above[link[0]].values
    kind = kinds.get(str(trunk.get("kind", link[0])))
    if kind is None or not kind.trains:
        return dict(section)
    inherited = dict(trunk)
    for name in NOT_INHERITED:
        inherited.pop(name, None)
    own = dict(section)
    sweep = own.pop("sweep", None)
    whole = with_fields(inherited, flat(own, link[0]), link[0])
    if sweep is not None:
        whole["sweep"] = sweep
    return whole


def first_section(base: Section, sweep: SweepConfig, where: str) -> Section:
    """Return a section with the fields of the first name in `each` and the first values in the grid."""
    fields = dict(next(iter(sweep.each.values()), None) or {})
    fields.pop("held_out", None)
    values: Section = next(iter(grid_of(fields.pop("grid", sweep.grid), where).values()), {})
    return with_fields(with_own(base, flat(fields, where), where), values, where)


def starred(section: object) -> Iterator[str]:
    """Yield the sweeps whose runs a section reads one by one: "pretrain" if it contains "@pretrain.*"."""
    if isinstance(section, str):
        match = EACH_RUN.fullmatch(section)
        if match is not None:
            yield match["sweep"]
    elif isinstance(section, Mapping):
        for value in section.values():
            yield from starred(value)


def starred_as(section: Any, suffix: str) -> Any:
    """Return a section with each "@pretrain.*" replaced with "@pretrain.<suffix>"."""
    if isinstance(section, str):
        return EACH_RUN.sub(rf"@\g<sweep>.{suffix}\g<part>", section)
    if isinstance(section, Mapping):
        return {key: starred_as(value, suffix) for key, value in section.items()}
    return section


def parents_of(name: str, stars: Collection[str], tables_above: Mapping[str, Mapping[str, Run]]) -> dict[str, Run]:
    """Return the runs of the sweeps read by a section, by suffix: the run's name without the sweep's name.

    Raises ConfigError if a name is not a sweep above the section, or if the runs of two sweeps have different
    suffixes.
    """
    parents: dict[str, Run] = {}
    for star in sorted(stars):
        require(
            star in tables_above,
            f"{name} reads @{star}.*, the runs of a sweep, but no section {star} above {name} has a sweep\n"
            f"  use @{star}, or move {name} below the sweep",
        )
        runs = {run_name.removeprefix(f"{star}."): run for run_name, run in tables_above[star].items()}
        require(
            not parents or parents.keys() == runs.keys(),
            f"{name} reads the runs of several sweeps, {', '.join(sorted(stars))}, whose runs have different names: "
            f"{', '.join(parents)}; {', '.join(runs)}\n"
            "  expected sweeps over the same values, so that their runs match by name",
        )
        parents = parents or runs
    return parents


def stages_of(
    name: str, stem: str, base: Section, sweep: SweepConfig, kinds: Kinds
) -> tuple[dict[str, StageSection], dict[str, Run]]:
    """Return all stages of a sweep except the table of its runs; also return the runs in this table.

    `stem` is the prefix of their names: `name`, or `name.suffix` for a run of another sweep.
    """
    where = f"{name}.sweep"
    first_stem = stem
    stages: dict[str, StageSection] = {}
    table: dict[str, Run] = {}
    for row, fields in (sweep.each or {"": {}}).items():
        own = dict(fields or {})
        held_out = flat(own.pop("held_out", sweep.held_out), where)
        grid = grid_of(own.pop("grid", sweep.grid), where)
        stem = f"{first_stem}.{row}".rstrip(".")
        section = with_own(base, flat(own, f"{where}.each.{row}"), where)
        runs: dict[str, Run] = {}
        if not grid:
            runs = seeded(stem, section, sweep.seeds, row or name)
        elif held_out:
            # Selecting a whole section would leave fields of the placeholder section in the config.
            for candidate in grid.values():
                for key, value in candidate.items():
                    require(
                        not isinstance(value, Mapping),
                        f"{where}.grid.{key} lists {value!r}, a section; but a grid with held_out can choose only "
                        "single values\n"
                        f"  list values of its fields: {where}.grid.{key}.FIELD=[…]",
                    )
            # Add the runs of the grid and its table before the runs with the best values.
            choice = f"{stem}.{GRID}"
            candidates = grid_runs(stem, with_fields(section, held_out, where), grid, [], where)
            stages |= written_runs(name, candidates)
            stages[choice] = StageSection(table_section(candidates, sweep, chooses=True), name)
            best_values = {key: f"@{choice}/{key}" for key in next(iter(grid.values()))}
            section = with_fields(section, best_values, where)
            # The table of all runs gets the section's name, so a single run needs a different one.
            if stem == name and not sweep.seeds:
                stem = f"{name}.{FINAL}"
            runs = seeded(stem, section, sweep.seeds, row or name)
            kind = kinds.get(str(base["kind"]))
            for key in best_values:
                is_input = kind is not None and any(fnmatchcase(key, pattern) for pattern in kind.inputs)
                require(
                    not is_input,
                    f"{next(iter(runs))}: {key} is an input, but a grid with held_out cannot choose inputs",
                )
        else:
            require(
                not row,
                f"{where} has both each and grid, but not held_out\n"
                "  add held_out, which selects the best values of the grid",
            )
            runs = grid_runs(stem, section, grid, sweep.seeds, where)
        stages |= written_runs(name, runs)
        table |= runs
    return stages, table


def seeded(stem: str, section: Section, seeds: list[int], row: str, values: Section | None = None) -> dict[str, Run]:
    """Return the runs of one table row by name: one run per seed, or a single run if there are no seeds."""
    if not seeds:
        return {stem: Run(section, row, None, values or {})}
    runs = {}
    for seed in seeds:
        runs[f"{stem}.seed-{seed}"] = Run({**section, "seed": seed}, row, seed, values or {})
    return runs


def grid_runs(stem: str, section: Section, grid: Mapping[str, Section], seeds: list[int], where: str) -> dict[str, Run]:
    """Return the runs of a grid by name; every combination of values is one row of the table."""
    runs: dict[str, Run] = {}
    for suffix, values in grid.items():
        combined = with_fields(section, values, where)
        runs |= seeded(f"{stem}.{suffix}", combined, seeds, as_text(values), values)
    return runs


def written_runs(source: str, runs: Mapping[str, Run]) -> dict[str, StageSection]:
    """Return the recipe section of each run, by the run's name."""
    return {name: StageSection(run.section, source) for name, run in runs.items()}


def table_section(
    runs: Mapping[str, Run], sweep: SweepConfig, *, chooses: bool, on_test: bool = False
) -> dict[str, object]:
    """Return the section of the stage that builds the table of these runs."""
    entries: dict[str, Section] = {}
    for name, run in runs.items():
        entries[name] = {"stage": f"@{name}", "row": run.row, "seed": run.seed, "values": dict(run.values)}
    section = {"kind": TABLE, "runs": entries, "best": sweep.best, "chooses": chooses, "groups": {}}
    if sweep.evaluation != "last":
        section["evaluation"] = sweep.evaluation
    if sweep.chosen_on_test or on_test:
        section["chosen_on_test"] = True
    return section


# ------------------------------------------------------------------------------------------------ fields and names


def grid_of(grid: Any, where: str) -> dict[str, Section]:
    """Return all combinations of a grid's values by run suffix: {"lr-0.01": {"optim.lr": 0.01}, …}."""
    values_of: dict[str, list[object]] = {}
    for key, values in flat(grid, f"{where}.grid").items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}.grid.{key} is {values!r}, expected a list of values")
        check_twice(f"{where}.grid.{key}", values)
        values_of[key] = values
    if not values_of:
        return {}
    # Name a field by the last part of its key, or by the whole key if two keys have the same last part.
    lasts = [key.rpartition(".")[2] for key in values_of]
    names: dict[str, str] = {}
    for key, last in zip(values_of, lasts, strict=True):
        names[key] = last
        if lasts.count(last) > 1:
            names[key] = key
    combinations: dict[str, Section] = {}
    for combination in itertools.product(*values_of.values()):
        parts = []
        for key, value in zip(values_of, combination, strict=True):
            parts.append(f"{names[key]}-{NO_NAME.sub('_', str(value))}")
        suffix = ".".join(parts)
        require(suffix not in combinations, f"{where}.grid: two runs would have the same name {suffix}")
        combinations[suffix] = dict(zip(values_of, combination, strict=True))
    return combinations


def with_own(base: Section, fields: Section, where: str) -> dict[str, object]:
    """Return a copy of a section with the fields for one name in `each`.

    If the fields select another model, only the image size and the classes of the section's model are kept.
    """
    section = dict(base)
    model = section.get("model")
    if "model.name" in fields and isinstance(model, Mapping) and model.get("name") != fields["model.name"]:
        section["model"] = {key: model[key] for key in ("image_size", "classes") if key in model}
    return with_fields(section, fields, where)


def check_twice(where: str, values: Sequence[object]) -> None:
    """Raise ConfigError if a list contains a value twice."""
    for value in values:
        require(values.count(value) == 1, f"{where} contains {value!r} twice, expected distinct values")


def as_text(values: Mapping[str, object]) -> str:
    """Format values for display: "optim.lr=0.01, steps=100"."""
    return ", ".join(f"{key}={value}" for key, value in values.items())


# ------------------------------------------------------------------------------------------------ for a submitted job


def make_absolute(name: str, section: dict[str, Any], patterns: Sequence[str], absolute: MakeAbsolute) -> None:
    """Make the relative paths in a section's sweep absolute; `patterns` match the fields with paths."""
    for part in ("each", "grid", "held_out"):
        fields = (section.get(TABLE) or {}).get(part)
        if fields:
            section[TABLE][part] = absolute_fields(fields, patterns, f"{name}.{TABLE}.{part}", absolute)


def absolute_fields(
    fields: Section, patterns: Sequence[str], where: str, absolute: MakeAbsolute, prefix: str = ""
) -> dict[str, object]:
    """Return a sweep's fields, whose values may be lists, with relative paths made absolute."""
    values: dict[str, object] = {}
    for name, value in fields.items():
        key = f"{prefix}{name}"
        # In `each`, the field follows the run's name and possibly `held_out`.
        is_path = any(fnmatchcase(key, pattern) or fnmatchcase(key, f"*.{pattern}") for pattern in patterns)
        # Descend instead of flattening, because names of runs may contain dots.
        if isinstance(value, Mapping):
            value = absolute_fields(value, patterns, where, absolute, f"{key}.")
        # A field is a single path in `each`, and a list of paths in `grid`.
        elif is_path and isinstance(value, list):
            value = [absolute(f"{where}.{key}", path) if isinstance(path, str) else path for path in value]
        elif is_path and isinstance(value, str):
            value = absolute(f"{where}.{key}", value)
        values[name] = value
    return values
