"""Write the data report of `check` as one self-contained HTML file: totals, histograms, thumbnails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from data.extras.doctor.report import Report
from data.extras.pages import page
from data.images.decode import decode

MAX_SHARDS = 1000  # rows in the table of shards
MAX_TIPS = 60  # positions of the chart of classes that show their values on hover
CHARTED = ("shorter side", "width / height", "kB")  # keys of `report.ShardReport.spreads`


def write_page(report: Report, path: str | Path, world: int = 1) -> Path:
    """Write the page, with advice for training on `world` workers, and return its path."""
    # First the shards with a problem of their own, then those with the most bad samples.
    shards = sorted(report.shards, key=lambda shard: (not shard.problem, -shard.bad.counts.total()))
    more = ""
    if len(shards) > MAX_SHARDS:
        more = f": the worst {MAX_SHARDS} of {len(shards)}"
    # Keep the thumbnails in shard order, so that they represent the whole set and not its worst shards.
    thumbnails = []
    for shard in report.shards:
        for caption, encoded in shard.grid:
            thumbnails.append((caption, page.jpeg(decode(encoded))))

    # Histograms of samples per class, and of sides, shapes and file sizes; each is a figure, which fits on a phone.
    with page.charted():
        figures = [Figure(figsize=(4.2, 2.4), dpi=72, layout="constrained") for _ in range(1 + len(CHARTED))]
        axes = [figure.add_subplot() for figure in figures]
        counts = sorted((report.classes[label] for label in range(report.index.classes)), reverse=True)
        axes[0].fill_between(range(len(counts)), counts, step="mid", color=page.LINES[0])
        tips = []
        for rank in np.unique(np.linspace(0, len(counts) - 1, MAX_TIPS).astype(int)).tolist() if counts else []:
            tips.append(page.Tip(axes[0], rank, None, [f"{counts[rank]:,} samples", f"class of rank {rank + 1:,}"]))
        titles = ["samples per class, largest first"]
        axes[0].set(xlabel="class, by rank", ylim=(0, None))
        for axis, name in zip(axes[1:], CHARTED, strict=True):
            title = f"{name} of an image"
            spread = report.spreads.get(name)
            # If the set has no good image, the chart is empty.
            if spread:
                low = min(spread)
                high = spread.quantile(0.99)  # a long tail would squeeze the rest of the histogram
                if low == high:  # the histogram needs a range of nonzero width
                    low -= 0.5
                    high += 0.5
                heights, edges, _ = axis.hist(
                    list(spread), bins=40, range=(low, high), weights=list(spread.values()), color=page.LINES[0]
                )
                for images, start, end in zip(heights, edges[:-1], edges[1:], strict=True):
                    words = [f"{images:,.0f} images", f"from {start:.4g} to {end:.4g}"]
                    tips.append(page.Tip(axis, (start + end) / 2, None, words))
                title += f", median {spread.quantile(0.5):.4g}"
            axis.set(ylabel="images")
            titles.append(title)
        charts = []
        for figure, axis, title in zip(figures, axes, titles, strict=True):
            axis.set_title(title, fontsize=10, loc="left")
            axis.tick_params(labelsize=8)
            charts.append(page.svg(figure, title, [tip for tip in tips if tip.axes is axis]))

    page.write_page(
        Path(path),
        "check.html",
        title=f"Data report for {report.index.tables.name}, digest {report.index.digest[:12]}",
        summary="\n".join(report.lines(world)),
        charts=charts,
        shards=shards[:MAX_SHARDS],
        more=more,
        samples=thumbnails,
    )
    return Path(path)
