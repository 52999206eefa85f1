"""The TPU form of the published algorithm, which benchmarks compare with, does what it states."""

import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def statements(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return [importlib.import_module(name) for name in ("published", "published_tpu")]


def test_equals_the_plain_statement(statements):
    from jax.experimental.pallas import tpu as pltpu

    plain, tpu = statements
    num_positions, num_rows, dim = 256, 300, 128  # rows divide no block
    rng = np.random.default_rng(0)
    # Factors that bfloat16 holds, so that both see the same logits.
    activations = jnp.asarray(rng.normal(size=(num_positions, dim)), jnp.bfloat16)
    embeddings = jnp.asarray(rng.normal(size=(num_rows, dim)) * dim**-0.5, jnp.bfloat16)
    arrays = (activations.astype(jnp.float32), embeddings.astype(jnp.float32))
    targets = rng.integers(0, num_rows, (num_positions, 3)).astype(np.int32)
    targets[::2, 1] = targets[::2, 0]  # a duplicate counts once
    targets[::3, 2] = -1
    interpret = pltpu.InterpretParams(detect_races=True)  # memory starts as NaN
    blocks = tpu.PublishedBlocks(forward_v=128, block_v=128, block_t=128)

    def loss(a, e):
        return tpu.published_cut_bce_tpu(a, e, jnp.asarray(targets), blocks, interpret=interpret)

    def plain_loss(a, e):
        return plain.published_cut_bce(a, e, jnp.asarray(targets), 100)

    got, got_gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(*arrays)
    want, want_gradients = jax.jit(jax.value_and_grad(plain_loss, (0, 1)))(*arrays)
    assert_close(got, want, "bfloat16", "per_position")
    for gradient, expected in zip(got_gradients, want_gradients, strict=True):
        assert_close(gradient, expected, "bfloat16", "gradient")
