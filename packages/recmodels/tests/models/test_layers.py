"""Layers with a backward pass of their own, and the bits of dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recmodels._src.models.layers import LayerNorm, Packing, hashed_bits


def _value_and_gradients(layer: nnx.Module, values: jax.Array, weights: jax.Array):
    graph, state = nnx.split(layer)

    def total(state, values):
        return (nnx.merge(graph, state)(values) * weights).sum()

    return jax.value_and_grad(total, argnums=(0, 1))(state, values)


def test_layer_norm_equals_that_of_flax():
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.normal(3, 2, (4, 5, 16)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=values.shape), jnp.float32)
    scale, bias = rng.normal(size=(2, 16)).astype(np.float32)
    ours, theirs = LayerNorm(16, jnp.dtype("float32")), nnx.LayerNorm(16, rngs=nnx.Rngs(0))
    for layer in (ours, theirs):
        layer.scale[...], layer.bias[...] = scale, bias
    np.testing.assert_allclose(ours(values), theirs(values), rtol=1e-5, atol=1e-5)
    actual = jax.tree.leaves(_value_and_gradients(ours, values, weights))
    expected = jax.tree.leaves(_value_and_gradients(theirs, values, weights))
    assert len(actual) == len(expected) == 4
    for ours_leaf, theirs_leaf in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours_leaf, theirs_leaf, rtol=1e-4, atol=1e-5)


def test_layer_norm_computes_in_float32_whatever_it_returns():
    values = jnp.linspace(1000, 1001, 16)
    reduced = LayerNorm(16, jnp.dtype("bfloat16"))(values)
    assert reduced.dtype == jnp.bfloat16
    expected = LayerNorm(16, jnp.dtype("float32"))(values)
    np.testing.assert_allclose(reduced.astype(np.float32), expected, rtol=2**-8)


def test_packed_rows_come_back_and_padding_is_zero():
    mask = jnp.asarray([[False, True, True], [False, False, False], [True, True, True]])
    values = jnp.arange(1.0, 19).reshape(9, 2)
    packing = Packing.of(mask, 7)  # two more rows than positions
    packed = packing.pack(values)
    np.testing.assert_array_equal(packed[:5], values[np.flatnonzero(mask)])
    assert not packed[5:].any()
    np.testing.assert_array_equal(packing.spread(packed), values * mask.reshape(-1, 1))


def test_packing_has_the_gradient_of_its_rows():
    mask = jnp.asarray([[False, True], [True, True]])
    packing = Packing.of(mask, 4)
    rng = np.random.default_rng(1)
    values, weights = jnp.asarray(rng.normal(size=(2, 4, 3)), jnp.float32)
    rows = np.flatnonzero(mask)

    def packed(values):
        return (packing.pack(values) * weights).sum()

    def spread(values):
        return (packing.spread(values) * weights).sum()

    expected = np.zeros((4, 3), np.float32)
    expected[rows] = weights[:3]
    np.testing.assert_array_equal(jax.grad(packed)(values), expected)
    expected = np.zeros((4, 3), np.float32)
    expected[:3] = weights[rows]
    np.testing.assert_array_equal(jax.grad(spread)(values), expected)


@pytest.mark.parametrize("seed", [0, 1, 2**31])
def test_hashed_bits_are_even_and_independent(seed):
    shape = (64, 1024)
    bits = np.asarray(hashed_bits(jax.random.key(seed), shape))
    assert bits.shape == shape
    assert bits.dtype == np.uint32
    columns = [(bits >> place) & 1 for place in range(32)]
    # Five standard deviations of a fair coin's mean over 65,536 throws.
    limit = 5 * 0.5 / np.sqrt(bits.size)
    for column in columns:
        assert abs(column.mean() - 0.5) < limit
        assert abs((column[:, 1:] ^ column[:, :-1]).mean() - 0.5) < limit
        assert abs((column[1:] ^ column[:-1]).mean() - 0.5) < limit
    for first in range(32):
        for second in range(first):
            assert abs((columns[first] ^ columns[second]).mean() - 0.5) < limit


def test_hashed_bits_of_two_keys_share_nothing():
    first = np.asarray(hashed_bits(jax.random.key(3), (65_536,)))
    second = np.asarray(hashed_bits(jax.random.fold_in(jax.random.key(3), 1), (65_536,)))
    ones = np.bitwise_count(first ^ second).mean()
    assert abs(ones - 16) < 5 * np.sqrt(32) / 2 / np.sqrt(first.size)
