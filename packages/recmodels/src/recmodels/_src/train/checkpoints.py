"""Checkpoints of a training run: model, optimizer, step and data position, saved as one unit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import orbax.checkpoint as ocp

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
        self._manager.save(
            int(state.step),
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), data=grain.checkpoint.CheckpointSave(data)
            ),
        )

    def restore_state(self, like: TrainState, sharding: jax.sharding.Sharding) -> TrainState:
        """The newest state, placed by `sharding`; `like` gives structure, shapes and dtypes."""
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), like
        )
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        return self._manager.restore(self.latest_step, args=args)["state"]

    def restore_data(self, data: Iterator[Any]) -> None:
        """Moves the data iterator to the position saved with the newest state."""
        args = ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(data))
        self._manager.restore(self.latest_step, args=args)

    def close(self) -> None:
        """Releases the manager's threads."""
        self._manager.close()
