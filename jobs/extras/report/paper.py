"""Write learning curves and the figures of studies as vector files for a paper: `report RUN … --figures FOLDER`.

1. Collect the charts: held-out metric, held-out loss and training loss, each over samples and over training time. With
   several runs, a chart has a line for each run; a sweep is a group of runs, and so is a stage shared by several runs.
2. Draw each chart in the width of a column, without a title, because a paper has a caption.
3. Write PDF and SVG (data/extras/pages/page.py: fonts, colours, sizes), named after the stage and the quantity.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from data.extras.pages.page import COLUMN, DASHES, GRID, INK, LINES, MARKERS, ON_PAPER, PAPER_STYLE, save_figure
from data.storage import Storage
from jobs.extras.history import RunHistory, StageHistory, read_run
from jobs.extras.report import charts
from jobs.extras.report.page import LearningCurve, learning_curves, names_of, runs_table, stages_of_runs
from jobs.extras.studies.chart import write_study_chart
from pipeline import artifacts

HEIGHT = 2.1  # inches
VECTOR = (".pdf", ".svg")
FEW = 12  # markers of a line; each point has one if there are at most as many
TIME_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
MAX_DRAWN = 4  # with at most as many lines, single steps are drawn too, thin and pale
QUANTITIES = ("held-out", "training loss")  # beginnings of the titles of written curves


def write_figures(paths: Sequence[Path], folder: Path, stores: Mapping[Path, Storage] | None = None) -> list[Path]:
    """Write the figures of one or several runs to a folder; return the paths of the files.

    If a path is the local copy of a run in an object store, `stores` maps the path to that store.
    """
    runs = [read_run(path, (stores or {}).get(path)) for path in paths]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(PAPER_STYLE):
        for name, of_runs in groups_of(runs).items():
            for curve in learning_curves(of_runs, runs_table(of_runs), ()):
                if curve.title.startswith(QUANTITIES):
                    written += save_figure(draw(curve), folder / file_name(name, curve), VECTOR)
        names = names_of(runs)
        for run in runs:
            for stage in run.stages:
                if (stage.folder / "figure.json").exists():
                    record = artifacts.read_record(stage.folder / "figure.json")
                    name = stage.name if len(runs) == 1 else f"{names[run.path].replace('/', '-')}-{stage.name}"
                    written += write_study_chart(record, folder / name, VECTOR)
    return written


def groups_of(runs: Sequence[RunHistory]) -> dict[str, dict[str, StageHistory]]:
    """Return the stages that share a figure: name of the group → label of the line → stage."""
    if len(runs) > 1:
        return {name: of_runs for name, of_runs in stages_of_runs(runs).items() if len(of_runs) > 1}
    groups: dict[str, dict[str, StageHistory]] = {}
    for stage in runs[0].trained:
        # The runs of the sweep `pretrain` are stages named pretrain.ROW or pretrain.ROW.SEED.
        sweep, _, row = stage.name.partition(".")
        groups.setdefault(sweep, {})[row or stage.name] = stage
    return groups


def file_name(group: str, curve: LearningCurve) -> str:
    """Return the name of a figure's files without suffix, such as pretrain-training-loss-over-time."""
    quantity = curve.title
    if curve.axis is charts.TIME:
        quantity += " over time"
    return re.sub(r"[^A-Za-z0-9._]+", "-", f"{group} {quantity}").strip("-")


def draw(curve: LearningCurve) -> Figure:
    """Draw a learning curve in the width of a column; call this and save the figure in PAPER_STYLE."""
    figure = Figure(figsize=(COLUMN, HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(color=ON_PAPER[GRID])
    own = [line for line in curve.lines if not line.is_faded]
    values = np.concatenate([line.y[np.isfinite(line.y)] for line in curve.lines])
    if charts.is_steep(values):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    # Seconds become the largest unit of which the axis has at least two.
    label = "images seen"
    lines = curve.lines
    if curve.axis is charts.TIME:
        reach = max((float(line.x[-1]) for line in lines if len(line.x)), default=0.0)
        unit = next((name for name, seconds in TIME_UNITS.items() if reach >= 2 * seconds), "seconds")
        label = f"training time ({unit})"
        lines = [line._replace(x=line.x / TIME_UNITS[unit]) for line in lines]
    else:
        axes.xaxis.set_major_formatter(charts.AMOUNT)
    axes.set_xlabel(label)
    sizes = set()
    for line in lines:
        if line.is_faded:
            axes.plot(line.x, line.y, color="#bbbbbb", linewidth=0.5, zorder=1, label=line.label)
            continue
        colour = ON_PAPER[LINES[line.number % len(LINES)]]
        style = line.number + line.number // len(LINES)
        x, y = charts.thin(line.x, line.y)
        if line.is_smoothed and len(line.y) >= charts.MIN_SMOOTHED * charts.MEANS:
            if len(own) <= MAX_DRAWN:
                axes.plot(x, y, color=colour, linewidth=0.3, alpha=0.35)
            x, y, size = charts.smooth(line.x, line.y)
            sizes.add(size)
        name = line.label[: charts.MAX_LABEL_LENGTH] if len(own) > 1 else ""
        (drawn,) = axes.plot(x, y, color=colour, linestyle=DASHES[style % len(DASHES)], label=name)
        if line.spread is not None:
            axes.errorbar(line.x, line.y, yerr=line.spread, fmt="none", ecolor=colour, elinewidth=0.7, capsize=2)
        if len(own) > 1 or len(x) <= FEW:
            # Dashes and markers distinguish the lines in grey too.
            drawn.set(marker=MARKERS[style % len(MARKERS)], markersize=3, markevery=max(1, len(x) // FEW))
    quantity = curve.title
    if sizes:
        quantity += f"\n(means of {' or '.join(f'{size:,}' for size in sorted(sizes))} steps)"
    axes.set_ylabel(quantity, parse_math=False)
    axes.locator_params(axis="x", nbins=5)
    if curve.is_share:
        axes.yaxis.set_major_formatter(charts.PERCENT)
    if len(curve.lines) > 1:
        legend = axes.legend(loc="best", handlelength=2.6, ncols=1 if len(own) <= 6 else 2)
        for text in legend.get_texts():
            text.set_parse_math(False)  # names can contain dollar signs
    axes.tick_params(color=ON_PAPER[INK])
    return figure
