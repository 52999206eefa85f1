"""SASRec: a causal transformer over a user's history, tied to the item table it scores with."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from recmodels._src.recipe import Recipe

_INITIAL_SCALE = 0.02  # GPT-2's standard deviation for weights and tables
_HALF_RANGE = 2**16  # numbers in the half of 32 random bits
_MASKED = -1e30  # score of an invisible position; far below any real one, and finite


class Block(nnx.Module):
    """Pre-norm GPT-2 block: causal attention, then a four times wider MLP, each with a residual.

    Dropout acts on what each half adds to the residual stream. Attention weights are not dropped:
    that would draw S*S numbers per head, more than everything else in the block.
    """

    def __init__(self, recipe: Recipe, rngs: nnx.Rngs) -> None:
        dim = recipe.hidden_dim
        self.num_heads = recipe.num_heads
        self.dropout = recipe.dropout
        self.attention_norm = _norm(recipe, rngs)
        self.qkv = _linear(recipe, dim, 3 * dim, rngs)
        self.attention_out = _linear(recipe, dim, dim, rngs, residual=True)
        self.mlp_norm = _norm(recipe, rngs)
        self.mlp_in = _linear(recipe, dim, 4 * dim, rngs)
        self.mlp_out = _linear(recipe, 4 * dim, dim, rngs, residual=True)

    def __call__(
        self,
        stream: Array,
        visible: Array,
        keep: tuple[Array | None, Array | None],
    ) -> Array:
        """Adds attention over the visible positions and the MLP to the residual stream.

        Args:
            stream: `[B * S, D]`. Without a batch axis, since XLA runs products of three-dimensional
                arrays at half the speed on a CPU.
            visible: `[B, 1, S, S]` bool, which positions each position attends to.
            keep: `[B * S, D]` bool for each half, what dropout keeps; None keeps everything.
        """
        num_positions, dim = stream.shape
        qkv = self.qkv(self.attention_norm(stream))
        heads = (visible.shape[0], -1, 3, self.num_heads, dim // self.num_heads)
        query, key, value = jnp.unstack(qkv.reshape(heads), axis=2)
        attended = _attention(query, key, value, visible).reshape(num_positions, dim)
        stream = stream + _dropout(self.attention_out(attended), self.dropout, keep[0])
        widened = jax.nn.gelu(self.mlp_in(self.mlp_norm(stream)))
        return stream + _dropout(self.mlp_out(widened), self.dropout, keep[1])


class HistoryEncoder(nnx.Module):
    """Turns the vectors of a right-aligned history into one activation per position."""

    def __init__(self, recipe: Recipe, rngs: nnx.Rngs) -> None:
        self.dropout = recipe.dropout
        self.compute_dtype = recipe.compute_dtype
        self.positions = nnx.Param(_table(rngs, recipe.max_length, recipe.hidden_dim))
        self.blocks = nnx.List([Block(recipe, rngs) for _ in range(recipe.num_layers)])
        self.final_norm = _norm(recipe, rngs)

    def __call__(
        self,
        history_vectors: Array,
        history_mask: Array,
        dropout_key: Array | None = None,
        *,
        recompute: bool = False,
    ) -> Array:
        """Activations of every position.

        Args:
            history_vectors: `[B, S, D]` float32 item vectors, most recent last, S = max_length.
            history_mask: `[B, S]`, False on padding. An all-False row gives finite activations.
            dropout_key: random key in training; None in evaluation (no dropout).
            recompute: whether the backward pass computes each block's inside again instead of
                keeping it.

        Returns:
            `[B, S, D]` in the recipe's compute type; positions on padding carry no meaning.
        """
        batch, length, dim = history_vectors.shape
        keep = self._draw_dropout((batch * length, dim), dropout_key)
        # The mask also gives padding a zero gradient, so row 0 learns nothing from histories.
        stream = jnp.where(history_mask[..., None], history_vectors, 0) + self.positions[...]
        stream = stream.reshape(batch * length, dim).astype(self.compute_dtype)
        stream = _dropout(stream, self.dropout, keep[0])
        causal = jnp.tril(jnp.ones((length, length), bool))
        visible = causal & history_mask[:, None, None, :]
        for layer, block in enumerate(self.blocks):
            run = jax.checkpoint(block) if recompute else block
            stream = run(stream, visible, (keep[1 + 2 * layer], keep[2 + 2 * layer]))
        return self.final_norm(stream).reshape(batch, length, dim)

    def _draw_dropout(self, shape: tuple[int, ...], key: Array | None) -> Sequence[Array | None]:
        # One draw for all places, kept apart from its uses: XLA would otherwise put a copy of the
        # generator into every one of them, forward and backward, and compile seconds longer. Two
        # places share the 32 bits of a number.
        num_places = 1 + 2 * len(self.blocks)
        if key is None or self.dropout == 0:
            return [None] * num_places
        bits = jax.random.bits(key, ((num_places + 1) // 2, *shape), jnp.uint32)
        threshold = jnp.uint32(round((1 - self.dropout) * _HALF_RANGE))
        keep = jnp.concatenate([bits % _HALF_RANGE < threshold, bits // _HALF_RANGE < threshold])
        return jax.lax.optimization_barrier(keep)


class SASRec(nnx.Module):
    """Item table, encoder and optional output bias; the table reads histories and scores items.

    Row 0 of the table is padding: it never enters an activation and is never recommended.
    """

    def __init__(self, recipe: Recipe, vocab_size: int, rngs: nnx.Rngs) -> None:
        self.item_embeddings = nnx.Param(_table(rngs, vocab_size, recipe.hidden_dim))
        self.encoder = HistoryEncoder(recipe, rngs)
        if recipe.output_bias:
            self.output_bias = nnx.Param(jnp.zeros(vocab_size))


class ModelParts(NamedTuple):
    """A model as its static structure and its arrays, the form that training works on."""

    encoder: "nnx.GraphDef[HistoryEncoder]"  # static part; merge it with params["encoder"]
    params: dict  # arrays by name: item_embeddings [V, D], encoder, output_bias [V] (optional)


def build(recipe: Recipe, vocab_size: int) -> ModelParts:
    """A freshly initialised model, its output bias still zero (see `popularity_bias`).

    Call it under `jax.eval_shape`-like `abstract` when only shapes are wanted.
    """
    model = SASRec(recipe, vocab_size, nnx.Rngs(recipe.seed))
    return ModelParts(nnx.split(model.encoder)[0], nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def encode(
    encoder: "nnx.GraphDef[HistoryEncoder]",
    params: dict,
    history_vectors: Array,
    history_mask: Array,
    dropout_key: Array | None = None,
    *,
    recompute: bool = False,
) -> Array:
    """Activations of every position; see `HistoryEncoder.__call__`."""
    model = nnx.merge(encoder, params["encoder"])
    return model(history_vectors, history_mask, dropout_key, recompute=recompute)


def popularity_bias(counts: Array, num_targets: int) -> Array:
    """Output bias with which a fresh model predicts each item's share of the training targets.

        bias_v = log(p_v / (1 - p_v)),   p_v = num_targets * count_v / sum(count)

    Args:
        counts: `[V]` interactions per row in the training part; row 0 is padding.
        num_targets: targets per position, so that p_v is the chance of v being one of them.

    Returns:
        `[V]` float32. A row never seen counts as half an interaction, so that every bias is finite.
    """
    total = jnp.maximum(counts.sum(), 1)
    share = num_targets * jnp.maximum(counts, 0.5) / total
    share = jnp.minimum(share, 0.5)  # in a tiny catalog the estimate can reach 1
    return (jnp.log(share) - jnp.log1p(-share)).astype(jnp.float32)


def _attention(
    query: Array,
    key: Array,
    value: Array,
    visible: Array,
) -> Array:
    # Scores, mask and softmax in float32; the mask is finite, so a position that sees nothing gets
    # the mean of the values and finite gradients instead of 0/0. Dividing after the second product
    # saves passes over the scores.
    scale = query.shape[-1] ** -0.5
    scores = jnp.einsum("bqhk,bshk->bhqs", query * scale, key, preferred_element_type=jnp.float32)
    scores = jnp.where(visible, scores, _MASKED)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    total = jnp.moveaxis(weights.sum(axis=-1), 1, 2)[..., None]
    weighted = jnp.einsum("bhqs,bshk->bqhk", weights.astype(value.dtype), value)
    return weighted / total.astype(value.dtype)


def _dropout(values: Array, rate: float, keep: Array | None) -> Array:
    return values if keep is None else jnp.where(keep, values / (1 - rate), 0)


def _table(rngs: nnx.Rngs, rows: int, dim: int) -> Array:
    return _INITIAL_SCALE * jax.random.normal(rngs.params(), (rows, dim))


def _norm(recipe: Recipe, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(recipe.hidden_dim, dtype=jnp.dtype(recipe.compute_dtype), rngs=rngs)


def _linear(
    recipe: Recipe, in_dim: int, out_dim: int, rngs: nnx.Rngs, *, residual: bool = False
) -> nnx.Linear:
    # GPT-2 starts smaller what is added to the stream, so that depth does not grow its variance.
    scale = _INITIAL_SCALE / (2 * recipe.num_layers) ** 0.5 if residual else _INITIAL_SCALE
    return nnx.Linear(
        in_dim,
        out_dim,
        dtype=jnp.dtype(recipe.compute_dtype),
        kernel_init=nnx.initializers.normal(scale),
        rngs=rngs,
    )
