"""Layers that all models share: the transformer block, dropout by given bits, initial values."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from recmodels._src.recipe import Recipe

_INITIAL_SCALE = 0.02  # GPT-2's standard deviation for weights and tables
_ROTARY_BASE = 10_000.0  # as published
_NORM_EPSILON = 1e-6  # as in Flax
_MASKED = -1e30  # score of an invisible position; far below any real one, and finite


class Packing(NamedTuple):
    """Where the positions that are no padding lie, so that they alone are computed.

    With a packing a stream holds a row for each of them, `[C, D]`; attention alone needs the
    positions of each history side by side.
    """

    places: Array  # [C] int32, places among the B * S positions; B * S where there is none
    rows: Array  # [B * S] int32, row of the stream of each position; C on padding

    @classmethod
    def of(cls, mask: Array, capacity: int) -> "Packing":
        """Of `[B, S]` bool with at most `capacity` positions that are True."""
        mask = mask.reshape(-1)
        places = jnp.nonzero(mask, size=capacity, fill_value=mask.size)[0]
        rows = jnp.where(mask, jnp.cumsum(mask) - 1, capacity)
        return cls(places.astype(jnp.int32), rows.astype(jnp.int32))

    def pack(self, values: Array) -> Array:
        """`[B * S, D]` to `[C, D]`, zero where there is no position."""
        return _moved(values, self.places, self.rows)

    def spread(self, values: Array) -> Array:
        """`[C, D]` to `[B * S, D]`, zero on padding."""
        return _moved(values, self.rows, self.places)


@jax.custom_vjp
def _moved(values: Array, sources: Array, destinations: Array) -> Array:
    # Each row goes to one place at most, so the way back is a gather too. The scatter that JAX
    # would derive fills with zeros, copies and writes, and runs on one core.
    del destinations
    return values.at[sources].get(mode="fill", fill_value=0)


def _moved_forward(values: Array, sources: Array, destinations: Array) -> tuple[Array, tuple]:
    return _moved(values, sources, destinations), (sources, destinations)


def _moved_backward(ways: tuple, gradient: Array) -> tuple[Array, None, None]:
    sources, destinations = ways
    return _moved(gradient, destinations, sources), None, None


_moved.defvjp(_moved_forward, _moved_backward)


class Block(nnx.Module):
    """Transformer block: attention, then a wider MLP, each added to the residual stream.

    Dropout acts on what each half adds to the residual stream. Attention weights are not dropped:
    that would draw S*S numbers per head, more than everything else in the block.
    """

    def __init__(self, recipe: Recipe, rngs: nnx.Rngs) -> None:
        dim = recipe.hidden_dim
        self.num_heads = recipe.num_heads
        self.dropout = recipe.dropout
        self.is_pre_norm = recipe.norm == "pre"
        self.is_rotary = recipe.positions == "rotary"
        self.activation = recipe.activation
        self.attention_norm = norm(recipe)
        self.qkv = _linear(recipe, dim, 3 * dim, rngs)
        self.attention_out = _linear(recipe, dim, dim, rngs, residual=True)
        self.mlp_norm = norm(recipe)
        self.mlp_in = _linear(recipe, dim, recipe.mlp_ratio * dim, rngs)
        self.mlp_out = _linear(recipe, recipe.mlp_ratio * dim, dim, rngs, residual=True)

    def __call__(
        self,
        stream: Array,
        visible: Array,
        keep: tuple[Array | None, Array | None],
        packing: Packing | None = None,
    ) -> Array:
        """Adds attention over the visible positions and the MLP to the residual stream.

        Args:
            stream: `[B * S, D]`, or `[C, D]` with a packing. Without a batch axis, since XLA runs
                products of three-dimensional arrays at half the speed on a CPU.
            visible: `[B, 1, S or 1, S]` bool, which positions each position attends to.
            keep: bool for each half, of the shape of `stream`, what dropout keeps; None keeps
                everything.
            packing: which positions the stream holds; None for all.
        """

        def attend(values: Array) -> Array:
            return self._attend(values, visible, packing)

        stream = self._add(stream, attend, self.attention_norm, keep[0])
        return self._add(stream, self._widen, self.mlp_norm, keep[1])

    def _add(
        self,
        stream: Array,
        half: Callable[[Array], Array],
        half_norm: "LayerNorm",
        keep: Array | None,
    ) -> Array:
        if self.is_pre_norm:
            return stream + dropped(half(half_norm(stream)), self.dropout, keep)
        return half_norm(stream + dropped(half(stream), self.dropout, keep))

    def _attend(self, values: Array, visible: Array, packing: Packing | None) -> Array:
        dim = values.shape[1]
        heads = (visible.shape[0], -1, 3, self.num_heads, dim // self.num_heads)
        qkv = self.qkv(values)
        qkv = qkv if packing is None else packing.spread(qkv)
        query, key, value = jnp.unstack(qkv.reshape(heads), axis=2)
        if self.is_rotary:
            query, key = rotated(query), rotated(key)
        attended = _attention(query, key, value, visible).reshape(-1, dim)
        return self.attention_out(attended if packing is None else packing.pack(attended))

    def _widen(self, values: Array) -> Array:
        activate = jax.nn.gelu if self.activation == "gelu" else jax.nn.relu
        return self.mlp_out(activate(self.mlp_in(values)))


def rotated(values: Array) -> Array:
    """Turns pairs of columns by angles that grow with the position (RoPE, arXiv 2104.09864).

    Products of two rotated vectors depend on how far apart they are, not on where.

    Args:
        values: `[B, S, heads, K]`, K even; column k pairs with column k + K / 2.

    Returns:
        The same shape and type.
    """
    length, half = values.shape[1], values.shape[-1] // 2
    frequencies = _ROTARY_BASE ** (-jnp.arange(half) / half)
    angles = (jnp.arange(length)[:, None] * frequencies)[:, None, :]
    cosine, sine = jnp.cos(angles).astype(values.dtype), jnp.sin(angles).astype(values.dtype)
    first, second = jnp.split(values, 2, axis=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(turned, axis=-1)


def dropped(values: Array, rate: float, keep: Array | None) -> Array:
    """Dropout with given bits: zero where `keep` is False, the rest scaled up; None keeps all."""
    return values if keep is None else jnp.where(keep, values / (1 - rate), 0)


def hashed_bits(key: Array, shape: tuple[int, ...]) -> Array:
    """Random bits for dropout: a hash of each element's number with the key mixed in twice.

    Independent enough to drop values by, and cheap: the rounds of `jax.random.bits` go through
    memory one after another on a CPU and took more time than the forward pass. The hash is the last
    step of MurmurHash3, where a change of any bit of the input flips half of the result's.

    Args:
        key: random key.
        shape: of the result, fewer than 2^32 elements.

    Returns:
        uint32 of that shape.
    """
    seeds = jax.random.key_data(key)
    numbers = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return _mixed(_mixed(numbers ^ seeds[0]) + seeds[1])


def _mixed(bits: Array) -> Array:
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def random_table(rngs: nnx.Rngs, *shape: int) -> Array:
    """Initial float32 values of a table, of the scale that GPT-2 starts with."""
    return _INITIAL_SCALE * jax.random.normal(rngs.params(), shape)


class LayerNorm(nnx.Module):
    """Layer norm over the last axis, with a scale and an offset, computed in float32.

    It stands in for `flax.nnx.LayerNorm` because of its gradient: XLA's own keeps arrays of the
    size of the values for what is one number a row, which costs more time than the norm itself.

    Args:
        dim: D, size of the last axis.
        dtype: of the result.
    """

    def __init__(self, dim: int, dtype: jnp.dtype) -> None:
        self.dtype = dtype
        self.scale = nnx.Param(jnp.ones(dim))
        self.bias = nnx.Param(jnp.zeros(dim))

    def __call__(self, values: Array) -> Array:
        """`[..., D]` to the same shape."""
        normalized = _normalized(values.astype(jnp.float32), self.scale[...], self.bias[...])
        return normalized.astype(self.dtype)


@jax.custom_vjp
def _normalized(values: Array, scale: Array, bias: Array) -> Array:
    return _normalized_forward(values, scale, bias)[0]


def _normalized_forward(values: Array, scale: Array, bias: Array) -> tuple[Array, tuple]:
    mean = _row_mean(values)
    inverse = jax.lax.rsqrt(_row_mean(jnp.square(values - mean)) + _NORM_EPSILON)
    return (values - mean) * inverse * scale + bias, (values, mean, inverse, scale)


def _normalized_backward(kept: tuple, gradient: Array) -> tuple[Array, Array, Array]:
    values, mean, inverse, scale = kept
    unit = (values - mean) * inverse
    d_unit = gradient * scale
    d_values = inverse * (d_unit - _row_mean(d_unit) - unit * _row_mean(d_unit * unit))
    rows = range(values.ndim - 1)
    return d_values, (gradient * unit).sum(rows), gradient.sum(rows)


_normalized.defvjp(_normalized_forward, _normalized_backward)


def _row_mean(values: Array) -> Array:
    return values.mean(axis=-1, keepdims=True)


def norm(recipe: Recipe) -> LayerNorm:
    """Layer norm over `hidden_dim` in the recipe's compute type."""
    return LayerNorm(recipe.hidden_dim, jnp.dtype(recipe.compute_dtype))


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


def _attention(query: Array, key: Array, value: Array, visible: Array) -> Array:
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
