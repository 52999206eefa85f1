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


def matvec(matrix: Array, vector: Array) -> Array:
    """Product of float32 factors, exact to float32 on every platform."""
    return lax.dot_general(
        matrix, vector, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def transposed(rows: Array) -> Array:
    """`[D, v]` from finite `[v, D]`.

    XLA folds a plain transposition into the product that reads it. On a CPU that costs 5 % of a
    sweep, and in bfloat16 half of it: such a product runs in float32. A barrier keeps the former
    apart; for the latter it takes a product with the identity, which is exact. (A layout
    constraint would do too, but programs with one cannot be exported.)
    """

    def on_cpu(rows: Array) -> Array:
        if rows.dtype != jnp.bfloat16:
            return lax.optimization_barrier(rows.T)
        identity = jnp.eye(rows.shape[1], dtype=rows.dtype)
        contract = (((1,), (1,)), ((), ()))
        return lax.dot_general(identity, rows, contract, preferred_element_type=rows.dtype)

    return lax.platform_dependent(rows, cpu=on_cpu, default=lambda rows: rows.T)
