"""Draw a study's figure.json (jobs/extras/studies/figure.py) as PNG, SVG and PDF, and as inline SVG for the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter

from data.extras.pages.page import (
    COLUMN,
    DASHES,
    GRID,
    INK,
    LINES,
    MARKERS,
    ON_PAPER,
    PAPER_STYLE,
    TEXT_WIDTH,
    Tip,
    charted,
    save_figure,
    svg,
)
from pipeline.values import amount

WIDTH = 4.2  # of a panel on a page, in inches
PAPER_HEIGHT = 2.6  # inches
MAX_TIPS = 300  # points of a panel with their values on hover
# Labels of the axes that jobs/extras/studies/axes.py computes; metrics keep their names, with ticks in percent.
UNITS = {
    "parameters": "parameters",
    "gmacs": "forward pass (GMAC per image)",
    "exaflops": "training compute (EFLOP)",
    "samples": "images seen",
    "images": "images in the training set",
    "steps": "steps",
    "seconds": "training time (s)",
    "images_per_s": "speed (images/s)",
}
MAX_LABEL_LENGTH = 28  # characters


def write_study_chart(
    record: Mapping[str, Any], path: Path, suffixes: Iterable[str] = (".png", ".svg", ".pdf")
) -> list[Path]:
    """Write a study's figure once for each suffix, in the colours and sizes for paper; return the paths."""
    with matplotlib.rc_context(PAPER_STYLE):
        figure = study_figure(record, ON_PAPER)
        width = COLUMN if "paper" not in record else TEXT_WIDTH
        figure.set_size_inches(width, PAPER_HEIGHT)
        return save_figure(figure, path, suffixes)


def study_charts(record: Mapping[str, Any]) -> list[Markup]:
    """Return a study's figure as inline SVGs for the report: our panel and, if there is one, the paper's.

    Each panel is a chart of its own: next to each other, two of them would be too small on a phone.
    """
    panels = [{key: value for key, value in record.items() if key != "paper"}]
    if "paper" in record:
        panels.append({**record["paper"], "log": record["log"], "stamp": ""})
    drawn = []
    for panel in panels:
        with charted():
            figure = study_figure(panel, {})
            (axes,) = figure.axes
            names = names_of(panel)
            tips = []
            for point in panel["points"][:MAX_TIPS]:
                x = names.index(point["x"]) if names else point["x"]
                lines = [f"{point['series']}: {point['row']}", f"{panel['y']} {value_text(point['y'], panel)}"]
                if point["low"] != point["high"]:
                    ends = [value_text(point[end], panel) for end in ("low", "high")]
                    lines[1] += f" ({' to '.join(ends)})"
                lines.append(f"{panel['x']} {point['x'] if names else format(point['x'], '.4g')}")
                tips.append(Tip(axes, x, point["y"], lines))
            drawn.append(svg(figure, panel["title"], tips))
    return drawn


def value_text(value: float, panel: Mapping[str, Any]) -> str:
    """Format a value on the y axis: a share in percent, or a number."""
    return f"{100 * value:.2f} %" if panel["is_share"] else f"{value:.4g}"


def names_of(panel: Mapping[str, Any]) -> list[str]:
    """Return the names on the x axis in order of appearance, at 0, 1, 2, …; none if x is a number."""
    return list(dict.fromkeys(point["x"] for point in panel["points"] if isinstance(point["x"], str)))


def study_figure(record: Mapping[str, Any], colours: Mapping[str, str]) -> Figure:
    """Draw our points and, in a second panel, any points from the paper; return the figure."""
    panels = [record]
    if "paper" in record:
        panels.append(record["paper"])
    bottom = 0.06 if record["stamp"] else 0.0  # share of the height for the stamp
    layout = ConstrainedLayoutEngine(rect=(0, bottom, 1, 1 - bottom))
    figure = Figure(figsize=(WIDTH * len(panels), 3), dpi=72, layout=layout)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw_panel(axes, panel, record["log"], colours)
    law = record.get("fit", {})
    if "line" in law:
        figure.axes[0].plot(*law["line"], color=colours.get(INK, INK), linewidth=0.9, linestyle=DASHES[1])
    if record["stamp"]:
        figure.text(0.01, 0.005, record["stamp"], fontsize=7, style="italic", va="bottom")
    return figure


def with_unit(name: str) -> str:
    """Return the label of an axis: a known quantity with its unit, or the name itself."""
    return UNITS.get(name.rpartition(".")[2], name)


def draw_panel(axes: Axes, panel: Mapping[str, Any], log: list[str], colours: Mapping[str, str]) -> None:
    """Draw a panel's points, one line per series; `log` lists the logarithmic axes."""
    axes.set_title(panel["title"], fontsize=9, loc="left")
    axes.tick_params(which="both", labelsize=7)
    axes.grid(color=colours.get(GRID, GRID), linewidth=0.6)
    axes.set_xlabel(with_unit(panel["x"]), fontsize=8)
    axes.set_ylabel(with_unit(panel["y"]), fontsize=8)
    names = names_of(panel)
    by_series: dict[str, list[Mapping[str, Any]]] = {}
    for point in panel["points"]:
        by_series.setdefault(point["series"], []).append(point)
    for number, (series, points) in enumerate(by_series.items()):
        colour = LINES[number % len(LINES)]
        style: Any = {"linestyle": DASHES[number % len(DASHES)], "marker": MARKERS[number % len(MARKERS)]}
        if names:
            style["linestyle"] = ""
        if panel["is_curve"]:
            style["marker"] = ""
        places = []
        for point in points:
            places.append(names.index(point["x"]) if names else point["x"])
        order = np.argsort(places, kind="stable")
        y, low, high = np.array([(point["y"], point["low"], point["high"]) for point in points])[order].T
        axes.errorbar(
            np.array(places)[order],
            y,
            yerr=np.maximum([y - low, high - y], 0),
            color=colours.get(colour, colour),
            markersize=4,
            linewidth=1.3,
            capsize=2.5,
            elinewidth=0.8,
            label=series[:MAX_LABEL_LENGTH],
            **style,
        )
    if len(by_series) > 1:
        axes.legend(fontsize=7, frameon=False, loc="best", handlelength=3.2)
    # Set the scale and tick labels of each axis: names, amounts or percentages.
    if names:
        axes.set_xticks(range(len(names)), [name[:MAX_LABEL_LENGTH] for name in names], rotation=30, ha="right")
    elif "x" in log:
        axes.set_xscale("log")
        # Set ticks at 1, 3, 10, 30, …: matplotlib's default labels all of 1 to 9 on a short logarithmic axis.
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.xaxis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(math.inf, math.inf)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_formatter(lambda value, _place: amount(value))
    if "y" in log:
        axes.set_yscale("log")
    elif panel["is_share"]:
        axes.yaxis.set_major_formatter(lambda value, _place: f"{100 * value:.3g} %")
