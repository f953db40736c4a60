"""Build a sweep's table: the metrics of its runs, their mean, interval and deviation, and the best row.

In:  the finished runs of a sweep (jobs/extras/studies/expand.py), each a stage with metrics
Out: sweep.json, a record with runs, rows, the chosen values and its own sha256; report.txt, the table as text

    finetune.grid, in %         accuracy
    optim.lr=0.003                97.41
    optim.lr=0.01                 98.02   best
    optim.lr=0.03                     -   diverged

                     parameters   GMACs    exaFLOPs   samples   steps   seconds   images/s
    optim.lr=0.003        26.6k   1e-4      1.2e-09      2.0k      60      12.1        159

1. Read the metrics of every run; a diverged run has no metrics.
2. Combine runs that differ only by seed into a row: mean and standard deviation (n − 1) of every metric. If the runs
   were evaluated on the same samples by a stage of kind evaluate, add the interval over runs, draws and samples
   (pipeline/evaluation/intervals.py). Accuracies of training stages have no interval, because they list no samples.
3. If other stages use the best values, choose the row with the highest mean; if several are equal, the first in the
   recipe. Exclude rows with a diverged run; fail if no row remains.
4. Otherwise, fail if any run has diverged: a mean over the other runs would be misleading.
5. If the runs have no metrics (for example resize), list only the axes.
"""

import json
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from data.errors import ConfigError, DataError, Diverged
from data.extras.shared_samples import shared_samples
from data.files import write_atomically
from jobs.extras.studies import expand
from jobs.extras.studies.axes import axes_of
from jobs.recipe.campaign import read_section
from jobs.resolved_recipe import (
    Available,
    Campaign,
    CheckResult,
    Context,
    Kinds,
    MakeAbsolute,
    Reads,
    Sections,
    Stage,
    StageKind,
    reference,
)
from jobs.stage_folders import TABLE as DOCUMENT
from models.checks import did_you_mean
from pipeline import artifacts
from pipeline.artifacts import DIVERGED
from pipeline.config import Tags, require, tags
from pipeline.evaluation import document, intervals
from pipeline.monitoring.telemetry import without_single_seeds
from pipeline.values import amount

MAX_SHARE_OF_COPIES = (
    0.01  # tolerated share of held-out samples with the same bytes in another set: many sets contain duplicates
)
TIES = "the highest mean; if equal, the first in the recipe"


@dataclass(frozen=True)
class RunConfig:
    """One run in a sweep's table."""

    stage: str = "???"  # reference to the run's stage, "@stage"
    row: str = ""  # row of the table; runs in the same row differ only by seed
    seed: int | None = None  # the run's seed, if the sweep has seeds
    values: dict[str, Any] = field(default_factory=dict)  # the run's values from the grid, by dotted name

    RESUME: ClassVar[Tags] = tags(forbid="stage row seed values")


@dataclass(frozen=True)
class TableConfig:
    """The table of a sweep. `expand` writes this section for every sweep; recipes do not contain it."""

    runs: dict[str, RunConfig] = field(default_factory=dict)  # by the names of their stages
    best: str = "accuracy"  # the metric in the first column, by which the best row is chosen
    chooses: bool = False  # whether other stages use the values of the best row
    groups: dict[str, list[str]] = field(default_factory=dict)  # groups of rows, each with a mean
    chosen_on_test: bool = False  # whether the values were chosen on the samples of the final results
    evaluation: Literal["last", "best"] = "last"  # which evaluation of each run counts

    RESUME: ClassVar[Tags] = tags(forbid="runs best chooses groups chosen_on_test evaluation")
    LATER: ClassVar[tuple[str, ...]] = ("chosen_on_test", "evaluation")


@dataclass(frozen=True)
class Result:
    """The metrics of one run, or the error if the run diverged."""

    stage: str
    key: str
    row: str
    seed: int | None
    values: Mapping[str, Any]  # of the grid, or chosen from a grid
    metrics: Mapping[str, float]
    diverged: str = ""  # the error message if the run diverged
    steps: Mapping[str, int] = field(default_factory=dict)  # metric → step of its best evaluation, if evaluation=best
    axes: Mapping[str, float] = field(
        default_factory=dict
    )  # parameters, exaflops, samples, … (jobs/extras/studies/axes.py)
    entries: Mapping[str, document.Entry] = field(default_factory=dict)  # from the run's evaluation.json, if it has one
    foretold: Mapping[str, Any] = field(default_factory=dict)  # a law's forecast, and whether the result was inside


@dataclass(frozen=True)
class Mean:
    """The mean of a metric over several runs."""

    mean: float
    sd: float | None  # sample standard deviation (n − 1); None for a single run
    runs: int
    interval: tuple[float, float] | None = None  # low and high, 95 %; None if the runs list no samples

    def __str__(self) -> str:
        """Format the known parts as percentages: "98.12 [97.43, 98.63] ± 0.07"."""
        return " ".join(filter(None, self.cells()))

    def cells(self) -> tuple[str, str, str]:
        """Return the mean, the interval and the deviation across runs as percentages; "" for unknown parts."""
        interval = ""
        if self.interval is not None:
            low, high = self.interval
            interval = f"[{100 * low:.2f}, {100 * high:.2f}]"
        deviation = ""
        if self.sd is not None:
            deviation = f"± {100 * self.sd:.2f}"
        return f"{100 * self.mean:.2f}", interval, deviation


@dataclass(frozen=True)
class Row:
    """Runs that differ only by seed, or the mean of several such rows."""

    name: str
    means: Mapping[str, Mean]  # by metric; empty if a run of the row has diverged
    values: Mapping[str, Any] = field(default_factory=dict)  # of the grid, or chosen from a grid
    remark: str = ""  # "diverged", a forecast, or the row's values if these are not its name
    axes: Mapping[str, float] = field(default_factory=dict)  # means of the axes that all runs have


class Table(StageKind):
    """The stage kind that builds the table of a sweep; it also expands sections with a `sweep` into runs."""

    name = expand.TABLE
    config = TableConfig
    inputs: ClassVar = {"runs.*.stage": Reads.OUTCOME}
    needs_workers = False

    def expand(self, sections: Sections, kinds: Kinds) -> Sections:
        """Return a recipe's sections; each section that contains a `sweep` becomes its runs and tables."""
        return expand.expand(sections, kinds, lambda name, section: read_section(name, section, kinds))

    def make_absolute(
        self, name: str, section: dict[str, Any], patterns: Sequence[str], absolute: MakeAbsolute
    ) -> None:
        """Make relative paths in a sweep absolute."""
        expand.make_absolute(name, section, patterns, absolute)

    def placeholders(self, cfg: TableConfig) -> Mapping[str, object]:
        """Return the first values in the grid, which other stages use until the table exists."""
        if not cfg.chooses:
            return {}
        return next(iter(cfg.runs.values())).values

    def values(self, folder: Path) -> Mapping[str, object]:
        """Return the values of the best row."""
        chosen: dict[str, object] = artifacts.read_record(folder / DOCUMENT)["chosen"]
        return chosen

    def value_in_words(self, cfg: TableConfig, name: str) -> str:
        """Describe a chosen value: "the best of 0.01, 0.1 by accuracy"."""
        values = dict.fromkeys(str(run.values[name]) for run in cfg.runs.values())
        return f"the best of {', '.join(values)} by {cfg.best}"

    def check_parent(self, stage: Stage, parent: Stage, available: Available) -> None:
        """Raise DataError if the table chooses values on training samples or on samples of the final evaluation."""
        check_held_out(stage, parent, available)

    def run(self, cfg: TableConfig, context: Context) -> dict[str, object]:
        """Build and log the table.

        Raises Diverged if a required run diverged, or DataError if a run lacks the metric of the table.
        """
        results = []
        for name, run_config in cfg.runs.items():
            results.append(result_of(name, run_config, cfg, context))
        rows = rows_of(results)
        best: Row | None = None
        for row in rows:
            # Of equal rows, keep the first.
            can_win = cfg.chooses and cfg.best in row.means
            if can_win and (best is None or row.means[cfg.best].mean > best.means[cfg.best].mean):
                best = row
        runs = []
        scores: list[bool] = []  # for each run with a forecast, whether its result was inside the interval
        diverged: list[str] = []
        folders = set()
        for result in results:
            runs.append(run_as_json(result))
            if result.foretold:
                scores.append(result.foretold["is_inside"])
            if not result.diverged:
                continue
            context.log(f"{context.stage.name}: {result.stage} has diverged: {result.diverged}")
            diverged.append(result.stage)
            folder = context.campaign.directory(context.campaign.stage(result.stage))
            folders.add(str(folder / artifacts.DONE))
        # A choice needs at least one row without a diverged run; a mean needs all runs.
        if diverged and best is None:
            expected = "the table needs all runs of the sweep"
            if cfg.chooses:
                expected = "at least one row must have no diverged run"
            raise Diverged(
                f"{context.stage.name}: {len(diverged)} runs of the sweep have diverged: {', '.join(diverged)}, but "
                f"{expected}\n"
                f"  lower optim.lr or change the sweep; to repeat the same runs, remove {shlex.join(sorted(folders))}"
            )

        means: list[Row] = []
        if not cfg.chooses:
            means = means_of(results, cfg.groups)
        write_table(context, cfg.best, rows, means, best)
        chosen: dict[str, object] = {}
        if best is not None:
            chosen.update(best.values)
        record: dict[str, object] = {
            "sweep": context.stage.name,
            "metric": cfg.best,
            "rule": TIES,
            "chosen": chosen,
            "runs": runs,
            "rows": rows_as_json(rows),
            "means": rows_as_json(means),
            "axes": {row.name: dict(row.axes) for row in rows},
        }
        is_measured = any(row.means for row in rows)
        if cfg.chosen_on_test and is_measured:
            record["chosen_on_test"] = True
        if cfg.evaluation == "best":
            record["evaluation"] = cfg.evaluation
        artifacts.write_record(context.directory / DOCUMENT, record)

        # One line for `status` and the table at the end of the campaign.
        if best is not None:
            summary = f"{best.name}: {cfg.best} {best.means[cfg.best]}, the best of {len(rows)}"
        elif not is_measured:
            summary = f"{len(results)} runs in {len(rows)} rows"
        else:
            parts = []
            for row in means or rows:
                part = "-"
                if row.means:
                    part = str(row.means[cfg.best])
                if row.name != context.stage.name:
                    part = f"{row.name} {part}"
                if row.remark:
                    part += f" ({row.remark})"
                parts.append(part)
            summary = f"{cfg.best} {', '.join(parts)}"
        if scores:
            summary += f"; {sum(scores)} of {len(scores)} inside the forecast"
        if cfg.chosen_on_test and is_measured:
            summary += ", chosen on test"
        if cfg.evaluation == "best":
            summary += ", best evaluations"
        return {"summary": summary, "files": artifacts.digests(context.directory, [DOCUMENT])}

    def checks(self, stage: Stage, available: Available) -> Iterator[CheckResult]:
        """Raise ConfigError if a run does not report the metric of its table."""
        cfg: TableConfig = stage.config
        metrics_of: dict[str, list[str]] = {}
        some_train = False
        for run_name in cfg.runs:
            run_stage = available.campaign.stage(run_name)
            metrics_of[run_name] = list(run_stage.kind.metrics(run_stage.config))
            some_train = some_train or run_stage.kind.trains
        # Allow runs without metrics if no other stage uses a chosen value.
        is_waited_for = bool(waiting_for(available.campaign, stage))
        if not any(metrics_of.values()) and not is_waited_for:
            if some_train:
                text = f"{stage.name}: its runs are not evaluated, so the table shows only their size and cost"
                yield CheckResult("WARN", "sweep", text, f"  set {stage.name}.data.evaluate=… to report accuracies")
            return
        for run_name, metrics in metrics_of.items():
            run_stage = available.campaign.stage(run_name)
            if cfg.best not in metrics:
                raise ConfigError(
                    f"{stage.name}: {run_name} does not report {cfg.best!r}{did_you_mean(cfg.best, metrics)}\n"
                    f"  expected one of its metrics as sweep.best: {', '.join(metrics) or 'none'}\n"
                    "  data.evaluate adds accuracy; probe adds 1shot, 5shot and so on; evaluate stages report protocols"
                )
            require(
                cfg.evaluation == "last" or run_stage.kind.trains,
                f"{stage.name}: {run_name} is of kind {run_stage.kind.name}, which is evaluated only once\n"
                "  sweep.evaluation=best needs runs that train; set sweep.evaluation=last",
            )


def run_as_json(result: Result) -> dict[str, object]:
    """Return a result as plain values for sweep.json; entries are reduced to their intervals."""
    values = asdict(replace(result, entries={}))
    values.pop("entries")
    intervals_of_run = {}
    for metric, entry in result.entries.items():
        intervals_of_run[metric] = (entry["low"], entry["high"])
    return {**values, "intervals": intervals_of_run}


def rows_as_json(rows: Sequence[Row]) -> dict[str, dict[str, object]]:
    """Return rows as plain values for sweep.json: {row: {metric: mean}}."""
    values: dict[str, dict[str, object]] = {}
    for row in rows:
        values[row.name] = {}
        for metric, mean in row.means.items():
            values[row.name][metric] = asdict(mean)
    return values


def result_of(name: str, cfg: RunConfig, table: TableConfig, context: Context) -> Result:
    """Read the result of a finished run. Raises DataError if the result lacks the metric of the table."""
    best = table.best
    folder = Path(context.campaign.path_of(cfg.stage))
    done = artifacts.read_done(folder)
    assert done is not None, "a stage starts only when its inputs have finished"
    # Skip the single draws of a few-shot probe: their mean is the result.
    metrics = without_single_seeds(done.get("metrics", {}))
    steps: dict[str, int] = {}
    if table.evaluation == "best":
        metrics = {}
        for metric, evaluation in done.get("best", {}).items():
            metrics[metric] = evaluation["value"]
            steps[metric] = evaluation["step"]
    diverged = done.get(DIVERGED, "")
    # Runs without metrics have only axes (see `checks`).
    stage = context.campaign.stage(name)
    is_measured = any(stage.kind.metrics(stage.config))
    if best not in metrics and is_measured and not diverged:
        raise DataError(
            f"{context.stage.name}: {name} has no {best!r} in {folder / artifacts.DONE}{did_you_mean(best, metrics)}\n"
            f"  expected one of its metrics as sweep.best: {', '.join(metrics) or 'none'}"
        )
    # Add the values that an earlier table chose for the run; its own stage.json contains them.
    chosen = artifacts.read_record(folder / "stage.json").get("chosen", {})
    values = {**cfg.values, **chosen}
    entries = {}
    if (folder / document.NAME).exists():
        entries = document.entries_of(json.loads((folder / document.NAME).read_text()))
    axes = axes_of(stage, folder) | done.get("axes", {})
    foretold = done.get("foretold", {})
    key = done["key"]
    return Result(name, key, cfg.row, cfg.seed, values, metrics, diverged, steps, axes, entries, foretold)


def rows_of(results: Sequence[Result]) -> list[Row]:
    """Combine runs that differ only by seed into rows, ordered by their first runs."""
    rows = []
    runs_of: dict[str, list[Result]] = {}
    for result in results:
        runs_of.setdefault(result.row, []).append(result)
    for name, runs in runs_of.items():
        # A row with a diverged run has no mean: a mean over the other runs would be misleading.
        lost = ""
        metrics = []
        axes_of_runs = []
        inside = 0
        for result in runs:
            metrics.append(result.metrics)
            axes_of_runs.append(result.axes)
            inside += result.foretold.get("is_inside", False)
            if result.diverged:
                lost = "diverged"
        means: dict[str, Mean] = {}
        if not lost:
            means = means_by_metric(metrics)
        for metric, mean in means.items():
            entries = [result.entries[metric] for result in runs if metric in result.entries]
            if len(entries) < len(runs):
                continue
            if len(runs) == 1:
                means[metric] = replace(mean, interval=(entries[0]["low"], entries[0]["high"]))
            # An interval over runs needs predictions for the same samples in all runs.
            elif all("right" in entry and entry["whole"] == entries[0]["whole"] != "" for entry in entries):
                right = np.stack(list(map(document.right_of, entries)))
                means[metric] = replace(mean, interval=intervals.over_draws(right))
        # Rows of a grid need no remark: they are named by their values.
        remark = expand.as_text(runs[0].values)
        if remark == name:
            remark = ""
        if lost:
            remark = lost
        elif runs[0].foretold:
            law = runs[0].foretold
            remark = f"forecast [{100 * law['low']:.2f}, {100 * law['high']:.2f}], {inside} of {len(runs)} inside"
        axes: dict[str, float] = {}
        for axis, mean in means_by_metric(axes_of_runs).items():
            axes[axis] = mean.mean
        rows.append(Row(name, means, runs[0].values, remark, axes))
    return rows


def means_by_metric(runs: Sequence[Mapping[str, float]]) -> dict[str, Mean]:
    """Return the mean and, for two or more runs, the standard deviation of every metric reported by all runs."""
    means: dict[str, Mean] = {}
    for metric in runs[0]:
        values = [run[metric] for run in runs if metric in run]
        if len(values) < len(runs):
            continue
        sd = None
        if len(values) > 1:
            sd = statistics.stdev(values)
        means[metric] = Mean(statistics.fmean(values), sd, len(values))
    return means


def means_of(results: Sequence[Result], groups: Mapping[str, list[str]]) -> list[Row]:
    """Return a row with the mean of each group of rows.

    Average over the rows for each seed first, then over the seeds, as if a whole benchmark had been repeated.
    """
    means = []
    for name, members in groups.items():
        by_seed: dict[int | None, list[Mapping[str, float]]] = {}
        for result in results:
            if result.row in members:
                by_seed.setdefault(result.seed, []).append(result.metrics)
        repeats: list[dict[str, float]] = []
        for runs in by_seed.values():
            of_seed = {}
            for metric, value in means_by_metric(runs).items():
                of_seed[metric] = value.mean
            repeats.append(of_seed)
        means.append(Row(f"{name} of {len(members)}", means_by_metric(repeats)))
    return means


def write_table(context: Context, metric: str, rows: Sequence[Row], means: Sequence[Row], best: Row | None) -> None:
    """Log the table and write it to report.txt; `metric` is the first column."""
    all_rows = [*rows, *means]
    # 1. Collect the metrics of all rows.
    known: dict[str, Mean] = {}
    for row in all_rows:
        known |= row.means
    metrics = sorted(known, key=lambda name: name != metric)
    title = context.stage.name
    if metrics:
        title += ", in %"
    if metrics and context.stage.config.chosen_on_test:
        title += ", chosen on test"
    if context.stage.config.evaluation == "best":
        title += ", best evaluation of each run (chosen on the evaluation set)"
    # 2. Add columns for the mean of each metric and, if known for any row, its interval and deviation.
    names = list(map(attrgetter("name"), all_rows))
    columns = [[title, *names]]
    for name in metrics:
        for part, heading in enumerate((f"{name:>13}", "95 %", "± sd")):
            cells = []
            for row in all_rows:
                cells.append("-" if name not in row.means else row.means[name].cells()[part] or "-")
            if part == 0 or set(cells) != {"-"}:
                columns.append([heading, *cells])
    lines = aligned(columns)
    for number, row in enumerate(all_rows, start=1):
        if row is best:
            lines[number] += "   best"
        elif row.remark:
            lines[number] += f"   {row.remark}"
    # 3. Add the axes if the runs train or have no metrics.
    axes: dict[str, float] = {}
    for row in rows:
        axes |= row.axes
    if not metrics or "samples" in axes:
        columns = [["", *names[: len(rows)]]]
        for axis in axes:
            cells = [{"gmacs": "GMACs", "exaflops": "exaFLOPs", "images_per_s": "images/s"}.get(axis, axis)]
            for row in rows:
                cell = "-"
                if axis in row.axes:
                    cell = f"{row.axes[axis]:.4g}" if axis in ("gmacs", "exaflops") else amount(row.axes[axis])
                cells.append(cell)
            columns.append(cells)
        lines += ["", *aligned(columns)]
    for line in lines:
        context.log(line)
    write_atomically(context.directory / "report.txt", "\n".join(lines) + "\n")


def aligned(columns: Sequence[Sequence[str]]) -> list[str]:
    """Format columns as lines; the first column is left-aligned, the others right-aligned."""
    first, *others = columns
    width = max(map(len, first))
    lines = [cell.ljust(width) for cell in first]
    for cells in others:
        width = max(map(len, cells)) + 3
        for number, cell in enumerate(cells):
            lines[number] += cell.rjust(width)
    return lines


# ------------------------------------------------------------------------ held-out samples


def check_held_out(table: Stage, run: Stage, available: Available) -> None:
    """Raise DataError if a grid run is evaluated on its training samples or on samples of the final evaluation.

    The chosen values would be biased. Data sets that do not exist yet are checked before the run starts.
    """
    campaign = available.campaign
    if not table.config.chooses:
        return
    final_runs = waiting_for(campaign, table)
    if not final_runs or campaign.stage(run.source).config.chosen_on_test:
        return
    # Accuracy is measured on data.evaluate, few-shot accuracy on the probe's sets.
    evaluated: dict[str, str] = {}
    others: dict[str, str] = {}
    for field_name, reads in run.reads.items():
        if reads is not Reads.SET:
            continue
        path = run.parents[field_name]
        if field_name.endswith("train"):
            others[f"{run.name}.{field_name}"] = path
        elif not run.kind.trains or (field_name == "data.evaluate") == (table.config.best == "accuracy"):
            evaluated[f"{run.name}.{field_name}"] = path
    for field_name, reads in final_runs[0].reads.items():
        if reads is Reads.SET and not field_name.endswith("train"):
            others[f"{final_runs[0].name}.{field_name}"] = final_runs[0].parents[field_name]
    for key, path in evaluated.items():
        for other_key, other_path in others.items():
            index = available.index(path)
            other = available.index(other_path)
            if index is None or other is None:
                continue
            same_places, same_bytes = shared_samples(index, other)
            # Allow a few identical images: many sets contain duplicates (`leaks` lists them).
            if same_places or same_bytes > MAX_SHARE_OF_COPIES * index.samples:
                raise DataError(
                    f"{key} ({path}) chooses values for {run.source}, but {max(same_places, same_bytes):,} of "
                    f"its {index.samples:,} samples are also in {other_key} ({other_path})\n"
                    "  choose on held-out samples: a part of the training set used neither for training nor "
                    "for the final evaluation (docs/studies.md)\n"
                    f"  set {run.source}.sweep.held_out.data.evaluate=…, or allow it with "
                    f"{run.source}.sweep.chosen_on_test=true; the table then says so"
                )


def waiting_for(campaign: Campaign, stage: Stage) -> list[Stage]:
    """Return the stages that use a value chosen by `stage`."""
    waiting = []
    for other in campaign.stages:
        links = [reference(value) for value in other.references.values()]
        if any(link is not None and link[0] == stage.name for link in links):
            waiting.append(other)
    return waiting
