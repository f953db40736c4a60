"""The charts of a run's page: curves over samples seen, and values with their intervals.

A curve of a million steps is thinned to some hundred buckets, of which the least and the greatest value stay: a single
step that jumped is still seen. Lines differ by their dashes and markers too, which the legend shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from data.page import DASHES, GRID, INK, LINES, MARKERS, charted, svg
from pipeline.monitoring.telemetry import amount

BUCKETS = 360  # of a curve; two points each
STEEP = 20.0  # times the median, from which on values are drawn on a logarithmic axis
SIZE = (4.9, 2.5)  # inches at 72 pixels
LONGEST_LABEL = 28  # characters
NO_STEPS = np.zeros(0, int)
PERCENT = FuncFormatter(lambda value, _place: f"{100 * value:g} %")


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


def line_chart(title: str, lines: Sequence[Line], marks: Sequence[Mark] = (), *, is_share: bool = False) -> Markup:
    """Draw curves over the samples seen; a share is written in percent."""
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
            label = line.label[:LONGEST_LABEL]
            axes.plot(x, y, linewidth=1.3, marker=marker, markersize=3.5, markevery=[len(x) - 1], label=label, **style)
            if line.spread is not None:
                axes.errorbar(line.x, line.y, yerr=line.spread, fmt="none", ecolor=style["color"], capsize=3)
        kinds: set[str] = set()
        for mark in marks:
            label = "" if mark.kind in kinds else mark.kind  # once in the legend
            if mark.kind in MARKED:
                axes.axvline(mark.x, color=INK, linewidth=0.9, linestyle=MARKED[mark.kind], label=label)
            elif mark.y is not None:
                axes.plot([mark.x], [mark.y], color=LINES[1], marker="^", markersize=7, linestyle="", label=label)
            else:
                continue
            kinds.add(mark.kind)
        axes.set_xlabel("samples seen", fontsize=8)
        if is_share:
            axes.yaxis.set_major_formatter(PERCENT)
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
        axes.xaxis.set_major_formatter(PERCENT)
        return svg(figure, title)


def figure_of(title: str, height: float = SIZE[1], left: float = 0.12) -> tuple[Figure, Axes]:
    """Return an empty chart; its title is the same text that is read out."""
    figure = Figure(figsize=(SIZE[0], height), dpi=72)
    bottom = 0.45 / height
    axes = figure.add_axes((left, bottom, 0.97 - left, 1 - bottom - 0.28 / height))
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(labelsize=7)
    axes.grid(color=GRID, linewidth=0.6)
    return figure, axes
