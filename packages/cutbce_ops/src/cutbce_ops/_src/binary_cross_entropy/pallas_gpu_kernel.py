"""The two GPU kernels of a sweep, in Pallas for Triton; `pallas_gpu.py` says why there are two.

Every program reads and writes whole arrays through masks: Triton blocks are powers of two, and
sizes here divide nothing. Arrays keep their size in memory; only their blocks are padded.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from cutbce_ops._src.binary_cross_entropy.config import SweepConfig
from cutbce_ops._src.binary_cross_entropy.pallas_gpu_tiles import (
    NUM_STAGES,
    KernelTiles,
    padded_dim,
)
from cutbce_ops._src.binary_cross_entropy.products import matmul
from cutbce_ops._src.binary_cross_entropy.sweep import Sweep, Wanted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """What both kernels read: arrays, their block specs, or the refs inside a kernel.

    Attributes:
      num_used: `[1]` int32, rows from here on do not count and may hold anything.
      activations: `[T, D]`.
      embeddings: `[V, D]`.
      bias: `[V]` or None.
      d_per_position: `[T]` float32; None without gradients.
    """

    num_used: Any
    activations: Any
    embeddings: Any
    bias: Any
    d_per_position: Any


def sweep_positions(operands: Operands, tiles: KernelTiles, config: SweepConfig, wanted: Wanted,
                    interpret: bool) -> Sweep:  # fmt: skip
    """Loss, counts and d_activations: programs hold positions, the table streams by."""
    num_positions, dim = operands.activations.shape
    splits, num_thresholds = tiles.num_splits, len(config.logit_thresholds)

    def result(is_wanted: bool, shape: tuple[int, ...], dtype=jnp.float32):
        return jax.ShapeDtypeStruct((splits, *shape), dtype) if is_wanted else None

    shapes = Sweep(
        loss=result(wanted.loss, (num_positions,)),
        num_predicted=result(wanted.counts, (num_thresholds, num_positions), jnp.int32),
        d_activations=result(wanted.gradients, (num_positions, dim)),
    )
    kernel = partial(_positions_kernel, sizes=(num_positions, operands.embeddings.shape[0], dim),
                     tiles=tiles, config=config)  # fmt: skip
    blocks = {"positions": tiles.held, "rows": tiles.streamed}
    swept = _call(kernel, operands, shapes, blocks, num_positions, tiles, interpret)
    swept = jax.tree.map(lambda sums: sums.sum(axis=0, dtype=sums.dtype), swept)
    if not wanted.counts:
        return swept
    return dataclasses.replace(swept, num_predicted=swept.num_predicted.T)


def sweep_rows(operands: Operands, tiles: KernelTiles, config: SweepConfig,
               interpret: bool) -> Sweep:  # fmt: skip
    """d_embeddings and d_bias: programs hold rows, positions stream by."""
    num_rows, dim = operands.embeddings.shape
    shapes = Sweep(
        d_embeddings=jax.ShapeDtypeStruct((tiles.num_splits, num_rows, dim), jnp.float32),
        d_bias=None
        if operands.bias is None
        else jax.ShapeDtypeStruct((tiles.num_splits, num_rows), jnp.float32),
    )
    kernel = partial(_rows_kernel, sizes=(operands.activations.shape[0], num_rows, dim),
                     tiles=tiles, config=config)  # fmt: skip
    blocks = {"positions": tiles.streamed, "rows": tiles.held}
    swept = _call(kernel, operands, shapes, blocks, num_rows, tiles, interpret)
    return jax.tree.map(lambda sums: sums.sum(axis=0, dtype=sums.dtype), swept)


def _call(kernel: Any, operands: Operands, shapes: Sweep, blocks: dict[str, int], num_held: int,
          tiles: KernelTiles, interpret: bool) -> Sweep:  # fmt: skip
    """Runs a kernel on (blocks of held vectors, splits) programs that all see whole arrays."""
    axes_of_operands = Operands("1", "positions dim", "rows dim", "rows", "positions")
    axes_of_results = Sweep("1 positions", "1 1 positions", "1 positions dim", "1 rows dim",
                            "1 rows")  # fmt: skip

    def specs(arrays: Any, axes: Any) -> Any:
        return jax.tree.map(
            lambda array, names: None if array is None else _whole(array.shape, names, blocks),
            arrays, axes, is_leaf=lambda leaf: leaf is None,
        )  # fmt: skip

    return pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=(math.ceil(num_held / tiles.held), tiles.num_splits),
        in_specs=(specs(operands, axes_of_operands),),
        out_specs=specs(shapes, axes_of_results),
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=NUM_STAGES),
        interpret=interpret,
    )(operands)


def _whole(shape: tuple[int, ...], axes: str, blocks: dict[str, int]) -> pl.BlockSpec:
    """The whole array as one block, each axis filled up to what its blocks reach."""
    filled = []
    for size, axis in zip(shape, axes.split(), strict=True):
        block = padded_dim(size) if axis == "dim" else blocks.get(axis, 1)
        filled.append(math.ceil(size / block) * block)
    return pl.BlockSpec(tuple(filled), lambda *_: (0,) * len(filled))


def _positions_kernel(operands: Operands, out: Sweep, *, sizes: tuple[int, int, int],
                      tiles: KernelTiles, config: SweepConfig) -> None:  # fmt: skip
    num_positions, num_rows, dim = sizes
    held_start, split = pl.program_id(0) * tiles.held, pl.program_id(1)
    num_used = operands.num_used[0]
    activations = _load(operands.activations, held_start, tiles.held, num_positions, dim)

    def add_rows(block: Array, sums: Sweep) -> Sweep:
        start = block * tiles.streamed
        rows = _load(operands.embeddings, start, tiles.streamed, num_used, dim)
        logits = matmul(config, activations, rows, (1, 1))  # [held, streamed]
        if operands.bias is not None:
            bias = _load(operands.bias, start, tiles.streamed, num_used)
            logits = logits + bias.astype(jnp.float32)[None, :]
        losses, d_logits = config.pointwise.sweep_function(logits)
        in_catalog = (start + jnp.arange(tiles.streamed) < num_used)[None, :]
        loss, num_predicted, d_activations = sums.loss, sums.num_predicted, sums.d_activations
        if loss is not None:
            loss = loss + jnp.where(in_catalog, losses, 0).sum(axis=1)
        if num_predicted is not None:
            num_predicted = tuple(
                count + ((logits > threshold) & in_catalog).sum(axis=1, dtype=jnp.int32)
                for count, threshold in zip(num_predicted, config.logit_thresholds, strict=True)
            )
        if d_activations is not None:  # rows that do not count are zero and add nothing
            operand = d_logits.astype(jnp.promote_types(activations.dtype, rows.dtype))
            d_activations = d_activations + matmul(config, operand, rows, (1, 0))
        return Sweep(loss, num_predicted, d_activations)

    zero = jnp.zeros((tiles.held,), jnp.float32)
    sums = Sweep(
        None if out.loss is None else zero,
        None if out.num_predicted is None
        else tuple(zero.astype(jnp.int32) for _ in config.logit_thresholds),
        None if out.d_activations is None else jnp.zeros(activations.shape, jnp.float32),
    )  # fmt: skip
    sums = _for_blocks_of_split(split, num_rows, num_used, tiles, add_rows, sums)
    if out.loss is not None:
        _store(out.loss, (split,), held_start, sums.loss, num_positions)
    for i, count in enumerate(sums.num_predicted or ()):
        _store(out.num_predicted, (split, jnp.int32(i)), held_start, count, num_positions)
    if out.d_activations is not None:
        weights = _load(operands.d_per_position, held_start, tiles.held, num_positions)
        d_activations = sums.d_activations * weights[:, None]
        _store(out.d_activations, (split,), held_start, d_activations, num_positions, dim)


def _rows_kernel(operands: Operands, out: Sweep, *, sizes: tuple[int, int, int],
                 tiles: KernelTiles, config: SweepConfig) -> None:  # fmt: skip
    num_positions, num_rows, dim = sizes
    held_start, split = pl.program_id(0) * tiles.held, pl.program_id(1)
    num_used = operands.num_used[0]
    rows = _load(operands.embeddings, held_start, tiles.held, num_used, dim)
    bias = None
    if operands.bias is not None:
        bias = _load(operands.bias, held_start, tiles.held, num_used).astype(jnp.float32)

    def add_positions(block: Array, sums: Sweep) -> Sweep:
        start = block * tiles.streamed
        activations = _load(operands.activations, start, tiles.streamed, num_positions, dim)
        logits = matmul(config, rows, activations, (1, 1))  # [held, streamed], transposed
        if bias is not None:
            logits = logits + bias[:, None]
        _, d_logits = config.pointwise.sweep_function(logits)
        weights = _load(operands.d_per_position, start, tiles.streamed, num_positions)
        d_logits = d_logits * weights[None, :]  # zero beyond the last position
        operand = d_logits.astype(jnp.promote_types(activations.dtype, rows.dtype))
        d_rows = sums.d_embeddings + matmul(config, operand, activations, (1, 0))
        d_bias = None if sums.d_bias is None else sums.d_bias + d_logits.sum(axis=1)
        return Sweep(d_embeddings=d_rows, d_bias=d_bias)

    sums = Sweep(
        d_embeddings=jnp.zeros(rows.shape, jnp.float32),
        d_bias=None if bias is None else jnp.zeros(bias.shape, jnp.float32),
    )
    sums = _for_blocks_of_split(split, num_positions, num_positions, tiles, add_positions, sums)
    in_catalog = held_start + jnp.arange(tiles.held) < num_used
    d_rows = jnp.where(in_catalog[:, None], sums.d_embeddings, 0)
    _store(out.d_embeddings, (split,), held_start, d_rows, num_rows, dim)
    if bias is not None:
        d_bias = jnp.where(in_catalog, sums.d_bias, 0)
        _store(out.d_bias, (split,), held_start, d_bias, num_rows)


def _for_blocks_of_split(split: Array, num_streamed: int, num_used: Any, tiles: KernelTiles,
                         body: Any, sums: Sweep) -> Sweep:  # fmt: skip
    """Loops over this split's share of the streamed blocks, as far as they are used."""
    num_blocks = math.ceil(math.ceil(num_streamed / tiles.streamed) / tiles.num_splits)
    first = split * num_blocks
    last = jnp.minimum(first + num_blocks, pl.cdiv(num_used, tiles.streamed))
    return lax.fori_loop(first, last, body, sums)


def _load(ref: Any, start: Array, size: int, end: Any, dim: int | None = None) -> Array:
    """`size` entries (or rows of `dim`) from `start` on; zero from `end` and from `dim` on."""
    index, mask = _inside(start, size, end, dim)
    return plt.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))


def _store(ref: Any, leading: tuple, start: Array, values: Array, end: Any,
           dim: int | None = None) -> None:  # fmt: skip
    """Writes what `_load` would read, below the `leading` indices."""
    index, mask = _inside(start, values.shape[0], end, dim)
    plt.store(ref.at[(*leading, *index)], values, mask=mask)


def _inside(start: Array, size: int, end: Any, dim: int | None) -> tuple:
    """Index of a block, and the mask of what is inside the array."""
    index, mask = (pl.ds(start, size),), start + jnp.arange(size) < end
    if dim is None:
        return index, mask
    columns = jnp.arange(padded_dim(dim)) < dim
    return (*index, slice(None)), mask[:, None] & columns[None, :]
