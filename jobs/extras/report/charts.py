"""Draw the charts in the HTML report: curves over samples seen or time, and values with confidence intervals.

The values of a chart appear on hover: those of all its curves at a position, or those of a point (`tips_of`).

A long curve is reduced to a few hundred buckets, each with its minimum and maximum, so that a single outlier stays
visible. A second curve shows means; the legend gives the number of steps per mean. Lines differ in dashes, markers and
colour.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from data.extras.pages.page import DASHES, GRID, INK, LINES, MARKERS, Tip, charted, svg
from pipeline.values import amount, duration

BUCKETS = 360  # number of buckets of a curve, with two points each
MEANS = 75  # maximum number of points of a smoothed curve
MIN_SMOOTHED = 3  # minimum number of steps per mean; below this, a second curve is not useful
STEEP = 20.0  # the axis is logarithmic if the largest value exceeds this multiple of the median
# Inches at 72 pixels each. Pages enlarge charts by up to 50 %; no text is smaller than 9 pixels.
WIDTH = 4.2
HEIGHT = 2.2
LINE = 0.19  # height of a row of the legend
LABELS = 52  # maximum number of characters in a row of the legend
MAX_LABEL_LENGTH = 28
MAX_TICKS = 7  # of the x axis: more would overlap
MAX_TIPS = 60  # positions of a chart that show their values on hover
NO_STEPS = np.zeros(0, int)
PERCENT = FuncFormatter(lambda value, _place: f"{100 * value:.4g} %")
SIGNIFICANT = FuncFormatter(lambda value, _place: f"{value:.4g}")
PLAIN = FuncFormatter(lambda value, _place: f"{value:g}")
AMOUNT = FuncFormatter(lambda value, _place: amount(value))
SECONDS = FuncFormatter(lambda value, _place: duration(value))
# Label and format of an x axis.
SAMPLES_SEEN = ("samples seen", AMOUNT)
TIME = ("time", SECONDS)


class Line(NamedTuple):
    """A curve; `number` selects the dashes, marker and colour."""

    label: str
    x: np.ndarray
    y: np.ndarray
    steps: np.ndarray = NO_STEPS  # step of each point, for the table of numbers
    number: int = 0
    is_smoothed: bool = False  # draw the noisy single steps thin, with their means on top
    is_faded: bool = False  # lost steps, repeated by a later attempt
    spread: np.ndarray | None = None  # (2, n): distance from each value to the lower and upper end of its interval


class Mark(NamedTuple):
    """An event at a position on the x axis."""

    x: float
    kind: str  # "restart", "spike", "excluded" or "first difference"
    y: float | None = None


# Line styles of vertical lines for events; spikes are triangles on the curve. The legend lists each kind of event.
MARKED = {"restart": (0, (4, 3)), "excluded": (0, (1, 2)), "first difference": (0, (7, 2, 1, 2))}


def thin(x: np.ndarray, y: np.ndarray, buckets: int = BUCKETS) -> tuple[np.ndarray, np.ndarray]:
    """Reduce a curve to its first and last points, and the minimum and maximum in each bucket."""
    if len(x) <= 2 * buckets:
        return x, y
    edges = np.linspace(0, len(x), buckets + 1).astype(int)
    chosen = {0, len(x) - 1}
    # If no value in a bucket is finite, keep its first point, which is shown as a gap.
    for low, high in itertools.pairwise(edges.tolist()):
        part = y[low:high]
        is_finite = np.isfinite(part)
        chosen.add(int(low + np.argmin(np.where(is_finite, part, np.inf))))
        chosen.add(int(low + np.argmax(np.where(is_finite, part, -np.inf))))
    places = np.array(sorted(chosen))
    return x[places], y[places]


def smooth(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Smooth a curve: return the bucket centres, the bucket means, and the number of points per bucket.

    Non-finite values are ignored; a bucket without finite values becomes a gap.
    """
    size = max(1, math.ceil(len(y) / MEANS))
    firsts = np.arange(0, len(y), size)
    lasts = np.append(firsts[1:], len(y)) - 1
    is_finite = np.isfinite(y)
    counts = np.add.reduceat(is_finite.astype(float), firsts)
    sums = np.add.reduceat(np.where(is_finite, y, 0.0), firsts)
    means = np.divide(sums, counts, out=np.full(len(firsts), np.nan), where=counts > 0)
    return (x[firsts] + x[lasts]) / 2, means, size


def is_steep(values: np.ndarray) -> bool:
    """Return whether a curve with these finite values needs a logarithmic axis."""
    return bool(len(values)) and values.min() > 0 and bool(values.max() > STEEP * np.median(values))


def line_chart(
    title: str,
    lines: Sequence[Line],
    marks: Sequence[Mark] = (),
    *,
    reach: float | None = None,
    is_share: bool = False,
    is_from_zero: bool = False,
    axis: tuple[str, FuncFormatter] = SAMPLES_SEEN,
) -> Markup:
    """Draw curves over samples seen, or another `axis`, up to `reach`.

    `is_share` formats values as percentages; with `is_from_zero`, the y axis begins at 0.
    """
    with charted():
        figure, axes = figure_of()
        values = np.zeros(0)
        curves = 0
        for line in lines:
            values = np.append(values, line.y[np.isfinite(line.y)])
            curves += not line.is_faded
        if is_steep(values):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(PLAIN)  # typesetting powers of ten takes matplotlib half a second
            axes.yaxis.set_minor_formatter(NullFormatter())
        is_alone = curves == 1  # a single curve needs no label, because the title names it
        for line in lines:
            colour = LINES[line.number % len(LINES)]
            label = line.label[:MAX_LABEL_LENGTH]
            x, y = thin(line.x, line.y)
            if line.is_faded:
                axes.plot(x, y, color=INK, linewidth=0.8, linestyle=DASHES[2], alpha=0.6, label=label)
                continue
            if is_alone:
                label = ""
            if line.is_smoothed and len(line.y) >= MIN_SMOOTHED * MEANS:
                of_steps = "each step" if is_alone else ""
                axes.plot(x, y, color=colour, linewidth=0.6, alpha=0.45, label=of_steps)
                x, y, size = smooth(line.x, line.y)
                label = f"{label}, mean of {size:,} steps".removeprefix(", ")
            # With more lines than colours, a colour gets other dashes and another marker.
            style = line.number + line.number // len(LINES)
            marker = ""
            if not is_alone or len(x) == 1:
                marker = MARKERS[style % len(MARKERS)]
            dashes = DASHES[style % len(DASHES)]
            (curve,) = axes.plot(x, y, color=colour, linewidth=1.4, linestyle=dashes, label=label)
            curve.set(marker=marker, markersize=3.5, markevery=[len(x) - 1])
            if line.spread is not None:
                axes.errorbar(line.x, line.y, yerr=line.spread, fmt="none", ecolor=colour, capsize=3)
        kinds: set[str] = set()
        for mark in marks:
            label = "" if mark.kind in kinds else mark.kind  # list each kind once in the legend
            if mark.kind in MARKED:
                axes.axvline(mark.x, color=INK, linewidth=0.9, linestyle=MARKED[mark.kind], label=label)
            elif mark.y is not None:
                axes.plot([mark.x], [mark.y], color=LINES[1], marker="^", markersize=7, linestyle="", label=label)
            else:
                continue
            kinds.add(mark.kind)
        if reach:
            axes.set_xlim(-0.02 * reach, 1.02 * reach)
        axes.set_xlabel(axis[0], fontsize=8)
        axes.xaxis.set_major_formatter(axis[1])
        axes.locator_params(axis="x", nbins=MAX_TICKS)
        if is_from_zero:
            axes.set_ylim(0, 1.05 * values.max() if len(values) and values.max() > 0 else 1)
        if is_share:
            axes.yaxis.set_major_formatter(PERCENT)
        # Put the legend below the axes, so that it does not cover a curve.
        _, labels = axes.get_legend_handles_labels()
        columns = max(1, min(3, LABELS // max(map(len, labels), default=1)))
        rows = math.ceil(len(labels) / columns)
        if rows:
            legend = figure.legend(loc="lower left", ncols=columns, fontsize=8.5, frameon=False, borderaxespad=0.1)
            for handle in legend.get_lines():
                handle.set_linewidth(1.4)
            for text in legend.get_texts():
                text.set_parse_math(False)  # names can contain dollar signs
        tips = tips_of(axes, lines, PERCENT if is_share else SIGNIFICANT, axis)
        return drawn(figure, axes, title, HEIGHT + rows * LINE, below=0.45 + rows * LINE, tips=tips)


def tips_of(axes: Axes, lines: Sequence[Line], formatter: FuncFormatter, axis: tuple[str, FuncFormatter]) -> list[Tip]:
    """Return the text for at most MAX_TIPS positions: the value of each curve at or after the position."""
    shown = [line for line in lines if len(line.x) and not line.is_faded]
    if not shown:
        return []
    x = np.unique(np.concatenate([line.x for line in shown]))
    x = x[np.unique(np.linspace(0, len(x) - 1, MAX_TIPS).astype(int))]
    tips = []
    for place in x.tolist():
        words = [f"{axis[1](place)} {axis[0] if axis is SAMPLES_SEEN else ''}".rstrip()]
        for line in shown:
            nearest = min(int(np.searchsorted(line.x, place)), len(line.x) - 1)
            value = f"{formatter(line.y[nearest])}"
            if line.spread is not None:
                low, high = line.spread[:, nearest]
                value += f" ({formatter(line.y[nearest] - low)} to {formatter(line.y[nearest] + high)})"
            if len(line.steps):
                words[0] = f"step {line.steps[nearest]:,}, {words[0]}" if line is shown[0] else words[0]
            words.append(value if len(shown) == 1 else f"{line.label[:MAX_LABEL_LENGTH]} {value}")
        tips.append(Tip(axes, place, None, words))
    return tips


def value_chart(title: str, named: Sequence[tuple[str, float, float, float]]) -> Markup:
    """Draw values (name, value, low, high) with their intervals, one per row, from top to bottom."""
    with charted():
        figure, axes = figure_of()
        rows = np.arange(len(named))
        names, *columns = zip(*named, strict=True)
        value, low, high = np.array(columns, float)
        spread = [np.maximum(value - low, 0), np.maximum(high - value, 0)]
        axes.errorbar(value, rows, xerr=spread, fmt="o", color=LINES[0], ecolor=INK, elinewidth=1, capsize=3, ms=4)
        axes.set_yticks(rows, np.array(names, f"U{MAX_LABEL_LENGTH}"), fontsize=8, parse_math=False)
        axes.set_ylim(len(named) - 0.5, -0.5)
        axes.xaxis.set_major_formatter(PERCENT)
        tips = []
        for row, (name, *of_row) in enumerate(named):
            middle, start, end = (f"{100 * number:.2f} %" for number in of_row)
            tips.append(Tip(axes, of_row[0], row, [name[:MAX_LABEL_LENGTH], f"{middle} ({start} to {end})"]))
        return drawn(figure, axes, title, 0.8 + 0.24 * len(named), left=0.48, tips=tips)


def figure_of() -> tuple[Figure, Axes]:
    """Return a figure with empty axes."""
    figure = Figure(dpi=72)
    axes = figure.add_subplot()
    axes.tick_params(labelsize=8)
    axes.grid(color=GRID, linewidth=0.6)
    return figure, axes


def drawn(
    figure: Figure,
    axes: Axes,
    title: str,
    height: float,
    left: float = 0.13,
    below: float = 0.3,
    tips: Sequence[Tip] = (),
) -> Markup:
    """Render a chart as inline SVG.

    `height` and `below` are in inches; `left` is a fraction of the width. Screen readers read the title.
    """
    width = 0.97 - left
    figure.set_size_inches(WIDTH, height)
    axes.set_position((left, below / height, width, 1 - (below + 0.28) / height))
    axes.set_title(title, fontsize=10, loc="left", x=-(left - 0.015) / width, parse_math=False)
    return svg(figure, title, tips)
