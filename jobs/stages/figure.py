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
4. With `curve` a row is a line: y of every evaluation, or step, in metrics.jsonl of its runs, mean over the seeds.
5. With `fit` a saturating power law of 1 − y (of a metric; of y otherwise) is laid over these axes
   (pipeline/evaluation/power_law.py). With `paper` published values stand in a panel of their own, with their source.
"""

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from data.errors import ConfigError, DataError
from data.files import write_whole
from jobs.resolved_recipe import Available, CheckResult, Context, Reads, Stage, StageKind, reference
from jobs.stages import sweep
from models.checks import did_you_mean
from pipeline import artifacts
from pipeline.config import Tags, require, tags
from pipeline.evaluation.power_law import fit, leave_largest_out
from pipeline.monitoring.telemetry import read_metrics

DOCUMENT = "figure.json"
PAPER = Path(__file__).parents[1] / "recipes/studies/paper.csv"
CITATION = "Dosovitskiy et al. 2021, arXiv:2010.11929"


@dataclass(frozen=True)
class Config:
    """What is drawn over what."""

    tables: dict[str, str] = field(default_factory=dict)  # by name: "@stage" of a sweep, or a folder: runs/x/finetune
    title: str = ""  # above it; "": y over x
    x: str = "row"  # an axis, a metric, a value of the grid, the row or a part of it (docs/sweeps.md)
    y: str = "accuracy"  # a metric, or an axis
    series: str = "table"  # what makes a line: `table`, or as x
    groups: dict[str, str] = field(default_factory=dict)  # lines by name → rows, as "S-*"; instead of series
    log: tuple[str, ...] = ()  # of x and y, the axes that are logarithmic
    curve: bool = False  # y of metrics.jsonl: loss, accuracy and so on; x: steps, samples, seconds or exaflops
    paper: dict[str, str] = field(default_factory=dict)  # table, x and y of published values (studies/paper.csv)
    fit: tuple[str, ...] = ()  # axes of a power law: one or two
    draws: int = 200  # studies that are drawn from the law
    stamp: str = ""  # below the figure, as "scaled down: other data, other sizes"

    RESUME: ClassVar[Tags] = tags(forbid="tables title x y series groups log curve paper fit draws stamp")

    def __post_init__(self) -> None:
        require(set(self.log) <= {"x", "y"}, f"log is {list(self.log)}, expected x, y or both")
        require(len(self.fit) <= 2 and self.draws > 1, "fit takes one or two axes, and draws more than 1")
        if self.paper:
            require(set(self.paper) == {"table", "x", "y"}, f"paper has {list(self.paper)}, expected table, x and y")
            published(self)


@dataclass(frozen=True)
class Point:
    """A row of a table, or a published value."""

    series: str
    row: str
    x: Any
    y: float
    low: float
    high: float
    runs: int
    axes: Mapping[str, float] = field(default_factory=dict)


def published(cfg: Config) -> list[Point]:
    """Return the published values that a figure asks for. Raises ConfigError where there are none."""
    values: dict[tuple[str, str], dict[str, str]] = {}
    names: dict[str, set[str]] = {}
    with open(PAPER, newline="") as file:
        for entry in csv.DictReader(file):
            names.setdefault(entry["table"], set()).update((entry["name"], "row"))
            if entry["table"] == cfg.paper["table"]:
                values.setdefault((entry["series"], entry["row"]), {})[entry["name"]] = entry["value"]
    table = cfg.paper["table"]
    require(table in names, f"paper.table is {table}{did_you_mean(table, names)}\n  expected {', '.join(names)}")
    for key in ("x", "y"):
        name = cfg.paper[key]
        known = ", ".join(sorted(names[table]))
        require(name in names[table], f"paper.{key} is {name}, which {table} does not have\n  expected {known}")
    points = []
    for (series, row), of_row in values.items():
        if cfg.paper["y"] not in of_row or cfg.paper["x"] not in ("row", *of_row):
            continue
        y = float(of_row[cfg.paper["y"]])
        x = row if cfg.paper["x"] == "row" else float(of_row[cfg.paper["x"]])
        points.append(Point(series, row, x, y, y, y, 1))
    return points


def run(cfg: Config, context: Context) -> dict[str, object]:
    """Gather the points, fit, and write the figure. Raises DataError where a table lacks what is drawn."""
    tables = {}
    for name, value in cfg.tables.items():
        folder = Path(context.campaign.path_of(value))
        tables[name] = (folder, artifacts.read_record(folder / sweep.DOCUMENT))
    points: list[Point] = []
    for name, (folder, record) in tables.items():
        # It gives its axes to the rows of the others, and has no points of its own.
        if cfg.x.startswith(f"{name}."):
            continue
        for row in record["rows"]:
            if cfg.curve:
                points += curve_of(cfg, name, row, folder, record)
            elif record["rows"][row] or cfg.y in record["axes"].get(row, {}):
                points.append(point_of(cfg, name, row, tables))
    require(bool(points), f"{context.stage.name}: no row of {', '.join(tables)} has a number: have all diverged?")
    figure: dict[str, Any] = {
        "title": cfg.title or f"{cfg.y} over {cfg.x}",
        **{"x": cfg.x, "y": cfg.y, "log": list(cfg.log), "stamp": cfg.stamp, "is_curve": cfg.curve},
        "is_share": is_metric(cfg, tables),
        "points": [asdict(point) for point in points],
        "sources": dict(cfg.tables),
    }
    if cfg.paper:
        figure["paper"] = {**cfg.paper, "citation": f"paper: {CITATION}, {cfg.paper['table']}"}
        figure["paper"]["points"] = [asdict(point) for point in published(cfg)]
    if cfg.fit:
        figure["fit"] = fitted(cfg, points, context.stage.name, is_share=figure["is_share"])
    # Imported here and not above, as in every stage: a recipe is checked without matplotlib.
    from jobs.stages.study_chart import write_study_chart

    artifacts.write_record(context.directory / DOCUMENT, figure)
    write_study_chart(figure, context.directory)
    write_whole(context.directory / "figure.csv", as_csv(figure))
    lines = list(as_markdown(figure))
    write_whole(context.directory / "figure.md", "\n".join(lines) + "\n")
    for line in lines:
        context.log(line)
    names = [DOCUMENT, "figure.png", "figure.svg", "figure.csv", "figure.md"]
    summary = f"{len(points)} points, {context.directory / 'figure.png'}"
    return {"summary": summary, "files": artifacts.digests(context.directory, names)}


# ------------------------------------------------------------------------------------------------ points

Tables = Mapping[str, tuple[Path, Mapping[str, Any]]]  # name → folder and sweep.json


def is_metric(cfg: Config, tables: Tables) -> bool:
    """Return whether y is a share of samples, as all metrics are; axes and losses are none."""
    if cfg.curve:
        return cfg.y != "loss"
    for _, record in tables.values():
        for means in record["rows"].values():
            if cfg.y in means:
                return True
    return False


def value_of(key: str, table: str, row: str, tables: Tables) -> Any:
    """Return what a key names of a row: an axis, a metric's mean, a value of the grid, the table, or its own name.

    Raises DataError where the row has none of this name, with those that it has.
    """
    parts = row.split(", ")
    if key == "table":
        return table
    if key == "row":
        return row
    if key.startswith("row.") and key[4:].isdigit() and 0 < int(key[4:]) <= len(parts):
        return parts[int(key[4:]) - 1]
    first, _, rest = key.partition(".")
    if first in tables and rest:
        # The longest row of the other table with whose name this one begins.
        for length in range(len(parts), 0, -1):
            name = ", ".join(parts[:length])
            if name in tables[first][1]["rows"]:
                return value_of(rest, first, name, tables)
        rows = ", ".join(tables[first][1]["rows"])
        raise DataError(f"{key}: {first} has no row with whose name {row!r} begins\n  its rows: {rows}")
    record = tables[table][1]
    known: dict[str, Any] = {}
    for result in record["runs"]:
        if result["row"] == row:
            known |= result["values"]
    known |= record["axes"].get(row, {})
    for metric, mean in record["rows"][row].items():
        known[metric] = mean["mean"]
    if key not in known:
        raise DataError(
            f"the row {row!r} of {table} has no {key!r}{did_you_mean(key, known)}\n"
            f"  expected one of {', '.join(['row', *known])}"
        )
    return known[key]


def point_of(cfg: Config, table: str, row: str, tables: Tables) -> Point:
    """Return the point of a row, with an error bar where y is a metric of several runs or of named samples."""
    y = value_of(cfg.y, table, row, tables)
    low = high = y
    mean = tables[table][1]["rows"][row].get(cfg.y)
    if mean is not None and mean["sd"] is not None:
        low, high = y - mean["sd"], y + mean["sd"]
    elif mean is not None and mean["interval"] is not None:
        low, high = mean["interval"]
    axes = {}
    for key in cfg.fit:
        axes[key] = value_of(key, table, row, tables)
    x = value_of(cfg.x, table, row, tables)
    runs = sum(result["row"] == row for result in tables[table][1]["runs"])
    return Point(series_of(cfg, table, row, tables), row, x, y, low, high, runs, axes)


def series_of(cfg: Config, table: str, row: str, tables: Tables) -> str:
    """Return the line that a row belongs to. Raises DataError where `groups` has none for it."""
    if not cfg.groups:
        return str(value_of(cfg.series, table, row, tables))
    for name, pattern in cfg.groups.items():
        if fnmatchcase(row, pattern):
            return name
    raise DataError(f"the row {row!r} of {table} is of none of the groups\n  expected a pattern for it: {cfg.groups}")


def curve_of(cfg: Config, table: str, row: str, folder: Path, record: Mapping[str, Any]) -> Iterator[Point]:
    """Iterate the points of a row's curve: mean and deviation over its runs, at the steps that all of them have."""
    curves: list[dict[int, float]] = []
    axes: Mapping[str, float] = {}
    for result in record["runs"]:
        if result["row"] != row or result["diverged"]:
            continue
        axes = result["axes"]
        values: dict[int, float] = {}
        for entry in read_metrics(folder.parent / f"{result['stage']}-{result['key'][:8]}", None):
            if cfg.y == "loss" and entry["kind"] == "train":
                values[entry["step"]] = float(np.mean(entry["losses"]))
            elif entry["kind"] == "evaluate" and cfg.y in entry:
                values[entry["step"]] = entry[cfg.y]
        curves.append(values)
    x = "steps" if cfg.x == "row" else cfg.x
    steps: list[int] = []
    if curves:
        steps = sorted(set.intersection(*map(set, curves)))
    if not steps or x not in axes:
        raise DataError(
            f"the runs of {row!r} of {table} have no curve of {cfg.y} over {x} in metrics.jsonl\n"
            f"  expected y: loss, or a metric of their evaluations; x: one of {', '.join(axes)}"
        )
    for step in steps:
        values_at = np.array([values[step] for values in curves])
        spread = 0.0
        if len(curves) > 1:
            spread = float(values_at.std(ddof=1))
        y = float(values_at.mean())
        yield Point(row, row, axes[x] * step / axes["steps"], y, y - spread, y + spread, len(curves))


def fitted(cfg: Config, points: list[Point], name: str, *, is_share: bool) -> dict[str, Any]:
    """Return the law over the axes of `fit`, what it foretells of the largest point, and its line over x."""
    x = np.array([[*point.axes.values()] for point in points], float)
    y = np.array([point.y for point in points], float)
    if is_share:
        y = 1 - y
    # The same study has the same intervals, run after run.
    rng = np.random.default_rng(0)
    try:
        law = fit(x, y, rng, cfg.draws)
        number, foretold, low, high = leave_largest_out(x, y, rng, cfg.draws)
    except ValueError as error:
        raise DataError(f"{name}.fit: {error}\n  leave fit out, or vary more in the sweep") from None
    result: dict[str, Any] = {
        "axes": dict(zip(cfg.fit, law.scale.tolist(), strict=True)),
        "of": f"1 - {cfg.y}" if is_share else cfg.y,
        "parameters": law.parameters(),
        "noise": law.noise,
        "largest": {"row": points[number].row, "foretold": foretold, "low": low, "high": high, "was": float(y[number])},
    }
    if cfg.fit == (cfg.x,):
        line = np.geomspace(x.min(), x.max(), 60)
        values = law.at(line[:, None])
        result["line"] = [line.tolist(), (1 - values if is_share else values).tolist()]
    return result


# ------------------------------------------------------------------------------------------------ as text


def as_csv(figure: Mapping[str, Any]) -> str:
    """Return all points as CSV: ours, and those of the paper."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["source", "series", "row", "x", "y", "low", "high", "runs"])
    for source, points in (("run", figure["points"]), ("paper", figure.get("paper", {}).get("points", []))):
        for point in points:
            writer.writerow([source, *(point[key] for key in ("series", "row", "x", "y", "low", "high", "runs"))])
    return text.getvalue()


def as_markdown(figure: Mapping[str, Any]) -> Iterator[str]:
    """Iterate the lines of the figure as Markdown: a table of ours, one of the paper, and the law."""
    yield f"### {figure['title']}"
    tables = [(figure["stamp"], figure["x"], figure["y"], figure["points"])]
    if "paper" in figure:
        paper = figure["paper"]
        tables.append((paper["citation"], paper["x"], paper["y"], paper["points"]))
    for caption, x, y, points in tables:
        yield ""
        if caption:
            yield from (f"*{caption}*", "")
        yield from (f"| series | row | {x} | {y} | low | high | runs |", "|---|---|--:|--:|--:|--:|--:|")
        # Of a curve the last point of each line; figure.csv has all of them.
        shown = points
        if figure["is_curve"]:
            shown = list({point["row"]: point for point in points}.values())
        for point in shown:
            at = point["x"] if isinstance(point["x"], str) else f"{point['x']:.4g}"
            yield (
                f"| {point['series']} | {point['row']} | {at} | {point['y']:.4g} | {point['low']:.4g} | "
                f"{point['high']:.4g} | {point['runs']} |"
            )
    if "fit" in figure:
        law = figure["fit"]
        at = ", ".join(f"{axis} {scale:.3g}" for axis, scale in law["axes"].items())
        yield from (
            "",
            f"{law['of']} = floor + Σ amount · (axis / scale)^−exponent, at the scale {at}; 90 % intervals:",
            "",
        )
        for name, (value, low, high) in law["parameters"].items():
            yield f"- {name} {value:.4g} [{low:.4g}, {high:.4g}]"
        largest = law["largest"]
        verdict = "inside" if largest["low"] <= largest["was"] <= largest["high"] else "OUTSIDE"
        yield (
            f"- without {largest['row']} it foretells {largest['foretold']:.4g} [{largest['low']:.4g}, "
            f"{largest['high']:.4g}]; it was {largest['was']:.4g}: {verdict}"
        )


# ------------------------------------------------------------------------------------------------ checks


def checks(stage: Stage, there: Available) -> Iterator[CheckResult]:
    """Refuse a figure without a table, and of stages that are none."""
    cfg: Config = stage.config
    require(bool(cfg.tables), f"{stage.name}.tables is empty: of what?\n  type {stage.name}.tables={{NAME: @SWEEP}}")
    for name, value in cfg.tables.items():
        link = reference(value)
        is_table = link is None or there.campaign.stage(link[0]).kind is sweep.KIND
        if not is_table:
            raise ConfigError(
                f"{stage.name}.tables.{name} is {value}, which is no sweep\n"
                "  expected the name of a section with `sweep`; for a single stage write sweep: {seeds: [0]}"
            )
    yield from ()


KIND = StageKind(
    name="figure",
    config=Config,
    run=run,
    inputs={"tables.*": Reads.TABLE},
    checks=checks,
    needs_workers=False,
)
