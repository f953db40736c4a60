"""The table of a sweep: what its runs came to, mean ± standard deviation over the seeds, and which values did best.

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
from jobs.context import Context
from jobs.resolved_recipe import Available, CheckResult, Reads, Stage, StageKind
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

    RESUME: ClassVar[Tags] = tags(forbid="runs best chooses groups")


@dataclass(frozen=True)
class Result:
    """What one run came to."""

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


Row = Mapping[str, Mean]  # metric → its mean; empty where a run of the row has diverged


def run(cfg: Config, context: Context) -> dict[str, Any]:
    """Make the table and say it. Raises Diverged where runs have diverged that cannot be missed, DataError."""
    results = [result_of(name, run_config, cfg.best, context) for name, run_config in cfg.runs.items()]
    diverged = [result for result in results if result.diverged]
    rows = rows_of(results)
    best = best_row(rows, cfg.best) if cfg.chooses else None
    for result in diverged:
        context.say(f"{context.name}: {result.stage} has diverged: {result.diverged}")
    if diverged and best is None:
        raise Diverged(diverged_text(context, diverged, chooses=cfg.chooses))

    means = means_of(results, cfg.groups) if not cfg.chooses else {}
    table = Table(context.name, results, rows, means, cfg.best, best)
    lines = table.lines()
    for line in lines:
        context.say(line)
    write_whole(context.directory / "report.txt", "\n".join(lines) + "\n")
    chosen = values_of(results, best) if best is not None else {}
    record = {
        "sweep": context.name,
        "metric": cfg.best,
        "rule": TIES,
        "chosen": chosen,
        "runs": [asdict(result) for result in results],
        "rows": {name: {metric: asdict(mean) for metric, mean in row.items()} for name, row in rows.items()},
        "means": {name: {metric: asdict(mean) for metric, mean in row.items()} for name, row in means.items()},
    }
    artifacts.write_record(context.directory / DOCUMENT, record)
    return {
        "summary": table.summary(),
        "files": artifacts.digests(context.directory, [DOCUMENT]),
    }


def chosen_values(folder: Path) -> dict[str, Any]:
    """Return the values that the table in this folder has chosen, by dotted field. Raises DataError, OSError."""
    return artifacts.read_record(folder / DOCUMENT).values["chosen"]


# ------------------------------------------------------------------------------------------------ what the runs say


def result_of(name: str, cfg: RunConfig, best: str, context: Context) -> Result:
    """Read what a finished run came to. Raises DataError where it has no number for the metric."""
    folder = Path(context.resolve(cfg.stage) or "")
    done = artifacts.read_done(folder)
    assert done is not None, "a stage starts when all that it reads has finished"
    # Single draws of a few-shot probe stay in the run's own record; their mean is the run's number.
    metrics = async_evaluation.without_single_seeds(done.get("metrics", {}))
    diverged = done.get(DIVERGED, "")
    if best not in metrics and not diverged:
        raise DataError(
            f"{context.name}: {name} has no {best!r} in {folder / artifacts.DONE}{did_you_mean(best, metrics)}\n"
            f"  expected one of its metrics as sweep.best: {', '.join(metrics) or 'none'}"
        )
    # What an earlier table has chosen for the run stands in the run's own record.
    chosen = artifacts.read_record(folder / "stage.json").values.get("chosen", {})
    values = {**cfg.values, **chosen}
    return Result(name, done["key"], cfg.row, cfg.seed, values, metrics, diverged, intervals_of(folder))


def intervals_of(folder: Path) -> dict[str, tuple[float, float]]:
    """Return low and high of every value of an evaluation; nothing of a stage that has left none."""
    path = folder / document.NAME
    if not path.exists():
        return {}
    entries = document.entries_of(json.loads(path.read_text()))
    return {name: (entry["low"], entry["high"]) for name, entry in entries.items()}


def rows_of(results: Sequence[Result]) -> dict[str, Row]:
    """Return the rows of the table in the order of their first runs."""
    rows: dict[str, Row] = {}
    for name in dict.fromkeys(result.row for result in results):
        runs = [result for result in results if result.row == name]
        has_diverged = any(result.diverged for result in runs)
        row = {} if has_diverged else means_by_metric([result.metrics for result in runs])
        # Several runs have their deviation; the interval of a single one is of its test samples.
        if len(runs) == 1:
            for metric, interval in runs[0].intervals.items():
                row[metric] = replace(row[metric], interval=interval)
        rows[name] = row
    return rows


def means_by_metric(runs: Sequence[Mapping[str, float]]) -> dict[str, Mean]:
    """Return the mean of every metric that all runs have."""
    means: dict[str, Mean] = {}
    for metric in runs[0]:
        values = [run[metric] for run in runs if metric in run]
        if len(values) == len(runs):
            means[metric] = mean_of(values)
    return means


def mean_of(values: Sequence[float]) -> Mean:
    """Return mean and standard deviation of a sample; the latter only of two and more."""
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Mean(statistics.fmean(values), sd, len(values))


def means_of(results: Sequence[Result], groups: Mapping[str, list[str]]) -> dict[str, Row]:
    """Return the means over several rows: of every group, and of all, where the table has groups.

    The mean over the rows is taken for every seed, and then its mean and standard deviation over the seeds, as a paper
    repeats a whole benchmark.
    """
    rows = list(dict.fromkeys(result.row for result in results))
    if not groups:
        return {}
    means: dict[str, Row] = {}
    for name, members in {**groups, "mean": rows}.items():
        by_seed: dict[int | None, list[Mapping[str, float]]] = {}
        for result in results:
            if result.row in members:
                by_seed.setdefault(result.seed, []).append(result.metrics)
        repeats = []
        for runs in by_seed.values():
            repeats.append({metric: value.mean for metric, value in means_by_metric(runs).items()})
        means[f"{name} of {len(members)}"] = means_by_metric(repeats)
    return means


def best_row(rows: Mapping[str, Row], metric: str) -> str | None:
    """Return the row with the highest mean, of equal ones the first; None where all rows have diverged."""
    best = None
    for name, row in rows.items():
        if row and (best is None or row[metric].mean > rows[best][metric].mean):
            best = name
    return best


def values_of(results: Sequence[Result], row: str) -> dict[str, Any]:
    """Return the values of the grid that a row stands for."""
    for result in results:
        if result.row == row:
            return dict(result.values)
    raise AssertionError(f"{row} is the row of no run")


def in_words(values: Mapping[str, Any]) -> str:
    """Return values for people: "optim.lr=0.01, steps=100"."""
    return ", ".join(f"{key}={value}" for key, value in values.items())


def diverged_text(context: Context, diverged: Sequence[Result], *, chooses: bool) -> str:
    """Return the message about runs without which there is no table."""
    names = ", ".join(result.stage for result in diverged)
    folders = sorted({str(Path(context.resolve(f"@{result.stage}") or "") / artifacts.DONE) for result in diverged})
    return (
        f"{context.name}: {len(diverged)} runs of the sweep have diverged: {names}\n"
        + ("  expected one that has not, to choose from\n" if chooses else "  expected all of them for the table\n")
        + "  lower optim.lr or change the sweep; to try the same again, remove "
        + " ".join(folders)
    )


# ------------------------------------------------------------------------------------------------ for people


@dataclass(frozen=True)
class Table:
    """What is shown of a sweep, in percent."""

    name: str
    results: Sequence[Result]
    rows: Mapping[str, Row]
    means: Mapping[str, Row]
    metric: str  # that decides
    best_row: str | None  # of a table that chooses

    def lines(self) -> list[str]:
        """Return the table as lines: the metric that decides first, then the others."""
        all_rows = {**self.rows, **self.means}
        metrics = [self.metric]
        for row in all_rows.values():
            metrics += [metric for metric in row if metric not in metrics]
        title = f"{self.name}, in %"
        width = max(len(first) for first in (title, *all_rows))
        texts = [mean_text(value) for row in all_rows.values() for value in row.values()]
        column = max(16, *(len(text) + 3 for text in (*metrics, *texts)))
        lines = [title.ljust(width) + "".join(f"{metric:>{column}}" for metric in metrics)]
        for row_name, row in all_rows.items():
            line = row_name.ljust(width)
            for metric in metrics:
                line += f"{mean_text(row[metric]) if metric in row else '-':>{column}}"
            if row_name == self.best_row:
                line += "   the best"
            elif row_name in self.rows:
                text = self.remark(row_name)
                line += f"   {text}" if text else ""
            lines.append(line)
        return lines

    def summary(self) -> str:
        """Return the table in one line, for `status` and the campaign's closing table."""
        if self.best_row is not None:
            best = mean_text(self.rows[self.best_row][self.metric])
            return f"{self.best_row}: {self.metric} {best}, the best of {len(self.rows)}"
        parts = []
        for row_name, row in (self.means or self.rows).items():
            part = mean_text(row[self.metric])
            if row_name != self.name:
                part = f"{row_name} {part}"
            values = self.remark(row_name) if row_name in self.rows else ""
            if values:
                part += f" ({values})"
            parts.append(part)
        return f"{self.metric} {', '.join(parts)}"

    def remark(self, row: str) -> str:
        """Return what stands behind a row: that it has diverged, or the values that were chosen for it; or nothing."""
        if any(result.diverged for result in self.results if result.row == row):
            return "diverged"
        text = in_words(values_of(self.results, row))
        # The rows of a grid are called by their values.
        return text if text != row else ""


def mean_text(value: Mean) -> str:
    """Return "98.12 ± 0.07", in percent; of one run "98.12", and its interval where it has one: "[97.43, 98.63]"."""
    text = f"{100 * value.mean:.2f}"
    if value.interval is not None:
        low, high = value.interval
        return f"{text} [{100 * low:.2f}, {100 * high:.2f}]"
    return text if value.sd is None else f"{text} ± {100 * value.sd:.2f}"


# ------------------------------------------------------------------------ what is known before it runs


def checks(stage: Stage, there: Available) -> Iterator[CheckResult]:
    """Refuse a table of a metric that one of its runs will not have."""
    cfg: Config = stage.config
    for run_name in cfg.runs:
        run_stage = there.campaign.stage(run_name)
        metrics = run_stage.kind.metrics(run_stage.config)
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
