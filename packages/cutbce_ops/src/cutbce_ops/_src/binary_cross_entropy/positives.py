"""Corrections for the targets, which the dense sweep counted as negatives.

Targets are few (T * L against T * V logits), so they are gathered and scattered outside the sweep
instead of being compared with every row of every tile.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from cutbce_ops._src.binary_cross_entropy import pallas_tpu
from cutbce_ops._src.binary_cross_entropy.config import SweepConfig
from cutbce_ops._src.binary_cross_entropy.dispatch import on_platform, takes_tpu_kernel
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetSums:
    """Sums over the targets of each position, for a correction that is linear in their logits.

    Attributes:
      logits: `[T]` float32, of their logits; None unless the loss is wanted.
      d_activations: `[T, D]` float32, of their rows times the correction's slope and the weight of
        the position; None unless gradients are wanted.
    """

    logits: Any
    d_activations: Any


def distinct_targets(targets: Array, vocab_size: int) -> Array:
    """Replaces padding, ids outside `[0, vocab_size)` and repeats in a position's list by -1."""
    is_inside = (targets >= 0) & (targets < vocab_size)
    num_targets = targets.shape[1]
    earlier = jnp.tril(jnp.ones((num_targets, num_targets), bool), k=-1)
    is_repeat = ((targets[:, :, None] == targets[:, None, :]) & earlier[None]).any(axis=2)
    return jnp.where(is_inside & ~is_repeat, targets, -1)


def add_up_targets(
    activations: Array,
    embeddings: Array,
    bias: Array | None,
    targets: Array,
    d_per_position: Array | None,
    config: SweepConfig,
    wanted: Wanted,
) -> TargetSums | None:
    """What a linear correction needs of the table, so that it can be read before the sweep.

    Args:
      activations: `[T, D]` float.
      embeddings: `[V, D]` float.
      bias: `[V]` float or None.
      targets: `[T, L]` int32 rows of `embeddings`, distinct per position; negative = none here.
      d_per_position: `[T]` float32, needed for gradients only.
      config: static options.
      wanted: which results to correct.

    Returns:
      The sums, or None where the correction of a target depends on its own logit.
    """
    arrays = (activations, embeddings, bias, targets, d_per_position)
    return _sums(*arrays, config, wanted, takes_tpu_kernel(activations, bias, config, wanted))


def _sums(activations: Array, embeddings: Array, bias: Array | None, targets: Array,
          d_per_position: Array | None, config: SweepConfig, wanted: Wanted,
          takes_kernel: bool) -> TargetSums | None:  # fmt: skip
    if wanted.counts or not config.pointwise.correction_is_linear:
        return None
    d_logits = None
    if wanted.gradients:
        assert d_per_position is not None
        d_logits = _linear_slope(config) * d_per_position
    operand = matmul_operand(activations, config).astype(jnp.float32)
    logits, d_activations = _add_up_rows(
        embeddings, targets, operand if wanted.loss else None, d_logits, config, takes_kernel
    )
    if logits is not None and bias is not None:
        is_target = targets >= 0
        bias_at = bias[jnp.where(is_target, targets, 0)].astype(jnp.float32)
        logits = logits + jnp.where(is_target, bias_at, 0).sum(axis=1)
    return TargetSums(logits, d_activations)


def correct_for_targets(
    sweep: Sweep,
    activations: Array,
    embeddings: Array,
    bias: Array | None,
    targets: Array,
    d_per_position: Array | None,
    config: SweepConfig,
    wanted: Wanted,
    sums: TargetSums | None = None,
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
      sums: what `add_up_targets` returned for the same arguments; None to add up here, by XLA.
    """
    on_tpu = sums is not None and takes_tpu_kernel(activations, bias, config, wanted)
    if sums is None:
        arrays = (activations, embeddings, bias, targets, d_per_position)
        sums = _sums(*arrays, config, wanted, takes_kernel=False)
    operand = matmul_operand(activations, config).astype(jnp.float32)
    if sums is not None:
        return _linear_correction(
            sweep, operand, targets, d_per_position, sums, config, wanted, on_tpu
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


def _linear_slope(config: SweepConfig) -> float:
    return config.pointwise.label_smoothing - 1


def _linear_correction(sweep: Sweep, operand: Array, targets: Array, d_per_position: Array | None,
                       sums: TargetSums, config: SweepConfig, wanted: Wanted,
                       on_tpu: bool) -> CorrectedSweep:  # fmt: skip
    """The same where a target adds `-label * x`: only the sum of its targets' rows is needed."""
    if wanted.loss:
        sweep = dataclasses.replace(sweep, loss=sweep.loss + _linear_slope(config) * sums.logits)
    if not wanted.gradients:
        return CorrectedSweep(sweep, None, None)
    assert d_per_position is not None
    d_logits = _linear_slope(config) * d_per_position
    d_embeddings = sweep.d_embeddings
    if on_tpu:
        # Formed before the sweep, it would have to wait in main memory.
        operand, d_embeddings = lax.optimization_barrier((operand, d_embeddings))
    update = d_logits[:, None] * operand
    past_the_end = jnp.where(targets >= 0, targets, d_embeddings.shape[0])
    past_the_end = past_the_end.T.reshape(-1)  # XLA cuts a vector more cheaply than a matrix
    num_positions, num_targets = targets.shape

    def one_target(target: Array, state: tuple) -> tuple:
        row = lax.dynamic_slice(past_the_end, (target * num_positions,), (num_positions,))
        options = {"mode": "drop", "wrap_negative_indices": False}
        d_embeddings, d_bias = state
        d_embeddings = d_embeddings.at[row].add(update, **options)
        d_bias = None if d_bias is None else d_bias.at[row].add(d_logits, **options)
        return d_embeddings, d_bias

    state = (d_embeddings, sweep.d_bias)
    d_embeddings, d_bias = lax.fori_loop(0, num_targets, one_target, state)
    d_activations = sweep.d_activations + sums.d_activations
    gradients = {"d_activations": d_activations, "d_embeddings": d_embeddings, "d_bias": d_bias}
    return CorrectedSweep(dataclasses.replace(sweep, **gradients), None, None)


def _add_up_rows(embeddings: Array, targets: Array, activations: Array | None,
                 d_logits: Array | None, config: SweepConfig,
                 takes_kernel: bool) -> tuple[Array | None, Array | None]:  # fmt: skip
    """Summed logits `[T]` of every position's targets, and `[T, D]` their rows times `d_logits`.

    Each where its factor is given.
    """
    num_positions, num_targets = targets.shape
    row_bytes = embeddings.shape[1] * embeddings.dtype.itemsize
    at_once = max(1, min(GATHERED_BYTES // (num_positions * row_bytes), num_targets))
    if takes_kernel:
        at_once = min(at_once, pallas_tpu.most_targets(row_bytes))

    def add_up(some: Array) -> tuple[Array | None, Array | None]:  # some: [at_once, T] int32
        rows = embeddings[jnp.where(some >= 0, some, 0)]
        return on_platform(
            (rows, some, activations, d_logits),
            partial(pallas_tpu.add_up_targets, config=config),
            partial(_add_up_by_xla, config=config),
            takes_kernel and at_once > 1,
            config,
        )

    if at_once == num_targets:
        return add_up(targets.T)
    padded = jnp.pad(targets.T, ((0, -num_targets % at_once), (0, 0)), constant_values=-1)
    groups = padded.reshape(-1, at_once, num_positions)

    def add_group(total: tuple, some: Array) -> tuple:
        return jax.tree.map(jnp.add, total, add_up(some)), None

    # A loop, since the compiler would gather for all groups at the same time.
    zeros = partial(jnp.zeros_like, embeddings, dtype=jnp.float32)  # vary over a mesh as these do
    total = (
        None if activations is None else zeros(shape=(num_positions,)),
        None if d_logits is None else zeros(shape=(num_positions, embeddings.shape[1])),
    )
    return lax.scan(add_group, total, groups)[0]


def _add_up_by_xla(rows: Array, targets: Array, activations: Array | None, d_logits: Array | None,
                   config: SweepConfig) -> tuple[Array | None, Array | None]:  # fmt: skip
    """What `pallas_tpu.add_up_targets` computes, by XLA."""
    rows = matmul_operand(rows, config).astype(jnp.float32)
    # Targets lead: a sum over a leading axis adds whole registers.
    total = jnp.where(targets[:, :, None] >= 0, rows, 0).sum(axis=0)
    return (
        None if activations is None else jnp.sum(activations * total, axis=1),
        None if d_logits is None else d_logits[:, None] * total,
    )


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
