"""The sweep of binary cross-entropy in plain XLA, on any backend.

All items count as negatives here; `positives.py` corrects the few that are targets, and
`linear_term.py` adds what label smoothing and positive weights do to every item.
"""

import dataclasses
import functools
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from cutbce_ops._src.binary_cross_entropy.config import SweepConfig
from cutbce_ops._src.binary_cross_entropy.pointwise import sigmoid
from cutbce_ops._src.binary_cross_entropy.sweep import Sweep, Wanted
from cutbce_ops._src.binary_cross_entropy.tile_loop import masked, sweep_tiles, total_of_rows


def dense_sweep(
    activations: Array,
    embeddings: Array,
    bias: Array | None,
    d_per_position: Array | None,
    vocab_offset: Array | None,
    config: SweepConfig,
    wanted: Wanted,
) -> Sweep:
    """Sweeps all rows as negatives.

    Args:
      activations: `[T, D]` float.
      embeddings: `[V, D]` float; this device's rows.
      bias: `[V]` float, or None.
      d_per_position: `[T]` float32, factor of the derivatives by the logits; needed for
        gradients only.
      vocab_offset: `[]` int32, global number of row 0 of `embeddings`; None when this is the
        whole table, which needs no mask.
      config: static options.
      wanted: which results to compute.
    """
    zeros = jnp.zeros_like(activations[:, 0], dtype=jnp.float32)
    num_thresholds = len(config.logit_thresholds)
    counts = jnp.zeros_like(activations, shape=(len(zeros), num_thresholds), dtype=jnp.int32)
    sums = Sweep(
        loss=zeros if wanted.loss else None, num_predicted=counts if wanted.counts else None
    )
    sums, gradients = sweep_tiles(
        partial(_negatives, config), sums, None, activations, embeddings, bias,
        d_per_position if wanted.gradients else None, vocab_offset, config,
    )  # fmt: skip
    return dataclasses.replace(gradients, loss=sums.loss, num_predicted=sums.num_predicted)


def _negatives(
    config: SweepConfig, logits: Array, in_catalog: Array | None, _: Any, sums: Sweep
) -> tuple[Sweep, Array]:
    """Tile function: adds the losses of the items as negatives, and counts them."""
    pointwise = config.pointwise
    if pointwise.is_plain:
        d_logits = masked(sigmoid(logits), in_catalog)
        total = partial(_softplus_total, logits, d_logits)
    else:
        losses, d_logits = (masked(part, in_catalog) for part in pointwise.negative(logits))
        total = partial(_total, losses)
    loss, num_predicted = sums.loss, sums.num_predicted
    if loss is not None:
        loss = loss + total()
    if num_predicted is not None:
        num_predicted += _num_above(logits, in_catalog, config.logit_thresholds)
    return Sweep(loss=loss, num_predicted=num_predicted), d_logits


def _total(values: Array) -> Array:
    """`[t]`, sum over the rows of `[v, t]`."""
    return total_of_rows(partial(functools.reduce, jnp.add), values)


def _softplus_total(logits: Array, probabilities: Array) -> Array:
    """`[t]`, sum over the rows of log(1 + e^x), with one pair of logarithms for many logits.

    Where m = min(p, 1 - p), log(1 + e^x) = max(x, 0) - log(1 - m). Of some logits the product of
    the 1 - m is kept, and apart from it what it lacks to 1: either is relatively exact, so that
    the logarithm is where it is tiny. Rows outside the catalog, x = p = 0, add nothing.
    """
    return total_of_rows(_softplus_of_strips, logits, probabilities)


def _softplus_of_strips(logits: list[Array], probabilities: list[Array]) -> Array:
    positive, kept, lost = 0.0, 1.0, 0.0
    for x, p in zip(logits, probabilities, strict=True):
        step = jnp.minimum(p, 1 - p) * kept
        kept, lost = kept - step, lost + step
        positive = positive + jnp.maximum(x, 0)
    logarithm = jnp.where(lost < 0.5, jnp.log1p(-lost), jnp.log(kept))
    return positive - logarithm


def _num_above(logits: Array, in_catalog: Array | None, thresholds: tuple[float, ...]) -> Array:
    """`[t, K]` int32, logits of a position above each threshold."""

    def count(threshold: float) -> Array:
        is_above = logits > threshold
        if in_catalog is not None:
            is_above = is_above & in_catalog[:, None]
        return _total(is_above.astype(jnp.int32))

    return jnp.stack([count(threshold) for threshold in thresholds], axis=1)
