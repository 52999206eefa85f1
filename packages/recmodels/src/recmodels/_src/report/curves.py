"""Curves of a run over its steps, from the records of metrics.jsonl."""

from collections.abc import Mapping, Sequence
from typing import Any

from recmodels._src import page

Record = Mapping[str, Any]


def dev_metrics(records: Sequence[Record], selection: str) -> list[str]:
    """Names of the metrics worth a curve: hits and NDCG of the longest list, MRR, the selecting."""
    dev = [record for record in records if record["split"] == "dev"]
    if not dev:
        return []
    names = [name for name in dev[0] if all(name in record for record in dev)]
    names = [name for name in names if name not in ("step", "split")]
    longest = max((int(name.split("@")[1]) for name in names if "@" in name), default=0)
    wanted = [f"hit@{longest}", f"ndcg@{longest}", "mrr", selection]
    return [name for name in dict.fromkeys(wanted) if name in names]


def curves(records: Sequence[Record], selection: str, tested_step: int) -> page.Markup:
    """Training loss and metrics on the dev part by step, the tested step marked.

    Args:
        records: of metrics.jsonl; at least one.
        selection: metric that chose the tested step, or "last".
        tested_step: the step that was tested and exported.
    """
    train = [record for record in records if record["split"] == "train"]
    dev = [record for record in records if record["split"] == "dev"]
    shown = {}
    if train:
        shown["Training loss"] = _plot(train, ["loss"], tested_step)
    if dev:
        shown["Dev part"] = _plot(dev, dev_metrics(dev, selection), tested_step, marker="o")
    return page.plots(shown)


def _plot(
    records: Sequence[Record], names: Sequence[str], tested_step: int, marker: str = ""
) -> page.Markup:
    figure, axes = page.new_figure()
    steps = [record["step"] for record in records]
    for name, color in zip(names, page.COLORS, strict=False):
        values = [record[name] for record in records]
        axes.plot(steps, values, color=color, linewidth=2, marker=marker, markersize=4, label=name)
    label = f"tested step {tested_step:,}"
    axes.axvline(tested_step, color="#52606d", linewidth=1, linestyle="--", label=label)
    axes.set_xlabel("step")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False)
    return page.figure_svg(figure)
