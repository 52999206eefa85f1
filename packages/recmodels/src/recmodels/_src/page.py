"""Pages for people: one HTML file that needs no other, with plots as inline SVG."""

import html
import importlib.util
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recmodels._src.atomic import atomic_file
from recmodels._src.errors import UserError

ACCENT = "#2563a8"
COLORS = (ACCENT, "#b4561f", "#2f7d4f", "#7a3e9d")
_INK, _GRID = "#1f2933", "#d9dee3"
INSTALL_PLOTS = '`pip install "recmodels[report]"`'
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; margin-bottom: 1rem; }}
h2 {{ font-size: 1.15rem; margin: 2.2rem 0 .6rem; }}
p {{ margin: .4rem 0; }}
.table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: .35rem .8rem .35rem 0;
  border-bottom: 1px solid #d9dee3; font-variant-numeric: tabular-nums; }}
th {{ font-weight: 600; white-space: nowrap; }}
.chosen td, .chosen th {{ background: #eaf1f9; }}
mark {{ background: #cfe5d6; color: inherit; padding: 0 .2rem; }}
.note {{ color: #52606d; font-size: .9rem; }}
.plots {{ display: flex; flex-wrap: wrap; gap: 1.5rem; margin-top: 2rem; }}
details {{ margin-top: 1rem; }}
figure {{ flex: 1 1 24rem; margin: 0; }}
figcaption {{ font-weight: 600; margin-bottom: .4rem; }}
svg {{ width: 100%; height: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


class Markup(str):
    """HTML that is part of a page as it is; every other text is escaped."""

    __slots__ = ()


def markup(value: object) -> Markup:
    """`value` as HTML: escaped, unless it is `Markup` already."""
    return value if isinstance(value, Markup) else Markup(html.escape(str(value)))


def paragraph(text: object, *, is_note: bool = False) -> Markup:
    """A paragraph; a note is set smaller."""
    start = '<p class="note">' if is_note else "<p>"
    return Markup(f"{start}{markup(text)}</p>")


def section(title: str, *parts: Markup) -> Markup:
    """A part of the page under a heading."""
    return Markup("\n".join((f"<h2>{markup(title)}</h2>", *parts)))


def details(summary: str, part: Markup, *, is_open: bool) -> Markup:
    """A part that the reader can open and close."""
    start = "<details open>" if is_open else "<details>"
    return Markup(f"{start}<summary>{markup(summary)}</summary>\n{part}\n</details>")


def fields_table(rows: Sequence[tuple[object, object]]) -> Markup:
    """A table of labels with their texts."""
    lines = (f"<tr><th>{markup(label)}</th><td>{markup(text)}</td></tr>" for label, text in rows)
    return _table(lines)


def grid_table(
    header: Sequence[object],
    rows: Sequence[Sequence[object]],
    *,
    chosen: int | None = None,
) -> Markup:
    """A table with a heading for each column; the first cell of a row is its label.

    Args:
        header: one for each column.
        rows: cells by row.
        chosen: number of a row to set off from the others.
    """
    lines = ["<tr>" + "".join(f"<th>{markup(cell)}</th>" for cell in header) + "</tr>"]
    for number, (label, *cells) in enumerate(rows):
        start = '<tr class="chosen">' if number == chosen else "<tr>"
        data = "".join(f"<td>{markup(cell)}</td>" for cell in cells)
        lines.append(f"{start}<th>{markup(label)}</th>{data}</tr>")
    return _table(lines)


def _table(lines: Any) -> Markup:
    return Markup('<div class="table"><table>\n' + "\n".join(lines) + "\n</table></div>")


def plots(svg_by_caption: Mapping[str, Markup]) -> Markup:
    """Plots side by side as far as there is room."""
    figures = (
        f"<figure><figcaption>{markup(caption)}</figcaption>{svg}</figure>"
        for caption, svg in svg_by_caption.items()
    )
    return Markup('<div class="plots">\n' + "\n".join(figures) + "\n</div>")


def write_page(path: Path, *, title: str, parts: Sequence[Markup], overwrite: bool) -> None:
    """Writes a page; it appears complete or not at all.

    Args:
        path: file to write.
        title: heading.
        parts: content, from top to bottom.
        overwrite: whether an existing file may be replaced.

    Raises:
        UserError: `path` exists and `overwrite` is false.
    """
    page = _PAGE.format(title=markup(title), body="\n".join(parts))
    with atomic_file(path, overwrite=overwrite) as temporary:
        temporary.write_text(page, encoding="utf-8")


def can_plot() -> bool:
    """Whether the plotting library is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_can_plot(what: str, otherwise: str = "") -> None:
    """Call it before long work, so that a missing library shows at once.

    Args:
        what: what is to be made.
        otherwise: what else the caller can do.

    Raises:
        UserError: matplotlib is not installed.
    """
    if not can_plot():
        raise UserError(f"{what} needs matplotlib; install it with {INSTALL_PLOTS}{otherwise}")


def new_figure() -> tuple[Any, Any]:
    """Figure and axes of a plot in the style of the page; needs matplotlib."""
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK)
    return figure, axes


def figure_svg(figure: Any) -> Markup:
    """A figure of `new_figure` as an element of a page."""
    import matplotlib as mpl

    buffer = io.StringIO()
    # Text as text, and the same page for the same content: no random ids, no date.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "recmodels"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    content = buffer.getvalue()
    return Markup(content[content.index("<svg") :])
