"""Draw a figure for a study: results of sweeps with error bars, the paper's values, and a fitted power law.

In:  tables of sweeps, of this run or of other runs
Out: figure.png, .svg and .pdf, figure.csv, figure.json (read by the report) and figure.md

    figure:
      tables: {pretrain: "@pretrain", finetune: "@finetune"}
      x: pretrain.exaflops           # of the parent row in the table `pretrain`
      y: accuracy
      log: [x]
      paper: {table: table 6, x: exaflops, y: ImageNet}

1. Each row of a table is a point. `x` and `y` are metrics, axes (parameters, gmacs, exaflops, samples, images, steps,
   seconds, images_per_s), values of a grid (model.depth), `row`, or a part of it: for "S-16, pets", row.2 is pets.
2. If x names a table, as in pretrain.exaflops, that table adds no points: its row "S-16" provides x for rows of other
   tables such as "S-16, pets".
3. The error bar of a metric is the standard deviation between seeds or, for a single run, the interval over samples.
4. With `curve`, each row is a line: y of every evaluation, or step, in the metrics.jsonl of its runs, averaged over
   seeds. A row whose runs have all diverged is omitted.
5. With `fit`, a saturating power law of 1 − y (if y is a metric, otherwise of y) is fitted over the given axes
   (pipeline/extras/power_law.py). If there are enough points, it is fitted again without the largest point, which the
   second fit then predicts. With `paper`, published values are drawn in a separate panel, with their source.
"""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import numpy as np

import models
from data.errors import ConfigError, DataError
from data.files import write_atomically
from jobs.extras.studies import table as sweep
from jobs.extras.studies.axes import AT_A_STEP, axes_at
from jobs.resolved_recipe import Available, Campaign, CheckResult, Context, Reads, Stage, StageKind, reference
from jobs.stages.training import planned_steps
from models.checks import did_you_mean
from pipeline import artifacts
from pipeline.config import Tags, require, tags
from pipeline.extras.power_law import DRAWS, EXPONENTS, check_points, fit, leave_largest_out
from pipeline.extras.recorded_config import recorded_config
from pipeline.monitoring.telemetry import read_metrics

DOCUMENT = "figure.json"
PAPER = Path(__file__).parents[2] / "recipes/studies/paper.csv"
CITATION = "paper: Dosovitskiy et al. 2021, arXiv:2010.11929"


@dataclass(frozen=True)
class FigureConfig:
    """The content and style of a figure."""

    tables: dict[str, str] = field(default_factory=dict)  # by name: "@stage" of a sweep, or a folder: runs/x/finetune
    title: str = ""  # of the figure; "": y over x
    x: str = "row"  # an axis, a metric, a value of the grid, the row or a part of it (docs/studies.md)
    y: str = "accuracy"  # a metric or an axis
    series: str = "table"  # the value that selects a point's line: `table`, or any value allowed for x
    groups: dict[str, str] = field(default_factory=dict)  # instead of series: line → pattern of its rows, e.g. "S-*"
    rows: str = ""  # pattern of rows to draw, e.g. "*, mean of *"; "": all except means over several rows
    log: tuple[str, ...] = ()  # logarithmic axes: x, y or both
    curve: bool = False  # y from metrics.jsonl: loss, accuracy and so on; x: steps, samples, seconds or exaflops
    paper: dict[str, str] = field(default_factory=dict)  # table, x and y of published values (studies/paper.csv)
    fit: tuple[str, ...] = ()  # axes of a power law: one or two
    draws: int = DRAWS  # simulated studies for each tested value of the law
    stamp: str = ""  # note below the figure, e.g. "scaled down: other data, other sizes"

    RESUME: ClassVar[Tags] = tags(forbid="tables title x y series groups rows log curve paper fit draws stamp")

    def __post_init__(self) -> None:
        require(set(self.log) <= {"x", "y"}, f"log is {list(self.log)}, expected x, y or both")
        require(
            len(self.fit) <= 2 and self.draws > 1,
            f"fit has {len(self.fit)} axes and draws is {self.draws}, expected one or two axes and at least 2 draws",
        )
        if self.paper:
            require(
                set(self.paper) == {"table", "x", "y"},
                f"paper has the keys {list(self.paper)}, expected table, x and y",
            )
            published(**self.paper)


class Point(TypedDict):
    """A point in figure.json: a row of a table, or a published value."""

    series: str  # the line it belongs to
    row: str
    x: Any  # a number, or a name
    y: float
    low: float  # lower end of the error bar
    high: float
    runs: int
    axes: dict[str, float]  # axes of the fit


@dataclass(frozen=True)
class FigureRow:
    """A row of a sweep's table."""

    name: str
    table: str
    values: dict[str, Any]  # all values that x, y, series and fit can name
    means: Mapping[str, Mapping[str, Any]]  # metric → mean over the runs
    runs: list[Mapping[str, Any]]
    folder: Path  # of the table

    def value(self, key: str) -> Any:
        """Return the row's value for `key`. Raises DataError, which lists the known keys, if there is none."""
        if key not in self.values:
            raise DataError(
                f"the row {self.name!r} of {self.table} has no {key!r}{did_you_mean(key, self.values)}\n"
                f"  expected one of {', '.join(self.values)}"
            )
        return self.values[key]


def published(table: str, x: str, y: str) -> list[Point]:
    """Return published values from a table in the paper. Raises ConfigError if the table or a column is unknown."""
    tables: dict[str, dict[tuple[str, str], dict[str, str]]] = {}  # table → (series, row) → values by name
    with open(PAPER, newline="") as file:
        for entry in csv.DictReader(file):
            key = (entry["series"], entry["row"])
            values = tables.setdefault(entry["table"], {}).setdefault(key, {"row": entry["row"]})
            values[entry["name"]] = entry["value"]
    require(table in tables, f"paper.table is {table}{did_you_mean(table, tables)}\n  expected {', '.join(tables)}")
    names = sorted(set().union(*tables[table].values()))
    for axis, name in (("x", x), ("y", y)):
        expected = ", ".join(names)
        require(name in names, f"paper.{axis} is {name}, but {table} does not have this column\n  expected {expected}")
    points: list[Point] = []
    for (series, row), values in tables[table].items():
        if x not in values or y not in values:
            continue
        place: float | str = row
        if x != "row":
            place = float(values[x])
        value = float(values[y])
        points.append(Point(series=series, row=row, x=place, y=value, low=value, high=value, runs=1, axes={}))
    return points


class Figure(StageKind):
    """The stage kind that draws a figure from the tables of sweeps."""

    name = "figure"
    config = FigureConfig
    inputs: ClassVar = {"tables.*": Reads.TABLE}
    needs_workers = False

    def run(self, cfg: FigureConfig, context: Context) -> dict[str, object]:
        """Collect the points, fit the law, and write the figure. Raises DataError if a table lacks a value."""
        # 1. Collect the points.
        points: list[Point] = []
        is_share = cfg.curve and cfg.y != "loss"  # all metrics are shares; axes and losses are not
        rows = read_rows(cfg, context.campaign)
        counts = Counter(row.name for row in rows)
        for row in rows:
            if cfg.curve:
                # Rows of several tables may have the same name, but each is a line.
                series = row.name if counts[row.name] == 1 else f"{row.table}: {row.name}"
                curve = list(curve_of(cfg, row, series))
                points += curve
                if not curve:
                    context.log(
                        f"{context.stage.name}: {row.name} of {row.table} has no curve, because its runs diverged"
                    )
            # Skip rows without metrics: their runs have diverged.
            elif row.means or cfg.y in row.values:
                points.append(point_of(cfg, row))
                is_share = is_share or cfg.y in row.means
        require(
            bool(points),
            f"{context.stage.name}: no row of {', '.join(cfg.tables)} has a value, so there is nothing to draw; check "
            "whether all runs diverged",
        )
        # If any x is not a number, for example null in a grid of widths, treat all of them as names.
        if not all(isinstance(point["x"], int | float) for point in points):
            for point in points:
                point["x"] = str(point["x"])

        # 2. Describe the panels (ours and the paper's), and fit the law.
        figure: dict[str, Any] = {
            "title": cfg.title or f"{cfg.y} over {cfg.x}",
            "x": cfg.x,
            "y": cfg.y,
            "log": list(cfg.log),
            "stamp": cfg.stamp,
            "is_curve": cfg.curve,
            "is_share": is_share,
            "points": points,
        }
        if cfg.paper:
            title = f"{CITATION}, {cfg.paper['table']}"
            drawn = {"title": title, "is_curve": False, "is_share": True, "points": published(**cfg.paper)}
            figure["paper"] = cfg.paper | drawn
        if cfg.fit:
            try:
                figure["fit"] = fitted(cfg, points, is_share=is_share)
            except ValueError as error:
                remedy = "remove fit, or vary more values in the sweep"
                raise DataError(f"{context.stage.name}.fit: {error}\n  {remedy}") from None

        # 3. Write the files. Importing matplotlib takes half a second, so do it only when a figure is drawn.
        from jobs.extras.studies.chart import write_study_chart

        artifacts.write_record(context.directory / DOCUMENT, figure)
        pictures = [path.name for path in write_study_chart(figure, context.directory / "figure")]
        table = io.StringIO()
        columns = ["source", "series", "row", "x", "y", "low", "high", "runs"]
        writer = csv.DictWriter(table, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        panels: dict[str, dict[str, Any]] = {"run": figure, "paper": figure.get("paper", {})}
        for source, panel in panels.items():
            for point in panel.get("points", []):
                writer.writerow({"source": source, **point})
        write_atomically(context.directory / "figure.csv", table.getvalue())
        lines = list(as_markdown(figure))
        write_atomically(context.directory / "figure.md", "\n".join(lines) + "\n")
        for line in lines:
            context.log(line)
        names = [DOCUMENT, *pictures, "figure.csv", "figure.md"]
        summary = f"{len(points)} points, figure.png"
        return {"summary": summary, "files": artifacts.digests(context.directory, names)}

    def checks(self, stage: Stage, available: Available) -> Iterable[CheckResult]:
        """Raise ConfigError for a figure without tables, or with a table not made by a sweep."""
        cfg: FigureConfig = stage.config
        require(bool(cfg.tables), f"{stage.name}.tables is empty\n  add a sweep: {stage.name}.tables={{NAME: @SWEEP}}")
        for name, value in cfg.tables.items():
            link = reference(value)
            if link is not None and available.campaign.stage(link[0]).kind.name != sweep.Table.name:
                raise ConfigError(
                    f"{stage.name}.tables.{name} is {value}, which is not a sweep\n"
                    "  expected a section with `sweep`; to turn a single stage into a sweep, add sweep: {seeds: [0]}"
                )
        if cfg.fit:
            check_fit(stage, available)
        return ()


# ------------------------------------------------------------------------------------------------ points


def check_fit(stage: Stage, available: Available) -> None:
    """Raise ConfigError if the planned runs cannot determine the law; ignore values unknown before the runs.

    Without this check, the fit would fail only after all runs have trained.
    """
    cfg: FigureConfig = stage.config
    planned: list[list[float]] = []  # of each point, its values on the axes of the fit
    for name, value in cfg.tables.items():
        link = reference(value)
        # Tables of other runs exist already, and the values of other axes are known after the runs.
        if link is None or not set(cfg.fit) <= set(AT_A_STEP):
            return
        if cfg.x.startswith(f"{name}."):
            continue
        seen = set()
        for run_name, run in available.campaign.stage(link[0]).config.runs.items():
            if run.row in seen or (cfg.rows and not fnmatchcase(run.row, cfg.rows)):
                continue
            seen.add(run.row)
            trained = available.campaign.stage(run_name)
            if not trained.kind.trains or trained.model is None:
                return
            last = planned_steps(trained.config, available)
            if last is None:
                return
            steps = [last]
            # A curve has a point for each evaluation; losses are reported more often.
            every = trained.config.log_every if cfg.y == "loss" else trained.config.evaluate_every
            if cfg.curve and every:
                steps = sorted({last, *range(every * (trained.config.first_step // every + 1), last + 1, every)})
            for step in steps:
                axes = axes_at(trained.config, trained.model, step, last)
                planned.append([axes[axis] for axis in cfg.fit])
    values = [list(column) for column in zip(*planned, strict=True)]
    try:
        check_points(values or [[] for _ in cfg.fit])
    except ValueError as error:
        counts = ", ".join(f"{len(set(column))} of {axis}" for axis, column in zip(cfg.fit, values, strict=False))
        raise ConfigError(
            f"{stage.name}.fit: the runs of {', '.join(cfg.tables.values())} cannot determine a law: {error}\n"
            f"  numbers of distinct values: {counts or 'none'}\n"
            "  add runs of other sizes or lengths to the sweep, or remove fit"
        ) from None


def read_rows(cfg: FigureConfig, campaign: Campaign) -> list[FigureRow]:
    """Return the rows to draw, each with the values of the parent rows in other tables."""
    rows = []
    for table, path in cfg.tables.items():
        folder = Path(campaign.path_of(path))
        record = artifacts.read_record(folder / sweep.DOCUMENT)
        for name, means in (record["rows"] | record["means"]).items():
            runs = []
            values: dict[str, Any] = {"row": name}
            for result in record["runs"]:
                if result["row"] == name:
                    runs.append(result)
                    values |= result["values"]
            values |= record["axes"].get(name, {})
            for metric, mean in means.items():
                values[metric] = mean["mean"]
            for number, part in enumerate(name.split(", "), start=1):
                values[f"row.{number}"] = part
            values["table"] = table
            rows.append(FigureRow(name, table, values, means, runs, folder))
    drawn = []
    for row in rows:
        # A table named by x is not drawn: it provides x for rows of other tables.
        is_named = fnmatchcase(row.name, cfg.rows) if cfg.rows else bool(row.runs)
        if not is_named or cfg.x.startswith(f"{row.table}."):
            continue
        values = dict(row.values)
        # "S-16, pets" gets the values of "S-16" in other tables. If several rows are prefixes, the longest wins.
        for above in sorted(rows, key=lambda above: len(above.name)):
            if above.table != row.table and f"{row.name}, ".startswith(f"{above.name}, "):
                for key, value in above.values.items():
                    values[f"{above.table}.{key}"] = value
        drawn.append(replace(row, values=values))
    return drawn


def point_of(cfg: FigureConfig, row: FigureRow) -> Point:
    """Return the point for a row, with an error bar if y is a metric with several runs or an interval."""
    series = "" if cfg.groups else str(row.value(cfg.series))
    for name, pattern in cfg.groups.items():
        if not series and fnmatchcase(row.name, pattern):
            series = name
    if not series:
        raise DataError(
            f"the row {row.name!r} of {row.table} matches no group\n  add a pattern for it to groups: {cfg.groups}"
        )
    y = row.value(cfg.y)
    mean = row.means.get(cfg.y, {"sd": None, "interval": None, "runs": len(row.runs)})
    point = Point(series=series, row=row.name, x=row.value(cfg.x), y=y, low=y, high=y, runs=mean["runs"], axes={})
    if mean["sd"] is not None:
        point |= {"low": y - mean["sd"], "high": y + mean["sd"]}
    elif mean["interval"] is not None:
        point["low"], point["high"] = mean["interval"]
    for axis in cfg.fit:
        point["axes"][axis] = row.value(axis)
    return point


def curve_of(cfg: FigureConfig, row: FigureRow, series: str) -> Iterator[Point]:
    """Yield the points of a row's curve: the mean and deviation over the runs, at the steps shared by all runs.

    `series` is the name of the line. Yields nothing if all runs have diverged.
    """
    x = "steps" if cfg.x == "row" else cfg.x
    curves: list[dict[int, float]] = []
    seconds_per_step: list[float] = []  # of each run, if known
    for result in row.runs:
        if result["diverged"]:
            continue
        ends = result["axes"]
        if "seconds" in ends:
            seconds_per_step.append(ends["seconds"] / ends["steps"])
        folder = row.folder.parent / f"{result['stage']}-{result['key'][:8]}"
        values: dict[int, float] = {}
        planned = 0  # steps
        for entry in read_metrics(folder, None):
            if entry["kind"] == "train":
                planned = entry["steps"]
            if cfg.y == "loss" and entry["kind"] == "train":
                values[entry["step"]] = float(np.mean(entry["losses"]))
            elif entry["kind"] == "evaluate" and cfg.y in entry:
                values[entry["step"]] = entry[cfg.y]
        curves.append(values)
    if not curves:
        return
    steps = set.intersection(*map(set, curves))
    if not steps or "steps" not in ends:
        raise DataError(
            f"the runs of {row.name!r} of {row.table} have no curve of {cfg.y} over {x} in metrics.jsonl\n"
            "  expected y: loss, or a metric of their evaluations"
        )
    # The runs of a row differ only by seed, so any of their configs will do.
    record = artifacts.read_record(folder / "stage.json")
    trained = recorded_config(record)
    model = models.from_dict(record["model"])
    for step in sorted(steps):
        # Axes include the trunk of a branch, as in `forecast_of`. The trunk's seconds are not known here.
        axes = axes_at(trained, model, step, planned)
        if trained.first_step == 0 and len(seconds_per_step) == len(curves):
            axes["seconds"] = float(np.mean(seconds_per_step)) * step
        for axis in (x, *cfg.fit):
            if axis not in axes:
                raise DataError(
                    f"{axis} is unknown for some steps of the runs of {row.name!r} of {row.table}"
                    f"{did_you_mean(axis, axes)}\n  expected one of {', '.join(axes)}"
                )
        values_at = np.array([values[step] for values in curves])
        y = float(values_at.mean())
        spread = 0.0
        if len(curves) > 1:
            spread = float(values_at.std(ddof=1))
        point = Point(series=series, row=row.name, x=axes[x], y=y, low=y, high=y, runs=len(curves), axes={})
        point |= {"low": y - spread, "high": y + spread}
        for axis in cfg.fit:
            point["axes"][axis] = axes[axis]
        yield point


def fitted(cfg: FigureConfig, points: Sequence[Point], *, is_share: bool) -> dict[str, Any]:
    """Return the law fitted over the axes in `fit`, the forecast for the largest point, and the law's line over x.

    If y is a proportion, the law describes the error, 1 − y. Raises ValueError if no law can be fitted.
    """
    x = np.array([list(point["axes"].values()) for point in points], float)
    y = np.array([point["y"] for point in points], float)
    of = cfg.y
    if is_share:
        y = 1 - y
        of = f"1 - {cfg.y}"
    law = fit(x, y, cfg.draws)
    result: dict[str, Any] = {
        "axes": dict(zip(cfg.fit, law.scale.tolist(), strict=True)),
        "of": of,
        "parameters": law.parameters(),
        "noise": law.noise,
        "law": law.record(),  # for the forecasts of other stages (jobs/extras/studies/law.py)
    }
    try:
        number, forecast, low, high = leave_largest_out(x, y, cfg.draws)
        row = points[number]["row"]
        result["largest"] = {"row": row, "foretold": forecast, "low": low, "high": high, "was": float(y[number])}
    except ValueError as error:
        result["largest"] = {"unknown": str(error)}  # too few points for a law without the largest
    if cfg.fit == (cfg.x,):
        line = np.geomspace(x.min(), x.max(), 60)
        values = law.at(line[:, None])
        if is_share:
            values = 1 - values
        result["line"] = [line.tolist(), values.tolist()]
    return result


def as_markdown(figure: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the figure as Markdown: a table of our values, a table of the paper's values, and the law."""
    yield f"### {figure['title']}"
    captions = {figure["stamp"]: figure}
    if "paper" in figure:
        captions[figure["paper"]["title"]] = figure["paper"]
    for caption, panel in captions.items():
        yield ""
        if caption:
            yield f"*{caption}*"
            yield ""
        yield f"| series | row | {panel['x']} | {panel['y']} | low | high | runs |"
        yield "|---|---|--:|--:|--:|--:|--:|"
        # List only the last point of each curve; figure.csv has all points.
        points = panel["points"]
        if panel["is_curve"]:
            points = {point["series"]: point for point in points}.values()
        for point in points:
            place = point["x"]
            if not isinstance(place, str):
                place = f"{place:.4g}"
            numbers = f"{point['y']:.4g} | {point['low']:.4g} | {point['high']:.4g}"
            yield f"| {point['series']} | {point['row']} | {place} | {numbers} | {point['runs']} |"
    if "fit" in figure:
        law = figure["fit"]
        scale = ", ".join(f"{axis} {value:.3g}" for axis, value in law["axes"].items())
        yield ""
        yield f"{law['of']} = floor + Σ amount · (axis / scale)^−exponent, with scale {scale}; 90 % intervals:"
        yield ""
        for name, (value, low, high) in law["parameters"].items():
            bounds = EXPONENTS if name.startswith("exponent") else (0.0, np.inf)
            is_open = low <= 1.001 * bounds[0] or high >= 0.999 * bounds[1]
            note = ", which these points do not bound on both sides" if is_open else ""
            yield f"- {name} {value:.4g} [{low:.4g}, {high:.4g}]{note}"
        largest = law["largest"]
        if "unknown" in largest:
            yield f"- no forecast of the largest point from the others: {largest['unknown']}"
            return
        verdict = "OUTSIDE"
        if largest["low"] <= largest["was"] <= largest["high"]:
            verdict = "inside"
        yield (
            f"- fitted without {largest['row']}, the law predicts {largest['foretold']:.4g} [{largest['low']:.4g}, "
            f"{largest['high']:.4g}]; measured: {largest['was']:.4g}, {verdict}"
        )
