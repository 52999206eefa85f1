"""TPU kernel of the correction for targets: adds up gathered rows, multiplies by the activations.

XLA's own sum under a mask takes five times as long. Here positions are turned to lanes, where one
number for each of them (a weight, which of its targets are there) costs nothing to multiply by.
"""

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # also the positions that are turned at a time
MOST_TARGETS = 31  # one bit of an int32 each, without the sign
MOST_POSITIONS = 1024  # in a block: their activations and results take memory too
BLOCK_BYTES = 2**21  # rows on the chip at a time; two such blocks are in flight


def most_targets(row_bytes: int) -> int:
    """Targets of each position whose rows one call can add up, at least 1."""
    return max(1, min(BLOCK_BYTES // (LANES * row_bytes), MOST_TARGETS))


# Compiled apart only so that the body is traced once for each shape.
@partial(jax.jit, static_argnames=("dtype", "interpret"))
def call_rows_kernel(
    arrays: dict[str, Array], *, dtype: Any, interpret: bool = False
) -> dict[str, Array]:
    """Sums over each position's targets, leaving those out that are not there.

    Args:
      arrays: the inputs by their reference name: `targets` `[L, T]` int32, negative = no target
        here; `rows` `[L, T, D]` float, any values, NaN too, where there is no target;
        `activations` `[T, D]` float32 for the logits; `d_logits` `[1, T]` float32 for gradients.
        D is a multiple of 128 and L at most `most_targets`.
      dtype: rows are rounded to it first.
      interpret: whether to run the kernel in the interpreter (tests).

    Returns:
      `logits` `[1, T]` float32, the sum of the rows times the activations, and `d_activations`
      `[D, T]` float32, the same sum times `d_logits`: each where its factor is given.
    """
    rows = arrays["rows"]
    num_targets, num_positions, dim = rows.shape
    fit = BLOCK_BYTES // (num_targets * dim * rows.dtype.itemsize)
    block_t = max(1, min(fit, MOST_POSITIONS, num_positions + LANES - 1) // LANES) * LANES

    num_blocks, num_slices = pl.cdiv(num_positions, block_t), block_t // LANES
    loops = [num_blocks] * (num_blocks > 1) + [num_blocks * num_slices] * (num_slices > 1)

    def lanes(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((size, block_t), lambda t: (0, t))

    specs = {
        "targets": lanes(num_targets),
        "rows": pl.BlockSpec((num_targets, block_t, dim), lambda t: (0, t, 0)),
        "activations": pl.BlockSpec((block_t, dim), lambda t: (t, 0)),
        "d_logits": lanes(1),
    }
    inputs = [name for name in specs if name in arrays]
    sizes = {"activations": ("logits", 1), "d_logits": ("d_activations", dim)}
    outputs = dict(sizes[name] for name in inputs if name in sizes)
    axis_type = jax.typeof(rows).manual_axis_type
    kwargs = {"manual_axis_type": axis_type} if axis_type.varying else {}
    results = pl.pallas_call(
        partial(_kernel, dtype, (*inputs, *outputs)),
        out_shape=[
            jax.ShapeDtypeStruct((size, num_positions), jnp.float32, **kwargs)
            for size in outputs.values()
        ],
        grid=(num_blocks,),
        in_specs=[specs[name] for name in inputs],
        out_specs=[lanes(size) for size in outputs.values()],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=pltpu.InterpretParams(detect_races=True) if interpret else False,
        name="cut_bce_targets",
        # For `tpu_lab`. Loops of one trip are left out, as the compiler leaves them out.
        metadata={"loop_iterations": json.dumps(loops)},
    )(*(arrays[name] for name in inputs))
    return dict(zip(outputs, results, strict=True))


def _kernel(dtype: Any, names: tuple[str, ...], *references: Any) -> None:
    refs = SimpleNamespace(**dict(zip(names, references, strict=True)))
    num_slices = refs.rows.shape[1] // LANES
    lax.fori_loop(0, num_slices, lambda step, _: _add_up(dtype, refs, step), None)


def _add_up(dtype: Any, refs: SimpleNamespace, step: Array) -> None:
    """128 positions."""
    num_targets, _, dim = refs.rows.shape
    positions = pl.ds(pl.multiple_of(step * LANES, LANES), LANES)
    target = lax.broadcasted_iota(jnp.int32, (num_targets, LANES), 0)
    is_there = jnp.where(refs.targets[:, positions] >= 0, jnp.left_shift(1, target), 0)
    bits = jnp.sum(is_there, axis=0, keepdims=True)
    bits = jnp.broadcast_to(bits, (LANES, LANES)).T  # those of a position in all lanes
    logits = jnp.zeros((1, LANES), jnp.float32)
    for start in range(0, dim, LANES):
        columns = pl.ds(start, LANES)
        total = jnp.zeros((LANES, LANES), jnp.float32)
        for target in range(num_targets):
            row = refs.rows[target, positions, columns].astype(dtype).astype(jnp.float32)
            total += jnp.where((bits & (1 << target)) != 0, row, 0.0)
        total = total.T  # [128 features, 128 positions]
        if hasattr(refs, "d_logits"):
            refs.d_activations[columns, positions] = refs.d_logits[:, positions] * total
        if hasattr(refs, "activations"):
            product = refs.activations[positions, columns].T * total
            logits += jnp.sum(product, axis=0, keepdims=True)
    if hasattr(refs, "activations"):
        refs.logits[:, positions] = logits
