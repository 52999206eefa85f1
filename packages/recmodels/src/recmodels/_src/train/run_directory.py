"""The run directory: what was asked for, on which data, and what came out."""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recmodels._src import storage
from recmodels._src.atomic import atomic_file
from recmodels._src.data.store import SequenceStore
from recmodels._src.errors import UserError
from recmodels._src.recipe import Recipe
from recmodels._src.train import processes
from recmodels._src.train.checkpoints import Checkpoints
from recmodels._src.train.metrics_log import missing_evaluations, read_metrics
from recmodels._src.train.placement import Placement
from recmodels._src.train.run_config import (
    RunConfig,
    check_store,
    parse_config,
    store_identity,
)
from recmodels._src.train.run_config import installed_version as installed_version
from recmodels._src.train.selection import DevSelection
from recmodels._src.train.step import TrainState


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """One training run on disk: config.json, checkpoints/, metrics.jsonl, tensorboard/, bundle/.

    `summary.json` is written last, so its presence means that the run is finished.
    """

    path: Path  # the folder
    recipe: Recipe  # what is trained
    store: dict[str, Any]  # identity of the sequence store: path, digest and counts
    num_rows: int  # rows of the item table, unused ones at its end included
    start_from: str | None = None  # finished run whose parameters it began with

    @classmethod
    def create_or_resume(
        cls,
        path: str | Path,
        recipe: Recipe,
        store: SequenceStore,
        *,
        num_rows: int,
        start_from: str | Path | None = None,
    ) -> "RunDirectory":
        """Starts a run in `path`, or continues the one that is there with the same settings.

        Args:
            path: folder of the run.
            recipe: what is trained.
            store: the sequences.
            num_rows: rows of the item table of a new run; an old one keeps its own.
            start_from: finished run whose parameters a new run begins with.

        Raises:
            UserError: `path` holds something else, or a run with another recipe or store.
        """
        path = storage.as_path(path)
        source = None if start_from is None else storage.as_path(start_from)
        begins_with = None if source is None else str(storage.absolute(source))
        is_run = (path / "config.json").exists()
        is_other = path.exists() and (not path.is_dir() or any(_visible(path)))
        processes.wait_for_all("the run was looked for")  # before the first process makes it
        if is_run:
            run = cls.open(path)
            _check_same(run, recipe, store)
            if run.start_from != begins_with:
                raise UserError(
                    f"{run.path} was started from {run.start_from or 'random parameters'}, not "
                    f"from {begins_with or 'random parameters'}; choose another --out."
                )
            return run
        if is_other:
            raise UserError(f"{path} exists and is not a training run; choose another --out.")
        run = cls(path, recipe, store_identity(store), num_rows, begins_with)
        if processes.is_first():
            run.write_json("config.json", run._config())
        processes.wait_for_all("the run was made")
        return run

    @classmethod
    def open(cls, path: str | Path) -> "RunDirectory":
        """Opens an existing run.

        Raises:
            UserError: there is no run at `path`, its config.json is damaged, or it was written by
                another version.
        """
        path = storage.as_path(path)
        file = path / "config.json"
        try:
            text = file.read_bytes()
        except OSError:
            raise UserError(f"{path} is not a training run: it has no config.json.") from None
        return cls(path, *parse_config(text, str(file)))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from training in this folder; a killed one leaves no lock behind.

        An object store has no such lock: there nothing keeps them from it.

        Raises:
            UserError: another process is training here.
        """
        # The first process holds the lock for all.
        if not processes.is_first() or storage.is_remote(self.path):
            yield
            return
        folder = os.open(self.path, os.O_RDONLY)
        try:
            self._lock(folder)
            self._remove_leftovers()
            yield
        finally:
            os.close(folder)

    def _lock(self, folder: int) -> None:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is training in {self.path}; wait for it or choose another --out."
            ) from None

    @property
    def summary(self) -> dict[str, Any] | None:
        """Content of summary.json; None while the run is not finished.

        Raises:
            UserError: it is damaged.
        """
        path = self.path / "summary.json"
        if not path.exists():
            return None
        try:
            summary = json.loads(path.read_bytes())
        except ValueError:
            raise self.damaged_summary() from None
        if not _is_summary(summary):
            raise self.damaged_summary()
        return summary

    def damaged_summary(self) -> UserError:
        """The error for a summary.json without the content it should have."""
        return UserError(
            f"{self.path / 'summary.json'} is damaged; remove it and run the same "
            "`recmodels train` again to get it back from the last checkpoint."
        )

    def open_store(self, store: str | Path | SequenceStore | None) -> SequenceStore:
        """The store of this run, from `store` or else from where it was in training."""
        if store is None:
            store = storage.as_path(self.store["path"])
            if not (store / "meta.json").is_file():
                raise UserError(
                    f"{store} is not a sequence store; if the store of {self.path} was moved, pass "
                    "its new place with --data."
                )
        if not isinstance(store, SequenceStore):
            store = SequenceStore.open(store)
        check_store(self.store, store, str(self.path))
        return store

    def checkpoints(self) -> Checkpoints:
        """The checkpoint folder, for writing."""
        return self._checkpoints(self.recipe.keep_checkpoints)

    def restore(self, placement: Placement | None = None) -> TrainState:
        """State of the checkpoint that counts by the recipe's `selection`.

        Args:
            placement: where it goes, with all processes taking part; one device by default.

        Raises:
            UserError: there is no complete checkpoint yet, or it is damaged.
        """
        checkpoints = self._checkpoints(None) if (self.path / "checkpoints").exists() else None
        if checkpoints is None or checkpoints.latest_step is None:
            raise UserError(f"{self.path} has no complete checkpoint yet; run `recmodels train`.")
        if placement is None:
            num_categories = self.store["num_categories"] if self.recipe.item_categories else 0
            vocab_size = self.store["num_items"] + 1
            placement = Placement(vocab_size, self.num_rows, num_categories=num_categories)
        try:
            step = self._chosen_step(checkpoints.steps)
            return checkpoints.restore(placement.state(self.recipe), step=step)[0]
        finally:
            checkpoints.close()

    def _checkpoints(self, keep: int | None) -> Checkpoints:
        trained = {f"recipe.{name}": each for name, each in self.recipe.model_settings().items()}
        trained |= {f"store.{name}": self.store[name] for name in ("digest", "num_items")}
        return Checkpoints(self.path / "checkpoints", keep, trained)

    def _chosen_step(self, steps: list[int]) -> int | None:
        """Step of the checkpoint that `selection` chose; None takes the newest."""
        if self.recipe.selection == "last":
            return None
        newest = steps[-1]
        if self.summary is not None:
            chosen = self.summary["test"].get("step")  # metrics.jsonl may have been cut since
        else:
            records = read_metrics(self.path)
            chosen = DevSelection(self.recipe, records).best_step
            if missing := missing_evaluations(records, self.recipe, newest):
                taken = newest if chosen is None else chosen
                warnings.warn(
                    f"metrics.jsonl of {self.path} lacks the evaluation of step {missing[0]}, so "
                    f"the step with the best {self.recipe.selection} is not sure; step {taken}, "
                    f"the {'newest' if chosen is None else 'best recorded'} one, is taken.",
                    stacklevel=3,
                )
        if chosen is None or chosen in steps:
            return chosen
        # A run in progress may have recorded an evaluation whose checkpoint is being written.
        warnings.warn(
            f"{self.path} has no checkpoint of step {chosen}, which {self.recipe.selection} on dev "
            f"chose; that of step {newest}, the newest one, is taken.",
            stacklevel=3,
        )
        return None

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Writes a JSON file of the run; it appears complete or not at all."""
        with atomic_file(self.path / name, overwrite=True) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _config(self) -> dict[str, Any]:
        return RunConfig(self.recipe, self.store, self.num_rows, self.start_from).to_dict()

    def _remove_leftovers(self) -> None:
        # Temporary outputs of a killed process carry its process id, so no later one reuses them.
        for entry in self.path.glob(".*.*-*"):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _is_summary(summary: Any) -> bool:
    if not isinstance(summary, dict) or not {"step", "step_ms", "test"} <= summary.keys():
        return False
    resources = summary.get("resources")
    return (
        type(summary["step"]) is int
        and isinstance(summary["step_ms"], float | int | None)
        and isinstance(summary["test"], dict)
        and (resources is None or _are_resources(resources))
    )


def _are_resources(resources: Any) -> bool:
    names = {"mesh", "device", "state_bytes", "device_peak_bytes", "process_peak_bytes", "parts"}
    return (
        isinstance(resources, dict)
        and names <= resources.keys()
        and isinstance(resources["state_bytes"], dict)
        and isinstance(resources["parts"], dict)
    )


def _check_same(run: RunDirectory, recipe: Recipe, store: SequenceStore) -> None:
    was, now = run.recipe.to_dict(), recipe.to_dict()
    differing = [f"{name} {was[name]!r} -> {now[name]!r}" for name in was if was[name] != now[name]]
    if differing:
        raise UserError(
            f"{run.path} holds a run with other settings ({', '.join(differing)}); "
            "repeat its settings to continue it or choose another --out."
        )
    run.open_store(store)


def _visible(path: Path) -> list[Path]:
    return [entry for entry in path.iterdir() if not entry.name.startswith(".")]
