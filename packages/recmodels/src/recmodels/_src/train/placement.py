"""Where the training state and the batches live, on one device or on a mesh of them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import cutbce_ops
from recmodels._src.data.store import SequenceStore
from recmodels._src.errors import UserError
from recmodels._src.models.side_inputs import SideInputs
from recmodels._src.recipe import DATA_AXIS, Recipe, parse_mesh
from recmodels._src.train.sharded import place_by_row
from recmodels._src.train.step import (
    TrainState,
    TrainStep,
    initial_state,
    make_train_step,
)

SHARDED_FROM_ITEMS = 100_000  # catalogs from this size on are spread over the mesh by default
# Rows of a spread table are filled up to a multiple of this, which the usual numbers of devices
# divide: the shapes in a checkpoint then do not depend on the mesh.
_ROWS_MULTIPLE = 1024
# Arrays with one entry for every table row, by the last name on their path. The optimizer's moments
# have the same paths.
_BY_ROW = ("item_embeddings", "output_embeddings", "output_bias")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Layout of state and batch.

    The batch is split over the mesh axis "data". The table, its bias and their optimizer moments
    are on every device, or spread by rows over all axes; everything else is on every device.
    """

    vocab_size: int  # table rows in use: the catalog and the padding row
    num_rows: int  # table rows in memory; those from `vocab_size` on stay zero
    mesh: Mesh | None = None  # None means one device and no sharding at all
    is_table_sharded: bool = False  # only on a mesh
    num_categories: int = 0  # of the items; 0 unless the recipe reads them

    @classmethod
    def of_this_machine(
        cls, recipe: Recipe, vocab_size: int, num_categories: int = 0
    ) -> "Placement":
        """The devices of all joined processes that the recipe's mesh asks for.

        Raises:
            UserError: there are fewer devices, the mesh leaves out a process, or the batch cannot
                be split evenly over them.
        """
        devices = jax.devices()
        axes = parse_mesh(recipe.mesh) or {DATA_AXIS: len(devices)}
        num_devices = math.prod(axes.values())
        num_processes = jax.process_count()
        if num_devices > len(devices) or (num_devices < len(devices) and num_processes > 1):
            who = "this machine has" if num_processes == 1 else f"{num_processes} processes have"
            raise UserError(
                f"`mesh` {recipe.mesh} needs {num_devices} devices; {who} {len(devices)}."
            )
        return cls.over(devices[:num_devices], recipe, vocab_size, num_categories)

    @classmethod
    def over(
        cls, devices: Sequence[Any], recipe: Recipe, vocab_size: int, num_categories: int = 0
    ) -> "Placement":
        """Exactly these devices, in the shape of the recipe's mesh; see `of_this_machine`."""
        axes = parse_mesh(recipe.mesh) or {DATA_AXIS: len(devices)}
        if math.prod(axes.values()) != len(devices):
            raise UserError(f"`mesh` {recipe.mesh} does not fit the {len(devices)} devices.")
        parts = recipe.accumulate_steps
        if recipe.batch_size % (axes[DATA_AXIS] * parts):
            times = "" if parts == 1 else f", times `accumulate_steps` {parts}"
            raise UserError(
                f"`batch_size` must be a multiple of the {axes[DATA_AXIS]} devices along "
                f'"{DATA_AXIS}"{times}; got {recipe.batch_size}.'
            )
        num_rows, is_sharded = vocab_size, _is_table_sharded(recipe, vocab_size)
        if is_sharded:
            multiple = math.lcm(_ROWS_MULTIPLE, len(devices))
            num_rows = math.ceil(vocab_size / multiple) * multiple
        if len(devices) == 1:
            return cls(vocab_size, num_rows, num_categories=num_categories)
        # Auto axes: the partitioner derives the rest of the step from state, batch and loss.
        axis_types = (jax.sharding.AxisType.Auto,) * len(axes)
        grid = np.asarray(devices).reshape(tuple(axes.values()))
        mesh = Mesh(grid, tuple(axes), axis_types=axis_types)
        return cls(vocab_size, num_rows, mesh, is_sharded, num_categories)

    def with_rows(self, num_rows: int) -> "Placement":
        """The same layout for the table of an existing run.

        Raises:
            UserError: its rows cannot be split evenly over the devices.
        """
        if self.is_table_sharded and num_rows % self.num_devices:
            raise UserError(
                f"the table of this run has {num_rows} rows, which {self.num_devices} devices "
                "cannot share evenly; continue on as many devices as before."
            )
        return dataclasses.replace(self, num_rows=num_rows)

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return 1 if self.mesh is None else self.mesh.size

    def describe_mesh(self) -> str:
        """The mesh as a recipe writes it."""
        axes = {DATA_AXIS: 1} if self.mesh is None else self.mesh.shape
        return ",".join(f"{axis}={size}" for axis, size in axes.items())

    @property
    def loss_sharding(self) -> cutbce_ops.LossSharding | None:
        """Layout of positions and table rows; None on one device."""
        if self.mesh is None:
            return None
        rows = self.mesh.axis_names if self.is_table_sharded else None
        return cutbce_ops.LossSharding(self.mesh, position_axes=DATA_AXIS, vocabulary_axes=rows)

    @property
    def replicated(self) -> jax.sharding.Sharding:
        """Sharding of what every device has whole."""
        if self.mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def by_row(self) -> jax.sharding.Sharding:
        """Sharding of what has an entry for each table row."""
        if self.mesh is None or not self.is_table_sharded:
            return self.replicated
        return NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))

    @property
    def batch(self) -> jax.sharding.Sharding:
        """Sharding of history and targets: split along the first axis."""
        if self.mesh is None:
            return self.replicated
        return NamedSharding(self.mesh, PartitionSpec(DATA_AXIS))

    def batch_share(self, batch_size: int) -> tuple[int, int]:
        """Which share of every batch this process puts in: its rank and the number of shares.

        Processes whose devices differ only along the model axis put in the same share.
        """
        indices = self.batch.addressable_devices_indices_map((batch_size,)).values()
        starts = [rows[0].start or 0 for rows in indices if rows is not None]
        per_device = batch_size // (1 if self.mesh is None else self.mesh.shape[DATA_AXIS])
        size = per_device * len(set(starts))
        return min(starts) // size, batch_size // size

    def global_batch(self, batch: dict[str, np.ndarray]) -> tuple[jax.Array, jax.Array]:
        """History and targets of the whole batch, from this process's share of it."""
        history, targets = (
            jax.make_array_from_process_local_data(self.batch, batch[name])
            for name in ("history", "targets")
        )
        return history, targets

    def side_inputs(
        self, batch: dict[str, np.ndarray], item_categories: jax.Array | None
    ) -> tuple[SideInputs, ...]:
        """Last argument of the compiled step, if there is one, from this process's share."""
        if "gaps" not in batch and item_categories is None:
            return ()
        gaps = batch.get("gaps")
        if gaps is not None:
            gaps = jax.make_array_from_process_local_data(self.batch, gaps)
        return (SideInputs(item_categories, gaps),)

    def state(self, recipe: Recipe) -> TrainState:
        """Shapes, dtypes and shardings of the training state, without allocating it."""
        counts = jax.ShapeDtypeStruct((self.vocab_size,), np.float32)
        shapes = jax.eval_shape(self._initial_state(recipe), counts)
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=self._sharding_of(path, leaf.shape)
            ),
            shapes,
        )

    def initial_state(self, recipe: Recipe, item_counts: np.ndarray) -> TrainState:
        """State before the first step, every part of it made where it belongs.

        Args:
            recipe: what is trained.
            item_counts: `[vocab_size]` training interactions per row.
        """
        make = jax.jit(
            self._initial_state(recipe),
            in_shardings=self.replicated,
            out_shardings=_shardings(self.state(recipe)),
        )
        return make(item_counts.astype(np.float32))

    def _initial_state(self, recipe: Recipe) -> Callable[[jax.Array], TrainState]:
        return functools.partial(
            initial_state, recipe, num_rows=self.num_rows, num_categories=self.num_categories
        )

    def compile_step(self, recipe: Recipe) -> TrainStep:
        """The compiled `step(state, history, targets, capacity)`; it consumes the state it gets.

        With a recipe that reads side inputs they are one more argument.
        """
        state, side = self.state(recipe), ()
        if recipe.item_categories or recipe.time_gaps:
            side = (
                SideInputs(
                    self.by_row if recipe.item_categories else None,
                    self.batch if recipe.time_gaps else None,
                ),
            )
        return jax.jit(
            self.step(recipe),
            static_argnums=3,
            donate_argnums=0,
            in_shardings=(_shardings(state), self.batch, self.batch, *side),
            out_shardings=self.step_results(state),
        )

    def step(self, recipe: Recipe) -> TrainStep:
        """The step before compilation."""
        return make_train_step(recipe, vocab_size=self.vocab_size, sharding=self.loss_sharding)

    def step_results(self, state: TrainState) -> Any:
        """Shardings of what the step returns, the state as `state` has it."""
        return _shardings(state), self.replicated

    def _sharding_of(self, path: tuple[Any, ...], shape: tuple[int, ...]) -> jax.sharding.Sharding:
        # Some optimizers keep other shapes under the same names, such as one number per column.
        is_by_row = shape[:1] == (self.num_rows,) and any(
            getattr(entry, "key", None) in _BY_ROW for entry in path
        )
        return self.by_row if is_by_row else self.replicated


def item_categories(
    recipe: Recipe,
    store: SequenceStore,
    num_rows: int,
    sharding: cutbce_ops.LossSharding | None,
) -> jax.Array | None:
    """`[num_rows, K]` int32 categories of each row, laid out as the table.

    Args:
        recipe: tells whether they are read; None if not.
        store: has them.
        num_rows: rows of the table in memory.
        sharding: how the table is laid out; None on one device.

    Raises:
        UserError: the store has no categories.
    """
    if not recipe.item_categories:
        return None
    return place_by_row(store.item_categories.table, num_rows, sharding)


def _is_table_sharded(recipe: Recipe, vocab_size: int) -> bool:
    if recipe.table != "auto":
        return recipe.table == "sharded"
    return vocab_size > SHARDED_FROM_ITEMS  # one row is padding


def _shardings(state: TrainState) -> TrainState:
    return jax.tree.map(lambda leaf: leaf.sharding, state)
