"""The sweep on a TPU: cuts the positions to fit the chip, and calls the kernel."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from cutbce_ops._src.binary_cross_entropy.config import SweepConfig
from cutbce_ops._src.binary_cross_entropy.products import matmul_operand
from cutbce_ops._src.binary_cross_entropy.sweep import Sweep, Wanted
from cutbce_ops._src.hardware import LANES, HardwareSpec
from cutbce_ops._src.tuning import TpuTiles, sweep_tiles

# What the compiler keeps for itself: copies in flight, spilled registers.
RESERVED_VMEM_BYTES = 2**20
# Positions per call from which the arithmetic hides the traffic of the table, with a margin.
ENOUGH_POSITIONS = 2048


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """Sizes of the kernel calls that make up one sweep.

    Attributes:
      tiles: how the kernel cuts its work.
      dim_padded: D as the kernel sees it.
      num_chunks: calls; each sweeps the whole table for its share of the positions.
      chunk_t: positions per call, fill included.
      vmem_bytes: on-chip memory of a call.
    """

    tiles: TpuTiles
    dim_padded: int
    num_chunks: int
    chunk_t: int
    vmem_bytes: int


def plan_kernel(num_positions: int, dim: int, has_bias: bool, config: SweepConfig, wanted: Wanted,
                hardware: HardwareSpec) -> KernelPlan:  # fmt: skip
    """Chooses tiles and the number of chunks; a pure function of sizes and chip.

    Raises:
      NotImplementedError: not even the smallest tile fits the chip.
    """
    dim_padded = math.ceil(dim / LANES) * LANES
    tiles = _fit_positions(_tiles(dim_padded, config, wanted, hardware), num_positions)
    bytes_of = functools.partial(
        _vmem_bytes, dim=dim_padded, has_bias=has_bias, config=config, wanted=wanted
    )

    def most_positions(tiles: TpuTiles) -> int:
        per_position, per_call = bytes_of(tiles)
        granule = tiles.block_t * tiles.unroll
        budget = hardware.vmem_bytes - RESERVED_VMEM_BYTES - per_call
        return budget // per_position // granule * granule

    enough = min(num_positions, ENOUGH_POSITIONS)
    while config.tiles is None and tiles.block_v > LANES and most_positions(tiles) < enough:
        tiles = dataclasses.replace(tiles, block_v=tiles.block_v // 2)
    granule = tiles.block_t * tiles.unroll
    per_position, per_call = bytes_of(tiles)
    largest = most_positions(tiles)
    if largest < granule:
        raise NotImplementedError(
            f"a tile of {tiles.block_v} x {tiles.block_t} logits at D={dim} needs "
            f"{per_call + granule * per_position} bytes of VMEM; {hardware.chip} has "
            f"{hardware.vmem_bytes}."
        )
    # Equal chunks: the last one would otherwise sweep the table for a few positions.
    num_chunks = math.ceil(num_positions / largest)
    chunk_t = math.ceil(num_positions / num_chunks / granule) * granule
    return KernelPlan(tiles, dim_padded, num_chunks, chunk_t, per_call + chunk_t * per_position)


def _tiles(dim: int, config: SweepConfig, wanted: Wanted, hardware: HardwareSpec) -> TpuTiles:
    mode = "forward" if not wanted.gradients else "fused" if wanted.loss else "backward"
    tiles = sweep_tiles(hardware.chip, dim, mode)
    if config.precision == "highest" or not config.pointwise.is_plain:
        # Twice the bytes and many more registers alive: smaller bodies spill less.
        tiles = TpuTiles(min(tiles.block_v, 512), LANES, 2, 8)
    if config.tiles is None:
        return tiles

    def whole(size: int) -> int:
        return math.ceil(size / LANES) * LANES

    return dataclasses.replace(
        tiles, block_v=whole(config.tiles.block_v), block_t=whole(config.tiles.block_t), unroll=2
    )


def _fit_positions(tiles: TpuTiles, num_positions: int) -> TpuTiles:
    """Smaller tiles for few positions, so that less than half of the work is fill."""
    while tiles.block_t * tiles.unroll >= 2 * num_positions:
        if tiles.unroll > 2:
            tiles = dataclasses.replace(tiles, unroll=tiles.unroll // 2)
        elif tiles.block_t > LANES:
            tiles = dataclasses.replace(tiles, block_t=LANES)
        else:
            break
    return tiles


def _vmem_bytes(tiles: TpuTiles, dim: int, has_bias: bool, config: SweepConfig,
                wanted: Wanted) -> tuple[int, int]:  # fmt: skip
    """Bytes per position and bytes per call; inputs and outputs that move are held twice."""
    num_counts = len(config.logit_thresholds) if wanted.counts else 0
    operand = 4 if config.precision == "highest" else 2
    dim_with_bias = dim + (LANES if has_bias else 0)
    per_position = operand * dim + 32 * num_counts + (64 if wanted.loss else 0)
    block = tiles.block_v * (2 * 4 * dim + 2 * operand * dim + 2 * 4 * LANES)
    block += 2 * 4 * tiles.block_v * tiles.block_t  # logits, and those of a second look
    if wanted.gradients:
        per_position += operand * dim_with_bias + 4 * dim
        # Written rows, transposed rows, accumulators; earlier gradients when there are chunks.
        block += tiles.block_v * (2 * 4 * dim + 2 * operand * dim + 2 * 4 * dim_with_bias)
        block += tiles.block_v * 2 * 4 * dim
        block += 2 * operand * tiles.block_v * tiles.block_t
    return per_position, block


def sweep(activations: Array, embeddings: Array, bias: Array | None,
          d_per_position: Array | None, vocab_offset: Array | None, config: SweepConfig,
          wanted: Wanted, hardware: HardwareSpec, *, interpret: bool = False) -> Sweep:  # fmt: skip
    """Sweeps all rows as negatives.

    Args:
      activations: `[T, D]` float.
      embeddings: `[V, D]` float; this device's rows.
      bias: `[V]` float, or None.
      d_per_position: `[T]` float32, needed for gradients only.
      vocab_offset: `[]` int32, global number of row 0; None when this is the whole table.
      config: static options.
      wanted: which results to compute.
      hardware: the chip.
      interpret: whether to run the kernel in the interpreter (tests).

    Returns:
      The sums and gradients.

    Raises:
      NotImplementedError: the case does not fit the chip.
    """
    num_positions, dim = activations.shape
    plan = plan_kernel(num_positions, dim, bias is not None, config, wanted, hardware)
    num_rows = _rows_in_use(embeddings.shape[0], vocab_offset, config.vocab_size)
    table = _pad_columns(embeddings, plan.dim_padded)
    bias = None if bias is None else bias[None, :].astype(jnp.float32)
    chunks = []
    d_table = d_bias = None
    for chunk in range(plan.num_chunks):
        cut = functools.partial(_cut, start=chunk * plan.chunk_t, size=plan.chunk_t)
        operands = _Operands.create(
            cut(activations), None if d_per_position is None else cut(d_per_position),
            plan, bias is not None, config,
        )  # fmt: skip
        result = _call(plan, config, wanted, hardware, interpret, operands, table, bias, num_rows,
                       d_table, d_bias)  # fmt: skip
        d_table, d_bias = result.get("d_table"), result.get("d_bias")
        chunks.append(_chunk_sums(result, operands, dim, len(config.logit_thresholds)))
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts)[:num_positions], *chunks)
    return dataclasses.replace(
        joined,
        d_embeddings=None if d_table is None else d_table[:, :dim],
        d_bias=None if d_bias is None else d_bias[0],
    )


def _rows_in_use(num_rows: int, vocab_offset: Array | None, vocab_size: int) -> Array:
    if vocab_offset is None:
        return jnp.full((1,), min(num_rows, vocab_size), jnp.int32)
    return jnp.clip(vocab_size - vocab_offset, 0, num_rows).astype(jnp.int32).reshape(1)


def _pad_columns(array: Array, dim: int) -> Array:
    missing = dim - array.shape[1]
    return jnp.pad(array, ((0, 0), (0, missing))) if missing else array


def _cut(array: Array, start: int, size: int) -> Array:
    """Rows `start` to `start + size`, filled with zeros past the end."""
    part = array[start : start + size]
    return jnp.pad(part, ((0, size - part.shape[0]),) + ((0, 0),) * (array.ndim - 1))


@dataclasses.dataclass(frozen=True)
class _Operands:
    """Factors of the products for one chunk of positions."""

    logit: Array  # [T, D]
    gradient: Any  # [T, D (+ 128)] or None
    d_per_position: Any  # [T] float32 or None

    @classmethod
    def create(cls, activations: Array, d_per_position: Array | None, plan: KernelPlan,
               has_bias: bool, config: SweepConfig) -> "_Operands":  # fmt: skip
        from cutbce_ops._src.binary_cross_entropy.pallas_tpu_kernel import LOG2_E

        dtype = jnp.float32 if config.precision == "highest" else jnp.bfloat16
        activations = _pad_columns(activations, plan.dim_padded).astype(jnp.float32)
        scale = LOG2_E if config.pointwise.is_plain else 1.0
        logit = (activations * scale).astype(dtype)
        if d_per_position is None:
            return cls(logit, None, None)
        gradient = activations * d_per_position[:, None]
        if has_bias:  # one more column of the table's gradient is that of the bias
            column = jnp.pad(d_per_position[:, None], ((0, 0), (0, LANES - 1)))
            gradient = jnp.concatenate([gradient, column], axis=1)
        return cls(logit, gradient.astype(dtype), d_per_position)


def _call(plan: KernelPlan, config: SweepConfig, wanted: Wanted, hardware: HardwareSpec,
          interpret: bool, operands: _Operands, table: Array, bias: Array | None, num_rows: Array,
          d_table: Array | None, d_bias: Array | None) -> dict[str, Array]:  # fmt: skip
    # Imported here: Pallas for TPU takes a while to load, which nobody else should pay for.
    from cutbce_ops._src.binary_cross_entropy.pallas_tpu_call import call_kernel
    from cutbce_ops._src.binary_cross_entropy.pallas_tpu_kernel import KernelConfig

    kernel = KernelConfig(
        num_positions=plan.chunk_t,
        dim=plan.dim_padded,
        block_v=plan.tiles.block_v,
        block_t=plan.tiles.block_t,
        unroll=plan.tiles.unroll,
        row_slice=plan.tiles.row_slice,
        bfloat16_elements=hardware.has_bfloat16_elements,
        highest=config.precision == "highest",
        with_loss=wanted.loss,
        with_counts=wanted.counts,
        with_gradients=wanted.gradients,
        has_bias=bias is not None,
        accumulate=d_table is not None,
        logit_thresholds=config.logit_thresholds if wanted.counts else (),
        pointwise=None if config.pointwise.is_plain else config.pointwise,
        interpret=interpret,
    )
    arrays = {
        "num_rows": num_rows,
        "logit_operand": operands.logit,
        "gradient_operand": operands.gradient,
        "table": table,
        "bias": bias,
        "earlier_d_table": d_table,
        "earlier_d_bias": d_bias,
    }
    return call_kernel(kernel, arrays, hardware.vmem_bytes - RESERVED_VMEM_BYTES)


def _chunk_sums(result: dict[str, Array], operands: _Operands, dim: int, num_counts: int) -> Sweep:
    """Per-position results of one call, positions leading."""
    loss = num_predicted = d_activations = None
    if "loss" in result:
        loss = result["loss"].sum(axis=0)
    if "counts" in result:
        counts = result["counts"]
        num_predicted = counts.reshape(num_counts, -1, counts.shape[1]).sum(1, dtype=jnp.int32).T
    if "d_activations" in result:
        d_activations = (result["d_activations"][:dim] * operands.d_per_position[None, :]).T
    return Sweep(loss=loss, num_predicted=num_predicted, d_activations=d_activations)


def most_targets(row_bytes: int) -> int:
    """Targets of each position whose rows one call of `add_up_targets` can add up, at least 1."""
    from cutbce_ops._src.binary_cross_entropy import pallas_tpu_rows

    return pallas_tpu_rows.most_targets(row_bytes)


def add_up_targets(
    rows: Array,
    targets: Array,
    activations: Array | None,
    d_logits: Array | None,
    config: SweepConfig,
    *,
    interpret: bool = False,
) -> tuple[Array | None, Array | None]:
    """Sums over each position's targets, leaving those out that are not there.

    Args:
      rows: `[L, T, D]` float; any values, NaN too, where there is no target. L is at most
        `most_targets`.
      targets: `[L, T]` int32; negative = no target here.
      activations: `[T, D]` float32, or None if no logits are wanted.
      d_logits: `[T]` float32, or None if no gradient is wanted.
      config: static options.
      interpret: whether to run the kernel in the interpreter (tests).

    Returns:
      `[T]` float32 or None, sum of the rows times the activations, and `[T, D]` float32 or None,
      the same sum times `d_logits`.
    """
    from cutbce_ops._src.binary_cross_entropy.pallas_tpu_rows import call_rows_kernel

    dtype = matmul_operand(rows[:0], config).dtype
    arrays = {"targets": targets, "rows": rows}
    if activations is not None:
        arrays["activations"] = activations
    if d_logits is not None:
        arrays["d_logits"] = d_logits[None, :]
    result = call_rows_kernel(arrays, dtype=dtype, interpret=interpret)
    logits = result["logits"][0] if "logits" in result else None
    return logits, result["d_activations"].T if "d_activations" in result else None
