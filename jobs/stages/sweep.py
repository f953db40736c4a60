"""The table of a sweep: the metrics of its runs, mean ± standard deviation over the seeds, and which values did best.

In:  the finished runs that jobs/recipe/sweeps.py has written into the recipe, each a stage with its metrics
Out: sweep.json, the record of runs, rows and choice, with its own sha256, and report.txt, the same for people

    finetune.grid, in %         accuracy
    optim.lr=0.003                97.41
    optim.lr=0.01                 98.02   the best
    optim.lr=0.03                     -   diverged

1. The metrics of every run are read from what it left behind; a run that has diverged has none.
2. Runs that differ by their seed alone make a row: mean and standard deviation (n − 1) of every metric.
3. A table that chooses takes the row with the highest mean. Of equal rows the first in the recipe wins, and one with a
   run that diverged does not take part. Where all have diverged there is nothing to choose, and the stage fails.
4. Another table needs all its runs: a mean of those that went well would be a number of nothing.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from data.errors import ConfigError, DataError, Diverged
from data.files import write_whole
from jobs.resolved_recipe import Available, CheckResult, Context, Reads, Stage, StageKind
from models.checks import did_you_mean
from pipeline import artifacts
from pipeline.config import Tags, tags
from pipeline.evaluation import async_evaluation, document

DOCUMENT = "sweep.json"
DIVERGED = "diverged"  # the entry of a done.json that says so, with the message of the run's end
TIES = "the highest mean; of equal ones the first in the recipe"


@dataclass(frozen=True)
class RunConfig:
    """One run of the table."""

    stage: str = "???"  # "@stage" that it is
    row: str = ""  # of the table; runs of one row differ by their seed
    seed: int | None = None  # of the run, where the sweep has seeds
    values: dict[str, Any] = field(default_factory=dict)  # of the grid, by dotted field

    RESUME: ClassVar[Tags] = tags(forbid="stage row seed values")


@dataclass(frozen=True)
class Config:
    """The table of a sweep. The key `sweep` of another stage's section writes it; nobody else needs to."""

    runs: dict[str, RunConfig] = field(default_factory=dict)  # by the names of their stages
    best: str = "accuracy"  # the metric that comes first and, where the table chooses, decides
    chooses: bool = False  # whether the values of the best row are what the table is for
    groups: dict[str, list[str]] = field(default_factory=dict)  # rows that get a mean of their own
    chosen_on_test: bool = False  # its values were chosen by samples that its numbers are of

    RESUME: ClassVar[Tags] = tags(forbid="runs best chooses groups chosen_on_test")
    LATER: ClassVar[tuple[str, ...]] = ("chosen_on_test",)


@dataclass(frozen=True)
class Result:
    """The metrics of one run, or that it has diverged."""

    stage: str
    key: str
    row: str
    seed: int | None
    values: Mapping[str, Any]  # of the grid, or chosen from one
    metrics: Mapping[str, float]
    diverged: str = ""  # the message of its end, where it has diverged
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # low and high, where it was evaluated


@dataclass(frozen=True)
class Mean:
    """A metric over several runs."""

    mean: float
    sd: float | None  # standard deviation of a sample (n − 1); None of one run alone
    runs: int
    interval: tuple[float, float] | None = None  # low and high, of one run alone whose evaluation says them

    def __str__(self) -> str:
        """Return "98.12 ± 0.07", in percent; of one run "98.12", and its interval if known: "98.12 [97.43, 98.63]"."""
        text = f"{100 * self.mean:.2f}"
        if self.interval is not None:
            low, high = self.interval
            return f"{text} [{100 * low:.2f}, {100 * high:.2f}]"
        return text if self.sd is None else f"{text} ± {100 * self.sd:.2f}"


@dataclass(frozen=True)
class Row:
    """The runs that differ by their seed alone, or the mean of several such rows."""

    name: str
    means: Mapping[str, Mean]  # by metric; empty where a run of the row has diverged
    values: Mapping[str, Any] = field(default_factory=dict)  # of the grid, or chosen from one
    remark: str = ""  # "diverged", or the values that were chosen for the row, where they are not its name


def run(cfg: Config, context: Context) -> dict[str, object]:
    """Make the table and log it. Raises Diverged where runs have diverged that cannot be missed, DataError."""
    results = []
    for name, run_config in cfg.runs.items():
        results.append(result_of(name, run_config, cfg.best, context))
    rows = rows_of(results)
    best: Row | None = None
    for row in rows:
        # Of equal rows the first wins.
        if cfg.chooses and row.means and (best is None or row.means[cfg.best].mean > best.means[cfg.best].mean):
            best = row
    diverged: list[str] = []
    folders = set()
    for result in results:
        if not result.diverged:
            continue
        context.log(f"{context.stage.name}: {result.stage} has diverged: {result.diverged}")
        diverged.append(result.stage)
        folder = context.campaign.directory(context.campaign.stage(result.stage))
        folders.add(str(folder / artifacts.DONE))
    # One run that has not diverged is enough for a choice; a mean needs all of them.
    if diverged and best is None:
        expected = "all of them for the table"
        if cfg.chooses:
            expected = "one that has not, to choose from"
        raise Diverged(
            f"{context.stage.name}: {len(diverged)} runs of the sweep have diverged: {', '.join(diverged)}\n"
            f"  expected {expected}\n"
            f"  lower optim.lr or change the sweep; to try the same again, remove {' '.join(sorted(folders))}"
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
        "runs": list(map(asdict, results)),
        "rows": rows_as_json(rows),
        "means": rows_as_json(means),
    }
    if cfg.chosen_on_test:
        record["chosen_on_test"] = True
    artifacts.write_record(context.directory / DOCUMENT, record)

    # In one line, for `status` and the campaign's closing table.
    if best is not None:
        summary = f"{best.name}: {cfg.best} {best.means[cfg.best]}, the best of {len(rows)}"
    else:
        parts = []
        for row in means or rows:
            part = str(row.means[cfg.best])
            if row.name != context.stage.name:
                part = f"{row.name} {part}"
            if row.remark:
                part += f" ({row.remark})"
            parts.append(part)
        summary = f"{cfg.best} {', '.join(parts)}"
    return {"summary": summary, "files": artifacts.digests(context.directory, [DOCUMENT])}


def rows_as_json(rows: Sequence[Row]) -> dict[str, dict[str, object]]:
    """Return {row: {metric: its mean as nested plain values}}."""
    values: dict[str, dict[str, object]] = {}
    for row in rows:
        values[row.name] = {}
        for metric, mean in row.means.items():
            values[row.name][metric] = asdict(mean)
    return values


def result_of(name: str, cfg: RunConfig, best: str, context: Context) -> Result:
    """Read the metrics of a finished run. Raises DataError where it has no number for the metric."""
    folder = Path(context.campaign.path_of(cfg.stage))
    done = artifacts.read_done(folder)
    assert done is not None, "a stage starts when all that it reads has finished"
    # Single draws of a few-shot probe stay in the run's own record; their mean is the run's number.
    metrics = async_evaluation.without_single_seeds(done.get("metrics", {}))
    diverged = done.get(DIVERGED, "")
    if best not in metrics and not diverged:
        raise DataError(
            f"{context.stage.name}: {name} has no {best!r} in {folder / artifacts.DONE}{did_you_mean(best, metrics)}\n"
            f"  expected one of its metrics as sweep.best: {', '.join(metrics) or 'none'}"
        )
    # What an earlier table has chosen for the run stands in the run's own record.
    chosen = artifacts.read_record(folder / "stage.json").get("chosen", {})
    values = {**cfg.values, **chosen}
    intervals = {}
    if (folder / document.NAME).exists():
        entries = document.entries_of(json.loads((folder / document.NAME).read_text()))
        for metric, entry in entries.items():
            intervals[metric] = (entry["low"], entry["high"])
    return Result(name, done["key"], cfg.row, cfg.seed, values, metrics, diverged, intervals)


def rows_of(results: Sequence[Result]) -> list[Row]:
    """Return the rows of the table in the order of their first runs."""
    rows = []
    runs_of: dict[str, list[Result]] = {}
    for result in results:
        runs_of.setdefault(result.row, []).append(result)
    for name, runs in runs_of.items():
        # A run that has diverged has no metrics, and a mean of the others would be a number of nothing.
        means: dict[str, Mean] = {}
        if not any(result.diverged for result in runs):
            means = means_by_metric([result.metrics for result in runs])
        # Several runs have their deviation; the interval of a single run is of its test samples.
        if len(runs) == 1 and means:
            for metric, interval in runs[0].intervals.items():
                means[metric] = replace(means[metric], interval=interval)
        # The rows of a grid are called by their values.
        remark = in_words(runs[0].values)
        if not means:
            remark = "diverged"
        elif remark == name:
            remark = ""
        rows.append(Row(name, means, runs[0].values, remark))
    return rows


def means_by_metric(runs: Sequence[Mapping[str, float]]) -> dict[str, Mean]:
    """Return mean and standard deviation of every metric that all runs have; the latter only of two and more."""
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
    """Return the means over several rows: of every group, and of all, where the table has groups.

    The mean over the rows is taken for every seed, and then its mean and standard deviation over the seeds, as a paper
    repeats a whole benchmark.
    """
    if not groups:
        return []
    all_rows: list[str] = []
    for result in results:
        if result.row not in all_rows:
            all_rows.append(result.row)
    means = []
    for name, members in {**groups, "mean": all_rows}.items():
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


def in_words(values: Mapping[str, object]) -> str:
    """Return values for people: "optim.lr=0.01, steps=100"."""
    return ", ".join(f"{key}={value}" for key, value in values.items())


def write_table(context: Context, metric: str, rows: Sequence[Row], means: Sequence[Row], best: Row | None) -> None:
    """Log the table and write it to report.txt: the metric that decides first, then the others."""
    all_rows = [*rows, *means]
    title = f"{context.stage.name}, in %"
    if context.stage.config.chosen_on_test:
        title += ", chosen on test"
    # 1. The metrics that are in any row, and the widths of the columns.
    metrics = [metric]
    width = len(title)
    column = 16
    for row in all_rows:
        width = max(width, len(row.name))
        for name, mean in row.means.items():
            if name not in metrics:
                metrics.append(name)
            column = max(column, len(name) + 3, len(str(mean)) + 3)
    column = max(column, len(metric) + 3)

    # 2. A line for every row.
    heading = title.ljust(width)
    for name in metrics:
        heading += f"{name:>{column}}"
    lines = [heading]
    for row in all_rows:
        line = row.name.ljust(width)
        for name in metrics:
            line += f"{row.means.get(name, '-')!s:>{column}}"
        if row is best:
            line += "   the best"
        elif row.remark:
            line += f"   {row.remark}"
        lines.append(line)
    for line in lines:
        context.log(line)
    write_whole(context.directory / "report.txt", "\n".join(lines) + "\n")


# ------------------------------------------------------------------------ what is known before it runs


def checks(stage: Stage, there: Available) -> Iterator[CheckResult]:
    """Refuse a table of a metric that one of its runs will not have."""
    cfg: Config = stage.config
    for run_name in cfg.runs:
        run_stage = there.campaign.stage(run_name)
        metrics = list(run_stage.kind.metrics(run_stage.config))
        if cfg.best not in metrics:
            raise ConfigError(
                f"{stage.name}: {run_name} will have no {cfg.best!r}{did_you_mean(cfg.best, metrics)}\n"
                f"  expected one of its metrics as sweep.best: {', '.join(metrics) or 'none'}\n"
                "  data.evaluate gives accuracy, probe gives 1shot, 5shot and so on, a stage evaluate what it is asked"
            )
    yield from ()


KIND = StageKind(
    name="sweep",
    config=Config,
    run=run,
    inputs={"runs.*.stage": Reads.OUTCOME},
    checks=checks,
    needs_workers=False,
)
