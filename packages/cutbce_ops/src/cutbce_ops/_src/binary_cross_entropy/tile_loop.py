"""The loop over tiles of logits in plain XLA, for every loss over the whole table.

For every tile x = rows @ activations.T a tile function updates its sums per position and returns
the derivative by x; the loop forms the products with it while the tile exists. Nothing of size
[T, V] or [num_blocks, T, D] is ever stored.

Tiles are [rows, positions], and the gradient of the activations is summed as [D, T]: no product
then contracts the first axis of a tile, which on a CPU takes twice the time and in bfloat16 more.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from cutbce_ops._src.binary_cross_entropy.config import SweepConfig, TileConfig, default_tiles
from cutbce_ops._src.binary_cross_entropy.products import (
    matmul,
    matmul_operand,
    matvec,
    transposed,
)
from cutbce_ops._src.binary_cross_entropy.sweep import Sweep

# Logits whose logarithm is taken together. Products of this many numbers of at least 1/2 are normal
# float32, and twice as many save nothing more.
NUM_STRIPS = 40

# (logits [v, t], in_catalog [v] bool or None for all, inputs [t, ...], sums [t, ...]) to the new
# sums and the derivatives [v, t] by the logits: 0 outside the catalog, None without gradients.
TileFunction = Callable[[Array, Array | None, Any, Any], tuple[Any, Array | None]]


def sweep_tiles(
    tile_function: TileFunction,
    sums: Any,
    inputs: Any,
    activations: Array,
    embeddings: Array,
    bias: Array | None,
    d_per_position: Array | None,
    vocab_offset: Array | None,
    config: SweepConfig,
) -> tuple[Any, Sweep]:
    """Calls `tile_function` for every tile of logits.

    Args:
      tile_function: see `TileFunction`.
      sums: pytree of `[T, ...]`, the values before the first tile.
      inputs: pytree of `[T, ...]` that the tile function reads.
      activations: `[T, D]` float.
      embeddings: `[V, D]` float; this device's rows.
      bias: `[V]` float, or None.
      d_per_position: `[T]` float32, factor of the derivatives by the logits; None for no gradients.
      vocab_offset: `[]` int32, global number of row 0 of `embeddings`; None when this is the
        whole table, which needs no mask.
      config: static options.

    Returns:
      The sums after the last tile, and a `Sweep` that holds the gradients only.
    """
    arrays = (sums, inputs, activations, embeddings, bias, d_per_position, vocab_offset)
    if config.tiles is not None:
        return _swept(config.tiles, tile_function, config, *arrays)
    # Chosen where the program is lowered, so that a CPU-only machine can compile for a TPU.
    return lax.platform_dependent(
        *arrays,
        cpu=partial(_swept, default_tiles("cpu"), tile_function, config),
        default=partial(_swept, default_tiles("accelerator"), tile_function, config),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Positions:
    """What a tile reads of its chunk of positions; the last chunk is filled up with zeros."""

    activations: Array  # [num_chunks, block_t, D], matmul dtype
    weighted: Any  # same, times d_per_position; the left factor of d_embeddings
    d_per_position: Any  # [num_chunks, block_t] float32, None without gradients
    inputs: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    """What the loop carries; gradients are None when they are not wanted."""

    sums: Any  # [num_chunks, block_t, ...]
    d_activations: Any  # [num_chunks, D, block_t] float32, not yet times d_per_position
    d_embeddings: Any  # [V, D] float32
    d_bias: Any  # [V] float32


def _swept(tiles: TileConfig, tile_function: TileFunction, config: SweepConfig, sums: Any,
           inputs: Any, activations: Array, embeddings: Array, bias: Array | None,
           d_per_position: Array | None, vocab_offset: Array | None,
           ) -> tuple[Any, Sweep]:  # fmt: skip
    num_positions = activations.shape[0]
    num_chunks = math.ceil(num_positions / tiles.block_t)
    cut = partial(_cut, num_chunks=num_chunks)
    positions = jax.tree.map(cut, _positions(activations, d_per_position, inputs, config))
    state = _initial_state(jax.tree.map(cut, sums), positions, embeddings, bias)
    num_rows = embeddings.shape[0]
    if vocab_offset is None:
        num_rows = min(num_rows, config.vocab_size)
    block_v = min(tiles.block_v, num_rows)
    sweep_rows = partial(
        _sweep_rows, tile_function, config, positions, embeddings, bias, vocab_offset
    )
    state = lax.fori_loop(
        0, num_rows // block_v, lambda i, state: sweep_rows(state, i * block_v, block_v), state
    )
    tail = num_rows % block_v
    if tail:  # a second, smaller copy of the body instead of a mask in every tile
        state = sweep_rows(state, jnp.int32(num_rows - tail), tail)

    def join(array: Array) -> Array:
        return array.reshape(-1, *array.shape[2:])[:num_positions]

    d_activations = state.d_activations
    if d_activations is not None:
        assert d_per_position is not None
        d_activations = join(d_activations.swapaxes(1, 2)) * d_per_position[:, None]
    return jax.tree.map(join, state.sums), Sweep(
        d_activations=d_activations, d_embeddings=state.d_embeddings, d_bias=state.d_bias
    )


def _positions(
    activations: Array, d_per_position: Array | None, inputs: Any, config: SweepConfig
) -> _Positions:
    operand = matmul_operand(activations, config)
    if d_per_position is None:
        return _Positions(operand, None, None, inputs)
    weighted = activations.astype(jnp.float32) * d_per_position[:, None]
    return _Positions(operand, weighted.astype(operand.dtype), d_per_position, inputs)


def _cut(array: Array, num_chunks: int) -> Array:
    """`[T, ...]` to `[num_chunks, block_t, ...]`, filled up with zeros."""
    block_t = math.ceil(array.shape[0] / num_chunks)
    padding = num_chunks * block_t - array.shape[0]
    padded = jnp.pad(array, ((0, padding),) + ((0, 0),) * (array.ndim - 1))
    return padded.reshape(num_chunks, block_t, *array.shape[1:])


def _initial_state(
    sums: Any, positions: _Positions, embeddings: Array, bias: Array | None
) -> _State:
    if positions.d_per_position is None:
        return _State(sums, None, None, None)

    def zeros(like: Array) -> Array:
        return jnp.zeros_like(like, dtype=jnp.float32)

    d_bias = None if bias is None else zeros(bias)
    d_activations = zeros(positions.activations.swapaxes(1, 2))
    return _State(sums, d_activations, zeros(embeddings), d_bias)


def _sweep_rows(tile_function: TileFunction, config: SweepConfig, positions: _Positions,
                embeddings: Array, bias: Array | None, vocab_offset: Array | None, state: _State,
                start: Array, num_rows: int) -> _State:  # fmt: skip
    """Adds `num_rows` rows from row `start` on to the state, one chunk of positions at a time."""
    rows = matmul_operand(lax.dynamic_slice_in_dim(embeddings, start, num_rows), config)
    row_bias = None if bias is None else lax.dynamic_slice_in_dim(bias, start, num_rows)
    in_catalog = None  # [num_rows] bool
    if vocab_offset is not None:
        in_catalog = vocab_offset + start + jnp.arange(num_rows) < config.vocab_size
        rows = jnp.where(in_catalog[:, None], rows, 0)  # padding rows may hold anything, even NaN
        row_bias = None if row_bias is None else jnp.where(in_catalog, row_bias, 0)
    # XLA would compute either anew for every logit.
    row_bias, in_catalog = lax.optimization_barrier((row_bias, in_catalog))
    tile = partial(_tile, tile_function, config, rows, row_bias, in_catalog)
    d_rows = d_row_bias = None
    if state.d_embeddings is not None:
        d_rows = jnp.zeros_like(rows, dtype=jnp.float32)
        d_row_bias = None if row_bias is None else jnp.zeros_like(row_bias, dtype=jnp.float32)
    is_one_chunk = positions.activations.shape[0] == 1
    (d_rows, d_row_bias), (sums, d_activations) = lax.scan(
        tile, (d_rows, d_row_bias), (positions, state.sums, state.d_activations),
        unroll=0 if is_one_chunk else 1,  # 0: straight code, in which XLA drops the zeros
    )  # fmt: skip
    d_embeddings, d_bias = jax.tree.map(
        lambda whole, block: lax.dynamic_update_slice_in_dim(whole, block, start, 0),
        (state.d_embeddings, state.d_bias), (d_rows, d_row_bias),
    )  # fmt: skip
    return _State(sums, d_activations, d_embeddings, d_bias)


def _tile(tile_function: TileFunction, config: SweepConfig, rows: Array, row_bias: Array | None,
          in_catalog: Array | None, carry: tuple, chunk: tuple) -> tuple:  # fmt: skip
    """One tile [num_rows, block_t] of logits, from birth to death."""
    d_rows, d_row_bias = carry
    positions, sums, d_activations = chunk
    logits = matmul(config, rows, positions.activations, (1, 1))
    if row_bias is not None:
        logits = logits + row_bias.astype(jnp.float32)[:, None]
    sums, d_logits = tile_function(logits, in_catalog, positions.inputs, sums)
    if d_rows is not None:
        assert d_logits is not None
        operand = d_logits.astype(positions.activations.dtype)
        d_activations = d_activations + matmul(config, transposed(rows), operand, (1, 0))
        d_rows = d_rows + matmul(config, operand, positions.weighted, (1, 0))
        if d_row_bias is not None:
            d_row_bias = d_row_bias + matvec(d_logits, positions.d_per_position)
    return (d_rows, d_row_bias), (sums, d_activations)


def masked(values: Array, in_catalog: Array | None, fill: float = 0) -> Array:
    """`[v, t]` values with `fill` in the rows that are not in use."""
    return values if in_catalog is None else jnp.where(in_catalog[:, None], values, fill)


def total_of_rows(combine: Callable[..., Array], *tiles: Array) -> Array:
    """`[t]`, sum over the rows of what `combine` makes of them.

    XLA's CPU backend draws what precedes a reduction into its loop, which is not vectorised, so a
    reduction gets as little as possible: `combine` makes one strip of many, in a vectorised loop.

    Args:
      combine: lists of strips `[n, t]`, one list for each tile, to a strip `[n, t]`.
      *tiles: `[v, t]`, all of one shape.
    """
    num_rows = tiles[0].shape[0]
    rest = num_rows % NUM_STRIPS  # these are strips of one row
    cuts = ((slice(0, num_rows - rest), NUM_STRIPS), (slice(num_rows - rest, num_rows), rest))
    totals = []
    for rows, num_strips in cuts:
        if rows.start < rows.stop:
            strip = combine(*(jnp.split(tile[rows], num_strips) for tile in tiles))
            strip = lax.optimization_barrier(strip)
            totals.append(strip.sum(axis=0, dtype=strip.dtype))  # int32 also under `jax_enable_x64`
    return functools.reduce(jnp.add, totals)
