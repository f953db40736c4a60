"""A figure of a study: points of the tables of sweeps, with error bars, the paper's values beside them, and a law.

In:  tables of sweeps, of this run or of others
Out: figure.png and .svg, figure.csv, figure.json (what the page of the run draws from) and figure.md

    figure:
      tables: {pretrain: "@pretrain", finetune: "@finetune"}
      x: pretrain.exaflops           # of the row of the table `pretrain` that the row goes on from
      y: accuracy
      log: [x]
      paper: {table: table 6, x: exaflops, y: ImageNet}

1. Each row of a table is a point. `x` and `y` are metrics, axes (parameters, gmacs, exaflops, samples, images, steps,
   seconds, images_per_s), values of a grid (model.depth), `row`, or a part of it: of "S-16, pets" row.2 is pets.
2. A table that x names, as in pretrain.exaflops, has no points of its own: its rows give x to the rows that go on from
   them, "S-16" to "S-16, pets".
3. A metric has an error bar: the deviation between seeds, or of one run the interval over its samples.
4. With `curve` a row is a line: y of every evaluation, or step, in metrics.jsonl of its runs, mean over the seeds. A
   row whose runs have all diverged has none.
5. With `fit` a saturating power law of 1 − y (of a metric; of y otherwise) is laid over these axes
   (pipeline/extras/power_law.py), and without the largest point once more, where enough others are left for a law.
   With `paper` published values stand in a panel of their own, with their source.
"""

import csv
import io
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
from jobs.extras.studies.axes import axes_at
from jobs.resolved_recipe import Available, Campaign, CheckResult, Context, Reads, Stage, StageKind, reference
from models.checks import did_you_mean
from pipeline import artifacts
from pipeline.config import Tags, require, tags
from pipeline.extras.power_law import fit, leave_largest_out
from pipeline.extras.recorded_config import recorded_config
from pipeline.monitoring.telemetry import read_metrics

DOCUMENT = "figure.json"
PAPER = Path(__file__).parents[2] / "recipes/studies/paper.csv"
CITATION = "paper: Dosovitskiy et al. 2021, arXiv:2010.11929"


@dataclass(frozen=True)
class FigureConfig:
    """What is drawn over what."""

    tables: dict[str, str] = field(default_factory=dict)  # by name: "@stage" of a sweep, or a folder: runs/x/finetune
    title: str = ""  # above it; "": y over x
    x: str = "row"  # an axis, a metric, a value of the grid, the row or a part of it (docs/studies.md)
    y: str = "accuracy"  # a metric, or an axis
    series: str = "table"  # what makes a line: `table`, or as x
    groups: dict[str, str] = field(default_factory=dict)  # lines by name → rows, as "S-*"; instead of series
    rows: str = ""  # that have points, as "*, mean of *"; "": all but means over several rows
    log: tuple[str, ...] = ()  # of x and y, the axes that are logarithmic
    curve: bool = False  # y of metrics.jsonl: loss, accuracy and so on; x: steps, samples, seconds or exaflops
    paper: dict[str, str] = field(default_factory=dict)  # table, x and y of published values (studies/paper.csv)
    fit: tuple[str, ...] = ()  # axes of a power law: one or two
    draws: int = 200  # studies that are drawn from the law
    stamp: str = ""  # below the figure, as "scaled down: other data, other sizes"

    RESUME: ClassVar[Tags] = tags(forbid="tables title x y series groups rows log curve paper fit draws stamp")

    def __post_init__(self) -> None:
        require(set(self.log) <= {"x", "y"}, f"log is {list(self.log)}, expected x, y or both")
        require(len(self.fit) <= 2 and self.draws > 1, "fit takes one or two axes, and draws more than 1")
        if self.paper:
            require(set(self.paper) == {"table", "x", "y"}, f"paper has {list(self.paper)}, expected table, x and y")
            published(**self.paper)


class Point(TypedDict):
    """A row of a table, or a published value, as figure.json holds it."""

    series: str  # its line
    row: str
    x: Any  # a number, or a name
    y: float
    low: float  # of the error bar
    high: float
    runs: int
    axes: dict[str, float]  # those of `fit`


@dataclass(frozen=True)
class FigureRow:
    """A row of a sweep's table."""

    name: str
    table: str
    values: dict[str, Any]  # all that x, y, series and fit may name
    means: Mapping[str, Mapping[str, Any]]  # of metrics, over the runs
    runs: list[Mapping[str, Any]]
    folder: Path  # of the table

    def value(self, key: str) -> Any:
        """Return a value of the row. Raises DataError where it has none of this name, with those that it has."""
        if key not in self.values:
            raise DataError(
                f"the row {self.name!r} of {self.table} has no {key!r}{did_you_mean(key, self.values)}\n"
                f"  expected one of {', '.join(self.values)}"
            )
        return self.values[key]


def published(table: str, x: str, y: str) -> list[Point]:
    """Return the published values of a table of the paper. Raises ConfigError where there are none."""
    tables: dict[str, dict[tuple[str, str], dict[str, str]]] = {}  # by series and row, the values by name
    with open(PAPER, newline="") as file:
        for entry in csv.DictReader(file):
            key = (entry["series"], entry["row"])
            values = tables.setdefault(entry["table"], {}).setdefault(key, {"row": entry["row"]})
            values[entry["name"]] = entry["value"]
    require(table in tables, f"paper.table is {table}{did_you_mean(table, tables)}\n  expected {', '.join(tables)}")
    names = sorted(set().union(*tables[table].values()))
    for axis, name in (("x", x), ("y", y)):
        expected = ", ".join(names)
        require(name in names, f"paper.{axis} is {name}, which {table} does not have\n  expected {expected}")
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
    """The kind of stage that draws a figure from the tables of sweeps."""

    name = "figure"
    config = FigureConfig
    inputs: ClassVar = {"tables.*": Reads.TABLE}
    needs_workers = False

    def run(self, cfg: FigureConfig, context: Context) -> dict[str, object]:
        """Gather the points, fit, and write the figure. Raises DataError where a table lacks what is drawn."""
        # 1. The points.
        points: list[Point] = []
        is_share = cfg.curve and cfg.y != "loss"  # as all metrics are; axes and losses are none
        for row in read_rows(cfg, context.campaign):
            if cfg.curve:
                curve = list(curve_of(cfg, row))
                points += curve
                if not curve:
                    context.log(f"{context.stage.name}: {row.name} of {row.table} has no curve: diverged")
            # A row whose runs have diverged has no metric.
            elif row.means or cfg.y in row.values:
                points.append(point_of(cfg, row))
                is_share = is_share or cfg.y in row.means
        require(
            bool(points), f"{context.stage.name}: no row of {', '.join(cfg.tables)} has a number: have all diverged?"
        )
        # A value of a grid may be no number, as null beside 768: then all of them are names.
        if not all(isinstance(point["x"], int | float) for point in points):
            for point in points:
                point["x"] = str(point["x"])

        # 2. The panels, ours and the paper's, and the law.
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
                way_out = "leave fit out, or vary more in the sweep"
                raise DataError(f"{context.stage.name}.fit: {error}\n  {way_out}") from None

        # 3. The files. The chart is imported here and not above: a recipe is checked without matplotlib.
        from jobs.extras.studies.chart import write_study_chart

        artifacts.write_record(context.directory / DOCUMENT, figure)
        write_study_chart(figure, context.directory)
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
        names = [DOCUMENT, "figure.png", "figure.svg", "figure.csv", "figure.md"]
        summary = f"{len(points)} points, figure.png"
        return {"summary": summary, "files": artifacts.digests(context.directory, names)}

    def checks(self, stage: Stage, available: Available) -> Iterable[CheckResult]:
        """Refuse a figure without a table, and of stages that are none."""
        cfg: FigureConfig = stage.config
        require(
            bool(cfg.tables), f"{stage.name}.tables is empty: of what?\n  type {stage.name}.tables={{NAME: @SWEEP}}"
        )
        for name, value in cfg.tables.items():
            link = reference(value)
            if link is not None and available.campaign.stage(link[0]).kind.name != sweep.Table.name:
                raise ConfigError(
                    f"{stage.name}.tables.{name} is {value}, which is no sweep\n"
                    "  expected the name of a section with `sweep`; for a single stage write sweep: {seeds: [0]}"
                )
        return ()


# ------------------------------------------------------------------------------------------------ points


def read_rows(cfg: FigureConfig, campaign: Campaign) -> list[FigureRow]:
    """Return the rows that have points, each with the values of the rows of other tables that it goes on from."""
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
        # The table that x names gives its axes to the rows of the others.
        is_named = fnmatchcase(row.name, cfg.rows) if cfg.rows else bool(row.runs)
        if not is_named or cfg.x.startswith(f"{row.table}."):
            continue
        values = dict(row.values)
        # "S-16, pets" goes on from "S-16". Where several names begin it, the longest is entered last, and stays.
        for above in sorted(rows, key=lambda above: len(above.name)):
            if above.table != row.table and f"{row.name}, ".startswith(f"{above.name}, "):
                for key, value in above.values.items():
                    values[f"{above.table}.{key}"] = value
        drawn.append(replace(row, values=values))
    return drawn


def point_of(cfg: FigureConfig, row: FigureRow) -> Point:
    """Return the point of a row, with an error bar where y is a metric of several runs or of named samples."""
    series = "" if cfg.groups else str(row.value(cfg.series))
    for name, pattern in cfg.groups.items():
        if not series and fnmatchcase(row.name, pattern):
            series = name
    if not series:
        raise DataError(
            f"the row {row.name!r} of {row.table} is of none of the groups\n  expected a pattern for it: {cfg.groups}"
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


def curve_of(cfg: FigureConfig, row: FigureRow) -> Iterator[Point]:
    """Iterate the points of a row's curve: mean and deviation over its runs, at the steps that all of them have.

    There are none if all its runs have diverged.
    """
    x = "steps" if cfg.x == "row" else cfg.x
    curves: list[dict[int, float]] = []
    for result in row.runs:
        if result["diverged"]:
            continue
        ends = result["axes"]
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
    # What the runs of a row are differs by their seed alone.
    record = artifacts.read_record(folder / "stage.json")
    trained = recorded_config(record)
    model = models.from_dict(record["model"])
    for step in sorted(steps):
        # As `foretell` counts them, which are those of trunk and branch together; seconds are known of the run alone.
        axes = axes_at(trained, model, step, planned)
        if trained.first_step == 0 and "seconds" in ends:
            axes["seconds"] = ends["seconds"] * step / ends["steps"]
        for axis in (x, *cfg.fit):
            if axis not in axes:
                raise DataError(
                    f"{axis} of the runs of {row.name!r} of {row.table} is not known step by step"
                    f"{did_you_mean(axis, axes)}\n  expected one of {', '.join(axes)}"
                )
        values_at = np.array([values[step] for values in curves])
        y = float(values_at.mean())
        spread = 0.0
        if len(curves) > 1:
            spread = float(values_at.std(ddof=1))
        point = Point(series=row.name, row=row.name, x=axes[x], y=y, low=y, high=y, runs=len(curves), axes={})
        point |= {"low": y - spread, "high": y + spread}
        for axis in cfg.fit:
            point["axes"][axis] = axes[axis]
        yield point


def fitted(cfg: FigureConfig, points: Sequence[Point], *, is_share: bool) -> dict[str, Any]:
    """Return the law over the axes of `fit`, what it foretells of the largest point, and its line over x.

    The law of a share is one of its error, 1 − y. Raises ValueError where none can be fitted.
    """
    x = np.array([list(point["axes"].values()) for point in points], float)
    y = np.array([point["y"] for point in points], float)
    of = cfg.y
    if is_share:
        y = 1 - y
        of = f"1 - {cfg.y}"
    # The same study has the same intervals, run after run.
    rng = np.random.default_rng(0)
    law = fit(x, y, rng, cfg.draws)
    result: dict[str, Any] = {
        "axes": dict(zip(cfg.fit, law.scale.tolist(), strict=True)),
        "of": of,
        "parameters": law.parameters(),
        "noise": law.noise,
        "law": law.record(),  # for stages that it foretells (jobs/extras/studies/law.py)
    }
    try:
        number, foretold, low, high = leave_largest_out(x, y, rng, cfg.draws)
        row = points[number]["row"]
        result["largest"] = {"row": row, "foretold": foretold, "low": low, "high": high, "was": float(y[number])}
    except ValueError as error:
        result["largest"] = {"unknown": str(error)}  # enough points for a law are too few for two
    if cfg.fit == (cfg.x,):
        line = np.geomspace(x.min(), x.max(), 60)
        values = law.at(line[:, None])
        if is_share:
            values = 1 - values
        result["line"] = [line.tolist(), values.tolist()]
    return result


def as_markdown(figure: Mapping[str, Any]) -> Iterator[str]:
    """Iterate the lines of the figure as Markdown: a table of ours, one of the paper, and the law."""
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
        # Of a curve the last point of each line; figure.csv has all of them.
        points = panel["points"]
        if panel["is_curve"]:
            points = {point["row"]: point for point in points}.values()
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
        yield f"{law['of']} = floor + Σ amount · (axis / scale)^−exponent, at the scale {scale}; 90 % intervals:"
        yield ""
        for name, (value, low, high) in law["parameters"].items():
            yield f"- {name} {value:.4g} [{low:.4g}, {high:.4g}]"
        largest = law["largest"]
        if "unknown" in largest:
            yield f"- what the law without the largest point foretells of it is not known: {largest['unknown']}"
            return
        verdict = "OUTSIDE"
        if largest["low"] <= largest["was"] <= largest["high"]:
            verdict = "inside"
        yield (
            f"- without {largest['row']} it foretells {largest['foretold']:.4g} [{largest['low']:.4g}, "
            f"{largest['high']:.4g}]; it was {largest['was']:.4g}: {verdict}"
        )
