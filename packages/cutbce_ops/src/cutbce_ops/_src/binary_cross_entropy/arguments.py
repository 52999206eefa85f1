"""Checks of the arrays that every loss over the whole table takes."""

import jax.numpy as jnp
from jax import Array

from cutbce_ops._src import checks


def check_arrays(activations: Array, embeddings: Array, bias: Array | None) -> None:
    """Raises unless the three are float and have shapes `[..., D]`, `[V, D]` and `[V]`."""
    for name, array in (("activations", activations), ("embeddings", embeddings)):
        checks.require_float(name, array)
    if embeddings.ndim != 2 or activations.ndim < 1:
        raise ValueError(
            "`activations` must have shape [..., D] and `embeddings` [V, D]; "
            f"got {activations.shape} and {embeddings.shape}."
        )
    if activations.shape[-1] != embeddings.shape[1]:
        raise ValueError(
            "The last axes of `activations` and `embeddings` must be equal (D); "
            f"got {activations.shape} and {embeddings.shape}."
        )
    if 0 in activations.shape or 0 in embeddings.shape:
        raise ValueError(
            "`activations` and `embeddings` must not be empty; "
            f"got {activations.shape} and {embeddings.shape}."
        )
    if bias is not None:
        checks.require_float("bias", bias)
        checks.require_shape("bias", bias, embeddings.shape[:1], "the rows of `embeddings`")


def flat_weights(position_weights: Array | None, shape: tuple[int, ...]) -> Array:
    """Checked `position_weights` of the given shape as `[T]` float32; ones for None."""
    if position_weights is None:
        position_weights = jnp.ones(shape, jnp.float32)
    try:
        position_weights = jnp.asarray(position_weights)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`position_weights` must be an array of real numbers; got {position_weights!r}."
        ) from error
    checks.require_shape("position_weights", position_weights, shape, "`activations`")
    if jnp.issubdtype(position_weights.dtype, jnp.complexfloating):
        raise TypeError(f"`position_weights` must be real; got dtype {position_weights.dtype}.")
    return position_weights.reshape(-1).astype(jnp.float32)
