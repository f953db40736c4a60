"""The doctor's report as one HTML file that needs nothing else: totals, histograms, a grid of samples."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from data.extras.doctor.report import Report
from data.extras.pages import page
from data.images.decode import decode

MOST_SHARDS = 1000  # rows of the table
CHARTED = ("shorter side", "width / height", "kB")  # names of `report.ShardReport.spreads`


def write_page(report: Report, path: str | Path, world: int = 1) -> Path:
    """Write the page, with advice for so many workers, and return its path."""
    # Problems of a whole shard first, then the most bad samples.
    shards = sorted(report.shards, key=lambda shard: (not shard.problem, -shard.bad.counts.total()))
    more = ""
    if len(shards) > MOST_SHARDS:
        more = f": the first {MOST_SHARDS} of {len(shards)}, the worst first"
    # The images stay in the order of the shards, so that the grid shows the whole set and not its worst part.
    thumbnails = []
    for shard in report.shards:
        for caption, encoded in shard.grid:
            thumbnails.append((caption, page.jpeg(decode(encoded))))

    # Samples a class, and how sides, shapes and sizes are spread.
    with page.charted():
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots(2, 2).ravel()
        counts = sorted((report.classes[label] for label in range(report.index.classes)), reverse=True)
        axes[0].fill_between(range(len(counts)), counts, step="mid", color=page.LINES[0])
        axes[0].set(title="samples a class, most first", xlabel="class, by rank", ylim=(0, None))
        for axis, name in zip(axes[1:], CHARTED, strict=True):
            title = f"{name} of an image"
            spread = report.spreads.get(name)
            # Where no image was good, the chart is empty.
            if spread:
                low = min(spread)
                high = spread.quantile(0.99)  # the longest tail would flatten all else
                if low == high:  # images that are all alike still need a bar of some width
                    low -= 0.5
                    high += 0.5
                axis.hist(list(spread), bins=40, range=(low, high), weights=list(spread.values()), color=page.LINES[0])
                title += f", median {spread.quantile(0.5):.4g}"
            axis.set(title=title, ylabel="images")

    page.write_page(
        Path(path),
        "check.html",
        title=f"Data report of {report.index.tables.name}, digest {report.index.digest[:12]}",
        summary="\n".join(report.lines(world)),
        chart=page.svg(figure, "samples a class, and how sides, shapes and sizes are spread"),
        shards=shards[:MOST_SHARDS],
        more=more,
        samples=thumbnails,
    )
    return Path(path)
