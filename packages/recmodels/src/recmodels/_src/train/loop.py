"""Training from a sequence store to a finished run directory, resumable at any moment."""

import contextlib
import dataclasses
import math
import statistics
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from tqdm import tqdm

from recmodels._src.bundle import is_whole, write_bundle
from recmodels._src.data.pipeline import (
    evaluation_batches,
    train_batches,
    training_window_lengths,
)
from recmodels._src.data.splits import PAD_TARGET, Split
from recmodels._src.data.store import SequenceStore
from recmodels._src.errors import TrainingInterruptedError, UserError
from recmodels._src.evaluate import Evaluation, evaluate_params, training_counts
from recmodels._src.recipe import Recipe
from recmodels._src.recipes import get_recipe
from recmodels._src.report.write import write_training_report
from recmodels._src.storage import as_path
from recmodels._src.train import processes
from recmodels._src.train.allocator import freed_memory_kept
from recmodels._src.train.checkpoints import Checkpoints
from recmodels._src.train.interruption import Interruption
from recmodels._src.train.loss_window import LossWindow, diverged
from recmodels._src.train.metrics_log import MetricsLog, missing_evaluations, read_metrics
from recmodels._src.train.placement import Placement, item_categories
from recmodels._src.train.resources import Timing, used_resources
from recmodels._src.train.run_directory import RunDirectory
from recmodels._src.train.selection import DevSelection
from recmodels._src.train.step import TrainState, is_usable
from recmodels._src.train.warm_start import check_source, start_from

# A batch with more positions than this many standard deviations above the mean computes the loss
# for all of them, padding too: rare, and it costs a second compilation.
_CAPACITY_DEVIATIONS = 4
_CAPACITY_STEP = 64  # keeps the shapes of similar data sets equal


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a finished run leaves behind."""

    run_dir: Path  # the run directory
    bundle: Path  # folder that `recserve build` reads
    step: int  # training steps done; `test.step` is the one that was selected
    loss_curve: list[tuple[int, float]]  # (step, mean loss since the previous record)
    test: Evaluation  # model and popularity on the test part
    step_ms: float | None  # median wall time of a step in the process that finished the run
    already_finished: bool  # True when there was nothing left to do


@freed_memory_kept()
def train(
    recipe: str | Recipe,
    store: str | Path | SequenceStore,
    run_dir: str | Path,
    *,
    start_from: str | Path | None = None,
    progress: bool = True,
) -> TrainResult:
    """Trains a recipe on a store, evaluates it on the test part and writes the bundle.

    Calling it again with the same arguments continues an interrupted run from its last checkpoint,
    with exactly the results of an uninterrupted one, and returns at once when the run is finished,
    after writing its bundle again if that was removed.

    Args:
        recipe: a recipe or the name of a built-in one.
        store: sequence store written by `prepare`.
        run_dir: folder of the run; made when absent.
        start_from: finished run of a model of the same sizes; this one begins with its parameters,
            matched by item id, so that the catalog may have grown. None begins at random.
        progress: whether to show progress bars.

    Processes joined by `jax.distributed.initialize()` train one model together when all of them
    call this with the same arguments and folders that all of them see.

    Returns:
        Loss curve, test metrics and the place of the bundle.

    Raises:
        UserError: unusable store or recipe, or `run_dir` holds something else.
        TrainingDivergedError: loss, parameters or scores are not finite; the message names the
            checkpoint that is kept.
        TrainingInterruptedError: the process got SIGTERM; a checkpoint of that step was saved.
    """
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    store = store if isinstance(store, SequenceStore) else SequenceStore.open(store)
    progress = progress and processes.is_first()
    if start_from is not None and not (as_path(run_dir) / "config.json").exists():
        check_source(as_path(start_from), recipe, store)
    num_categories = len(store.item_categories.names) if recipe.item_categories else 0
    placement = Placement.of_this_machine(recipe, store.num_items + 1, num_categories)
    rank, num_ranks = placement.batch_share(recipe.batch_size)
    data = train_batches(store, recipe, rank=rank, num_ranks=num_ranks)
    _check_evaluable(recipe, store)
    run = RunDirectory.create_or_resume(
        run_dir, recipe, store, num_rows=placement.num_rows, start_from=start_from
    )
    placement = placement.with_rows(run.num_rows)
    with run.locked():
        if run.summary is not None:
            if processes.any_of_all(not is_whole(run.path / "bundle")):
                _write_bundle(run, store, run.restore(placement))
            return _result(run, already_finished=True)
        _train(run, store, placement, data, progress)
        return _result(run, already_finished=False)


def _train(
    run: RunDirectory,
    store: SequenceStore,
    placement: Placement,
    data: grain.DatasetIterator,
    progress: bool,
) -> None:
    checkpoints = run.checkpoints()
    # From here to the end, so that a SIGTERM while the first step compiles is not lost either.
    with contextlib.closing(checkpoints), Interruption() as interruption:
        counts = training_counts(store, run.recipe)
        state, losses = _start(run, store, placement, checkpoints, counts)
        step = int(state.step)
        data.set_state(data.get_state() | {"next_index": step})
        with contextlib.closing(MetricsLog(run.path, step)) as log:
            processes.wait_for_all("younger records were dropped")
            records = read_metrics(run.path)
            _warn_of_lost_records(run, records, step)
            selection = DevSelection(run.recipe, records)
            window = LossWindow(checkpoints, losses)
            trainer = _Trainer(
                run, store, counts, placement, checkpoints, log, selection, window,
                interruption, progress,
            )  # fmt: skip
            state, step_ms = trainer.timing.of("training steps", trainer.fit, state, data)
            trainer.timing.of("checkpoints", checkpoints.wait)
            state = _selected(state, selection, checkpoints, placement, run.recipe)
            _finish(trainer, state, step_ms)


@dataclasses.dataclass
class _Trainer:
    """The step loop with its logging, evaluation and checkpoints."""

    run: RunDirectory
    store: SequenceStore
    counts: np.ndarray
    placement: Placement
    checkpoints: Checkpoints
    log: MetricsLog
    selection: DevSelection
    window: "LossWindow"
    interruption: Interruption
    progress: bool
    step: int = 0  # steps done
    timing: Timing = dataclasses.field(default_factory=Timing)

    def fit(self, state: TrainState, data: Iterator[Any]) -> tuple[TrainState, float | None]:
        """Runs the remaining steps; returns the final state and the median step time."""
        recipe, self.step = self.run.recipe, int(state.step)
        step_function = self.placement.compile_step(recipe)
        categories = item_categories(
            recipe, self.store, self.placement.num_rows, self.placement.loss_sharding
        )
        usual = usual_capacity(training_window_lengths(self.store, recipe), recipe)
        # Compaction would move positions between devices, and parts of a batch differ in length.
        is_compacted = self.placement.mesh is None and recipe.accumulate_steps == 1
        speeds = []
        with self._bar(self.step) as bar:
            while self.step < recipe.num_steps and not self.selection.is_out_of_patience:
                batch = next(data)
                capacity = loss_capacity(batch["targets"], usual) if is_compacted else None
                side = self.placement.side_inputs(batch, categories)
                state, step_metrics = step_function(
                    state, *self.placement.global_batch(batch), capacity, *side
                )
                self.step += 1
                self.window.add(self.step, step_metrics)
                bar.update()
                if self.step % recipe.log_every == 0 or self.step == recipe.num_steps:
                    speeds.append(self._record(bar))
                if self._evaluate_and_save(state):
                    self.window.restart_clock()
        return state, statistics.median(speeds) if speeds else None

    def _bar(self, first: int) -> tqdm:
        total = self.run.recipe.num_steps
        return tqdm(
            initial=first, total=total, desc="train", unit="step", disable=not self.progress
        )

    def _record(self, bar: tqdm) -> float:
        loss, step_ms = self.window.finish()
        self.log.write(self.step, "train", {"loss": loss})
        self.log.write_board(self.step, "train", {"step_ms": step_ms})
        bar.set_postfix(loss=f"{loss:.4g}")
        return step_ms

    def _evaluate_and_save(self, state: TrainState) -> bool:
        recipe, is_stopping = self.run.recipe, self._is_stopping()
        is_last = self.step == recipe.num_steps
        evaluates = self.step % recipe.evaluate_every == 0 or is_last
        saves = self.step % recipe.checkpoint_every == 0 or is_last or is_stopping
        if evaluates or saves:
            # The loss of a step is that before its update, so the update is checked by itself.
            self.window.read_pending()
            if not is_usable(state.params):
                raise diverged(self.step, "the parameters are not finite", self.checkpoints)
        if evaluates:
            is_best = self.selection.add(self.step, self._evaluate(state))
            saves = saves or is_best or self.selection.is_out_of_patience
        if saves:
            # Records first: a checkpoint whose records are missing would lose them for good.
            self.log.sync()
            best_step = self.selection.best_step
            self.timing.of(
                "checkpoints", self.checkpoints.save, state, self.window.losses, best_step
            )
        if is_stopping and not is_last:
            raise TrainingInterruptedError(
                f"stopped by SIGTERM after step {self.step}, which is saved; the same command "
                "continues from there."
            )
        return evaluates or saves

    def _is_stopping(self) -> bool:
        # Processes have to stop after the same step, and asking the others costs time.
        if jax.process_count() == 1:
            return self.interruption.requested
        asks = self.step % self.run.recipe.log_every == 0
        return asks and processes.any_of_all(self.interruption.requested)

    def _evaluate(self, state: TrainState) -> dict[str, float]:
        dev = self.timing.of(
            "evaluations on dev",
            evaluate_params,
            state.result,
            self.run.recipe,
            self.store,
            part="dev",
            step=self.step,
            hide_seen=self.run.recipe.hide_seen,
            item_counts=self.counts,
            sharding=self.placement.loss_sharding,
            progress=False,
        )
        self.log.write(self.step, "dev", dev.model)
        return dev.model


def usual_capacity(window_lengths: np.ndarray, recipe: Recipe) -> int:
    """Number of positions with a target that hardly any batch exceeds.

    Args:
        window_lengths: `[num_windows]` training positions of every window.
        recipe: gives the windows in a batch and the positions in a window.
    """
    mean, deviation = window_lengths.mean(), window_lengths.std()
    batch_size = recipe.batch_size
    bound = batch_size * mean + _CAPACITY_DEVIATIONS * math.sqrt(batch_size) * deviation
    return min(math.ceil(bound / _CAPACITY_STEP) * _CAPACITY_STEP, batch_size * recipe.max_length)


def loss_capacity(targets: np.ndarray, usual: int) -> int:
    """Positions to compute the loss for: the usual number, or all when a batch has more."""
    has_target = (targets != PAD_TARGET).any(-1)
    return usual if has_target.sum() <= usual else has_target.size


def _start(
    run: RunDirectory,
    store: SequenceStore,
    placement: Placement,
    checkpoints: Checkpoints,
    counts: np.ndarray,
) -> tuple[TrainState, list[float]]:
    if checkpoints.latest_step is None:
        state = placement.initial_state(run.recipe, counts)
        if run.start_from is not None:
            state = start_from(state, as_path(run.start_from), run, store, placement)
        return state, []
    return checkpoints.restore(placement.state(run.recipe))


def _warn_of_lost_records(run: RunDirectory, records: list[dict[str, Any]], step: int) -> None:
    missing = missing_evaluations(records, run.recipe, step)
    if missing and processes.is_first():
        chosen = "" if run.recipe.selection == "last" else "; the best step is one of the others"
        warnings.warn(
            f"metrics.jsonl of {run.path} lacks the evaluation of step {missing[0]}, which was "
            f"recorded before the checkpoint of step {step}{chosen}.",
            stacklevel=4,
        )


def _selected(
    state: TrainState,
    selection: DevSelection,
    checkpoints: Checkpoints,
    placement: Placement,
    recipe: Recipe,
) -> TrainState:
    """The state that is tested and exported."""
    best_step, step = selection.best_step, int(state.step)
    if best_step in (None, step):
        return state
    if best_step not in checkpoints.steps:
        warnings.warn(
            f"the checkpoint of step {best_step}, which {recipe.selection} on dev chose, is gone; "
            f"step {step} is tested and exported.",
            stacklevel=4,
        )
        return state
    return checkpoints.restore(placement.state(recipe), step=best_step)[0]


def _finish(trainer: _Trainer, state: TrainState, step_ms: float | None) -> None:
    run, store, timing = trainer.run, trainer.store, trainer.timing
    step, sharding = int(state.step), trainer.placement.loss_sharding
    test = timing.of(
        "evaluation on test",
        evaluate_params,
        state.result,
        run.recipe,
        store,
        part="test",
        step=step,
        hide_seen=run.recipe.hide_seen,
        item_counts=trainer.counts,
        sharding=sharding,
        baselines="all",
        detail="full",
        progress=trainer.progress,
    )
    trainer.log.write(step, "test", test.model)
    trainer.log.sync()
    timing.of("bundle", _write_bundle, run, store, state)
    resources = used_resources(state, trainer.placement, timing)
    summary = {"step": trainer.step, "step_ms": step_ms, "resources": resources}
    summary["test"] = test.to_dict()
    write_training_report(run, store, state, summary, sharding)
    if processes.is_first():
        run.write_json("summary.json", summary)
    processes.wait_for_all("the run was finished")


def _write_bundle(run: RunDirectory, store: SequenceStore, state: TrainState) -> None:
    # All processes take part in collecting the arrays; one writes them.
    params, step = jax.tree.map(processes.to_host, state.result), int(state.step)
    if processes.is_first():
        write_bundle(run.path / "bundle", run.recipe, params, store, step=step, overwrite=True)


def _result(run: RunDirectory, *, already_finished: bool) -> TrainResult:
    summary = run.summary
    assert summary is not None
    records = read_metrics(run.path)
    try:
        test = Evaluation.from_dict(summary["test"])
    except ValueError:
        raise run.damaged_summary() from None
    return TrainResult(
        run_dir=run.path,
        bundle=run.path / "bundle",
        step=summary["step"],
        loss_curve=[(line["step"], line["loss"]) for line in records if line["split"] == "train"],
        test=test,
        step_ms=summary["step_ms"],
        already_finished=already_finished,
    )


def _check_evaluable(recipe: Recipe, store: SequenceStore) -> None:
    # Making the iterator checks that there is someone to evaluate: better now than hours later.
    split = Split(recipe.protocol, recipe.num_targets)
    evaluation_batches(store, split, "test", recipe.max_length, 1)
    if recipe.selection != "last" and int(recipe.selection.split("@")[1]) > store.num_items:
        raise UserError(
            f"`selection` {recipe.selection} needs more items than the {store.num_items} of "
            f"{store.location}."
        )
