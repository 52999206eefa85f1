"""The sweep over a mesh: the only module of this operator with collectives.

Every device sweeps the rows it holds for all positions that share its table shard. Positions are
gathered over the axes that split both positions and rows (the smaller side travels), partial sums
over rows return by a reduce-scatter or an all-reduce, and the gradient of the table is summed only
over axes that replicate it.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from cutbce_ops._src.binary_cross_entropy.config import SweepConfig
from cutbce_ops._src.binary_cross_entropy.dispatch import dense_sweep
from cutbce_ops._src.binary_cross_entropy.linear_term import add_linear_term, slope_cotangent
from cutbce_ops._src.binary_cross_entropy.positives import (
    CorrectedSweep,
    correct_for_targets,
    distinct_targets,
)
from cutbce_ops._src.binary_cross_entropy.sweep import Sweep, Wanted
from cutbce_ops._src.sharding import LossSharding

# One message of an all-reduce: enough to fill the links of a TPU slice, little beside the table.
SUM_BLOCK_BYTES = 2**25


def sweep(
    activations: Array,
    embeddings: Array,
    bias: Array | None,
    targets: Array,
    d_per_position: Array | None,
    config: SweepConfig,
    wanted: Wanted,
    sharding: LossSharding | None,
) -> CorrectedSweep:
    """Sweeps the table, on one device or over a mesh.

    Args:
      activations: `[T, D]` float.
      embeddings: `[V, D]` float.
      bias: `[V]` float or None.
      targets: `[T, L]` int32, any values.
      d_per_position: `[T]` float32 or None.
      config: static options; `config.vocab_size` counts global rows.
      wanted: which results to compute.
      sharding: mesh layout, or None for one device.
    """
    targets = distinct_targets(targets, config.vocab_size)
    if sharding is None:
        return _local(activations, embeddings, bias, targets, d_per_position, None, config, wanted)
    num_positions, num_rows = activations.shape[0], embeddings.shape[0]
    # Fill for even shards. A table that does not divide is copied here: store it padded instead.
    fill_positions = partial(_fill, num_shards=sharding.num_position_shards)
    fill_rows = partial(_fill, num_shards=sharding.num_vocabulary_shards)
    activations, d_per_position = jax.tree.map(fill_positions, (activations, d_per_position))
    targets = fill_positions(targets, value=-1)
    embeddings, bias = jax.tree.map(fill_rows, (embeddings, bias))
    positions, rows = sharding.position_spec(), sharding.vocabulary_spec()
    result = jax.shard_map(
        partial(_on_shard, sharding=sharding, config=config, wanted=wanted),
        mesh=sharding.mesh,
        in_specs=(positions, rows, rows, positions, positions),
        out_specs=CorrectedSweep(
            Sweep(positions, positions, positions, rows, rows), positions, positions
        ),
        check_vma=False,
    )(activations, embeddings, bias, targets, d_per_position)
    return _cut(result, num_positions, num_rows)


def _local(activations: Array, embeddings: Array, bias: Array | None, targets: Array,
           d_per_position: Array | None, vocab_offset: Array | None, config: SweepConfig,
           wanted: Wanted) -> CorrectedSweep:  # fmt: skip
    factor = slope_cotangent(d_per_position, config)
    dense = dense_sweep(activations, embeddings, bias, factor, vocab_offset, config, wanted)
    dense = add_linear_term(
        dense, activations, embeddings, bias, d_per_position, vocab_offset, config, wanted
    )
    return correct_for_targets(
        dense, activations, embeddings, bias, targets, d_per_position, config, wanted
    )


def _on_shard(activations: Array, embeddings: Array, bias: Array | None, targets: Array,
              d_per_position: Array | None, *, sharding: LossSharding, config: SweepConfig,
              wanted: Wanted) -> CorrectedSweep:  # fmt: skip
    gather = partial(_gather, sharding=sharding)
    activations, targets = gather(activations), gather(targets)
    d_per_position = None if d_per_position is None else gather(d_per_position)
    vocab_offset = None
    if sharding.vocabulary_names:
        num_rows = embeddings.shape[0]
        vocab_offset = lax.axis_index(sharding.vocabulary_names) * num_rows
        is_here = (targets >= vocab_offset) & (targets < vocab_offset + num_rows)
        targets = jnp.where(is_here, targets - vocab_offset, -1)
    local = _local(
        activations, embeddings, bias, targets, d_per_position, vocab_offset, config, wanted
    )
    reduce = partial(_reduce_positions, sharding=sharding)
    sum_replicas = partial(_sum_in_place, axes=sharding.table_replica_names)
    return CorrectedSweep(
        Sweep(
            loss=reduce(local.sweep.loss),
            num_predicted=reduce(local.sweep.num_predicted),
            d_activations=reduce(local.sweep.d_activations),
            d_embeddings=sum_replicas(local.sweep.d_embeddings),
            d_bias=sum_replicas(local.sweep.d_bias),
        ),
        num_targets=reduce(local.num_targets),
        num_hit=reduce(local.num_hit),
    )


def _gather(array: Array, sharding: LossSharding) -> Array:
    if not sharding.gathered_names:
        return array
    return lax.all_gather(array, sharding.gathered_names, axis=0, tiled=True)


def _reduce_positions(array: Array | None, sharding: LossSharding) -> Array | None:
    """Sums partial results over the row shards and leaves each device its own positions."""
    if array is None:
        return None
    array = _sum_over(array, sharding.position_replica_names)
    if not sharding.gathered_names:
        return array
    return lax.psum_scatter(array, sharding.gathered_names, scatter_dimension=0, tiled=True)


def _sum_over(array: Array | None, axes: tuple[str, ...]) -> Array | None:
    return array if array is None or not axes else lax.psum(array, axes)


def _sum_in_place(array: Array | None, axes: tuple[str, ...]) -> Array | None:
    """Sums a large array over `axes` block by block, so that no second array of its size exists.

    The compiler gives an all-reduce of the whole table gradient its own result buffer: 0.84 GiB
    for 876,939 rows of 256.
    """
    if array is None or not axes or array.nbytes <= 2 * SUM_BLOCK_BYTES:
        return _sum_over(array, axes)
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


def _fill(array: Array, num_shards: int, value: int = 0) -> Array:
    """Lengthens the leading axis with `value` until it divides over the shards."""
    missing = math.ceil(array.shape[0] / num_shards) * num_shards - array.shape[0]
    if missing == 0:
        return array
    widths = ((0, missing),) + ((0, 0),) * (array.ndim - 1)
    return jnp.pad(array, widths, constant_values=value)


def _cut(result: CorrectedSweep, num_positions: int, num_rows: int) -> CorrectedSweep:
    """Drops what `_fill` added."""

    def cut(array: Any, size: int) -> Any:
        return array if array is None or array.shape[0] == size else array[:size]

    sweep = result.sweep
    return CorrectedSweep(
        Sweep(
            loss=cut(sweep.loss, num_positions),
            num_predicted=cut(sweep.num_predicted, num_positions),
            d_activations=cut(sweep.d_activations, num_positions),
            d_embeddings=cut(sweep.d_embeddings, num_rows),
            d_bias=cut(sweep.d_bias, num_rows),
        ),
        num_targets=cut(result.num_targets, num_positions),
        num_hit=cut(result.num_hit, num_positions),
    )
