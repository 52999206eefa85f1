"""The part of the plain family that is linear in the logits, in closed form.

Sweeps sum softplus(x) with slope 1. A label at every item adds `-label * sum_v x_tv`, which needs
no sweep: sum_v x_tv = a_t . sum_v e_v + sum_v b_v. Without label smoothing nothing happens here.
"""

import dataclasses
from functools import partial

import jax.numpy as jnp
from jax import Array

from cutbce_ops._src.binary_cross_entropy.config import SweepConfig
from cutbce_ops._src.binary_cross_entropy.products import matmul_operand
from cutbce_ops._src.binary_cross_entropy.sweep import Sweep, Wanted

ROWS_PER_PARTIAL_SUM = 1024  # a running float32 sum over the whole table would lose digits


def slope_cotangent(d_per_position: Array | None, config: SweepConfig) -> Array | None:
    """`d_per_position` as a sweep must receive it: times the slope of the softplus."""
    slope = config.pointwise.negative_slope if config.pointwise.is_plain else 1.0
    return d_per_position if d_per_position is None or slope == 1 else slope * d_per_position


def add_linear_term(
    sweep: Sweep,
    activations: Array,
    embeddings: Array,
    bias: Array | None,
    d_per_position: Array | None,
    vocab_offset: Array | None,
    config: SweepConfig,
    wanted: Wanted,
) -> Sweep:
    """Completes a sweep whose gradients were taken with `slope_cotangent`.

    Args:
      sweep: result of `dense_sweep`; for losses outside the plain family it is returned as it is.
      activations: `[T, D]` float.
      embeddings: `[V, D]` float; this device's rows.
      bias: `[V]` float or None.
      d_per_position: `[T]` float32, not multiplied by the slope; needed for gradients only.
      vocab_offset: `[]` int32, global number of row 0, or None for the whole table.
      config: static options.
      wanted: which results the sweep holds.
    """
    if not config.pointwise.is_plain:
        return sweep
    slope, label = config.pointwise.negative_slope, config.pointwise.negative_label
    if wanted.loss and slope != 1:
        sweep = dataclasses.replace(sweep, loss=slope * sweep.loss)
    if label == 0:
        return sweep
    in_catalog = jnp.arange(embeddings.shape[0]) < config.vocab_size - (
        0 if vocab_offset is None else vocab_offset
    )
    operand = matmul_operand(activations, config).astype(jnp.float32)
    rows = matmul_operand(embeddings, config).astype(jnp.float32)
    row_sum = _sum_of_rows(jnp.where(in_catalog[:, None], rows, 0))  # [D]; unused rows may be NaN
    if wanted.loss:
        logit_sum = jnp.sum(operand * row_sum[None, :], axis=1)
        if bias is not None:
            logit_sum += _sum_of_rows(jnp.where(in_catalog, bias.astype(jnp.float32), 0))
        sweep = dataclasses.replace(sweep, loss=sweep.loss - label * logit_sum)
    if wanted.gradients:
        assert d_per_position is not None
        d_logits = -label * d_per_position
        sweep = _add_gradients(sweep, operand, row_sum, d_logits, in_catalog)
    return sweep


def _add_gradients(
    sweep: Sweep, operand: Array, row_sum: Array, d_logits: Array, in_catalog: Array
) -> Sweep:
    every_row = _sum_of_rows(operand * d_logits[:, None])  # [D], the same for every row
    d_bias = sweep.d_bias
    if d_bias is not None:
        d_bias = d_bias + jnp.where(in_catalog, jnp.sum(d_logits), 0)
    return dataclasses.replace(
        sweep,
        d_activations=sweep.d_activations + d_logits[:, None] * row_sum[None, :],
        d_embeddings=sweep.d_embeddings + jnp.where(in_catalog[:, None], every_row[None, :], 0),
        d_bias=d_bias,
    )


def _sum_of_rows(array: Array) -> Array:
    """Sum over axis 0 in two levels."""
    num_parts = array.shape[0] // ROWS_PER_PARTIAL_SUM
    cut = num_parts * ROWS_PER_PARTIAL_SUM
    parts = array[:cut].reshape(num_parts, ROWS_PER_PARTIAL_SUM, *array.shape[1:])
    # Sums of int32 would be int64 under `jax_enable_x64`.
    total = partial(jnp.sum, dtype=array.dtype)
    return total(total(parts, axis=1), axis=0) + total(array[cut:], axis=0)
