"""The doctor's report as one HTML file that needs nothing else: totals, histograms, a grid of samples."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from pathlib import Path

import cv2
from jinja2 import Environment
from matplotlib.figure import Figure

from data.checks import printable
from data.files import write_whole
from data.images.decode import decode
from data.shards.report import Report

MOST_SHARDS = 1000  # rows of the table
THUMBNAIL = 112  # pixels of the longer side
CHARTED = ("shorter side", "width / height", "kB")  # names of `report.ShardReport.spreads`
# Keys and names come out of tars that others made: autoescape keeps them from being read as HTML, and
# `printable` from turning the direction of the text.
ENVIRONMENT = Environment(autoescape=True, trim_blocks=True)
ENVIRONMENT.filters["printable"] = printable
TEMPLATE = ENVIRONMENT.from_string("""<!doctype html>
<meta charset="utf-8"><title>{{ name }}</title>
<style>
body { font: 15px system-ui; margin: 2rem auto; max-width: 60rem; color: #222 }
pre { background: #f4f4f4; padding: 1rem; overflow: auto }
img { max-width: 100%; height: auto }
figure { display: inline-block; margin: .3rem; text-align: center }
figcaption { font-size: 11px; color: #777 }
td, th { padding: .15rem .8rem; text-align: right }
td:first-child, td:last-child, th:first-child, th:last-child { text-align: left }
</style>
<h1>{{ name }}</h1>
<pre>{{ summary }}</pre>
<img src="data:image/png;base64,{{ chart }}">
<h2>Shards{{ more }}</h2>
<table><tr><th>shard<th>samples<th>good<th>bad<th>problem
{% for s in shards %}
<tr><td>{{ s.name | printable }}<td>{{ s.samples }}<td>{{ s.good }}<td>{{ s.bad.total() }}
<td>{{ s.problem | printable }}
{% endfor %}
</table>
<h2>Samples</h2>
{% for key, image in samples %}
<figure><img src="data:image/jpeg;base64,{{ image }}"><figcaption>{{ key }}</figcaption></figure>
{% endfor %}
""")


def write_page(report: Report, path: str | Path, world: int = 1) -> Path:
    """Write the page, with advice for so many workers, and return its path."""
    # Problems of a whole shard first, then the most bad samples.
    shards = sorted(report.shards, key=lambda shard: (not shard.problem, -shard.bad.total()))
    more = ""
    if len(shards) > MOST_SHARDS:
        more = f": the first {MOST_SHARDS} of {len(shards)}, the worst first"
    # The images stay in the order of the shards, so that the grid shows the whole set and not its worst part.
    thumbnails = []
    for shard in report.shards:
        for image in shard.grid:
            thumbnails.append((printable(image.caption), thumbnail(image.encoded)))

    # Samples a class, and how sides, shapes and sizes are spread.
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, 2).ravel()
    counts = sorted((report.classes[label] for label in range(report.index.classes)), reverse=True)
    axes[0].fill_between(range(len(counts)), counts, step="mid")
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
            axis.hist(list(spread), bins=40, range=(low, high), weights=list(spread.values()))
            title += f", median {spread.quantile(0.5):.4g}"
        axis.set(title=title, ylabel="images")
    chart = BytesIO()
    figure.savefig(chart, format="png", dpi=110)

    page = TEMPLATE.render(
        name=f"Data report of {report.index.tables.name}, digest {report.index.digest[:12]}",
        summary="\n".join(report.lines(world)),
        chart=b64encode(chart.getvalue()).decode(),
        shards=shards[:MOST_SHARDS],
        more=more,
        samples=thumbnails,
    )
    write_whole(Path(path), page)
    return Path(path)


def thumbnail(encoded: bytes) -> str:
    """Return a small JPEG in base64."""
    image = decode(encoded)  # H, W, RGB
    longer_side = max(image.shape[:2])
    # A sliver of an image would otherwise come out with no rows or columns.
    height = max(1, image.shape[0] * THUMBNAIL // longer_side)
    width = max(1, image.shape[1] * THUMBNAIL // longer_side)
    # OpenCV takes the channels as BGR when it encodes.
    small = cv2.resize(image[..., ::-1], (width, height), interpolation=cv2.INTER_AREA)
    return b64encode(cv2.imencode(".jpg", small)[1].tobytes()).decode()
