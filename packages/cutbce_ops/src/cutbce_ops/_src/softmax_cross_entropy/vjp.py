"""Hand-written derivative of the softmax loss per position."""

import jax
import jax.numpy as jnp
from jax import Array

from cutbce_ops._src.binary_cross_entropy.vjp import Static, as_primals
from cutbce_ops._src.softmax_cross_entropy import sharded


def _loss(static: Static, activations: Array, embeddings: Array, bias: Array | None,
          targets: Array) -> Array:  # fmt: skip
    """`[T]` float32, log-sum-exp less the target's logit; 0 without a target (`targets` `[T]`)."""
    return _forward(static, activations, embeddings, bias, targets)[0]


def _forward(static: Static, *primals):
    activations, embeddings, bias, targets = primals
    loss, normalizer = sharded.forward(
        activations, embeddings, bias, targets[:, None], static.config, static.sharding
    )
    # The normalizer is all that the backward sweep needs beside the arguments.
    return jnp.where(targets >= 0, loss, 0), (primals, normalizer)


def _backward(static: Static, residuals: tuple, d_per_position: Array) -> tuple:
    (activations, embeddings, bias, targets), normalizer = residuals
    d_per_position = jnp.where(targets >= 0, d_per_position, 0)
    swept = sharded.gradients(
        activations, embeddings, bias, targets[:, None], normalizer, d_per_position,
        static.config, static.sharding,
    )  # fmt: skip
    return *as_primals(residuals[0], swept, jnp.float32(1)), None


per_position_loss = jax.custom_vjp(_loss, nondiff_argnums=(0,))
per_position_loss.defvjp(_forward, _backward)
