"""The published CutBCE algorithm, stated in plain XLA for comparison.

Forward: a scan over blocks of the vocabulary that adds up the loss of each tile of logits.
Backward: a second scan that recomputes the logits of each block. Labels of a tile come from
comparing each of the L targets with every row of the block.

Reference: "Cut Binary Cross Entropy", arXiv 2610.05559. Written from the paper's description.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax


def _labels(targets: Array, first_row: Array, block_v: int) -> Array:
    rows = first_row + jnp.arange(block_v)
    labels = jnp.zeros((targets.shape[0], block_v), bool)
    for column in range(targets.shape[1]):
        labels |= targets[:, column][:, None] == rows[None, :]
    return labels.astype(jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def published_cut_bce(activations: Array, embeddings: Array, targets: Array, block_v: int) -> Array:
    """Mean loss, `[]` float32. `block_v` must divide the vocabulary."""
    num_positions, vocab_size = activations.shape[0], embeddings.shape[0]

    def add_block(total: Array, block: Array) -> tuple[Array, None]:
        rows = lax.dynamic_slice_in_dim(embeddings, block * block_v, block_v)
        x = activations @ rows.T
        y = _labels(targets, block * block_v, block_v)
        tile = jnp.maximum(x, 0) - x * y + jnp.log1p(jnp.exp(-jnp.abs(x)))
        return total + tile.sum(axis=1), None

    zero = jnp.zeros(num_positions)
    per_position, _ = lax.scan(add_block, zero, jnp.arange(vocab_size // block_v))
    return per_position.mean() / vocab_size


def _forward(activations, embeddings, targets, block_v):
    loss = published_cut_bce(activations, embeddings, targets, block_v)
    return loss, (activations, embeddings, targets)


def _backward(block_v, residuals, cotangent):
    activations, embeddings, targets = residuals
    num_positions, vocab_size = activations.shape[0], embeddings.shape[0]
    scale = cotangent / (num_positions * vocab_size)

    def add_block(d_activations: Array, block: Array) -> tuple[Array, Array]:
        rows = lax.dynamic_slice_in_dim(embeddings, block * block_v, block_v)
        d_x = jax.nn.sigmoid(activations @ rows.T) - _labels(targets, block * block_v, block_v)
        d_x = d_x * scale
        return d_activations + d_x @ rows, d_x.T @ activations

    zero = jnp.zeros_like(activations)
    d_activations, d_rows = lax.scan(add_block, zero, jnp.arange(vocab_size // block_v))
    return d_activations, d_rows.reshape(embeddings.shape), None


published_cut_bce.defvjp(_forward, _backward)
