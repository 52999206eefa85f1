"""Checksums see every flipped bit; that meshes agree on them, test_mesh.py shows by restoring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recmodels._src.train.checksums import checksums


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "int8"])
@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (2, 3, 4)])
def test_every_flipped_bit(dtype, shape):
    array = np.asarray(jax.random.normal(jax.random.key(0), shape) * 50).astype(jnp.dtype(dtype))
    raw = np.frombuffer(array.tobytes(), np.uint8)
    seen = {checksums({"x": jnp.asarray(array)})["x"]}
    everywhere = np.frombuffer((raw ^ 0x80).tobytes(), array.dtype).reshape(shape)
    seen.add(checksums({"x": jnp.asarray(everywhere)})["x"])
    for bit in range(8 * raw.size):
        flipped = raw.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        damaged = np.frombuffer(flipped.tobytes(), array.dtype).reshape(shape)
        seen.add(checksums({"x": jnp.asarray(damaged)})["x"])
    assert len(seen) == 8 * raw.size + (1 if raw.size == 1 else 2)


def test_order_counts():
    rows = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    values = {checksums({"x": jnp.asarray(np.roll(rows, n, axis=0))})["x"] for n in range(8)}
    assert len(values) == 8
