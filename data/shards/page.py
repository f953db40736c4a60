"""The doctor's report as one HTML file that needs nothing else: totals, histograms, a grid of samples."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from pathlib import Path

import cv2
from jinja2 import Environment
from matplotlib.figure import Figure

from data.files import write_whole
from data.images.decode import decode
from data.shards.doctor import Report

MOST_SHARDS = 1000  # rows of the table
TEMPLATE = Environment(autoescape=True, trim_blocks=True).from_string("""<!doctype html>
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
<tr><td>{{ s.name }}<td>{{ s.samples }}<td>{{ s.good }}<td>{{ s.bad.total() }}<td>{{ s.problem }}
{% endfor %}
</table>
<h2>Samples</h2>
{% for key, image in samples %}
<figure><img src="data:image/jpeg;base64,{{ image }}"><figcaption>{{ key }}</figcaption></figure>
{% endfor %}
""")


def write_page(report: Report, path: str | Path, world: int = 1) -> Path:
    """Write the page, with advice for so many workers, and return its path."""
    worst = sorted(report.shards, key=lambda shard: (not shard.problem, -shard.bad.total()))
    page = TEMPLATE.render(
        name=f"Data report of {report.index.tables.name}, digest {report.index.digest[:12]}",
        summary="\n".join(report.lines(world)),
        chart=chart(report),
        shards=worst[:MOST_SHARDS],
        more=f": the first {MOST_SHARDS} of {len(worst)}, the worst first" if len(worst) > MOST_SHARDS else "",
        samples=[(key, thumbnail(image)) for shard in report.shards for key, image in shard.grid],
    )
    write_whole(Path(path), page)
    return Path(path)


def chart(report: Report) -> str:
    """Samples a class, and how sides, shapes and sizes are spread, as one PNG in base64."""
    spreads = report.spreads
    counts = sorted((report.classes[c] for c in range(report.index.classes)), reverse=True)
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, 2).ravel()
    axes[0].fill_between(range(len(counts)), counts, step="mid")
    axes[0].set(title="samples a class, most first", xlabel="class, by rank", ylim=(0, None))
    for axis, name in zip(axes[1:], ("shorter side", "width / height", "kB"), strict=True):
        title = f"{name} of an image"
        if name in spreads:
            low, high = min(spreads[name]), spreads[name].quantile(0.99)  # the longest tail would flatten all else
            around = (low, high) if high > low else (low - 0.5, low + 0.5)
            axis.hist(list(spreads[name]), bins=40, range=around, weights=list(spreads[name].values()))
            title += f", median {spreads[name].quantile(0.5):.4g}"
        axis.set(title=title, ylabel="images")
    png = BytesIO()
    figure.savefig(png, format="png", dpi=110)
    return b64encode(png.getvalue()).decode()


def thumbnail(encoded: bytes) -> str:
    """A small JPEG in base64."""
    image = decode(encoded)
    h, w = (max(1, side * 112 // max(image.shape[:2])) for side in image.shape[:2])
    small = cv2.resize(image[..., ::-1], (w, h), interpolation=cv2.INTER_AREA)
    return b64encode(cv2.imencode(".jpg", small)[1].tobytes()).decode()
