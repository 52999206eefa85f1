"""The parts of a run's page, each from plain data."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recmodels._src import page
from recmodels._src.data.store import SequenceStore
from recmodels._src.evaluation.result import Evaluation
from recmodels._src.recipe import Recipe
from recmodels._src.report.curves import Record, curves, dev_metrics
from recmodels._src.report.examples import Example

_STEPS = "training steps"
_NOT_RECORDED = "Recorded by `recmodels train` when a run finishes; this run has no such record."


def head(
    evaluation: Evaluation, store: SequenceStore, recipe: Recipe, progress: str
) -> page.Markup:
    """Protocol, data and where the run stands."""
    protocol, excluded = str(evaluation).splitlines()[:2]
    data = (
        f"{store.num_users:,} users, {store.num_items:,} items, {store.num_interactions:,} "
        f"interactions (digest {store.digest[:12]})"
    )
    chosen = "the last one" if recipe.selection == "last" else f"best {recipe.selection} on dev"
    rows = [
        ("protocol", f"{protocol}; {excluded}"),
        ("data", data),
        ("run", progress),
        ("tested and exported", f"step {evaluation.step:,}: {chosen}"),
    ]
    return page.fields_table(rows)


def curves_section(records: Sequence[Record], recipe: Recipe, tested_step: int) -> page.Markup:
    """Plots where they can be made, and the evaluations on dev as a table."""
    parts, has_plots = [], page.can_plot()
    if not records:
        parts.append(page.paragraph("Nothing is recorded yet."))
    elif has_plots:
        parts.append(curves(records, recipe.selection, tested_step))
    else:
        parts.append(
            page.paragraph(
                "Plots are left out, because matplotlib is not installed. Get them with "
                f"{page.INSTALL_PLOTS} and `recmodels report RUN`.",
                is_note=True,
            )
        )
    dev = [record for record in records if record["split"] == "dev"]
    if dev:
        names = dev_metrics(dev, recipe.selection)
        rows = [[f"{r['step']:,}", *(f"{r[name]:.4f}" for name in names)] for r in dev]
        steps = [record["step"] for record in dev]
        chosen = steps.index(tested_step) if tested_step in steps else None
        table = page.grid_table(["step", *names], rows, chosen=chosen)
        parts.append(page.details("Evaluations on the dev part", table, is_open=not has_plots))
    return page.section("Curves", *parts)


def results_section(evaluation: Evaluation) -> page.Markup:
    """Metrics with intervals, baselines beside them."""
    others = {name: values for name, values in evaluation.columns.items() if name != "model"}
    header = ["metric", "model", *(["95 % interval"] if evaluation.intervals else []), *others]
    rows = []
    for name, value in evaluation.model.items():
        cells = [name, f"{value:.4f}"]
        if evaluation.intervals:
            low_high = evaluation.intervals.get(name)
            cells.append("{:.4f} to {:.4f}".format(*low_high) if low_high else "")
        rows.append([*cells, *(f"{values[name]:.4f}" for values in others.values())])
    notes = []
    if evaluation.intervals:
        notes.append("Intervals: percentile bootstrap over users.")
    for name, size in evaluation.strata.items():
        notes.append(f"{name}: {size['num_items']:,} items, {size['num_users']:,} users.")
    notes += [f"{name} is left out: {reason}." for name, reason in evaluation.left_out.items()]
    parts = [page.grid_table(header, rows)]
    if notes:
        parts.append(page.paragraph(" ".join(notes), is_note=True))
    return page.section("Test", *parts)


def examples_section(examples: Sequence[Example]) -> page.Markup:
    """A few users: newest items, what they did next, what is recommended."""
    rows = [
        (
            example.user_id,
            _listed(map(page.markup, example.history)),
            _listed(map(page.markup, example.held_out)),
            _listed(_recommended(*each) for each in example.recommended),
        )
        for example in examples
    ]
    return page.section(
        "Example recommendations",
        page.grid_table(["user", "newest of the history", "held out", "recommended"], rows),
        page.paragraph(
            "Best first, in your ids; marked are items that were held out.", is_note=True
        ),
    )


def _listed(labels: Iterable[page.Markup]) -> page.Markup:
    labels = list(labels)
    # Titles get a line each: commas would not tell where one ends.
    return page.Markup(("<br>" if any(" (" in label for label in labels) else ", ").join(labels))


def _recommended(label: str, is_held_out: bool) -> page.Markup:
    text = page.markup(label)
    return page.Markup(f"<mark>{text}</mark>") if is_held_out else text


def memory_section(resources: Mapping[str, Any] | None) -> page.Markup:
    """What the training state took, by what it is."""
    if resources is None:
        return page.section("Memory", page.paragraph(_NOT_RECORDED))
    by_class = {name: size for name, size in resources["state_bytes"].items() if size}
    rows = [(name, _bytes(size)) for name, size in by_class.items()]
    rows.append(("state in all", _bytes(sum(by_class.values()))))
    if resources["device_peak_bytes"] is not None:
        rows.append(("highest use of the device", _bytes(resources["device_peak_bytes"])))
    rows.append(("highest use of the process", _bytes(resources["process_peak_bytes"])))
    where = f"Of each device ({resources['device']}, mesh {resources['mesh']})."
    return page.section("Memory", page.fields_table(rows), page.paragraph(where, is_note=True))


def time_section(resources: Mapping[str, Any] | None, step_ms: float | None) -> page.Markup:
    """What the time went into, the most first."""
    if resources is None:
        return page.section("Slowest parts", page.paragraph(_NOT_RECORDED))
    parts = sorted(resources["parts"].items(), key=lambda part: -part[1]["seconds"])
    total = sum(part["seconds"] for _, part in parts) or 1.0
    rows = []
    for name, part in parts:
        calls = part["calls"]
        each = f"{calls:,} times {part['seconds'] / calls:,.2f} s" if calls > 1 else ""
        if name == _STEPS and step_ms is not None:
            each = f"{step_ms:,.1f} ms a step (median)"
        rows.append((name, f"{part['seconds']:,.1f} s", f"{part['seconds'] / total:.1%}", each))
    return page.section(
        "Slowest parts",
        page.grid_table(["part", "time", "share", "each"], rows),
        page.paragraph(
            "Wall-clock time in the process that finished the run. Training steps include their "
            "compilation and reading the data; checkpoints are written in the background.",
            is_note=True,
        ),
    )


def recipe_section(recipe: Recipe) -> page.Markup:
    """Every field with its meaning."""
    rows = [
        (field.name, getattr(recipe, field.name), field.metadata["help"])
        for field in dataclasses.fields(recipe)
    ]
    return page.section("Recipe", page.grid_table(["field", "value", "meaning"], rows))


def versions_section(versions: Mapping[str, str]) -> page.Markup:
    """Versions with which the run was started."""
    return page.section("Versions", page.fields_table(list(versions.items())))


def _bytes(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size / 2**10:,.1f} KiB"
