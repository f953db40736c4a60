"""Pages of HTML that open offline: one base with the style, charts as inline SVG, small images.

    write_page(Path("report.html"), "check.html", title="…", chart=svg(figure, "samples a class"), …)

The templates lie beside this file, in `templates`; each fills the body of base.html. Nothing on a page is asked of
anybody: its policy (CSP) forbids scripts and requests. Names come out of files that others made: every value is
escaped, and written as `printable` text, which cannot turn the direction of the line; `| lines` is for texts of
several.

A chart is a matplotlib Figure drawn in INK, GRID and LINES. They stand for the page's own colours, light or dark.
"""

from __future__ import annotations

import re
from base64 import b64encode
from contextlib import AbstractContextManager
from io import StringIO
from pathlib import Path
from typing import Any

import cv2
import matplotlib
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from data.checks import printable, printable_lines
from data.files import write_atomically

THUMBNAIL = 112  # pixels of the longer side
INK = "#010101"
GRID = "#010102"
LINES = ("#010103", "#010104", "#010105", "#010106", "#010107", "#010108")
# Lines differ by these too, so that nobody needs the colour.
DASHES = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (6, 2, 1, 2)), (0, (9, 3)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")
# Colours of a file that nothing but a viewer opens, in the place of the page's.
ON_PAPER = {INK: "#222222", GRID: "#dddddd"} | dict(
    zip(LINES, ("#1f5fa8", "#c4441c", "#2f7d32", "#7b3fa0", "#a07000", "#00788c"), strict=True)
)
COLOURS = {INK: "var(--ink)", GRID: "var(--line)"} | {line: f"var(--c{n})" for n, line in enumerate(LINES, 1)}
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text, in a font of the reader
    "svg.hashsalt": "patchline",  # the same figure makes the same bytes
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
# What matplotlib writes beside the drawing: a prolog, metadata, namespaces that HTML knows, and names of groups that
# several charts would share.
NOT_DRAWN = re.compile(
    r'\A.*?(?=<svg)|<metadata>.*?</metadata>|<!--.*?-->| xmlns(:xlink)?="[^"]*"| id="[A-Za-z0-9]+_[0-9]+"', re.DOTALL
)


def charted() -> AbstractContextManager[None]:
    """Return the context in which a figure of a page is made and drawn."""
    return matplotlib.rc_context(STYLE)


def svg(figure: Figure, title: str) -> Markup:
    """Return a figure as inline SVG in the page's colours, with its title for those who cannot see it."""
    file = StringIO()
    with charted():
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = NOT_DRAWN.sub("", file.getvalue()).replace("'DejaVu Sans'", "sans-serif")
    # A hundredth of a pixel is enough: half of the bytes of a curve are digits behind it.
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    for colour, variable in COLOURS.items():
        text = text.replace(colour, variable)
    return Markup(text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1))


def write_page(path: Path, template: str, **values: object) -> None:
    """Write a page of a template in data/extras/pages/templates; it appears whole or not at all."""
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=shown)
    # How values are written, for all templates.
    environment.filters["lines"] = lambda text: escape(printable_lines(text))
    # A path goes on in the next line behind one of its strokes, and not in the middle of a name.
    environment.filters["path"] = lambda text: escape(printable(text)).replace("/", Markup("/<wbr>"))
    environment.filters["first_line"] = lambda text: text.partition("\n")[0]
    environment.filters["thousands"] = "{:,}".format
    environment.filters["percent"] = "{:.2%}".format
    write_atomically(path, environment.get_template(template).render(values))


def shown(value: object) -> object:
    """Return a value of a template as it is shown: markup of ours as it is, all other text printable, in one line."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value


def jpeg(image: cv2.typing.MatLike, longest: int = THUMBNAIL) -> Markup:
    """Return pixels (H, W, RGB) as a JPEG in base64, no side of it longer than `longest`."""
    return Markup(b64encode(jpeg_bytes(image, longest)).decode())


def jpeg_bytes(image: cv2.typing.MatLike, longest: int = THUMBNAIL) -> bytes:
    """Return pixels (H, W, RGB) as a JPEG, no side of it longer than `longest`."""
    longer_side = max(image.shape[:2])
    longest = min(longest, max(longer_side, THUMBNAIL))
    # A sliver of an image would otherwise come out with no rows or columns.
    height = max(1, image.shape[0] * longest // longer_side)
    width = max(1, image.shape[1] * longest // longer_side)
    # OpenCV takes the channels as BGR when it encodes.
    small = cv2.resize(image[..., ::-1], (width, height), interpolation=cv2.INTER_AREA)
    return cv2.imencode(".jpg", small)[1].tobytes()
