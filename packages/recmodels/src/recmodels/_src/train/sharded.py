"""Reading and adding rows of an item table that is spread over a mesh; the table never moves.

Row numbers and vectors travel instead: `[T]` integers and `[T, D]` floats for the T positions of
a batch, against `[V, D]` for the table.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding

from cutbce_ops import LossSharding


def take_rows(table: Array, rows: Array, sharding: LossSharding | None) -> Array:
    """`table[rows]` of a table that may be spread over a mesh by rows.

    Every device looks up the rows it holds, for all positions that meet its shard, and leaves zeros
    for the others; the sum over the shards returns to the owners of the positions.

    Args:
        table: `[V, D]` float; V divides evenly over the vocabulary axes.
        rows: `[B, ...]` integers in `[0, V)`; B divides evenly over the position axes.
        sharding: how both are laid out; None on one device.

    Returns:
        `[B, ..., D]`, laid out as `rows`.
    """
    if sharding is None or not sharding.vocabulary_names:
        return table[rows]
    positions = sharding.position_spec()
    return jax.shard_map(
        partial(_take_on_shard, sharding=sharding),
        mesh=sharding.mesh,
        in_specs=(sharding.vocabulary_spec(), positions),
        out_specs=positions,
        check_vma=False,
    )(table, rows)


def take_categories(
    item_categories: Array | None, rows: Array, sharding: LossSharding | None
) -> Array | None:
    """`item_categories[rows]`, see `take_rows`; None without categories."""
    return None if item_categories is None else take_rows(item_categories, rows, sharding)


def place_by_row(array: np.ndarray, num_rows: int, sharding: LossSharding | None) -> Array:
    """An array with an entry for each row of the catalog, laid out as the item table.

    Args:
        array: `[V, ...]`.
        num_rows: rows of the table in memory, at least V; those from V on become zero.
        sharding: how the table is laid out; None on one device.
    """
    padding = [(0, num_rows - len(array))] + [(0, 0)] * (array.ndim - 1)
    padded = np.pad(array, padding)
    if sharding is None:
        return jnp.asarray(padded)
    layout = NamedSharding(sharding.mesh, sharding.vocabulary_spec())
    return jax.make_array_from_callback(padded.shape, layout, lambda index: padded[index])


def add_rows(table: Array, rows: Array, vectors: Array, sharding: LossSharding | None) -> Array:
    """`table.at[rows].add(vectors)`, the transpose of `take_rows`; the result can reuse `table`.

    Every device receives the vectors of all positions and adds those that belong to its rows. That
    is `[T, D]`; adding up tables that each device made from its own positions would be `[V, D]`.

    Args:
        table: `[V, D]` float; V divides evenly over the vocabulary axes.
        rows: `[B, ...]` integers in `[0, V)`; B divides evenly over the position axes.
        vectors: `[B, ..., D]`, laid out as `rows`.
        sharding: how they are laid out; None on one device.

    Returns:
        `[V, D]`, laid out as `table`.
    """
    if sharding is None:
        return table.at[rows].add(vectors)
    positions, vocabulary = sharding.position_spec(), sharding.vocabulary_spec()
    return jax.shard_map(
        partial(_add_on_shard, sharding=sharding),
        mesh=sharding.mesh,
        in_specs=(vocabulary, positions, positions),
        out_specs=vocabulary,
        check_vma=False,
    )(table, rows, vectors)


def _take_on_shard(table: Array, rows: Array, *, sharding: LossSharding) -> Array:
    rows = _local_rows(_gather(rows, sharding.gathered_names), table.shape[0], sharding)
    vectors = table.at[rows].get(mode="fill", fill_value=0)
    if sharding.gathered_names:
        vectors = lax.psum_scatter(
            vectors, sharding.gathered_names, scatter_dimension=0, tiled=True
        )
    if sharding.position_replica_names:
        vectors = lax.psum(vectors, sharding.position_replica_names)
    return vectors


def _add_on_shard(table: Array, rows: Array, vectors: Array, *, sharding: LossSharding) -> Array:
    rows = _local_rows(_gather(rows, sharding.position_names), table.shape[0], sharding)
    return table.at[rows].add(_gather(vectors, sharding.position_names), mode="drop")


def _local_rows(rows: Array, num_rows: int, sharding: LossSharding) -> Array:
    """Numbers inside this device's shard; `num_rows`, one past its end, for rows held elsewhere."""
    if not sharding.vocabulary_names:
        return rows
    local = rows - lax.axis_index(sharding.vocabulary_names) * num_rows
    return jnp.where((local >= 0) & (local < num_rows), local, num_rows)


def _gather(array: Array, axes: tuple[str, ...]) -> Array:
    return lax.all_gather(array, axes, axis=0, tiled=True) if axes else array
