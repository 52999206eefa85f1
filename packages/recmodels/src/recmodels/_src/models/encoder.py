"""The history encoder that all models share: vectors of items in, one activation per position."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from recmodels._src.models.layers import (
    Block,
    Packing,
    dropped,
    hashed_bits,
    norm,
    random_table,
)
from recmodels._src.recipe import Recipe

_HALF_RANGE = 2**16  # numbers in the half of 32 random bits


class HistoryEncoder(nnx.Module):
    """Turns the vectors of a right-aligned history into one activation per position.

    Args:
        recipe: sizes and options.
        rngs: where the initial weights are drawn from.
        num_positions: S, positions of every row.
        is_causal: whether a position sees only itself and earlier ones; else it sees all.
    """

    def __init__(
        self, recipe: Recipe, rngs: nnx.Rngs, *, num_positions: int, is_causal: bool
    ) -> None:
        self.dropout = recipe.dropout
        self.compute_dtype = recipe.compute_dtype
        self.is_causal = is_causal
        is_learned = recipe.positions == "learned"
        table = random_table(rngs, num_positions, recipe.hidden_dim) if is_learned else None
        self.positions = None if table is None else nnx.Param(table)
        self.blocks = nnx.List([Block(recipe, rngs) for _ in range(recipe.num_layers)])
        # A post-norm block ends in a norm, so the input has the one that would come last.
        self.input_norm = norm(recipe) if recipe.norm == "post" else None
        self.final_norm = norm(recipe) if recipe.norm == "pre" else None

    def __call__(
        self,
        vectors: Array,
        mask: Array,
        dropout_key: Array | None = None,
        *,
        recompute: bool = False,
        capacity: int | None = None,
    ) -> Array:
        """Activations of every position.

        Args:
            vectors: `[B, S, D]` float32, most recent last.
            mask: `[B, S]`, False on padding. An all-False row gives finite activations.
            dropout_key: random key in training; None in evaluation (no dropout).
            recompute: whether the backward pass computes each block's inside again instead of
                keeping it.
            capacity: at least the number of positions that are no padding, so that only so many are
                computed; None computes all. What dropout drops depends on it, nothing else.

        Returns:
            `[B, S, D]` in the recipe's compute type; positions on padding carry no meaning.
        """
        batch, length, dim = vectors.shape
        packing = None
        if capacity is not None and capacity < batch * length:
            packing = Packing.of(mask, capacity)
        # The mask also gives padding a zero gradient, so row 0 learns nothing from histories.
        stream = jnp.where(mask[..., None], vectors, 0)
        if self.positions is not None:
            stream = stream + self.positions[...]
        stream = stream.reshape(batch * length, dim).astype(self.compute_dtype)
        stream = stream if packing is None else packing.pack(stream)
        keep = self._draw_dropout(stream.shape, dropout_key)
        if self.input_norm is not None:
            stream = self.input_norm(stream)
        stream = dropped(stream, self.dropout, keep[0])
        visible = self._visible(mask)
        for layer, block in enumerate(self.blocks):
            run = jax.checkpoint(block) if recompute else block
            stream = run(stream, visible, (keep[1 + 2 * layer], keep[2 + 2 * layer]), packing)
        if self.final_norm is not None:
            stream = self.final_norm(stream)
        stream = stream if packing is None else packing.spread(stream)
        return stream.reshape(batch, length, dim)

    def _visible(self, mask: Array) -> Array:
        visible = mask[:, None, None, :]
        if not self.is_causal:
            return visible
        length = mask.shape[1]
        return jnp.tril(jnp.ones((length, length), bool)) & visible

    def _draw_dropout(self, shape: tuple[int, ...], key: Array | None) -> Sequence[Array | None]:
        # One draw for all places, kept apart from its uses: XLA would otherwise put a copy of the
        # generator into every one of them, forward and backward, and compile seconds longer. Two
        # places share the 32 bits of a number.
        num_places = 1 + 2 * len(self.blocks)
        if key is None or self.dropout == 0:
            return [None] * num_places
        bits = hashed_bits(key, ((num_places + 1) // 2, *shape))
        threshold = jnp.uint32(round((1 - self.dropout) * _HALF_RANGE))
        keep = jnp.concatenate([bits % _HALF_RANGE < threshold, bits // _HALF_RANGE < threshold])
        return jax.lax.optimization_barrier(keep)
