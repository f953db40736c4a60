"""The doctor's report as one HTML file that needs nothing else: totals, histograms, a grid of samples."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from pathlib import Path

import cv2
import numpy as np

from data.decode import decode
from data.doctor import Report

STYLE = """body{font:15px system-ui;margin:2rem auto;max-width:60rem;color:#222}h2{margin-top:2rem}
pre{background:#f4f4f4;padding:1rem;overflow:auto}figure{display:inline-block;margin:.3rem;text-align:center}
figcaption{font-size:11px;color:#777}rect{fill:#4878a8}td,th{padding:.15rem .8rem;text-align:right}"""


def write_page(report: Report, path: str | Path) -> Path:
    """Write the page and return its path."""
    sides = np.concatenate([shard.sides for shard in report.shards])
    sizes = np.concatenate([shard.sizes for shard in report.shards])
    counts = np.array([report.classes[c] for c in range(report.index.classes)])
    parts = [
        f"<!doctype html><meta charset=utf-8><title>data</title><style>{STYLE}</style><h1>Data report</h1>",
        f"<pre>{escape(chr(10).join(report.lines()))}</pre>",
        "<h2>Samples a class, most first</h2>",
        bars(np.sort(counts)[::-1][:: max(1, len(counts) // 400)]),
        *(histogram(title, values) for title, values in (
            ("Shorter side, pixels", sides.min(1, initial=1 << 30)),
            ("Width / height", sides[:, 1] / np.maximum(sides[:, 0], 1)),
            ("Bytes an image", sizes),
        )),
        "<h2>Shards</h2><table><tr><th>shard<th>samples<th>good<th>bad<th>problem",
        *(
            f"<tr><td>{escape(s.name)}<td>{s.samples}<td>{len(s.sizes)}<td>{s.bad.total()}<td>{escape(s.problem)}"
            for s in report.shards[:1000]
        ),
        "</table><h2>Samples</h2>",
        *(figure(key, image) for shard in report.shards for key, image in shard.grid),
    ]  # fmt: skip
    Path(path).write_text("\n".join(parts))
    return Path(path)


def histogram(title: str, values: np.ndarray) -> str:
    if not len(values):
        return ""
    counts, edges = np.histogram(values, 40, (values.min(), np.quantile(values, 0.99) + 1e-9))
    legend = f"{edges[0]:.4g} … {edges[-1]:.4g} (99 %), median {np.median(values):.4g}"
    return f"<h2>{title}</h2>{bars(counts)}<p>{legend}"


def bars(counts: np.ndarray) -> str:
    """A bar chart as inline SVG."""
    width, most = 900 / max(len(counts), 1), max(int(counts.max(initial=0)), 1)
    rects = "".join(
        f'<rect x="{n * width:.1f}" y="{120 - 120 * count / most:.1f}" width="{max(width - 1, 0.5):.1f}" '
        f'height="{120 * count / most:.1f}"><title>{count}</title></rect>'
        for n, count in enumerate(counts)
    )
    return f'<svg width="900" height="120">{rects}</svg>'


def figure(key: str, encoded: bytes) -> str:
    image = decode(encoded)
    scale = 112 / max(image.shape[:2])
    small = cv2.resize(image[..., ::-1], None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    data = b64encode(cv2.imencode(".jpg", small)[1].tobytes()).decode()
    caption = f"<figcaption>{escape(key[-24:])}</figcaption>"
    return f'<figure><img src="data:image/jpeg;base64,{data}">{caption}</figure>'
