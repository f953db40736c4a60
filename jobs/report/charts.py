"""The charts of a run's page: curves over samples seen, values with their intervals, and figures of studies.

A curve of a million steps is thinned to some hundred buckets, of which the least and the greatest value stay: a single
step that jumped is still seen. Lines differ by their dashes and markers too, which the legend shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter

from data.page import GRID, INK, LINES, STYLE, charted, svg
from pipeline.monitoring.telemetry import amount

BUCKETS = 360  # of a curve; two points each
DASHES = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (6, 2, 1, 2)), (0, (9, 3)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")
# Colours of a file that nothing but a viewer opens, in the place of the page's.
ON_PAPER = {INK: "#222222", GRID: "#dddddd"} | dict(
    zip(LINES, ("#1f5fa8", "#c4441c", "#2f7d32", "#7b3fa0", "#a07000", "#00788c"), strict=True)
)
STEEP = 20.0  # times the median, from which on values are drawn on a logarithmic axis
SIZE = (4.9, 2.5)  # inches at 72 pixels
LONGEST_LABEL = 28  # characters
NO_STEPS = np.zeros(0, int)


class Line(NamedTuple):
    """A curve; `number` decides its dashes and colour."""

    label: str
    x: np.ndarray
    y: np.ndarray
    steps: np.ndarray = NO_STEPS  # at each point, where they are shown in numbers
    number: int = 0
    is_faded: bool = False  # steps that were taken again
    spread: np.ndarray | None = None  # (2, n), how far the interval of each value reaches down and up


class Mark(NamedTuple):
    """Something that happened at a place of the x axis."""

    x: float
    kind: str  # "restart", "spike" or "left out"
    y: float | None = None


# A line across the chart, or a triangle on the curve; each with its word, so that nobody needs the colour.
MARKED = {"restart": (0, (4, 3)), "left out": (0, (1, 2)), "parted": (0, (7, 2, 1, 2))}


def thin(x: np.ndarray, y: np.ndarray, buckets: int = BUCKETS) -> tuple[np.ndarray, np.ndarray]:
    """Return the points of a curve that show it: first, last, and of each bucket the least and the greatest value."""
    if len(x) <= 2 * buckets:
        return x, y
    edges = np.linspace(0, len(x), buckets + 1).astype(int)
    chosen = {0, len(x) - 1}
    # A bucket of values that are not finite shows as a gap: its first point stays.
    for low, high in itertools.pairwise(edges.tolist()):
        part = y[low:high]
        is_finite = np.isfinite(part)
        chosen.add(int(low + np.argmin(np.where(is_finite, part, np.inf))))
        chosen.add(int(low + np.argmax(np.where(is_finite, part, -np.inf))))
    places = np.array(sorted(chosen))
    return x[places], y[places]


def line_chart(title: str, lines: Sequence[Line], marks: Sequence[Mark] = ()) -> Markup:
    """Draw curves over the samples seen."""
    with charted():
        figure, axes = figure_of(title)
        values = np.concatenate([np.zeros(0), *(line.y for line in lines)])
        values = values[np.isfinite(values)]
        if len(values) and values.min() > 0 and values.max() > STEEP * np.median(values):
            axes.set_yscale("log")
        for line in lines:
            x, y = thin(line.x, line.y)
            style: dict[str, Any] = {
                "color": LINES[line.number % len(LINES)],
                "linestyle": DASHES[line.number % len(DASHES)],
            }
            if line.is_faded:
                style = {"color": INK, "linestyle": DASHES[2], "alpha": 0.6}
            marker = ""
            if len(lines) > 1 or len(x) == 1:
                marker = MARKERS[line.number % len(MARKERS)]
            axes.plot(x, y, linewidth=1.3, marker=marker, markersize=3.5, markevery=[len(x) - 1], **style)
            if line.spread is not None:
                axes.errorbar(line.x, line.y, yerr=line.spread, fmt="none", ecolor=style["color"], capsize=3)
            axes.plot([], [], marker=marker, markersize=3.5, label=line.label[:LONGEST_LABEL], **style)
        kinds = set()
        for mark in marks:
            kinds.add(mark.kind)
            if mark.kind in MARKED:
                axes.axvline(mark.x, color=INK, linewidth=0.9, linestyle=MARKED[mark.kind])
            elif mark.y is not None:
                axes.plot([mark.x], [mark.y], color=LINES[1], marker="^", markersize=7, linestyle="")
        for kind in sorted(kinds):
            if kind in MARKED:
                axes.plot([], [], color=INK, linewidth=0.9, linestyle=MARKED[kind], label=kind)
            else:
                axes.plot([], [], color=LINES[1], marker="^", linestyle="", label=kind)
        axes.set_xlabel("samples seen", fontsize=8)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _place: amount(value)))
        if len(lines) > 1 or kinds:
            axes.legend(fontsize=7, frameon=False, loc="best", handlelength=3.2)
        return svg(figure, title)


def value_chart(title: str, named: Sequence[tuple[str, float, float, float]]) -> Markup:
    """Draw values (name, value, low, high) with their intervals, a row each, the first at the top."""
    with charted():
        figure, axes = figure_of(title, height=0.9 + 0.26 * len(named), left=0.32)
        rows = np.arange(len(named))
        names, *columns = zip(*named, strict=True)
        value, low, high = np.array(columns, float)
        spread = [np.maximum(value - low, 0), np.maximum(high - value, 0)]
        axes.errorbar(value, rows, xerr=spread, fmt="o", color=LINES[0], ecolor=INK, elinewidth=1, capsize=3, ms=4)
        axes.set_yticks(rows, [name[:LONGEST_LABEL] for name in names], fontsize=7)
        axes.set_ylim(len(named) - 0.5, -0.5)  # the first at the top
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{100 * value:g} %"))
        return svg(figure, title)


def write_study_chart(record: Mapping[str, Any], folder: Path) -> None:
    """Write the figure of a study as figure.png and figure.svg, in colours that need no page."""
    style: Any = {"figure.facecolor": "white"}
    for key, value in STYLE.items():
        style.setdefault(key, ON_PAPER.get(value, value) if isinstance(value, str) else value)
    with matplotlib.rc_context(style):
        drawn = study_figure(record, ON_PAPER)
        drawn.savefig(folder / "figure.png", dpi=150)
        drawn.savefig(folder / "figure.svg", metadata={"Date": None})


def study_chart(record: Mapping[str, Any]) -> Markup:
    """Draw the figure of a study for the page."""
    with charted():
        return svg(study_figure(record, {}), record["title"])


def study_figure(record: Mapping[str, Any], colours: Mapping[str, str]) -> Figure:
    """Return the chart of a figure.json (jobs/stages/figure.py): our points, and the paper's in a panel beside them."""
    panels = [(record["title"], record["x"], record["y"], record["points"], record["is_share"])]
    if "paper" in record:
        paper = record["paper"]
        panels.append((paper["citation"], paper["x"], paper["y"], paper["points"], True))
    # Below the panels there is a line for the stamp.
    layout = ConstrainedLayoutEngine(rect=(0, 0.06, 1, 0.94) if record["stamp"] else (0, 0, 1, 1))
    figure = Figure(figsize=(SIZE[0] * len(panels), 3.4), dpi=72, layout=layout)
    for axes, (title, x, y, points, is_share) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        axes.set_title(title, fontsize=9, loc="left")
        axes.tick_params(which="both", labelsize=7)
        axes.grid(color=colours.get(GRID, GRID), linewidth=0.6)
        axes.set_xlabel(x, fontsize=8)
        axes.set_ylabel(y, fontsize=8)
        # Names stand at 0, 1, 2, … in the order in which they come.
        names: list[str] = []
        by_series: dict[str, list[Mapping[str, Any]]] = {}
        for point in points:
            by_series.setdefault(point["series"], []).append(point)
            if isinstance(point["x"], str) and point["x"] not in names:
                names.append(point["x"])
        for number, (series, of_series) in enumerate(by_series.items()):
            places = [names.index(point["x"]) if names else point["x"] for point in of_series]
            order = np.argsort(places, kind="stable")
            values = np.array([(point["y"], point["low"], point["high"]) for point in of_series])[order]
            colour = LINES[number % len(LINES)]
            axes.errorbar(
                np.array(places)[order],
                values[:, 0],
                yerr=np.maximum([values[:, 0] - values[:, 1], values[:, 2] - values[:, 0]], 0),
                color=colours.get(colour, colour),
                linestyle="" if names else DASHES[number % len(DASHES)],
                marker="" if record["is_curve"] and points is record["points"] else MARKERS[number % len(MARKERS)],
                **{
                    "markersize": 4,
                    "linewidth": 1.3,
                    "capsize": 2.5,
                    "elinewidth": 0.8,
                    "label": series[:LONGEST_LABEL],
                },
            )
        if len(by_series) > 1:
            axes.legend(fontsize=7, frameon=False, loc="best", handlelength=3.2)
        if "x" in record["log"] and not names:
            axes.set_xscale("log")
        if "y" in record["log"]:
            axes.set_yscale("log")
        if names:
            axes.set_xticks(range(len(names)), [name[:LONGEST_LABEL] for name in names], rotation=30, ha="right")
        elif "x" not in record["log"]:
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _place: amount(value)))
        if is_share and "y" not in record["log"]:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{100 * value:.3g} %"))
    law = record.get("fit", {})
    if "line" in law:
        figure.axes[0].plot(*law["line"], color=colours.get(INK, INK), linewidth=0.9, linestyle=DASHES[1])
    if record["stamp"]:
        figure.text(0.01, 0.005, record["stamp"], fontsize=7, style="italic", va="bottom")
    return figure


def figure_of(title: str, height: float = SIZE[1], left: float = 0.12) -> tuple[Figure, Axes]:
    """Return an empty chart; its title is the same text that is read out."""
    figure = Figure(figsize=(SIZE[0], height), dpi=72)
    bottom = 0.45 / height
    axes = figure.add_axes((left, bottom, 0.97 - left, 1 - bottom - 0.28 / height))
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(labelsize=7)
    axes.grid(color=GRID, linewidth=0.6)
    return figure, axes
