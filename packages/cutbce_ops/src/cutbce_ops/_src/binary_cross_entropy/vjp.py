"""Hand-written derivatives: the scalar loss (fused) and the per-position loss (recompute).

The scalar loss knows its own derivative as soon as a tile of logits exists, so one sweep yields
the loss and both gradients; the residuals are the gradients, scaled by the cotangent later. The
per-position loss waits for its cotangents and sweeps a second time.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from cutbce_ops._src.binary_cross_entropy import sharded
from cutbce_ops._src.binary_cross_entropy.config import SweepConfig
from cutbce_ops._src.binary_cross_entropy.positives import CorrectedSweep
from cutbce_ops._src.binary_cross_entropy.sweep import Sweep, Wanted
from cutbce_ops._src.metrics import ConfusionCounts
from cutbce_ops._src.sharding import LossSharding


@dataclasses.dataclass(frozen=True)
class Static:
    """Static arguments of one call.

    Attributes:
      config: options of the sweep.
      sharding: mesh layout or None.
      with_counts: whether the forward sweep also counts, above `config.logit_thresholds`.
    """

    config: SweepConfig
    sharding: LossSharding | None
    with_counts: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forward:
    """Values of a forward sweep.

    Attributes:
      per_position: `[T]` float32, mean loss over the vocabulary.
      counts: confusion counts `[T, K]`, or None when `with_counts` is off.
    """

    per_position: Array
    counts: ConfusionCounts | None


def _sweep(static: Static, primals: tuple, d_per_position: Array | None, wanted: Wanted):
    activations, embeddings, bias, targets = primals
    if d_per_position is not None:
        d_per_position = d_per_position / static.config.vocab_size
    return sharded.sweep(
        activations, embeddings, bias, targets, d_per_position, static.config, wanted,
        static.sharding,
    )  # fmt: skip


def _forward(static: Static, swept: CorrectedSweep) -> Forward:
    vocab_size = static.config.vocab_size
    per_position = swept.sweep.loss / vocab_size
    if not static.with_counts:
        return Forward(per_position, None)
    tp, num_targets = swept.num_hit, swept.num_targets[:, None]
    # Target logits are computed apart from the sweep: one that rounds across a threshold must not
    # make fp negative.
    fp = jnp.maximum(swept.sweep.num_predicted - tp, 0)
    fn = num_targets - tp
    return Forward(per_position, ConfusionCounts(tp, fp, fn, vocab_size - tp - fp - fn))


def as_primals(like: tuple, gradients: Sweep, scale: Array) -> tuple:
    """Gradients times the cotangent, in the dtypes of (activations, embeddings, bias)."""

    def finish(gradient: Any, primal: Array | None) -> Array | None:
        return None if primal is None else (gradient * scale).astype(primal.dtype)

    activations, embeddings, bias = like[:3]
    return (
        finish(gradients.d_activations, activations),
        finish(gradients.d_embeddings, embeddings),
        finish(gradients.d_bias, bias),
    )


def _per_position_loss(static: Static, activations: Array, embeddings: Array, bias: Array | None,
                      targets: Array) -> Forward:  # fmt: skip
    """Loss per position; its backward sweep recomputes the logits (counts carry no gradient)."""
    primals = (activations, embeddings, bias, targets)
    return _forward(static, _sweep(static, primals, None, Wanted(True, static.with_counts)))


def _per_position_forward(static: Static, *primals):
    return per_position_loss(static, *primals), primals


def _per_position_backward(static: Static, primals: tuple, cotangent: Forward) -> tuple:
    d_per_position = sharded.whole_cotangent(
        cotangent.per_position, primals[0], static.sharding, "position_replica_names"
    )
    swept = _sweep(static, primals, d_per_position, Wanted(gradients=True))
    return *as_primals(primals, swept.sweep, jnp.float32(1)), None


per_position_loss = jax.custom_vjp(_per_position_loss, nondiff_argnums=(0,))
per_position_loss.defvjp(_per_position_forward, _per_position_backward)


def mean_weights(position_weights: Array, sharding: LossSharding | None) -> Array:
    """`[T]` weights divided by their sum; zeros when the sum is zero."""
    total = sharded.sum_of_positions(position_weights, sharding)
    return jnp.where(total != 0, position_weights / jnp.where(total != 0, total, 1), 0)


def _fused_loss(static: Static, activations: Array, embeddings: Array, bias: Array | None,
               targets: Array, weights: Array) -> tuple[Array, Forward]:  # fmt: skip
    """Sum of `weights * per_position` with gradients from the same sweep as the loss.

    The second result is for inspection only; the caller must stop its gradient.
    """
    forward = per_position_loss(static, activations, embeddings, bias, targets)
    return weighted_sum(static, weights, forward), forward


def weighted_sum(static: Static, weights: Array, forward: Forward) -> Array:
    """`[]` sum over all positions of `weights * per_position`."""
    return sharded.sum_of_positions(weights * forward.per_position, static.sharding)


def _fused_forward(static: Static, *arguments):
    *primals, weights = arguments
    wanted = Wanted(loss=True, counts=static.with_counts, gradients=True)
    swept = _sweep(static, tuple(primals), weights, wanted)
    forward = _forward(static, swept)
    loss = weighted_sum(static, weights, forward)
    # Gradients stay float32 until they are scaled; the scalars only remember the dtypes.
    like = tuple(None if array is None else jnp.zeros((), array.dtype) for array in primals)
    gradients = dataclasses.replace(swept.sweep, loss=None, num_predicted=None)
    return (loss, forward), (like, gradients, forward.per_position)


def _fused_backward(static: Static, residuals: tuple, cotangents: tuple) -> tuple:
    like, gradients, per_position = residuals
    whole = partial(
        sharded.whole_cotangent, cotangents[0], gradients.d_activations, static.sharding
    )
    d_weights = whole("position_names") * per_position
    return *as_primals(like, gradients, whole("names")), None, d_weights


fused_loss = jax.custom_vjp(_fused_loss, nondiff_argnums=(0,))
fused_loss.defvjp(_fused_forward, _fused_backward)
