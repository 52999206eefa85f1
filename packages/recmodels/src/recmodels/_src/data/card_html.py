"""The page of a dataset card: its lines as a table, and two plots as inline SVG."""

import html
import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recmodels._src.atomic import atomic_file
from recmodels._src.errors import UserError

_INK, _ACCENT, _GRID = "#1f2933", "#2563a8", "#d9dee3"
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
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: .35rem .8rem .35rem 0;
  border-bottom: 1px solid #d9dee3; font-variant-numeric: tabular-nums; }}
th {{ font-weight: 600; white-space: nowrap; }}
.plots {{ display: flex; flex-wrap: wrap; gap: 1.5rem; margin-top: 2rem; }}
figure {{ flex: 1 1 24rem; margin: 0; }}
figcaption {{ font-weight: 600; margin-bottom: .4rem; }}
svg {{ width: 100%; height: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
<table>
{rows}
</table>
<div class="plots">
{plots}
</div>
</body>
</html>
"""


def write_card_html(
    path: Path,
    *,
    title: str,
    lines: Sequence[tuple[str, str]],
    length_bins: Sequence[tuple[int, int, int]],
    popularity_curve: Sequence[tuple[int, int]],
    overwrite: bool,
) -> None:
    """Writes the page; one file, which needs no other.

    Args:
      path: file to write.
      title: heading.
      lines: label and text of each row of the table.
      length_bins: fewest events, most events, number of users.
      popularity_curve: rank and number of events of items.
      overwrite: whether an existing file may be replaced.

    Raises:
      UserError: `path` exists, or matplotlib is not installed.
    """
    plots = {
        "Users by number of events": _lengths_svg(length_bins),
        "Events of an item by its rank": _popularity_svg(popularity_curve),
    }
    page = _PAGE.format(
        title=html.escape(title),
        rows="\n".join(
            f"<tr><th>{html.escape(label)}</th><td>{html.escape(text)}</td></tr>"
            for label, text in lines
        ),
        plots="\n".join(
            f"<figure><figcaption>{caption}</figcaption>{svg}</figure>"
            for caption, svg in plots.items()
        ),
    )
    with atomic_file(path, overwrite=overwrite) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _lengths_svg(length_bins: Sequence[tuple[int, int, int]]) -> str:
    figure, axes = _figure()
    labels = [f"{low:,}" if low == high else f"{low:,} to {high:,}" for low, high, _ in length_bins]
    axes.bar(labels, [num_users for _, _, num_users in length_bins], color=_ACCENT, width=0.8)
    axes.tick_params(axis="x", rotation=45)
    axes.set_xlabel("events of the user")
    axes.set_ylabel("users")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    return _svg(figure)


def _popularity_svg(popularity_curve: Sequence[tuple[int, int]]) -> str:
    figure, axes = _figure()
    # An item that does not occur has no place on a logarithmic axis.
    points = [(rank, count) for rank, count in popularity_curve if count > 0]
    axes.plot(*zip(*points, strict=True), color=_ACCENT, linewidth=2, marker=".")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rank of the item, most frequent first")
    axes.set_ylabel("events")
    return _svg(figure)


def check_can_plot() -> None:
    """Call it before long work, so that a missing library shows at once.

    Raises:
      UserError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "the page of a dataset card needs matplotlib; install it with "
            '`pip install "recmodels[report]"`, or leave out --out'
        )


def _figure() -> tuple[Any, Any]:
    check_can_plot()
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK)
    return figure, axes


def _svg(figure: Any) -> str:
    import matplotlib as mpl

    buffer = io.StringIO()
    # Text as text, and the same card for the same store: no random ids, no date.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "recmodels"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    content = buffer.getvalue()
    return content[content.index("<svg") :]
