"""The page of a dataset card: its lines as a table, and two plots."""

from collections.abc import Sequence
from pathlib import Path

from recmodels._src import page


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
    check_can_plot()
    plots = {
        "Users by number of events": _lengths_svg(length_bins),
        "Events of an item by its rank": _popularity_svg(popularity_curve),
    }
    parts = [page.fields_table(lines), page.plots(plots)]
    page.write_page(path, title=title, parts=parts, overwrite=overwrite)


def check_can_plot() -> None:
    """Call it before long work, so that a missing library shows at once.

    Raises:
      UserError: matplotlib is not installed.
    """
    page.check_can_plot("the page of a dataset card", ", or leave out --out")


def _lengths_svg(length_bins: Sequence[tuple[int, int, int]]) -> page.Markup:
    figure, axes = page.new_figure()
    labels = [f"{low:,}" if low == high else f"{low:,} to {high:,}" for low, high, _ in length_bins]
    num_users = [num_users for _, _, num_users in length_bins]
    axes.bar(labels, num_users, color=page.ACCENT, width=0.8)
    axes.tick_params(axis="x", rotation=45)
    axes.set_xlabel("events of the user")
    axes.set_ylabel("users")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    return page.figure_svg(figure)


def _popularity_svg(popularity_curve: Sequence[tuple[int, int]]) -> page.Markup:
    figure, axes = page.new_figure()
    # An item that does not occur has no place on a logarithmic axis.
    points = [(rank, count) for rank, count in popularity_curve if count > 0]
    axes.plot(*zip(*points, strict=True), color=page.ACCENT, linewidth=2, marker=".")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rank of the item, most frequent first")
    axes.set_ylabel("events")
    return page.figure_svg(figure)
