"""`report.html`: a run on one page, written by `train` at its end and again on demand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cutbce_ops
from recmodels._src import page
from recmodels._src.atomic import check_output
from recmodels._src.data.store import SequenceStore
from recmodels._src.evaluate import measure_run
from recmodels._src.evaluation.measure import Request
from recmodels._src.evaluation.result import Evaluation
from recmodels._src.recipe import Recipe
from recmodels._src.report import sections
from recmodels._src.report.examples import Example, find_examples
from recmodels._src.storage import as_path
from recmodels._src.train import processes
from recmodels._src.train.metrics_log import read_metrics
from recmodels._src.train.run_directory import RunDirectory
from recmodels._src.train.step import TrainState

_FILE = "report.html"


def write_report(
    run_dir: str | Path,
    out: str | Path | None = None,
    *,
    store: str | Path | SequenceStore | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Path:
    """Writes the page of a run: curves, test metrics, examples, memory, time and recipe.

    A finished run is shown as training measured it; one that is not is evaluated at its checkpoint
    first. The page is one file that needs no other.

    Args:
        run_dir: folder written by `train`.
        out: file to write; None takes `report.html` in the run directory, which is replaced.
        store: sequence store of the run; None takes the one recorded in the run.
        overwrite: whether an existing file `out` may be replaced.
        progress: whether to show a progress bar.

    Returns:
        The file.

    Raises:
        UserError: no run or checkpoint there, another store, `out` exists, or matplotlib is not
            installed.
        TrainingDivergedError: parameters or scores of the model are not finite.
    """
    run = RunDirectory.open(run_dir)
    path = run.path / _FILE if out is None else as_path(out)
    check_output(path, overwrite=overwrite or out is None)
    page.check_can_plot("the page of a run")
    store = run.open_store(store)
    summary, state = run.summary, run.restore()
    evaluation = _evaluation(run, summary)
    if evaluation is None:
        request = Request(
            part="test",
            hide_seen=run.recipe.hide_seen,
            baselines="all",
            detail="full",
            progress=progress,
        )
        evaluation = measure_run(run, state, store, request).evaluation
    examples = find_examples(state.result, run.recipe, store, step=int(state.step))
    _write(path, run, store, evaluation, examples, summary)
    return path


def write_training_report(
    run: RunDirectory,
    store: SequenceStore,
    state: TrainState,
    summary: dict[str, Any],
    sharding: cutbce_ops.LossSharding | None,
) -> None:
    """Writes the page at the end of a training; all processes take part, the first one writes.

    Without matplotlib the page has no plots and says so.

    Args:
        run: the run.
        store: its sequences.
        state: the state that was tested.
        summary: what `summary.json` will hold.
        sharding: how the state is laid out over a mesh; None on one device.
    """
    examples = find_examples(
        state.result, run.recipe, store, step=int(state.step), sharding=sharding
    )
    if processes.is_first():
        evaluation = Evaluation(**summary["test"])
        _write(run.path / _FILE, run, store, evaluation, examples, summary)


def _evaluation(run: RunDirectory, summary: dict[str, Any] | None) -> Evaluation | None:
    if summary is None:
        return None
    try:
        return Evaluation.from_dict(summary["test"])
    except ValueError:
        raise run.damaged_summary() from None


def _write(
    path: Path,
    run: RunDirectory,
    store: SequenceStore,
    evaluation: Evaluation,
    examples: Sequence[Example],
    summary: dict[str, Any] | None,
) -> None:
    recipe, records = run.recipe, read_metrics(run.path)
    resources = (summary or {}).get("resources")
    parts = [
        sections.head(evaluation, store, recipe, _progress(recipe, summary, evaluation.step)),
        sections.curves_section(records, recipe, evaluation.step),
        sections.results_section(evaluation),
        sections.examples_section(examples),
        sections.memory_section(resources),
        sections.time_section(resources, (summary or {}).get("step_ms")),
        sections.recipe_section(recipe),
        sections.versions_section(_versions(run)),
    ]
    data = store.meta.get("source", {}).get("name", "a sequence store")
    page.write_page(path, title=f"{recipe.name} on {data}", parts=parts, overwrite=True)


def _versions(run: RunDirectory) -> dict[str, str]:
    config = json.loads((run.path / "config.json").read_text(encoding="utf-8"))
    return config.get("versions", {})


def _progress(recipe: Recipe, summary: dict[str, Any] | None, step: int) -> str:
    if summary is None:
        return f"not finished; shown is the checkpoint of step {step:,} of {recipe.num_steps:,}"
    if summary["step"] < recipe.num_steps:
        done = f"{summary['step']:,} of {recipe.num_steps:,}"
        return f"finished after {done} steps, out of patience"
    return f"finished after {summary['step']:,} steps"
