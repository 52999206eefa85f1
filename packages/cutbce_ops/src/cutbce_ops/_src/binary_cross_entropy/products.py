"""Operands and products of the sweeps: the one place that knows what `precision` means."""

import jax.numpy as jnp
from jax import Array, lax

from cutbce_ops._src.binary_cross_entropy.config import SweepConfig


def matmul_operand(array: Array, config: SweepConfig) -> Array:
    """Casts an operand of the products to the dtype that `precision` asks for."""
    if config.precision == "bfloat16":
        return array.astype(jnp.bfloat16)
    return array.astype(jnp.float32) if config.precision == "highest" else array


def matmul(config: SweepConfig, left: Array, right: Array, contract: tuple[int, int]) -> Array:
    """Product over the two given axes, accumulated in float32."""
    precision = lax.Precision.HIGHEST if config.precision == "highest" else lax.Precision.DEFAULT
    dtype = jnp.promote_types(left.dtype, right.dtype)
    return lax.dot_general(
        left.astype(dtype), right.astype(dtype), (((contract[0],), (contract[1],)), ((), ())),
        precision=precision, preferred_element_type=jnp.float32,
    )  # fmt: skip
