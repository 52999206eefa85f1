"""The published CutBCE algorithm in its TPU form, stated for comparison.

Forward: an XLA scan over blocks of the vocabulary that adds up the loss of one tile of logits at a
time. Backward: a Pallas kernel that recomputes each tile. It adds the gradient of a block of the
table up over the positions; of the activations it writes one part per block of the vocabulary,
`[v_blocks, T, D]`, and XLA sums the parts. Labels of a tile come from comparing each of the L
targets with every row. Factors of products are bfloat16, sums are float32.

Reference: "Cut Binary Cross Entropy", arXiv 2610.05559. Written from the paper's description.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # of a register; a block of targets takes a whole row of it
POSITION_SLICE = 16  # positions whose derivatives are formed at a time


@dataclasses.dataclass(frozen=True)
class PublishedBlocks:
    """Block sizes of the published algorithm.

    Attributes:
      forward_v: table rows per step of the forward scan.
      block_v, block_t: tile of the backward kernel; multiples of 128. `block_t` divides T.
    """

    forward_v: int
    block_v: int
    block_t: int


def published_cut_bce_tpu(
    activations: Array,
    embeddings: Array,
    targets: Array,
    blocks: PublishedBlocks,
    *,
    interpret: Any = False,
    vmem_limit_bytes: int | None = None,
) -> Array:
    """Mean loss, `[]` float32, with the published backward pass.

    Args:
      activations: `[T, D]` float32.
      embeddings: `[V, D]` float32.
      targets: `[T, L]` int32.
      blocks: block sizes.
      interpret: what Pallas takes to run the kernel in the interpreter; False for the TPU.
      vmem_limit_bytes: on-chip memory that the kernel may use; None for the compiler's default.

    Returns:
      The loss.
    """
    return _loss(activations, embeddings, targets, blocks, interpret, vmem_limit_bytes)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _loss(activations, embeddings, targets, blocks, interpret, vmem_limit_bytes):
    per_position = forward_scan(activations, embeddings, targets, blocks.forward_v)
    return per_position.mean() / embeddings.shape[0]


def forward_scan(activations: Array, embeddings: Array, targets: Array, block_v: int) -> Array:
    """Summed loss of every position, `[T]` float32."""
    operand = activations.astype(jnp.bfloat16)
    num_blocks, num_left = divmod(embeddings.shape[0], block_v)

    def tile_loss(first_row: Array | int, rows: Array) -> Array:
        x = _product(operand, rows.astype(jnp.bfloat16), (1, 1))
        ids = first_row + jnp.arange(rows.shape[0], dtype=jnp.int32)
        is_target = _is_target(targets, ids[None, :])
        tile = jnp.maximum(x, 0) - jnp.where(is_target, x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
        return tile.sum(axis=1)

    def add_block(total: Array, block: Array) -> tuple[Array, None]:
        rows = lax.dynamic_slice_in_dim(embeddings, block * block_v, block_v)
        return total + tile_loss(block * block_v, rows), None

    total = jnp.zeros(activations.shape[0])
    total, _ = lax.scan(add_block, total, jnp.arange(num_blocks))
    if num_left:
        total += tile_loss(num_blocks * block_v, embeddings[num_blocks * block_v :])
    return total


def _forward(activations, embeddings, targets, blocks, interpret, vmem_limit_bytes):
    loss = _loss(activations, embeddings, targets, blocks, interpret, vmem_limit_bytes)
    return loss, (activations, embeddings, targets)


def _backward(blocks, interpret, vmem_limit_bytes, residuals, cotangent):
    activations, embeddings, targets = residuals
    scale = cotangent / (activations.shape[0] * embeddings.shape[0])
    parts, d_embeddings = backward_kernel(
        activations.astype(jnp.bfloat16), embeddings, targets, blocks, interpret, vmem_limit_bytes,
        scale=scale,
    )  # fmt: skip
    return parts.sum(axis=0) * scale, d_embeddings, None


_loss.defvjp(_forward, _backward)


def backward_kernel(
    activations: Array,
    embeddings: Array,
    targets: Array,
    blocks: PublishedBlocks,
    interpret: Any = False,
    vmem_limit_bytes: int | None = None,
    *,
    scale: Array,
) -> tuple[Array, Array]:
    """Parts of the gradient of the activations, and the gradient of the table.

    Args:
      activations: `[T, D]` bfloat16.
      embeddings: `[V, D]` float32.
      targets: `[T, L]` int32.
      blocks: block sizes.
      interpret: what Pallas takes to run the kernel in the interpreter; False for the TPU.
      vmem_limit_bytes: on-chip memory that the kernel may use; None for the compiler's default.
      scale: `[]` float32, factor of the table's gradient.

    Returns:
      `[v_blocks, T, D]` float32 without the factor, and `[V, D]` float32 with it.
    """
    (num_positions, dim), num_rows = activations.shape, embeddings.shape[0]
    block_v, block_t = blocks.block_v, blocks.block_t
    if num_positions % block_t:
        raise ValueError(f"`block_t` must divide T={num_positions}; got {block_t}.")
    num_v, num_t = math.ceil(num_rows / block_v), num_positions // block_t
    rows = pl.BlockSpec((block_v, dim), lambda v, t: (v, 0))
    return pl.pallas_call(
        partial(_kernel, num_rows, num_t),
        out_shape=(
            jax.ShapeDtypeStruct((num_v, num_positions, dim), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, dim), jnp.float32),
        ),
        grid=(num_v, num_t),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((block_t, targets.shape[1]), lambda v, t: (t, 0)),
            pl.BlockSpec((block_t, dim), lambda v, t: (t, 0)),
            rows,
        ],
        out_specs=(pl.BlockSpec((None, block_t, dim), lambda v, t: (v, t, 0)), rows),
        scratch_shapes=[
            pltpu.VMEM((block_v, dim), jnp.bfloat16),
            pltpu.VMEM((block_t, block_v), jnp.float32),
            pltpu.VMEM((block_t, block_v), jnp.bfloat16),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
        cost_estimate=_cost(num_v, num_positions, num_rows, dim),
        interpret=interpret,
        name="published_backward",
    )(scale.reshape(1), targets, activations, embeddings)


def _kernel(
    num_rows, num_t, scale, targets, activations, table, d_activations, d_table, rows, x, d_x
):
    """One tile: `[block_t, block_v]` logits, their derivative, and its two products."""
    v, t = pl.program_id(0), pl.program_id(1)
    block_v = table.shape[0]

    @pl.when(t == 0)
    def _():
        row = v * block_v + lax.broadcasted_iota(jnp.int32, table.shape, 0)
        # The last block reads past the table; zeros there add nothing to the activations.
        rows[...] = jnp.where(row < num_rows, table[...], 0.0).astype(rows.dtype)
        d_table[...] = jnp.zeros(d_table.shape, d_table.dtype)

    x[...] = _product(activations[...], rows[...], (1, 1))
    ids = v * block_v + lax.broadcasted_iota(jnp.int32, (1, block_v), 1)
    # A few positions at a time: what is computed for them then stays in registers.
    for start in range(0, x.shape[0], POSITION_SLICE):
        positions = pl.ds(start, POSITION_SLICE)
        p = jax.nn.sigmoid(x[positions, :])
        # Selects, not one disjunction: a bundle holds fewer operations on masks than on values.
        label = jnp.zeros_like(p)
        for column in range(targets.shape[1]):
            target = targets[positions, column : column + 1]
            label = jnp.where(target == ids, 1.0, label)
        d_x[positions, :] = (p - label).astype(d_x.dtype)
    d_activations[...] = _product(d_x[...], rows[...], (1, 0))
    d_table[...] += _product(d_x[...], activations[...], (0, 0))

    @pl.when(t == num_t - 1)
    def _():
        d_table[...] *= scale[0]


def _is_target(targets: Array, ids: Array) -> Array:
    """Labels of a tile, `[t, v]` bool, from `[t, L]` targets and `[1, v]` row numbers."""
    found = targets[:, 0:1] == ids
    for column in range(1, targets.shape[1]):
        found |= targets[:, column : column + 1] == ids
    return found


def _product(left: Array, right: Array, contract: tuple[int, int]) -> Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)


def _cost(num_v: int, num_positions: int, num_rows: int, dim: int) -> pl.CostEstimate:
    num_logits = num_positions * num_rows
    # For each block of the table: activations and targets read, a part of the gradient written.
    per_position = 2 * dim + 4 * LANES + 4 * dim
    return pl.CostEstimate(
        flops=6 * num_logits * dim,
        transcendentals=2 * num_logits,
        bytes_accessed=num_v * num_positions * per_position + 2 * 4 * num_rows * dim,
    )
