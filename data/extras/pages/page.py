"""Write self-contained HTML pages: a base template with the style, charts as inline SVG, and embedded thumbnails.

    write_page(Path("report.html"), "check.html", title="…", chart=svg(figure, "samples per class"), …)

The templates are in the `templates` folder, and extend base.html. A page loads nothing: its content security policy
(CSP) forbids scripts and requests. Names on a page come from untrusted files, so every value is escaped and converted
to `printable` text, which cannot change the text direction. Use the filter `| lines` for text with several lines.

A chart is a matplotlib Figure drawn with the placeholder colours INK, GRID and LINES, which `svg` replaces with the CSS
colours of the page, for light and dark mode.
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

THUMBNAIL = 112  # pixels; longer side of a thumbnail
INK = "#010101"
GRID = "#010102"
LINES = ("#010103", "#010104", "#010105", "#010106", "#010107", "#010108")
# Dashes and markers distinguish the lines for readers who cannot distinguish the colours.
DASHES = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (6, 2, 1, 2)), (0, (9, 3)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")
# Colours for SVG files outside a page, which have no CSS.
ON_PAPER = {INK: "#222222", GRID: "#dddddd"} | dict(
    zip(LINES, ("#1f5fa8", "#c4441c", "#2f7d32", "#7b3fa0", "#a07000", "#00788c"), strict=True)
)
COLOURS = {INK: "var(--ink)", GRID: "var(--line)"} | {line: f"var(--c{n})" for n, line in enumerate(LINES, 1)}
STYLE: Any = {
    "svg.fonttype": "none",  # keep text as text, in the reader's font
    "svg.hashsalt": "patchline",  # make the output deterministic
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
# Parts of matplotlib's SVG to remove: prolog, metadata, comments, namespaces that HTML does not need, and group ids,
# which would be repeated in several charts of a page.
NOT_DRAWN = re.compile(
    r'\A.*?(?=<svg)|<metadata>.*?</metadata>|<!--.*?-->| xmlns(:xlink)?="[^"]*"| id="[A-Za-z0-9]+_[0-9]+"', re.DOTALL
)


def charted() -> AbstractContextManager[None]:
    """Return the matplotlib context in which to create and draw a figure for a page."""
    return matplotlib.rc_context(STYLE)


def svg(figure: Figure, title: str) -> Markup:
    """Convert a figure to inline SVG in the page's colours, with its title as text for screen readers."""
    file = StringIO()
    with charted():
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = NOT_DRAWN.sub("", file.getvalue()).replace("'DejaVu Sans'", "sans-serif")
    # Round to a hundredth of a pixel, which halves the size of a curve.
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    for colour, variable in COLOURS.items():
        text = text.replace(colour, variable)
    return Markup(text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1))


def write_page(path: Path, template: str, **values: object) -> None:
    """Render a template of data/extras/pages/templates, and write the page atomically."""
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=shown)
    # Filters for all templates.
    environment.filters["lines"] = lambda text: escape(printable_lines(text))
    # Allow a line break in a path only after a slash.
    environment.filters["path"] = lambda text: escape(printable(text)).replace("/", Markup("/<wbr>"))
    environment.filters["first_line"] = lambda text: text.partition("\n")[0]
    environment.filters["thousands"] = "{:,}".format
    environment.filters["percent"] = "{:.2%}".format
    write_atomically(path, environment.get_template(template).render(values))


def shown(value: object) -> object:
    """Make a template value safe to display: keep our own markup, and make other text printable on one line."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value


def jpeg(image: cv2.typing.MatLike, longest: int = THUMBNAIL) -> Markup:
    """Encode pixels (H, W, RGB) as a base64 JPEG with sides of at most `longest` pixels."""
    return Markup(b64encode(jpeg_bytes(image, longest)).decode())


def jpeg_bytes(image: cv2.typing.MatLike, longest: int = THUMBNAIL) -> bytes:
    """Encode pixels (H, W, RGB) as a JPEG with sides of at most `longest` pixels."""
    longer_side = max(image.shape[:2])
    longest = min(longest, max(longer_side, THUMBNAIL))
    # At least one pixel, even for an extreme aspect ratio.
    height = max(1, image.shape[0] * longest // longer_side)
    width = max(1, image.shape[1] * longest // longer_side)
    # OpenCV encodes BGR.
    small = cv2.resize(image[..., ::-1], (width, height), interpolation=cv2.INTER_AREA)
    return cv2.imencode(".jpg", small)[1].tobytes()
