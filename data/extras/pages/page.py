"""Write self-contained HTML pages: a base template with the style, charts as inline SVG, and embedded thumbnails.

    write_page(Path("report.html"), "check.html", title="…", chart=svg(figure, "samples per class"), …)

The templates are in the `templates` folder, and extend base.html. A page loads nothing: its content security policy
(CSP) forbids scripts and requests. Names on a page come from untrusted files, so every value is escaped and converted
to `printable` text, which cannot change the text direction. Use the filter `| lines` for text with several lines.

A chart is a matplotlib Figure drawn with the placeholder colours INK, GRID and LINES, which `svg` replaces with the CSS
colours of the page, for light and dark mode. Values appear when the mouse is over a chart's `Tip`: this needs only CSS.
`save_figure` writes a figure for a paper instead: PNG, SVG and PDF, drawn in PAPER_STYLE at its size in print (COLUMN
or TEXT_WIDTH inches wide).
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import matplotlib
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape
from matplotlib.axes import Axes
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
# Colours outside a page, for figures of a paper, which colour-blind readers can distinguish: Okabe and Ito 2008, Color
# Universal Design, https://jfly.uni-koeln.de/color.
ON_PAPER = {INK: "#222222", GRID: "#dddddd"} | dict(
    zip(LINES, ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"), strict=True)
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
COLUMN = 3.25  # inches; ICML's template, and CVPR's within 1 %
TEXT_WIDTH = 6.75  # inches; both columns
# Type 42 embeds TrueType fonts in a PDF; many publishers refuse matplotlib's default, Type 3. In an SVG, text stays
# text (STYLE), which can be searched and edited; programs without DejaVu Sans show it in Arial or Helvetica.
PAPER_STYLE: Any = {
    **{key: ON_PAPER.get(value, value) if isinstance(value, str) else value for key, value in STYLE.items()},
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
    "pdf.fonttype": 42,
    "figure.facecolor": "white",
    # Points in print: the text of these templates has 10.
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
}
FORMATS: dict[str, dict[str, Any]] = {  # suffix → options; without a date, equal figures have equal bytes
    ".png": {"dpi": 300},
    ".svg": {"metadata": {"Date": None}},
    ".pdf": {"metadata": {"CreationDate": None}},
}
TIP_RADIUS = 7  # pixels around a point
TIP_LINE = 11  # pixels between lines of a tip
# Parts of matplotlib's SVG to remove: prolog, metadata, comments, namespaces that HTML does not need, and group ids,
# which would be repeated in several charts of a page.
NOT_DRAWN = re.compile(
    r'\A.*?(?=<svg)|<metadata>.*?</metadata>|<!--.*?-->| xmlns(:xlink)?="[^"]*"| id="[A-Za-z0-9]+_[0-9]+"', re.DOTALL
)


def charted() -> AbstractContextManager[None]:
    """Return the matplotlib context in which to create and draw a figure for a page."""
    return matplotlib.rc_context(STYLE)


class Tip(NamedTuple):
    """Text shown while the mouse is over a part of a chart: around a point or, without `y`, at its position x."""

    axes: Axes
    x: float  # like y, in the units of the axes
    y: float | None
    lines: Sequence[str]


def svg(figure: Figure, title: str, tips: Iterable[Tip] = ()) -> Markup:
    """Convert a figure to inline SVG in the page's colours, with its title as text for screen readers."""
    file = StringIO()
    with charted():
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = NOT_DRAWN.sub("", file.getvalue()).replace("'DejaVu Sans'", "sans-serif")
    # Round to a hundredth of a pixel, which halves the size of a curve.
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    for colour, variable in COLOURS.items():
        text = text.replace(colour, variable)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    return Markup(text.replace("</svg>", f"{tip_marks(figure, list(tips))}</svg>"))


def tip_marks(figure: Figure, tips: Sequence[Tip]) -> Markup:
    """Return the SVG elements of a drawn figure's tips; a page's style shows their text on hover."""
    height = figure.bbox.height
    at = Markup("")
    # The columns of the tips without y, from the middle between two neighbours to the next.
    columns: dict[Axes, list[float]] = {}
    for tip in tips:
        columns.setdefault(tip.axes, []).append(tip.axes.transData.transform((tip.x, 0))[0])
    for axes, places in columns.items():
        box = axes.bbox
        x_before = [box.x0, *places]
        x_after = [*places, box.x1]
        edges = [max(min((a + b) / 2, box.x1), box.x0) for a, b in zip(x_before, x_after, strict=True)]
        edges[0], edges[-1] = box.x0, box.x1
        for number, tip in enumerate(tip for tip in tips if tip.axes is axes):
            x = places[number]
            y = height - box.y1
            if tip.y is None:
                low, high = edges[number], edges[number + 1]
                shape = Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
                    low, y, max(high - low, 0), box.height
                )
                shape += Markup('<path d="M{:.1f},{:.1f}v{:.1f}"/>').format(x, y, box.height)
                y += TIP_LINE
            else:
                y = height - axes.transData.transform((tip.x, tip.y))[1]
                shape = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{}"/>').format(x, y, TIP_RADIUS)
                y -= TIP_RADIUS + TIP_LINE * (len(tip.lines) - 1)
                y = max(y, TIP_LINE)
            is_left = x < figure.bbox.width / 2
            anchor = "start" if is_left else "end"
            place = x + (5 if is_left else -5)
            words = Markup("")
            for line, part in enumerate(tip.lines):
                row = Markup('<tspan x="{:.1f}" y="{:.1f}">{}</tspan>')
                words += row.format(place, y + TIP_LINE * line, shown(part))
            at += Markup('<g class="tip">{}<text text-anchor="{}">{}</text></g>').format(shape, anchor, words)
    return at


def save_figure(figure: Figure, path: Path, suffixes: Iterable[str] = tuple(FORMATS)) -> list[Path]:
    """Write a figure that was drawn in PAPER_STYLE once for each suffix; return the paths."""
    paths = []
    for suffix in suffixes:
        paths.append(path.with_name(path.name + suffix))
        figure.savefig(paths[-1], **FORMATS[suffix])
        figure.set_layout_engine("none")  # the layout is final; each computation takes as long as drawing
    return paths


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
