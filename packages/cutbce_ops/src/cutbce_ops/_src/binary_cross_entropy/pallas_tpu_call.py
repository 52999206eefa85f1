"""Calling the TPU kernel of the sweep: blocks, memory on chip, and what the compiler is told."""

import json
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cutbce_ops._src.binary_cross_entropy.pallas_tpu_kernel import (
    LANES,
    SUBLANES,
    KernelConfig,
    sweep_kernel,
)
from cutbce_ops._src.binary_cross_entropy.pallas_tpu_loops import loop_iterations


# Compiled apart only so that the body, thousands of operations, is traced once for each shape.
@partial(jax.jit, static_argnames=("config", "vmem_limit_bytes"))
def call_kernel(
    config: KernelConfig, arrays: dict[str, Array], vmem_limit_bytes: int
) -> dict[str, Array]:
    """Runs the kernel over a whole table.

    Args:
      config: static options.
      arrays: the inputs by their reference name: `num_rows` `[1]` int32 (rows in use),
        `logit_operand` `[T, D]`, `gradient_operand` `[T, D (+ 128)]`, `table` `[V, D]`, `bias`
        `[1, V]`, `earlier_d_table` `[V, D]`, `earlier_d_bias` `[1, V]`.
      vmem_limit_bytes: of the chip.

    Returns:
      The outputs by name: `loss` `[8, T]` float32 and `counts` `[8 K, T]` int32, to be summed over
      groups of 8 rows, `d_activations` `[D, T]`, `d_table` `[V, D]` and `d_bias` `[1, V]` float32.
    """
    num_table_rows = arrays["table"].shape[0]
    num_blocks = math.ceil(num_table_rows / config.block_v)
    specs = _block_specs(config, num_blocks)
    names = config.ref_names
    inputs = names[: names.index("table") + 1]
    inputs += tuple(n for n in ("bias", "earlier_d_table", "earlier_d_bias") if n in names)
    shapes = _output_shapes(config, num_table_rows, _manual_axis_type(arrays))
    outputs = tuple(name for name in names if name in shapes)
    scratch = _scratch_shapes(config)
    aliases = {
        inputs.index(f"earlier_{name}"): outputs.index(name)
        for name in ("d_table", "d_bias")
        if f"earlier_{name}" in inputs
    }
    results = pl.pallas_call(
        partial(sweep_kernel, config),
        out_shape=[shapes[name] for name in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_blocks + 1,),
            in_specs=[specs[name] for name in inputs[1:]],
            out_specs=[specs[name] for name in outputs],
            scratch_shapes=[scratch[name] for name in names if name in scratch],
        ),
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_limit_bytes
        ),
        cost_estimate=_cost(config, num_table_rows),
        interpret=pltpu.InterpretParams(detect_races=True) if config.interpret else False,
        name="cut_bce_sweep",
        # For `tpu_lab`, which cannot see them in the kernel's schedule.
        metadata={"loop_iterations": json.dumps(loop_iterations(config, num_table_rows))},
    )(*(arrays[name] for name in inputs))
    return dict(zip(outputs, results, strict=True))


def _cost(config: KernelConfig, num_table_rows: int) -> pl.CostEstimate:
    num_logits = config.num_positions * num_table_rows
    num_products = 3 if config.with_gradients else 1
    num_tables = 2 if config.with_gradients else 1
    return pl.CostEstimate(
        flops=2 * num_products * num_logits * config.dim,
        transcendentals=2 * num_logits,
        bytes_accessed=4 * num_tables * num_table_rows * config.dim,
    )


def _block_specs(config: KernelConfig, num_blocks: int) -> dict[str, pl.BlockSpec]:
    dim, block_v, num_positions = config.dim, config.block_v, config.num_positions
    last = num_blocks - 1

    def resident(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda v, _: (0, 0))

    read = pl.BlockSpec((block_v, dim), lambda v, _: (jnp.minimum(v, last), 0))
    read_lanes = pl.BlockSpec((1, block_v), lambda v, _: (0, jnp.minimum(v, last)))
    return {
        "logit_operand": resident(num_positions, dim),
        "gradient_operand": resident(num_positions, config.dim_with_bias),
        "table": read,
        "bias": read_lanes,
        "earlier_d_table": read,
        "earlier_d_bias": read_lanes,
        "loss": resident(SUBLANES, num_positions),
        "counts": resident(SUBLANES * len(config.logit_thresholds), num_positions),
        "d_activations": resident(dim, num_positions),
        # Written one step late: the last tiles of a block pass through the stages in the next.
        "d_table": pl.BlockSpec((block_v, dim), lambda v, _: (jnp.maximum(v - 1, 0), 0)),
        "d_bias": pl.BlockSpec((1, block_v), lambda v, _: (0, jnp.maximum(v - 1, 0))),
    }


def _manual_axis_type(arrays: dict[str, Array]) -> dict[str, Any]:
    """How outputs vary over the axes of a surrounding `shard_map`: as the inputs do."""
    types = [jax.typeof(array).manual_axis_type for array in arrays.values() if array is not None]
    most = max(types, key=lambda type_: len(type_.varying))
    return {"manual_axis_type": most} if most.varying else {}


def _output_shapes(
    config: KernelConfig, num_table_rows: int, axis_type: dict[str, Any]
) -> dict[str, jax.ShapeDtypeStruct]:
    num_positions = config.num_positions
    num_counts = SUBLANES * len(config.logit_thresholds)
    shapes = {
        "loss": ((SUBLANES, num_positions), jnp.float32),
        "counts": ((num_counts, num_positions), jnp.int32),
        "d_activations": ((config.dim, num_positions), jnp.float32),
        "d_table": ((num_table_rows, config.dim), jnp.float32),
        "d_bias": ((1, num_table_rows), jnp.float32),
    }
    return {name: jax.ShapeDtypeStruct(*shape, **axis_type) for name, shape in shapes.items()}


def _scratch_shapes(config: KernelConfig) -> dict[str, Any]:
    block_v, block_t, dim, dtype = config.block_v, config.block_t, config.dim, config.operand_dtype
    return {
        "block_loss": pltpu.VMEM((SUBLANES, config.num_positions), jnp.float32),
        "rows": pltpu.VMEM((2, block_v, dim), dtype),
        "rows_t": pltpu.VMEM((2, dim, block_v), dtype),
        "d_rows": pltpu.VMEM((2, block_v, config.dim_with_bias), jnp.float32),
        "offset": pltpu.VMEM((2, block_v, LANES), jnp.float32),
        "logits": pltpu.VMEM((block_v, block_t), jnp.float32),
        "logits_again": pltpu.VMEM((block_v, block_t), jnp.float32),
        "p": pltpu.VMEM((2, block_v, block_t), dtype),
    }
