"""The sweep over a mesh: the only module of this operator that knows of devices.

Every device sweeps the rows it holds for all positions that share its table shard. Positions are
gathered over the axes that split both positions and rows (the smaller side travels), partial sums
over rows return by a reduce-scatter or an all-reduce, and the gradient of the table is summed only
over axes that replicate it.
"""

import dataclasses
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from cutbce_ops._src.binary_cross_entropy.config import SweepConfig
from cutbce_ops._src.binary_cross_entropy.dispatch import dense_sweep, takes_tpu_kernel
from cutbce_ops._src.binary_cross_entropy.linear_term import add_linear_term, slope_cotangent
from cutbce_ops._src.binary_cross_entropy.positives import (
    CorrectedSweep,
    add_up_targets,
    correct_for_targets,
    distinct_targets,
)
from cutbce_ops._src.binary_cross_entropy.sweep import Sweep, Wanted
from cutbce_ops._src.hardware import LANES, may_target_tpu
from cutbce_ops._src.sharded import (
    first_row,
    gather_positions,
    is_manual,
    lay_out_positions,
    lay_out_rows,
    reduce_positions,
    require_no_placement,
    restore_positions,
    run_on_shards,
    scatter_positions,
    sum_in_place,
    sum_over,
    vary_alike,
    varying_axes,
)
from cutbce_ops._src.sharding import LossSharding

# Fields of a Sweep whose leading axis is table rows; that of all others is positions.
ROW_FIELDS = ("d_embeddings", "d_bias")
GRADIENT_FIELDS = ("d_activations", *ROW_FIELDS)


def lay_out(
    activations: Array,
    embeddings: Array,
    bias: Array | None,
    targets: Array,
    weights: Array | None,
    sharding: LossSharding | None,
) -> tuple[tuple[Array, Array, Array | None, Array], Any]:
    """Gives all arguments the lengths and the placing that `sweep` needs.

    This stands outside the hand-written derivatives, so that JAX takes gradients back to the
    lengths and the placing of the originals.

    Returns:
      The first four arguments, and the weights (zero where a position was filled in).
    """
    primals = (activations, embeddings, bias, targets)
    if sharding is None:
        require_no_placement(activations=activations, embeddings=embeddings, targets=targets)
        *primals, weights = vary_alike((*primals, weights))
        return tuple(primals), weights
    if is_manual(sharding):
        weights = None if weights is None else vary_alike(weights, sharding.position_names)
        return vary_alike(primals, sharding.names), weights
    positions = partial(lay_out_positions, sharding=sharding)
    primals = (
        positions(activations),
        lay_out_rows(embeddings, sharding),
        lay_out_rows(bias, sharding),
        positions(targets, fill=-1),
    )
    return primals, None if weights is None else positions(weights)


def restore(per_position: Any, activations: Array, sharding: LossSharding | None) -> Any:
    """Takes results for each position back to the positions of `activations`, before `lay_out`."""
    return jax.tree.map(
        partial(restore_positions, like=activations, sharding=sharding), per_position
    )


def sum_of_positions(values: Array, sharding: LossSharding | None) -> Array:
    """`[]` sum of `[T]` values, over the positions of all devices."""
    total = jnp.sum(values)
    if sharding is None or not is_manual(sharding):
        return total
    return sum_over(total, sharding.position_names)


def whole_cotangent(
    cotangent: Array,
    primal: Array,
    sharding: LossSharding | None,
    axes: Literal["names", "position_names", "position_replica_names"],
) -> Array:
    """The cotangent of a value that is equal along `axes` of `sharding`.

    Inside a `shard_map` that does not check, every device holds a part of it, by JAX's convention.
    Elsewhere, and where types are checked (`primal` then varies), the cotangent is whole.
    """
    if sharding is None or not is_manual(sharding) or varying_axes(primal):
        return cotangent
    return sum_over(cotangent, getattr(sharding, axes))


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
    """Sweeps the table, on one device or over a mesh, with arguments that `lay_out` laid out.

    Inside a `shard_map` gradients are this device's part: JAX sums them where an argument came in
    as a replica.

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
    arrays = (activations, embeddings, bias, targets, d_per_position)
    if sharding is None:
        return _local(*arrays, None, config, wanted)
    positions, rows = sharding.position_spec(), sharding.vocabulary_spec()
    fields = [field.name for field in dataclasses.fields(Sweep)]
    specs = Sweep(**{name: rows if name in ROW_FIELDS else positions for name in fields})
    run = run_on_shards(
        partial(
            _on_shard, sharding=sharding, config=config, wanted=wanted,
            with_part_of_gradients=is_manual(sharding),
        ),
        sharding,
        in_specs=(positions, rows, rows, positions, positions),
        out_specs=CorrectedSweep(specs, positions, positions),
    )  # fmt: skip
    return run(*arrays)


def _local(activations: Array, embeddings: Array, bias: Array | None, targets: Array,
           d_per_position: Array | None, vocab_offset: Array | None, config: SweepConfig,
           wanted: Wanted) -> CorrectedSweep:  # fmt: skip
    targets = distinct_targets(targets, config.vocab_size)
    if vocab_offset is not None:
        num_rows = embeddings.shape[0]
        is_here = (targets >= vocab_offset) & (targets < vocab_offset + num_rows)
        targets = jnp.where(is_here, targets - vocab_offset, -1)
    dim = activations.shape[1]
    activations, embeddings = whole_registers(activations), whole_registers(embeddings)
    of_targets = (activations, embeddings, bias, targets, d_per_position)
    sums = add_up_targets(*of_targets, config, wanted)
    if sums is not None and takes_tpu_kernel(activations, bias, config, wanted):
        # The kernel of the sweep leaves no memory on the chip to gather into: it has to come later.
        activations, sums = lax.optimization_barrier((activations, sums))
    factor = slope_cotangent(d_per_position, config)
    dense = dense_sweep(activations, embeddings, bias, factor, vocab_offset, config, wanted)
    dense = add_linear_term(
        dense, activations, embeddings, bias, d_per_position, vocab_offset, config, wanted
    )
    corrected = correct_for_targets(
        dense, activations, embeddings, bias, targets, d_per_position, config, wanted, sums
    )
    return dataclasses.replace(corrected, sweep=first_features(corrected.sweep, dim))


def whole_registers(vectors: Array) -> Array:
    """For a TPU, zeros up to a multiple of 128 features.

    XLA keeps `[V, D]` with such a D by columns, and would turn the table round and back once for
    the kernel, once for each gather and once for each scatter. So it is turned once for all.
    """
    missing = -vectors.shape[1] % LANES
    if missing == 0 or not may_target_tpu():
        return vectors
    return jnp.pad(vectors, ((0, 0), (0, missing)))


def first_features(sweep: Sweep, dim: int) -> Sweep:
    """Drops what `whole_registers` added."""
    vectors = (sweep.d_activations, sweep.d_embeddings)
    d_activations, d_embeddings = jax.tree.map(
        lambda array: array if array.shape[1] == dim else array[:, :dim], vectors
    )
    return dataclasses.replace(sweep, d_activations=d_activations, d_embeddings=d_embeddings)


def _on_shard(activations: Array, embeddings: Array, bias: Array | None, targets: Array,
              d_per_position: Array | None, *, sharding: LossSharding, config: SweepConfig,
              wanted: Wanted, with_part_of_gradients: bool) -> CorrectedSweep:  # fmt: skip
    positions = jax.tree.map(
        partial(gather_positions, sharding=sharding), (activations, targets, d_per_position)
    )
    activations, targets, d_per_position = vary_alike(positions, sharding.names)
    offset = first_row(embeddings.shape[0], sharding)
    local = _local(activations, embeddings, bias, targets, d_per_position, offset, config, wanted)
    gradients = reduce_gradients(local.sweep, sharding, with_part_of_gradients)
    sums = dataclasses.replace(local.sweep, **dict.fromkeys(GRADIENT_FIELDS))
    reduced = jax.tree.map(
        partial(reduce_positions, sharding=sharding), dataclasses.replace(local, sweep=sums)
    )
    kept = {name: getattr(gradients, name) for name in GRADIENT_FIELDS}
    return dataclasses.replace(reduced, sweep=dataclasses.replace(reduced.sweep, **kept))


def reduce_gradients(swept: Sweep, sharding: LossSharding, with_part_of_gradients: bool) -> Sweep:
    """Gradients of this device's positions and rows, from those of one device's sweep.

    `with_part_of_gradients` leaves the sum over replicas to JAX, which takes it inside a
    `shard_map` where an argument came in as a replica.
    """
    row_fields = {name: getattr(swept, name) for name in ROW_FIELDS}
    reduce_positions_of = scatter_positions if with_part_of_gradients else reduce_positions
    if not with_part_of_gradients:
        sum_replicas = partial(sum_in_place, axes=sharding.table_replica_names)
        row_fields = jax.tree.map(sum_replicas, row_fields)
    d_activations = jax.tree.map(
        partial(reduce_positions_of, sharding=sharding), swept.d_activations
    )
    return Sweep(d_activations=d_activations, **row_fields)
