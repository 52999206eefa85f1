"""The loss of one logit and its hand-written derivative, element by element."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from cutbce_ops._src.binary_cross_entropy.pointwise import PointwiseLoss

LOSSES = [
    PointwiseLoss(),
    PointwiseLoss(pos_weight=3.0, label_smoothing=0.2),
    PointwiseLoss(focal_gamma=1.0),
    PointwiseLoss(focal_gamma=0.5, pos_weight=2.0),
    PointwiseLoss(focal_gamma=2.0, label_smoothing=0.1),
    PointwiseLoss(focal_gamma=1.5, logit_cap=30.0),
]


def truth_of(loss: PointwiseLoss, logits, y: float):
    x, d_cap = oracle.capped(np.asarray(logits, np.float64), loss.logit_cap)
    value, d_value = oracle.pointwise_loss(x, y, loss.pos_weight, loss.focal_gamma)
    return value, d_value * d_cap


def kinds(loss: PointwiseLoss):
    smoothing = loss.label_smoothing / 2
    return (loss.negative, smoothing), (loss.positive, 1 - smoothing)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_value_and_derivative_match_float64(loss: PointwiseLoss):
    logits = np.linspace(-30, 30, 4001, dtype=np.float32)
    # Capping rounds a logit anew: a probability moves by up to 30 * 2e-7, its 2.5th power by more.
    rtol = 2e-5 if loss.logit_cap else 1e-6
    for function, y in kinds(loss):
        for got, want in zip(jax.jit(function)(logits), truth_of(loss, logits, y), strict=True):
            # A smoothed loss has a minimum, where its derivative is a difference.
            atol = 1e-6 if loss.label_smoothing else 0
            np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_sweep_and_correction_add_up(loss: PointwiseLoss):
    logits = jnp.linspace(-9, 9, 101)
    loss_sum, d_sum = loss.sweep_function(logits)
    if loss.is_plain:  # what `linear_term.py` adds
        loss_sum = loss.negative_slope * loss_sum - loss.negative_label * logits
        d_sum = loss.negative_slope * d_sum - loss.negative_label
    for got, want in zip((loss_sum, d_sum), loss.negative(logits), strict=True):
        np.testing.assert_allclose(got, want, atol=3e-6)
    added, d_added = loss.correction(logits)
    positive, d_positive = loss.positive(logits)
    np.testing.assert_allclose(loss_sum + added, positive, atol=3e-6)
    np.testing.assert_allclose(d_sum + d_added, d_positive, atol=3e-6)


def test_probabilities_down_to_1e_minus_30():
    logits = np.log(np.logspace(-30, -6, 200)).astype(np.float32)
    want = np.logaddexp(0, logits.astype(np.float64))
    plain, d_plain = PointwiseLoss().sweep_function(jnp.asarray(logits))
    np.testing.assert_allclose(plain, want, rtol=1e-6)
    np.testing.assert_allclose(d_plain, want, rtol=2e-6)  # p = log(1 + e^x) (1 - p / 2)
    for gamma in (0.25, 1.0):
        loss = PointwiseLoss(focal_gamma=gamma)
        keeps = want > 1e-18  # the square of a smaller probability leaves float32
        for got, exact in zip(
            loss.negative(jnp.asarray(logits)), truth_of(loss, logits, 0.0), strict=True
        ):
            np.testing.assert_allclose(got[keeps], exact[keeps], rtol=5e-6)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_extreme_logits_are_finite(loss: PointwiseLoss):
    for function, y in kinds(loss):
        value, derivative = function(jnp.array([-1e4, 1e4]))
        with np.errstate(divide="ignore", invalid="ignore"):
            want, _ = truth_of(loss, np.array([-1e4, 1e4]), y)
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-30)
        assert np.isfinite(derivative).all()


@pytest.mark.parametrize("cap", [None, 3.0])
def test_thresholds_in_terms_of_uncapped_logits(cap: float | None):
    loss = PointwiseLoss(logit_cap=cap)
    logits = np.linspace(-50, 50, 1001)
    for threshold in (-4.0, -1.0, 0.0, 2.5, 4.0):
        want = oracle.capped(logits, cap)[0] > threshold
        np.testing.assert_array_equal(logits > loss.raw_threshold(threshold), want)
