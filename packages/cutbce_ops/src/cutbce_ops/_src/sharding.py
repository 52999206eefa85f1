"""How positions and table rows are laid over a device mesh."""

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

AxisNames = str | tuple[str, ...] | None


def _as_tuple(axes: AxisNames) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


@dataclasses.dataclass(frozen=True)
class LossSharding:
    """Mesh axes that split the positions and the rows of the item table.

    The two may be equal, disjoint or overlap. Axes in neither hold replicas.

    * `vocabulary_axes=None`: every device sweeps the whole table for its positions, and the
      gradient of the table is summed over `position_axes`. A table that is stored in shards is
      gathered first; its gradient can be stored in shards through `out_shardings`.
    * `vocabulary_axes` set: every device sweeps only its own rows. Activations and targets travel
      over the axes that split both; the table never does, and its gradient needs no collective
      over `vocabulary_axes`. With `position_axes == vocabulary_axes` this is the mode for a table
      and an optimizer state stored in shards (FSDP): what travels is [T, D], not [V, D].
    * Different axes, such as `(("data", "model"), "model")`: rows split inside a group of devices,
      groups replicas of one another; shards of the gradient are summed across groups.

    Neither positions nor rows need to divide over their axes, but a table that does not is copied
    at every call: store it padded and pass `vocab_size`.

    The axes of the mesh may be automatic, explicit (`jax.set_mesh`, the default of
    `jax.make_mesh`) or manual:

    * Explicit: arguments of any placing are resharded as needed, and gradients are placed like
      their arguments. Of `[B, S, D]` activations only B may be split.
    * Manual, inside a `jax.shard_map` over all of these axes, `check_vma` true or false: array
      arguments are this device's shards, equally long on all devices; `vocab_size` and table rows
      in targets and results count globally. The loss is that of all positions, the same on every
      device, and its derivative follows JAX's rules for `jax.lax.psum`. Without a `LossSharding`
      every device has the loss of its own positions instead.

    Attributes:
      mesh: `jax.sharding.Mesh`, or an `AbstractMesh` when compiling for absent devices; its axes
        all `AxisType.Auto` or all `AxisType.Explicit` (or manual, where it comes from
        `jax.sharding.get_abstract_mesh()`).
      position_axes: axis name, tuple of names or None (positions replicated); queries of a ranking
        are positions.
      vocabulary_axes: axis name, tuple of names or None (table replicated).
    """

    mesh: Mesh | AbstractMesh
    position_axes: AxisNames = None
    vocabulary_axes: AxisNames = None

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh | AbstractMesh):
            raise TypeError(
                "`mesh` must be a jax.sharding.Mesh or AbstractMesh; "
                f"got {type(self.mesh).__name__}. For one device leave `sharding` None."
            )
        for name in ("position_axes", "vocabulary_axes"):
            given: Any = getattr(self, name)
            axes = tuple(given) if isinstance(given, tuple | list) else (given,)
            if given is not None and not all(isinstance(axis, str) for axis in axes):
                raise TypeError(
                    f"`{name}` must be the name of a mesh axis, a tuple of names or None; "
                    f"got {given!r}."
                )
            axes = _as_tuple(getattr(self, name))
            unknown = [axis for axis in axes if axis not in self.mesh.shape]
            if unknown:
                raise ValueError(
                    f"`{name}` names {unknown}, which the mesh does not have; "
                    f"its axes are {tuple(self.mesh.shape)}."
                )
            if len(set(axes)) != len(axes):
                raise ValueError(f"`{name}` repeats an axis: {axes}.")
        types = set(self.mesh.axis_types)
        if types >= {AxisType.Explicit, AxisType.Auto}:
            raise ValueError(
                "`mesh` must not mix axes of type Explicit and Auto; got "
                f"{dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))}. "
                "Give jax.make_mesh axis_types that are all the same."
            )

    @property
    def position_names(self) -> tuple[str, ...]:
        """Axes that split positions."""
        return _as_tuple(self.position_axes)

    @property
    def vocabulary_names(self) -> tuple[str, ...]:
        """Axes that split table rows."""
        return _as_tuple(self.vocabulary_axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axes that split positions, rows or both."""
        return (*self.position_names, *self.position_replica_names)

    @property
    def gathered_names(self) -> tuple[str, ...]:
        """Axes that split both: positions are gathered over them, so that each meets every row."""
        return tuple(axis for axis in self.position_names if axis in self.vocabulary_names)

    @property
    def table_replica_names(self) -> tuple[str, ...]:
        """Axes that split positions only: the table gradient is summed over them."""
        return tuple(axis for axis in self.position_names if axis not in self.vocabulary_names)

    @property
    def position_replica_names(self) -> tuple[str, ...]:
        """Axes that split rows only: per-position sums are added over them."""
        return tuple(axis for axis in self.vocabulary_names if axis not in self.position_names)

    @property
    def num_position_shards(self) -> int:
        """Number of pieces the positions are cut into."""
        return _product(self.mesh.shape[axis] for axis in self.position_names)

    @property
    def num_vocabulary_shards(self) -> int:
        """Number of pieces the table rows are cut into."""
        return _product(self.mesh.shape[axis] for axis in self.vocabulary_names)

    def position_spec(self) -> jax.sharding.PartitionSpec:
        """PartitionSpec of an array whose leading axis is positions."""
        return jax.sharding.PartitionSpec(self.position_names or None)

    def vocabulary_spec(self) -> jax.sharding.PartitionSpec:
        """PartitionSpec of an array whose leading axis is table rows."""
        return jax.sharding.PartitionSpec(self.vocabulary_names or None)


def _product(sizes) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result
