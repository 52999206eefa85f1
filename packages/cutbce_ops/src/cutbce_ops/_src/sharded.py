"""Laying arrays over a mesh and running a body on every shard, for all operators.

An operator with a `LossSharding` meets one of three kinds of mesh axes: automatic ones (the
compiler places arrays, `shard_map` takes them as it finds them), explicit ones (the type of an
array says how it is placed, so it is resharded first), and manual ones, inside the caller's own
`shard_map` (arrays are this device's shards already).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cutbce_ops._src.sharding import LossSharding

# One message of an all-reduce: enough to fill the links of a TPU slice, little beside the table.
SUM_BLOCK_BYTES = 2**25


def is_manual(sharding: LossSharding) -> bool:
    """Whether the caller is inside a `shard_map` over the axes of `sharding`."""
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    used = set(sharding.names or sharding.mesh.axis_names)
    if used & manual and not used <= manual:
        raise ValueError(
            f"`sharding` names {sorted(used)}, of which only {sorted(used & manual)} belong to the "
            "shard_map around this call. Let shard_map take all of these axes, or none."
        )
    return bool(used & manual)


def num_global_rows(embeddings: Array, sharding: LossSharding | None) -> int:
    """Rows of the whole table, of which the caller may hold only this device's shard."""
    if not isinstance(sharding, LossSharding) or not is_manual(sharding):
        return embeddings.shape[0]
    return embeddings.shape[0] * sharding.num_vocabulary_shards


def run_on_shards(
    body: Callable, sharding: LossSharding, in_specs: Any, out_specs: Any
) -> Callable:
    """Returns `body` as a function of global arrays; of local shards inside a `shard_map`."""
    if is_manual(sharding):
        return body
    return jax.shard_map(
        body, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def lay_out_positions(array: Array, sharding: LossSharding | None, fill: int = 0) -> Array:
    """Fills the leading axis up with `fill` for even shards, and places it if its type says so."""
    if sharding is None:
        return array
    return _lay_out(array, sharding, sharding.num_position_shards, sharding.position_spec(), fill)


def lay_out_rows(array: Any, sharding: LossSharding | None) -> Any:
    """The same for the table, or its bias (or None), filled with zeros.

    A table that does not divide over the shards is copied here: store it padded instead.
    """
    if array is None or sharding is None:
        return array
    return _lay_out(array, sharding, sharding.num_vocabulary_shards, sharding.vocabulary_spec(), 0)


def _lay_out(
    array: Array, sharding: LossSharding, num_shards: int, spec: PartitionSpec, fill: int
) -> Array:
    if is_manual(sharding):
        return array
    is_explicit = AxisType.Explicit in sharding.mesh.axis_types
    missing = math.ceil(array.shape[0] / num_shards) * num_shards - array.shape[0]
    if missing:
        if is_explicit:  # an explicit shard cannot grow by a part of its neighbour
            array = jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec()))
        widths = ((0, missing),) + ((0, 0),) * (array.ndim - 1)
        array = jnp.pad(array, widths, constant_values=fill)
    if is_explicit:
        array = jax.sharding.reshard(array, NamedSharding(sharding.mesh, spec))
    return array


def cut_fill(array: Array, size: int, sharding: LossSharding | None) -> Array:
    """Drops from the leading axis what laying out added to it."""
    if sharding is None or array.shape[0] == size or is_manual(sharding):
        return array
    if AxisType.Explicit in sharding.mesh.axis_types:
        array = jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec()))
    return array[:size]


def restore_positions(array: Array, like: Array, sharding: LossSharding | None) -> Array:
    """Takes a result for each position back to the length and the placing of `like`."""
    if sharding is None or is_manual(sharding):
        return array
    array = cut_fill(array, like.shape[0], sharding)
    if AxisType.Explicit in sharding.mesh.axis_types:
        spec = PartitionSpec(*jax.typeof(like).sharding.spec[:1])
        array = jax.sharding.reshard(array, NamedSharding(sharding.mesh, spec))
    return array


def require_no_placement(**arrays: Array) -> None:
    """Raises ValueError if the type of an array says that it is split over explicit mesh axes."""
    for name, array in arrays.items():
        spec = jax.typeof(array).sharding.spec
        if any(axes is not None for axes in spec):
            raise ValueError(
                f"`{name}` is split over explicit mesh axes, {spec}, and `sharding` is None: pass "
                "a LossSharding of that mesh, which says what to do with them."
            )


def varying_axes(array: Array) -> frozenset[str]:
    """Mesh axes over which the type of `array` varies: empty outside a checking `shard_map`."""
    return jax.typeof(array).mat.varying


def vary_alike(arrays: Any, axes: tuple[str, ...] = ()) -> Any:
    """Lets all arrays vary over the axes over which any does, and over `axes`.

    Inside a `shard_map` that checks (`check_vma=True`) a loop may not begin with zeros that are
    equal on all devices and end with sums that differ; zeros made like one of these arrays vary
    as they must. Derivatives need no collective of their own either: casting back sums them.
    Without the check nothing happens.
    """
    union = frozenset(axes).union(*(varying_axes(array) for array in jax.tree.leaves(arrays)))

    def cast(array: Array) -> Array:
        return lax.pcast(array, tuple(union - varying_axes(array)), to="varying")

    return jax.tree.map(cast, arrays) if union else arrays


def first_row(num_rows: int, sharding: LossSharding) -> Array | None:
    """`[]` int32, global number of this shard's first of `num_rows` rows; None for a whole table.

    Only inside the body of `run_on_shards`, like everything below.
    """
    if not sharding.vocabulary_names:
        return None
    return lax.axis_index(sharding.vocabulary_names) * num_rows


def gather_positions(array: Array, sharding: LossSharding) -> Array:
    """Positions of all devices that split both positions and rows: each must meet every row."""
    if not sharding.gathered_names:
        return array
    return lax.all_gather(array, sharding.gathered_names, axis=0, tiled=True)


def sum_over(array: Array, axes: tuple[str, ...]) -> Array:
    """Sum over mesh axes, none of them included."""
    return lax.psum(array, axes) if axes else array


def max_over(array: Array, axes: tuple[str, ...]) -> Array:
    """Largest over mesh axes, none of them included."""
    return lax.pmax(array, axes) if axes else array


def scatter_positions(array: Array, sharding: LossSharding) -> Array:
    """Sums over the axes that `gather_positions` gathered, and leaves each device its positions."""
    if not sharding.gathered_names:
        return array
    return lax.psum_scatter(array, sharding.gathered_names, scatter_dimension=0, tiled=True)


def reduce_positions(array: Array, sharding: LossSharding) -> Array:
    """Sums partial results over the row shards and leaves each device its own positions."""
    return scatter_positions(sum_over(array, sharding.position_replica_names), sharding)


def exchange_candidates(array: Array, sharding: LossSharding) -> Array:
    """`[Q, k]` of every row shard to `[own Q, shards * k]`: what all row shards found for it."""
    if sharding.gathered_names:
        array = lax.all_to_all(
            array, sharding.gathered_names, split_axis=0, concat_axis=1, tiled=True
        )
    if sharding.position_replica_names:
        array = lax.all_gather(array, sharding.position_replica_names, axis=1, tiled=True)
    return array


def same_everywhere(array: Array, axes: tuple[str, ...]) -> Array:
    """Types values that are equal along `axes` as equal, where types are checked."""
    axes = tuple(axis for axis in axes if axis in varying_axes(array))
    return max_over(array, axes)


def sum_in_place(array: Array, axes: tuple[str, ...]) -> Array:
    """Sums a large array over `axes` block by block, so that no second array of its size exists.

    The compiler gives an all-reduce of the whole table gradient its own result buffer: 0.84 GiB
    for 876,939 rows of 256.
    """
    if not axes or array.nbytes <= 2 * SUM_BLOCK_BYTES:
        return sum_over(array, axes)
    num_rows = array.shape[0]
    block = max(1, SUM_BLOCK_BYTES // (array.nbytes // num_rows))

    def sum_rows(whole: Array, start: Any, size: int) -> Array:
        rows = lax.psum(lax.dynamic_slice_in_dim(whole, start, size), axes)
        return lax.dynamic_update_slice_in_dim(whole, rows, start, 0)

    array = lax.fori_loop(
        0, num_rows // block, lambda i, whole: sum_rows(whole, i * block, block), array
    )
    tail = num_rows % block
    return sum_rows(array, num_rows - tail, tail) if tail else array
