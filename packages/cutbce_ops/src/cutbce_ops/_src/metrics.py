"""Confusion counts of the prediction "every item above a probability", and their metrics."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from cutbce_ops._src import checks

MAX_BETA = 1e6  # beyond it F-beta is recall, and its square leaves the range of float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConfusionCounts:
    """Counts per position, int32, of a position's V decisions at one or several probabilities.

    A position whose weight is zero (padding) has zero counts. A logit within one rounding of a
    threshold may be counted on either side.

    Attributes:
      tp: targets above the threshold; `[...]`, or `[..., K]` for a tuple of K thresholds.
      fp: other items above the threshold, same shape.
      fn: targets not above the threshold, same shape.
      tn: other items not above the threshold, same shape.
      thresholds: probability, or tuple of ascending probabilities (static).
    """

    tp: Array
    fp: Array
    fn: Array
    tn: Array
    thresholds: float | tuple[float, ...] = dataclasses.field(
        default=0.5, metadata={"static": True}
    )


def _totals(counts: ConfusionCounts) -> tuple[Array, Array, Array, Array]:
    """(tp, fp, fn, tn) summed over positions: `[]`, or `[K]` for several thresholds."""
    if isinstance(counts.thresholds, tuple):
        _check_last_axis(counts, len(counts.thresholds))

    def total(count: Array) -> Array:
        # float32 holds sums beyond 2^31 (V = 10^8 and a few positions) at a relative error of 1e-7.
        count = jnp.asarray(count).astype(jnp.float32)
        num_kept = 1 if isinstance(counts.thresholds, tuple) else 0
        return jnp.sum(count, axis=tuple(range(count.ndim - num_kept)))

    return total(counts.tp), total(counts.fp), total(counts.fn), total(counts.tn)


def _check_last_axis(counts: ConfusionCounts, num_thresholds: int) -> None:
    for name in ("tp", "fp", "fn", "tn"):
        shape = jnp.shape(getattr(counts, name))
        if shape[-1:] != (num_thresholds,):
            raise ValueError(
                f"`counts.{name}` must have shape [..., {num_thresholds}], one count for each of "
                f"its {num_thresholds} thresholds; got {shape}."
            )


def _ratio(numerator: Array, denominator: Array) -> Array:
    return jnp.where(denominator > 0, numerator / jnp.where(denominator > 0, denominator, 1), 0.0)


def binary_accuracy(counts: ConfusionCounts) -> Array:
    """Share of right decisions.

    Args:
      counts: counts of any shape; they are summed over the positions first.

    Returns:
      `[]` float32 (`[K]` for K thresholds); 0 when nothing was counted.
    """
    tp, fp, fn, tn = _totals(counts)
    return _ratio(tp + tn, tp + tn + fp + fn)


def precision(counts: ConfusionCounts) -> Array:
    """Share of predicted items that are targets.

    Args:
      counts: counts of any shape; they are summed over the positions first.

    Returns:
      `[]` float32 (`[K]` for K thresholds); 0 when nothing is predicted.
    """
    tp, fp, _, _ = _totals(counts)
    return _ratio(tp, tp + fp)


def recall(counts: ConfusionCounts) -> Array:
    """Share of targets that are predicted.

    Args:
      counts: counts of any shape; they are summed over the positions first.

    Returns:
      `[]` float32 (`[K]` for K thresholds); 0 when there is no target.
    """
    tp, _, fn, _ = _totals(counts)
    return _ratio(tp, tp + fn)


def f_beta(counts: ConfusionCounts, beta: float = 1.0) -> Array:
    """Weighted harmonic mean of precision and recall.

    Args:
      counts: counts of any shape; they are summed over the positions first.
      beta: how many times recall counts as much as precision; above 0, at most 1e6.

    Returns:
      `[]` float32 (`[K]` for K thresholds); 0 when nothing is predicted and there is no target.

    Raises:
      ValueError: `beta` is outside its range.
    """
    checks.require_number("beta", beta, 0.0, MAX_BETA, low_is_allowed=False)
    tp, fp, fn, _ = _totals(counts)
    weighted_tp = (1 + beta**2) * tp
    return _ratio(weighted_tp, weighted_tp + beta**2 * fn + fp)


def auc_pr(counts: ConfusionCounts) -> Array:
    """Area under the precision-recall curve, estimated from counts at several thresholds.

    Between two thresholds false positives are taken to be linear in true positives, which bends
    the curve of precision over recall; drawing straight lines there would flatter the result. With
    predicted items P = tp + fp, its slope s = d tp / d P and i = tp_low - s P_low on a segment, and
    N targets, the area of the segment is

        s (tp_high - tp_low + i log(P_high / P_low)) / N.

    Beyond the highest threshold precision is held at its value there; below the lowest one nothing
    is added, so spread the thresholds until recall is near 1 at the first.

    Args:
      counts: counts `[..., K]` with a tuple of K >= 2 `thresholds`; summed over positions first.

    Returns:
      `[]` float32; 0 when there is no target.

    Raises:
      ValueError: `counts` has fewer than two thresholds.

    Reference: J. Davis and M. Goadrich, The relationship between Precision-Recall and ROC curves,
      ICML 2006, section 4.

    Example:
      >>> import jax.numpy as jnp, cutbce_ops
      >>> tp, fp = jnp.array([4, 3]), jnp.array([6, 0])
      >>> counts = cutbce_ops.ConfusionCounts(tp, fp, 4 - tp, 90 - fp, thresholds=(0.1, 0.6))
      >>> round(float(cutbce_ops.auc_pr(counts)), 4)
      0.8963
    """
    if not isinstance(counts.thresholds, tuple) or len(counts.thresholds) < 2:
        raise ValueError(
            "`counts` must hold a tuple of at least 2 `thresholds` for a curve; "
            f"got thresholds={counts.thresholds!r}."
        )
    tp, fp, fn, _ = _totals(counts)
    predicted = tp + fp
    # Segments run from a threshold to the next lower one, along which both counts grow.
    slope = _ratio(tp[:-1] - tp[1:], predicted[:-1] - predicted[1:])
    intercept = tp[1:] - slope * predicted[1:]
    has_both = (predicted[1:] > 0) & (predicted[:-1] > 0)
    growth = jnp.log(jnp.where(has_both, predicted[:-1] / jnp.where(has_both, predicted[1:], 1), 1))
    areas = slope * (tp[:-1] - tp[1:] + intercept * growth)
    highest = _ratio(tp[-1], predicted[-1]) * tp[-1]
    return _ratio(jnp.sum(areas) + highest, tp[0] + fn[0])
