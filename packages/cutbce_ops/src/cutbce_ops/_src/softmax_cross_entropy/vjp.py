"""Hand-written derivative of the softmax loss per position."""

import jax
import jax.numpy as jnp
from jax import Array

from cutbce_ops._src.binary_cross_entropy.sharded import whole_cotangent
from cutbce_ops._src.binary_cross_entropy.vjp import Static, as_primals
from cutbce_ops._src.softmax_cross_entropy import sharded


def _loss(static: Static, activations: Array, embeddings: Array, bias: Array | None,
          targets: Array) -> Array:  # fmt: skip
    """`[T]` float32, log-sum-exp less the target's logit; `targets` is `[T, 1]`.

    Without a target it is some finite number, which the caller must leave out.
    """
    return _forward(static, activations, embeddings, bias, targets)[0]


def _forward(static: Static, activations: Array, embeddings: Array, bias: Array | None,
             targets: Array) -> tuple[Array, tuple]:  # fmt: skip
    primals = (activations, embeddings, bias, targets)
    loss, normalizer = sharded.forward(*primals, static.config, static.sharding)
    # The normalizer is all that the backward sweep needs beside the arguments.
    return loss, (primals, normalizer)


def _backward(static: Static, residuals: tuple, d_per_position: Array) -> tuple:
    primals, normalizer = residuals
    activations, embeddings, bias, targets = primals
    d_per_position = whole_cotangent(
        d_per_position, activations, static.sharding, "position_replica_names"
    )
    swept = sharded.gradients(
        activations, embeddings, bias, targets, normalizer, d_per_position, static.config,
        static.sharding,
    )  # fmt: skip
    return *as_primals(primals, swept, jnp.float32(1)), None


per_position_loss = jax.custom_vjp(_loss, nondiff_argnums=(0,))
per_position_loss.defvjp(_forward, _backward)
