"""The accuracy promised at B = N = 32, V = 100,000, D = 128, L = 8, against float64 and Keras."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import oracle
import pytest
from tolerances import relative_l2

import cutbce_ops

T, V, D, L = 32 * 32, 100_000, 128, 8


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    activations = jnp.asarray(rng.normal(size=(T, D)), jnp.float32)
    embeddings = jnp.asarray(rng.normal(size=(V, D)) / np.sqrt(D), jnp.float32)
    targets = jnp.asarray(rng.integers(0, V, (T, L)), jnp.int32)
    return activations, embeddings, targets


@pytest.fixture(scope="module")
def ours(problem):
    activations, embeddings, targets = problem
    return jax.jit(jax.value_and_grad(cutbce_ops.cut_binary_cross_entropy, (0, 1)))(
        activations, embeddings, targets
    )


def test_against_float64(problem, ours):
    truth = oracle.binary_cross_entropy(*problem)
    loss, (d_activations, d_embeddings) = ours
    assert relative_l2(loss, truth.loss) <= 2e-7
    assert relative_l2(d_activations, truth.d_activations) <= 1e-6
    assert relative_l2(d_embeddings, truth.d_embeddings) <= 1e-6


def test_against_keras(problem, ours):
    targets = np.asarray(problem[2])
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def keras_loss(activations, embeddings, labels):
        return cross_entropy(labels, activations @ embeddings.T)

    labels = jnp.asarray(oracle.multi_hot(targets, V), jnp.float32)
    want = jax.jit(jax.value_and_grad(keras_loss, (0, 1)))(problem[0], problem[1], labels)
    assert relative_l2(ours[0], want[0]) <= 2e-7
    assert relative_l2(ours[1][0], want[1][0]) <= 1e-6
    assert relative_l2(ours[1][1], want[1][1]) <= 1e-6
