"""The sweep over the table in plain XLA: one tile of logits at a time, on any backend.

For every tile x = activations @ rows.T the loss, the counts and both gradients are formed while
the tile exists, and nothing of size [T, V] or [num_blocks, T, D] is ever stored. All items count
as negatives here; `positives.py` corrects the few that are targets, and `linear_term.py` adds what
label smoothing and positive weights do to every item.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from cutbce_ops._src.binary_cross_entropy.config import SweepConfig, TileConfig, default_tiles
from cutbce_ops._src.binary_cross_entropy.products import matmul, matmul_operand
from cutbce_ops._src.binary_cross_entropy.sweep import Sweep, Wanted

COUNT_STRIPS = 8


def dense_sweep(
    activations: Array,
    embeddings: Array,
    bias: Array | None,
    d_per_position: Array | None,
    vocab_offset: Array | None,
    config: SweepConfig,
    wanted: Wanted,
) -> Sweep:
    """Sweeps all rows as negatives.

    Args:
      activations: `[T, D]` float.
      embeddings: `[V, D]` float; this device's rows.
      bias: `[V]` float, or None.
      d_per_position: `[T]` float32, factor of `sweep_function`'s derivatives; needed for
        gradients only.
      vocab_offset: `[]` int32, global number of row 0 of `embeddings`; None when this is the
        whole table, which needs no mask.
      config: static options.
      wanted: which results to compute.
    """
    if config.tiles is not None:
        return _swept(config.tiles, config, wanted, activations, embeddings, bias,
                      d_per_position, vocab_offset)  # fmt: skip
    # Chosen where the program is lowered, so that a CPU-only machine can compile for a TPU.
    return lax.platform_dependent(
        activations, embeddings, bias, d_per_position, vocab_offset,
        cpu=partial(_swept, default_tiles("cpu"), config, wanted),
        default=partial(_swept, default_tiles("accelerator"), config, wanted),
    )  # fmt: skip


def _swept(tiles: TileConfig, config: SweepConfig, wanted: Wanted, activations: Array,
           embeddings: Array, bias: Array | None, d_per_position: Array | None,
           vocab_offset: Array | None) -> Sweep:  # fmt: skip
    num_positions = activations.shape[0]
    chunks = _PositionChunks.create(activations, d_per_position, tiles, config, wanted)
    num_rows = embeddings.shape[0]
    if vocab_offset is None:
        num_rows = min(num_rows, config.vocab_size)
    block_v = min(tiles.block_v, num_rows)
    sweep_rows = partial(_sweep_rows, chunks, embeddings, bias, vocab_offset, config, wanted)
    state = _zero_state(chunks, embeddings, bias, config, wanted)
    state = lax.fori_loop(
        0, num_rows // block_v, lambda i, state: sweep_rows(state, i * block_v, block_v), state
    )
    tail = num_rows % block_v
    if tail:  # a second, smaller copy of the body instead of a mask in every tile
        state = sweep_rows(state, jnp.int32(num_rows - tail), tail)
    return _finish(state, num_positions)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _PositionChunks:
    """Positions cut into equal chunks; the last is filled up with zeros that weigh nothing."""

    activations: Array  # [num_chunks, block_t, D], matmul dtype
    weighted: Any  # same, times d_per_position; the left factor of d_embeddings
    d_per_position: Any  # [num_chunks, block_t] float32, None without gradients

    @classmethod
    def create(cls, activations: Array, d_per_position: Array | None, tiles: TileConfig,
               config: SweepConfig, wanted: Wanted) -> "_PositionChunks":  # fmt: skip
        num_positions = activations.shape[0]
        num_chunks = math.ceil(num_positions / tiles.block_t)
        block_t = math.ceil(num_positions / num_chunks)
        padding = num_chunks * block_t - num_positions

        def cut(array: Array) -> Array:
            padded = jnp.pad(array, ((0, padding),) + ((0, 0),) * (array.ndim - 1))
            return padded.reshape(num_chunks, block_t, *array.shape[1:])

        operand = matmul_operand(activations, config)
        if not wanted.gradients:
            return cls(cut(operand), None, None)
        assert d_per_position is not None
        weighted = activations.astype(jnp.float32) * d_per_position[:, None]
        return cls(cut(operand), cut(weighted.astype(operand.dtype)), cut(d_per_position))


def _zero_state(
    chunks: _PositionChunks,
    embeddings: Array,
    bias: Array | None,
    config: SweepConfig,
    wanted: Wanted,
) -> Sweep:
    num_chunks, block_t, dim = chunks.activations.shape
    num_rows = embeddings.shape[0]

    def zeros(is_wanted: bool, shape: tuple[int, ...], dtype=jnp.float32) -> Array | None:
        return jnp.zeros(shape, dtype) if is_wanted else None

    return Sweep(
        loss=zeros(wanted.loss, (num_chunks, block_t)),
        num_predicted=zeros(
            wanted.counts, (num_chunks, block_t, len(config.logit_thresholds)), jnp.int32
        ),
        d_activations=zeros(wanted.gradients, (num_chunks, block_t, dim)),
        d_embeddings=zeros(wanted.gradients, (num_rows, dim)),
        d_bias=zeros(wanted.gradients and bias is not None, (num_rows,)),
    )


def _sweep_rows(chunks: _PositionChunks, embeddings: Array, bias: Array | None,
                vocab_offset: Array | None, config: SweepConfig, wanted: Wanted, state: Sweep,
                start: Array, num_rows: int) -> Sweep:  # fmt: skip
    """Adds `num_rows` rows from row `start` on to the state, one chunk of positions at a time."""
    rows = matmul_operand(lax.dynamic_slice_in_dim(embeddings, start, num_rows), config)
    row_bias = None if bias is None else lax.dynamic_slice_in_dim(bias, start, num_rows)
    in_catalog = None  # [num_rows] bool
    if vocab_offset is not None:
        in_catalog = vocab_offset + start + jnp.arange(num_rows) < config.vocab_size
        rows = jnp.where(in_catalog[:, None], rows, 0)  # padding rows may hold anything, even NaN
    tile = partial(_tile, rows, row_bias, in_catalog, config, wanted)
    dim = rows.shape[1]
    d_rows = jnp.zeros((num_rows, dim), jnp.float32) if wanted.gradients else None
    d_row_bias = None if state.d_bias is None else jnp.zeros((num_rows,), jnp.float32)
    (d_rows, d_row_bias), added = lax.scan(tile, (d_rows, d_row_bias), chunks)
    loss, num_predicted, d_activations = jax.tree.map(
        jnp.add, (state.loss, state.num_predicted, state.d_activations), added
    )
    d_embeddings, d_bias = jax.tree.map(
        lambda whole, block: lax.dynamic_update_slice_in_dim(whole, block, start, 0),
        (state.d_embeddings, state.d_bias), (d_rows, d_row_bias),
    )  # fmt: skip
    return Sweep(loss, num_predicted, d_activations, d_embeddings, d_bias)


def _tile(rows: Array, row_bias: Array | None, in_catalog: Array | None, config: SweepConfig,
          wanted: Wanted, carry: tuple, chunk: _PositionChunks) -> tuple:  # fmt: skip
    """One tile [block_t, num_rows] of logits, from birth to death."""
    d_rows, d_row_bias = carry
    logits = matmul(config, chunk.activations, rows, (1, 1))
    if row_bias is not None:
        logits = logits + row_bias.astype(jnp.float32)[None, :]
    losses, d_logits = config.pointwise.sweep_function(logits)
    loss = num_predicted = d_activations = None
    if wanted.loss:
        loss = _masked(losses, in_catalog).sum(axis=1)
    if wanted.counts:
        num_predicted = _num_above(logits, in_catalog, config.logit_thresholds)
    if wanted.gradients:
        d_logits = _masked(d_logits, in_catalog)
        operand = d_logits.astype(chunk.activations.dtype)
        d_activations = matmul(config, operand, rows, (1, 0))
        d_activations = d_activations * chunk.d_per_position[:, None]
        d_rows = d_rows + matmul(config, operand, chunk.weighted, (0, 0))
        if d_row_bias is not None:
            d_row_bias = d_row_bias + jnp.sum(d_logits * chunk.d_per_position[:, None], axis=0)
    return (d_rows, d_row_bias), (loss, num_predicted, d_activations)


def _num_above(logits: Array, in_catalog: Array | None, thresholds: tuple[float, ...]) -> Array:
    """`[T, K]` int32, logits of a position above each threshold.

    Strips of the tile are added before the sum along a row: a sum of all integers at once costs
    the CPU 20 % of the sweep (it writes and reads a tile of integers), this way 6 %.
    """
    num_rows = logits.shape[1]
    width = max(1, num_rows // COUNT_STRIPS)

    def count(threshold: float) -> Array:
        def is_above(start: int, stop: int) -> Array:
            strip = logits[:, start:stop] > threshold
            if in_catalog is not None:
                strip = strip & in_catalog[None, start:stop]
            return strip.astype(jnp.int32)

        whole = num_rows // width * width
        total = sum(is_above(start, start + width) for start in range(0, whole, width)).sum(axis=1)
        return total + is_above(whole, num_rows).sum(axis=1) if whole < num_rows else total

    return jnp.stack([count(threshold) for threshold in thresholds], axis=1)


def _masked(values: Array, in_catalog: Array | None) -> Array:
    return values if in_catalog is None else jnp.where(in_catalog[None, :], values, 0)


def _finish(state: Sweep, num_positions: int) -> Sweep:
    """Joins the chunks of positions and drops the fill."""

    def join(array: Array | None) -> Array | None:
        return None if array is None else array.reshape(-1, *array.shape[2:])[:num_positions]

    return dataclasses.replace(
        state,
        loss=join(state.loss),
        num_predicted=join(state.num_predicted),
        d_activations=join(state.d_activations),
    )
