"""Confusion counts of the prediction "every item with a positive logit", and their metrics."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from cutbce_ops._src import checks

MAX_BETA = 1e6  # beyond it F-beta is recall, and its square leaves the range of float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConfusionCounts:
    """Counts per position, int32, of a position's V decisions at probability 0.5 (logit 0).

    A position whose weight is zero (padding) has four zero counts. A logit within one rounding
    of zero may be counted on either side.

    Attributes:
      tp: targets with a positive logit.
      fp: other items with a positive logit.
      fn: targets without a positive logit.
      tn: other items without a positive logit.
    """

    tp: Array
    fp: Array
    fn: Array
    tn: Array


def _total(counts: Array) -> Array:
    # float32 holds sums beyond 2^31 (V = 10^8 and a few positions) at a relative error of 1e-7.
    return jnp.sum(jnp.asarray(counts).astype(jnp.float32))


def _ratio(numerator: Array, denominator: Array) -> Array:
    return jnp.where(denominator > 0, numerator / jnp.where(denominator > 0, denominator, 1), 0.0)


def binary_accuracy(counts: ConfusionCounts) -> Array:
    """Share of right decisions.

    Args:
      counts: counts of any shape; they are summed first.

    Returns:
      `[]` float32; 0 when nothing was counted.
    """
    right = _total(counts.tp) + _total(counts.tn)
    return _ratio(right, right + _total(counts.fp) + _total(counts.fn))


def precision(counts: ConfusionCounts) -> Array:
    """Share of predicted items that are targets.

    Args:
      counts: counts of any shape; they are summed first.

    Returns:
      `[]` float32; 0 when nothing is predicted.
    """
    return _ratio(_total(counts.tp), _total(counts.tp) + _total(counts.fp))


def recall(counts: ConfusionCounts) -> Array:
    """Share of targets that are predicted.

    Args:
      counts: counts of any shape; they are summed first.

    Returns:
      `[]` float32; 0 when there is no target.
    """
    return _ratio(_total(counts.tp), _total(counts.tp) + _total(counts.fn))


def f_beta(counts: ConfusionCounts, beta: float = 1.0) -> Array:
    """Weighted harmonic mean of precision and recall.

    Args:
      counts: counts of any shape; they are summed first.
      beta: how many times recall counts as much as precision; above 0, at most 1e6.

    Returns:
      `[]` float32; 0 when nothing is predicted and there is no target.

    Raises:
      ValueError: `beta` is outside its range.
    """
    checks.require_number("beta", beta, 0.0, MAX_BETA, low_is_allowed=False)
    weighted_tp = (1 + beta**2) * _total(counts.tp)
    return _ratio(weighted_tp, weighted_tp + beta**2 * _total(counts.fn) + _total(counts.fp))
