"""Checkpoints of a training run: model, optimizer, step and data position, saved as one unit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import orbax.checkpoint as ocp

from recmodels._src.atomic import writing
from recmodels._src.errors import UserError
from recmodels._src.train.step import TrainState


class Checkpoints:
    """The checkpoint folder of one run, through Orbax.

    A checkpoint is written beside its final name and renamed when complete, so a process killed at
    any moment leaves the previous one usable; the leftovers go when a writer opens the folder.

    Args:
        folder: the folder, made when absent.
        keep: number of newest checkpoints to keep; None only reads and removes nothing, so that a
            reader does no harm to a run in progress.
    """

    def __init__(self, folder: Path, keep: int | None) -> None:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            cleanup_tmp_directories=keep is not None,
            # The step donates the state's buffers; a background writer could read the next step's.
            enable_async_checkpointing=False,
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    @property
    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, None without any."""
        return self._manager.latest_step()

    def save(self, state: TrainState, data: Iterator[Any]) -> None:
        """Saves the state and the position of the data iterator under the state's step."""
        step = int(state.step)
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), data=grain.checkpoint.CheckpointSave(data)
        )
        with writing(Path(self._manager.directory) / str(step)):
            self._manager.save(step, args=args)

    def restore_state(self, like: TrainState) -> TrainState:
        """The newest state in the shapes, dtypes and shardings of `like`."""
        args = ocp.args.Composite(state=ocp.args.StandardRestore(like))
        return self._restore(args)["state"]

    def restore_data(self, data: Iterator[Any]) -> None:
        """Moves the data iterator to the position saved with the newest state."""
        args = ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(data))
        self._restore(args)

    def _restore(self, args: ocp.args.Composite) -> Any:
        try:
            # Orbax reports this one from many threads, with tracebacks beside the exception.
            manifest = self._manager.directory / str(self.latest_step) / "state" / "manifest.ocdbt"
            if not manifest.stat().length:
                raise ValueError(f"{manifest.name} is empty")
            return self._manager.restore(self.latest_step, args=args)
        # What a missing or cut file gives, by the file; other failures are no damage.
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            *older, newest = sorted(self._manager.all_steps())
            left = f"continue from step {older[-1]}" if older else "start from the beginning"
            raise UserError(
                f"checkpoint {self._manager.directory / str(newest)} is damaged ({reason}); "
                f"remove that folder to {left}."
            ) from error

    def close(self) -> None:
        """Releases the manager's threads."""
        self._manager.close()
