"""The targets' rows are added up in groups; how many at once must not matter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cutbce_ops
from cutbce_ops._src.binary_cross_entropy import positives

NUM_POSITIONS, NUM_ROWS, DIM, NUM_TARGETS = 24, 100, 16, 5
ROW_BYTES = NUM_POSITIONS * DIM * 4  # one target's row of every position


def loss_and_gradients():
    rng = np.random.default_rng(0)
    activations = jnp.asarray(rng.normal(size=(NUM_POSITIONS, DIM)), jnp.float32)
    embeddings = jnp.asarray(rng.normal(size=(NUM_ROWS, DIM)), jnp.float32)
    targets = jnp.asarray(rng.integers(-20, NUM_ROWS, (NUM_POSITIONS, NUM_TARGETS)), jnp.int32)

    def loss(activations, embeddings):
        return cutbce_ops.cut_binary_cross_entropy(activations, embeddings, targets)

    return jax.value_and_grad(loss, (0, 1))(activations, embeddings)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_groups_of_targets_give_what_all_at_once_give(monkeypatch, at_once: int):
    want = loss_and_gradients()
    monkeypatch.setattr(positives, "GATHERED_BYTES", at_once * ROW_BYTES)
    got = loss_and_gradients()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), got, want)
