"""Metrics from confusion counts, against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutbce_ops

COUNTS = cutbce_ops.ConfusionCounts(
    tp=jnp.array([3, 0]), fp=jnp.array([1, 2]), fn=jnp.array([0, 4]), tn=jnp.array([6, 4])
)


def test_metrics():
    np.testing.assert_allclose(cutbce_ops.binary_accuracy(COUNTS), 13 / 20, rtol=1e-6)
    np.testing.assert_allclose(cutbce_ops.precision(COUNTS), 3 / 6, rtol=1e-6)
    np.testing.assert_allclose(cutbce_ops.recall(COUNTS), 3 / 7, rtol=1e-6)
    np.testing.assert_allclose(cutbce_ops.f_beta(COUNTS), 2 * 3 / (2 * 3 + 4 + 3), rtol=1e-6)
    np.testing.assert_allclose(
        cutbce_ops.f_beta(COUNTS, 2.0), 5 * 3 / (5 * 3 + 4 * 4 + 3), rtol=1e-6
    )


def test_nothing_counted_gives_zero():
    zero = jnp.zeros(3, jnp.int32)
    counts = cutbce_ops.ConfusionCounts(zero, zero, zero, zero)
    for metric in (
        cutbce_ops.binary_accuracy, cutbce_ops.precision, cutbce_ops.recall, cutbce_ops.f_beta,
    ):  # fmt: skip
        assert float(metric(counts)) == 0.0


def test_totals_beyond_int32():
    many = jnp.full(40, 2**30, jnp.int32)
    counts = cutbce_ops.ConfusionCounts(many, many, many, many)
    np.testing.assert_allclose(cutbce_ops.binary_accuracy(counts), 0.5, rtol=1e-6)


def test_beta_must_be_positive():
    for beta in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"`beta` must be finite and in \(0.0, 1000000.0\]"):
            cutbce_ops.f_beta(COUNTS, beta)


def test_several_thresholds_keep_their_axis():
    counts = cutbce_ops.ConfusionCounts(
        tp=jnp.array([[3, 1], [1, 0]]), fp=jnp.array([[2, 0], [4, 1]]),
        fn=jnp.array([[0, 2], [0, 1]]), tn=jnp.array([[5, 7], [5, 8]]), thresholds=(0.2, 0.7),
    )  # fmt: skip
    np.testing.assert_allclose(cutbce_ops.binary_accuracy(counts), [14 / 20, 16 / 20], rtol=1e-6)
    np.testing.assert_allclose(cutbce_ops.precision(counts), [4 / 10, 1 / 2], rtol=1e-6)
    np.testing.assert_allclose(cutbce_ops.recall(counts), [1.0, 1 / 4], rtol=1e-6)
    np.testing.assert_allclose(cutbce_ops.f_beta(counts), [8 / 14, 1 / 3], rtol=1e-6)


def test_counts_must_fit_their_thresholds():
    counts = cutbce_ops.ConfusionCounts(*(jnp.zeros((4, 2)),) * 4, thresholds=(0.1, 0.5, 0.9))
    for metric in (cutbce_ops.auc_pr, cutbce_ops.recall):
        with pytest.raises(
            ValueError, match=r"`counts.tp` must have shape \[..., 3\].*got \(4, 2\)"
        ):
            metric(counts)


def curve(tp, fp, num_targets) -> cutbce_ops.ConfusionCounts:
    tp, fp = np.asarray(tp), np.asarray(fp)
    thresholds = tuple(np.linspace(0.1, 0.9, len(tp)).tolist())
    return cutbce_ops.ConfusionCounts(tp, fp, num_targets - tp, 10_000 - fp, thresholds)


def test_area_under_precision_recall_equals_the_integral_over_single_items():
    tp, fp = [40, 31, 12, 0], [900, 100, 10, 0]
    area = 0.0
    for low in range(3):
        # Precision over recall on the segment, with fp linear in tp, summed by the midpoint rule.
        steps = np.linspace(0, 1, 200_001)
        steps = (steps[1:] + steps[:-1]) / 2
        hits = tp[low + 1] + steps * (tp[low] - tp[low + 1])
        others = fp[low + 1] + steps * (fp[low] - fp[low + 1])
        area += np.mean(hits / (hits + others)) * (tp[low] - tp[low + 1]) / 50
    np.testing.assert_allclose(cutbce_ops.auc_pr(curve(tp, fp, 50)), area, rtol=1e-6)


@pytest.mark.parametrize(
    ("tp", "fp", "want"),
    [
        ([50, 50, 20], [0, 0, 0], 1.0),  # nothing but targets
        ([50, 25], [950, 475], 0.05),  # as good as chance
        ([30, 30], [10, 10], 0.6 * 0.75),  # two equal thresholds: the constant part only
        ([0, 0], [7, 0], 0.0),
    ],
)
def test_area_under_precision_recall_of_known_curves(tp, fp, want):
    np.testing.assert_allclose(cutbce_ops.auc_pr(curve(tp, fp, 50)), want, rtol=1e-6)


def test_a_curve_needs_two_thresholds():
    with pytest.raises(ValueError, match=r"tuple of at least 2 `thresholds`.*got thresholds=0.5"):
        cutbce_ops.auc_pr(COUNTS)


def test_counts_are_int32_even_with_64_bits_enabled():
    activations, table = jnp.ones((4, 8), jnp.float32), jnp.ones((3000, 8), jnp.float32)
    targets = jnp.zeros((4, 2), jnp.int32)
    with jax.enable_x64(True):
        loss, output = cutbce_ops.cut_binary_cross_entropy_with_aux(
            activations, table, targets, label_smoothing=0.1, thresholds=(0.2, 0.5)
        )
    assert loss.dtype == jnp.float32
    assert output.counts.tn.dtype == jnp.int32
    assert output.counts.tn.shape == (4, 2)
