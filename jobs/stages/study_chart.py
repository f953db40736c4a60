"""The chart of a figure.json (jobs/stages/figure.py): as files for any viewer, and inline in the page of the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter

from data.page import DASHES, GRID, INK, LINES, MARKERS, ON_PAPER, STYLE, charted, svg
from pipeline.monitoring.telemetry import amount

WIDTH = 4.9  # inches of a panel
LONGEST_LABEL = 28  # characters


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
    figure = Figure(figsize=(WIDTH * len(panels), 3.4), dpi=72, layout=layout)
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
