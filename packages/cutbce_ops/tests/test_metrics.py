"""Metrics from confusion counts, against their definitions."""

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
