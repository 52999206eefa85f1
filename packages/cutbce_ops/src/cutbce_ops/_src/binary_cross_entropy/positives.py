"""Corrections for the targets, which the dense sweep counted as negatives.

Targets are few (T * L against T * V logits), so they are gathered and scattered outside the sweep
instead of being compared with every row of every tile.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from cutbce_ops._src.binary_cross_entropy.config import SweepConfig
from cutbce_ops._src.binary_cross_entropy.products import matmul_operand
from cutbce_ops._src.binary_cross_entropy.sweep import Sweep, Wanted

GATHERED_BYTES = 2**26  # rows of targets that are gathered before they are added up


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CorrectedSweep:
    """A sweep with its targets taken into account.

    Attributes:
      sweep: the corrected sums and gradients.
      num_targets: `[T]` int32, distinct targets inside the catalog; None without counts.
      num_hit: `[T, K]` int32, those with a logit above each threshold; None without counts.
    """

    sweep: Sweep
    num_targets: Any
    num_hit: Any


def distinct_targets(targets: Array, vocab_size: int) -> Array:
    """Replaces padding, ids outside `[0, vocab_size)` and repeats in a position's list by -1."""
    is_inside = (targets >= 0) & (targets < vocab_size)
    num_targets = targets.shape[1]
    earlier = jnp.tril(jnp.ones((num_targets, num_targets), bool), k=-1)
    is_repeat = ((targets[:, :, None] == targets[:, None, :]) & earlier[None]).any(axis=2)
    return jnp.where(is_inside & ~is_repeat, targets, -1)


def correct_for_targets(
    sweep: Sweep,
    activations: Array,
    embeddings: Array,
    bias: Array | None,
    targets: Array,
    d_per_position: Array | None,
    config: SweepConfig,
    wanted: Wanted,
) -> CorrectedSweep:
    """Adds, for each target, its loss and gradient as a positive less those as a negative.

    Args:
      sweep: result of `dense_sweep` on the same arguments, with its linear term.
      activations: `[T, D]` float.
      embeddings: `[V, D]` float.
      bias: `[V]` float or None.
      targets: `[T, L]` int32 rows of `embeddings`, distinct per position; negative = none here.
      d_per_position: `[T]` float32, needed for gradients only.
      config: static options.
      wanted: which results to correct.
    """
    operand = matmul_operand(activations, config).astype(jnp.float32)
    if not wanted.counts and config.pointwise.correction_is_linear:
        return _linear_correction(
            sweep, operand, embeddings, bias, targets, d_per_position, config, wanted
        )
    thresholds = jnp.asarray(config.logit_thresholds, jnp.float32)
    counts = None
    if wanted.counts:
        none = jnp.zeros_like(sweep.num_predicted)
        counts = (none[:, 0], none)

    def one_target(state: tuple, row: Array) -> tuple:  # row: [T] int32
        sweep, counts = state
        is_target = row >= 0
        row = jnp.where(is_target, row, 0)
        vectors = matmul_operand(embeddings[row], config).astype(jnp.float32)  # [T, D]
        logits = jnp.sum(operand * vectors, axis=1)
        if bias is not None:
            logits = logits + bias[row].astype(jnp.float32)
        loss, d_logits = config.pointwise.correction(logits)
        if wanted.loss:
            loss = sweep.loss + jnp.where(is_target, loss, 0)
            sweep = dataclasses.replace(sweep, loss=loss)
        if wanted.counts:
            is_hit = is_target[:, None] & (logits[:, None] > thresholds[None, :])
            counts = (counts[0] + is_target.astype(jnp.int32), counts[1] + is_hit.astype(jnp.int32))
        if wanted.gradients:
            assert d_per_position is not None
            d_logits = jnp.where(is_target, d_logits * d_per_position, 0)
            sweep = _add_gradients(sweep, row, d_logits, operand, vectors)
        return (sweep, counts), None

    (sweep, counts), _ = lax.scan(one_target, (sweep, counts), targets.T)
    num_targets, num_hit = counts if counts is not None else (None, None)
    return CorrectedSweep(sweep, num_targets, num_hit)


def _linear_correction(sweep: Sweep, operand: Array, embeddings: Array, bias: Array | None,
                       targets: Array, d_per_position: Array | None, config: SweepConfig,
                       wanted: Wanted) -> CorrectedSweep:  # fmt: skip
    """The same where a target adds `-label * x`: only the sum of its targets' rows is needed."""
    label = 1 - config.pointwise.label_smoothing
    rows_sum = _sum_of_rows(embeddings, targets, config)
    if wanted.loss:
        logits = jnp.sum(operand * rows_sum, axis=1)
        if bias is not None:
            is_target = targets >= 0
            bias_at = bias[jnp.where(is_target, targets, 0)].astype(jnp.float32)
            logits = logits + jnp.where(is_target, bias_at, 0).sum(axis=1)
        sweep = dataclasses.replace(sweep, loss=sweep.loss - label * logits)
    if wanted.gradients:
        assert d_per_position is not None
        d_logits = -label * d_per_position
        update = d_logits[:, None] * operand
        past_the_end = jnp.where(targets >= 0, targets, embeddings.shape[0])  # dropped

        def one_target(state: tuple, row: Array) -> tuple:  # row: [T] int32
            d_embeddings, d_bias = state
            d_embeddings = d_embeddings.at[row].add(update, mode="drop")
            d_bias = None if d_bias is None else d_bias.at[row].add(d_logits, mode="drop")
            return (d_embeddings, d_bias), None

        state = (sweep.d_embeddings, sweep.d_bias)
        (d_embeddings, d_bias), _ = lax.scan(one_target, state, past_the_end.T)
        sweep = dataclasses.replace(
            sweep,
            d_activations=sweep.d_activations + d_logits[:, None] * rows_sum,
            d_embeddings=d_embeddings,
            d_bias=d_bias,
        )
    return CorrectedSweep(sweep, None, None)


def _sum_of_rows(embeddings: Array, targets: Array, config: SweepConfig) -> Array:
    """`[T, D]` float32, sum of the rows of every position's targets."""
    num_positions, num_targets = targets.shape
    dim = embeddings.shape[1]
    at_once = GATHERED_BYTES // (num_positions * dim * embeddings.dtype.itemsize)
    at_once = max(1, min(at_once, num_targets))

    def add_some(total: Array, some: Array) -> tuple[Array, None]:  # some: [at_once, T] int32
        is_target = some >= 0
        vectors = matmul_operand(embeddings[jnp.where(is_target, some, 0)], config)
        vectors = jnp.where(is_target[:, :, None], vectors.astype(jnp.float32), 0)
        return total + vectors.sum(axis=0), None

    # Targets lead: a sum over a leading axis adds whole registers.
    padded = jnp.pad(targets.T, ((0, -num_targets % at_once), (0, 0)), constant_values=-1)
    total = jnp.zeros_like(embeddings, shape=(num_positions, dim), dtype=jnp.float32)
    if at_once == num_targets:
        return add_some(total, padded)[0]
    # A loop, since the compiler would gather for all groups at the same time.
    return lax.scan(add_some, total, padded.reshape(-1, at_once, num_positions))[0]


def _add_gradients(
    sweep: Sweep, row: Array, d_logits: Array, operand: Array, vectors: Array
) -> Sweep:
    d_bias = None if sweep.d_bias is None else sweep.d_bias.at[row].add(d_logits)
    return dataclasses.replace(
        sweep,
        d_activations=sweep.d_activations + d_logits[:, None] * vectors,
        d_embeddings=sweep.d_embeddings.at[row].add(d_logits[:, None] * operand),
        d_bias=d_bias,
    )
