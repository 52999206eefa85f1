"""Full-catalog evaluation: every user, every item, no sampling, baselines beside the model."""

from pathlib import Path

import numpy as np

import cutbce_ops
from recmodels._src.data.splits import Part
from recmodels._src.data.store import SequenceStore
from recmodels._src.evaluation.measure import Baselines, Detail, Measurement, Request, measure
from recmodels._src.evaluation.measure import training_counts as training_counts
from recmodels._src.evaluation.model import make_query_function as make_query_function
from recmodels._src.evaluation.result import Evaluation as Evaluation
from recmodels._src.evaluation.saved_ranks import ranks_identity, ranks_path, save_ranks
from recmodels._src.recipe import Recipe
from recmodels._src.train.run_directory import RunDirectory
from recmodels._src.train.step import TrainState


def evaluate(
    run_dir: str | Path,
    *,
    store: str | Path | SequenceStore | None = None,
    part: Part = "test",
    hide_seen: bool | None = None,
    ks: tuple[int, ...] | None = None,
    baselines: Baselines = "all",
    progress: bool = True,
) -> Evaluation:
    """Evaluates a run at the checkpoint that its recipe's `selection` chooses.

    Every user's ranks are kept in the run directory, as `ranks/test-hidden.parquet` or the like.

    Args:
        run_dir: folder written by `train`.
        store: sequence store of the run; None takes the one recorded in the run.
        part: held-out part, "dev" or "test".
        hide_seen: whether items of the history are taken out of the ranking; None takes the
            recipe's choice.
        ks: list lengths of the metrics; None takes 8 and 10, or the catalog when it is smaller.
        baselines: what stands beside the model: "none", "popularity", or "all": popularity,
            last-item Markov, item-kNN and random.
        progress: whether to show a progress bar.

    Returns:
        Metrics over all users that are long enough, with intervals of those of the model.

    Raises:
        UserError: no run or checkpoint there, another store, a `k` outside the catalog, or an
            unknown choice.
        TrainingDivergedError: parameters or scores of the model are not finite.
    """
    run = RunDirectory.open(run_dir)
    store = run.open_store(store)
    request = Request(
        part=part,
        hide_seen=run.recipe.hide_seen if hide_seen is None else hide_seen,
        ks=ks,
        baselines=baselines,
        detail="full",
        progress=progress,
    )
    return measure_run(run, run.restore(), store, request).evaluation


def measure_run(
    run: RunDirectory, state: TrainState, store: SequenceStore, request: Request
) -> Measurement:
    """Measures a run in a state and keeps every user's ranks with it."""
    found = measure(state.result, run.recipe, store, request, step=int(state.step))
    path = ranks_path(run.path, request.part, request.hide_seen)
    save_ranks(path, found.ranks, store, ranks_identity(state.result, store))
    return found


def evaluate_params(
    params: dict,
    recipe: Recipe,
    store: SequenceStore,
    *,
    part: Part,
    step: int,
    hide_seen: bool,
    ks: tuple[int, ...] | None = None,
    item_counts: np.ndarray | None = None,
    sharding: cutbce_ops.LossSharding | None = None,
    baselines: Baselines = "popularity",
    detail: Detail = "ranks",
    progress: bool = True,
) -> Evaluation:
    """Evaluates given parameters; see `evaluate`.

    Args:
        params: arrays of the model, see `SequenceModel`.
        recipe: how they were trained.
        store: the sequences.
        part: held-out part.
        step: training steps of the parameters, reported only.
        hide_seen: whether items of the history are taken out of the ranking.
        ks: list lengths of the metrics; None takes 8 and 10, or the catalog when it is smaller.
        item_counts: result of `training_counts`, if at hand.
        sharding: how the parameters are laid out over a mesh; None on one device.
        baselines: what stands beside the model; see `evaluate`.
        detail: "ranks" gives the metrics that follow from the ranks of the held-out items; "full"
            adds coverage and overlap of the lists, which take another sweep of the table, hits by
            popularity, and intervals.
        progress: whether to show a progress bar.

    Raises:
        UserError: a `k` is outside the catalog, or a choice is unknown.
        TrainingDivergedError: parameters or scores of the model are not finite.
    """
    request = Request(
        part=part,
        hide_seen=hide_seen,
        ks=ks,
        baselines=baselines,
        detail=detail,
        progress=progress,
    )
    return measure(
        params, recipe, store, request, step=step, item_counts=item_counts, sharding=sharding
    ).evaluation
