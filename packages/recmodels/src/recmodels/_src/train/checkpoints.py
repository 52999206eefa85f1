"""Checkpoints of a training run: model, optimizer, step and open loss window.

The step is the data position too: batch k is a pure function of k.
"""

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from recmodels._src import storage
from recmodels._src.atomic import writing
from recmodels._src.errors import UserError
from recmodels._src.train.checksums import array_name, checksums
from recmodels._src.train.quiet import leave_out_noise_of_orbax
from recmodels._src.train.staging import Staging, needs_staging
from recmodels._src.train.step import TrainState


class Checkpoints:
    """The checkpoint folder of one run, through Orbax.

    A checkpoint is written in the background, beside its final name, and renamed when complete, so
    a process killed at any moment leaves the previous one usable; the leftovers go when a writer
    opens the folder. In an object store a last object says that it is complete.

    Args:
        folder: the folder, made when absent.
        keep: number of newest checkpoints to keep; None only reads and removes nothing, so that a
            reader does no harm to a run in progress.
        trained: what of the run's config.json the arrays depend on, by name, ready for JSON; it is
            kept with every checkpoint, so that a change of config.json does not pass for damage.
    """

    def __init__(self, folder: Path, keep: int | None, trained: Mapping[str, Any]) -> None:
        leave_out_noise_of_orbax()
        self._keep = keep
        self._trained = json.loads(json.dumps(trained))  # in the form in which it comes back
        options = ocp.CheckpointManagerOptions(
            cleanup_tmp_directories=keep is not None,
            # Where making a folder fails in the background, Orbax's other threads wait for it for
            # ten minutes, and the process with them.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._folder = storage.absolute(folder)
        self._staging = Staging(self._folder) if needs_staging(self._folder) else None
        directory = self._folder if self._staging is None else self._staging.folder
        with storage.reaching("use", self._folder):
            self._manager = ocp.CheckpointManager(directory, options=options)
        self._obsolete: list[int] = []

    @property
    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first."""
        self.wait()
        return self._all_steps()

    @property
    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, None without any."""
        return self.steps[-1] if self.steps else None

    def save(
        self,
        state: TrainState,
        window_losses: Sequence[float],
        best_step: int | None,
    ) -> None:
        """Starts to save under the state's step; returns once the arguments may change again.

        Args:
            state: the training state.
            window_losses: losses since the last loss record.
            best_step: step of a checkpoint to keep beside the newest ones; None without any.

        Raises:
            OSError: the disk is full, found by this or by the previous save.
        """
        step = int(state.step)
        self.wait()  # one at a time, and the next one may fail for the same reason
        state = _detached(state)
        window = {
            "losses": list(window_losses),
            "trained": self._trained,
            "checksums": checksums(state),
        }
        old = self._all_steps()
        kept = sorted([*old, step])[-self._keep :] if self._keep else [*old, step]
        obsolete = set(old) - {*kept, best_step}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), window=ocp.args.JsonSave(window)
        )
        with writing(self._folder / str(step)):
            self._manager.save(step, args=args, force=True)
            if self._staging is not None:
                self._manager.wait_until_finished()
                self._staging.upload(step)
        # Only after this one is complete: until then the older ones are all there is.
        self._obsolete = sorted(obsolete)

    def restore(
        self, like: TrainState, *, step: int | None = None
    ) -> tuple[TrainState, list[float]]:
        """A state in the shapes, dtypes and shardings of `like`, and the losses of its open window.

        Where the newest checkpoint is damaged, a warning says so and the one before it is taken.

        Args:
            like: `TrainState` of shapes.
            step: exactly this checkpoint; None takes the newest one that can be read. A writer
                then removes those that cannot, since their steps will be saved again.

        Raises:
            UserError: there is none, or none can be read; or `step` cannot; or config.json was
                changed since.
        """
        steps = self.steps if step is None else [step]
        if not steps:
            raise UserError(f"{self._folder} has no complete checkpoint yet.")
        damaged = []
        for candidate in reversed(steps):
            try:
                restored = self._restore(candidate, like)
            except _DamagedError as damage:
                damaged.append((candidate, damage))
                continue
            self._leave_out(damaged, candidate)
            return restored
        newest, damage = damaged[0]
        path = self._folder / str(newest)
        remedy = (
            "and no other can be read; remove the folder of the run to start from the beginning"
            if step is None
            else "and it is the one that `selection` chose; remove it to take the newest instead"
        )
        raise UserError(f"checkpoint {path} is damaged ({damage}) {remedy}.") from damage

    def close(self) -> None:
        """Finishes what is being written and releases the manager's threads."""
        try:
            self.wait()
        finally:
            with writing(self._folder):
                self._manager.close()
            if self._staging is not None:
                self._staging.close()

    def wait(self) -> None:
        """Returns once everything is written and what is not to be kept is removed.

        Raises:
            OSError: the disk is full.
        """
        with writing(self._folder):
            self._manager.wait_until_finished()
            if self._staging is not None:
                self._staging.wait()
        for step in self._obsolete:
            self._delete(step)
        self._obsolete = []

    def _all_steps(self) -> list[int]:
        if self._staging is not None:
            return sorted(self._staging.steps())
        with storage.reaching("read", self._folder):
            return sorted(self._manager.all_steps())

    def _delete(self, step: int) -> None:
        with storage.reaching("remove", self._folder / str(step)):
            if self._staging is not None:
                self._staging.delete(step)
            if step in self._manager.all_steps():
                self._manager.delete(step)

    def _restore(self, step: int, like: TrainState) -> tuple[TrainState, list[float]]:
        with self._as_damage(step):
            if self._staging is not None:
                self._staging.fetch(step)
                self._manager.reload()
            folder = self._manager.directory / str(step) / "state"
            # Orbax reports this one from many threads, with tracebacks beside the exception.
            if not (folder / "manifest.ocdbt").stat().length:
                raise ValueError("manifest.ocdbt is empty")
            args = ocp.args.Composite(window=ocp.args.JsonRestore())
            window = self._manager.restore(step, args=args)["window"]
            losses = [float(loss) for loss in window["losses"]]
            trained = self._trained | window.get("trained", {})  # older checkpoints have none
            saved = _shapes(ocp.StandardCheckpointHandler().metadata(folder))
        self._check_fits(step, trained, self._trained, "`{}`")
        self._check_fits(step, saved, _shapes(like), "the shape of `{}`")
        with self._as_damage(step):
            args = ocp.args.Composite(state=ocp.args.StandardRestore(like))
            state = self._manager.restore(step, args=args)["state"]
            _check_sums(window.get("checksums"), state)
        return state, losses

    def _check_fits(
        self, step: int, saved: Mapping[str, Any], now: Mapping[str, Any], what: str
    ) -> None:
        for name in dict.fromkeys([*now, *saved]):
            if saved.get(name) != now.get(name):
                is_now, was = now.get(name, "absent"), saved.get(name, "absent")
                folder = self._folder
                raise UserError(
                    f"{folder.parent / 'config.json'} does not fit what was trained: by it "
                    f"{what.format(name)} is {is_now}, in checkpoint {folder / str(step)} {was}; "
                    "put back what was there."
                )

    def _leave_out(self, damaged: list[tuple[int, "_DamagedError"]], taken: int) -> None:
        for step, damage in damaged:
            warnings.warn(
                f"checkpoint {self._folder / str(step)} is damaged ({damage}); "
                f"that of step {taken} is taken instead.",
                stacklevel=3,
            )
            if self._keep is not None:
                self._delete(step)

    @contextlib.contextmanager
    def _as_damage(self, step: int) -> Iterator[None]:
        try:
            with storage.reaching("read", self._folder / str(step)):
                yield
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise  # too little memory to read it does not make it damaged
        # A missing or cut file gives an exception of almost any type, by the file.
        except Exception as error:
            is_out_of_reach = isinstance(error, OSError) and not storage.is_absence(error)
            if storage.is_remote(self._folder) and is_out_of_reach:
                raise
            told = error.__cause__ or error  # of the file, where Orbax wraps it
            raise _DamagedError(f"{type(told).__name__}: {told}".splitlines()[0][:300]) from error


class _DamagedError(Exception):
    """A checkpoint that cannot be read; the text says why."""


def _shapes(tree: Any) -> dict[str, list[int]]:
    """Shape of every array of a tree by the path that Orbax gives it."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {array_name(path): list(leaf.shape) for path, leaf in leaves}


def _check_sums(saved: Mapping[str, int] | None, state: TrainState) -> None:
    if saved is None:  # older checkpoints have none
        return
    differing = [name for name, now in checksums(state).items() if saved.get(name) != now]
    if differing:
        raise ValueError(f"the checksum of `{differing[0]}` is not the one it was saved with")


def _detached(state: TrainState) -> TrainState:
    """The state in memory of its own where saving would read from the memory of `state` itself.

    The next step reuses the memory of the state. From an accelerator the values are copied before
    `save` returns; on a CPU they are not, and the background writer would read the next step's.
    """

    def detached(leaf: jax.Array) -> jax.Array:
        is_in_host_memory = all(device.platform == "cpu" for device in leaf.devices())
        return jnp.copy(leaf) if is_in_host_memory else leaf

    return jax.tree.map(detached, state)
