"""What a call will run and what it will need, told without running it."""

import dataclasses
import math
from typing import Any

from cutbce_ops._src import checks
from cutbce_ops._src.binary_cross_entropy import pallas_tpu
from cutbce_ops._src.binary_cross_entropy.arguments import check_arrays
from cutbce_ops._src.binary_cross_entropy.config import (
    GRADIENT_MODES,
    GradientMode,
    Precision,
    TileConfig,
    default_tiles,
)
from cutbce_ops._src.binary_cross_entropy.dispatch import Choice, choose
from cutbce_ops._src.binary_cross_entropy.options import Options, as_thresholds
from cutbce_ops._src.binary_cross_entropy.sweep import Wanted
from cutbce_ops._src.hardware import ANY_TPU, CHIPS, HardwareSpec
from cutbce_ops._src.sharding import LossSharding

FLOAT32_BYTES, INT32_BYTES = 4, 4
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Plan:
    """How `cut_binary_cross_entropy` would compute loss and gradients; `print` shows it.

    Attributes:
      choice: the implementation, and why others were refused.
      gradient_mode: "fused" or "recompute".
      tiles: the tile of logits.
      num_positions: positions that one device sweeps.
      num_rows: table rows that one device sweeps.
      num_sweeps: passes over the table, forward and backward, chunks of positions counted.
      vmem_bytes: on-chip memory of a TPU kernel call; 0 for other implementations.
      inputs_bytes: main memory of one device's arguments.
      working_bytes: main memory beyond the arguments: gradients, gathered positions, operands and
        tiles; an upper estimate, not counting copies for layout.
      logits_bytes: what `[num_positions, num_rows]` float32 logits would take.
    """

    choice: Choice
    gradient_mode: str
    tiles: TileConfig
    num_positions: int
    num_rows: int
    num_sweeps: int
    vmem_bytes: int
    inputs_bytes: int
    working_bytes: int
    logits_bytes: int

    def __str__(self) -> str:
        lines = [
            f"implementation  {self.choice}",
            f"gradient mode   {self.gradient_mode}, {self.num_sweeps} pass(es) over the table",
            f"one device      {self.num_positions} positions x {self.num_rows} rows",
            f"tile of logits  {self.tiles.block_t} positions x {self.tiles.block_v} rows",
            f"on-chip memory  {self.vmem_bytes / MIB:.1f} MiB",
            f"arguments       {self.inputs_bytes / MIB:.1f} MiB",
            f"beyond them     {self.working_bytes / MIB:.1f} MiB",
            f"logits, unmade  {self.logits_bytes / MIB:.1f} MiB",
        ]
        return "\n".join(lines)


def plan_cut_binary_cross_entropy(
    activations: Any,
    embeddings: Any,
    targets: Any,
    *,
    hardware: HardwareSpec | str,
    bias: Any = None,
    vocab_size: int | None = None,
    thresholds: float | tuple[float, ...] | None = None,
    label_smoothing: float = 0.0,
    pos_weight: float | None = None,
    focal_gamma: float = 0.0,
    logit_cap: float | None = None,
    sharding: LossSharding | None = None,
    gradient_mode: GradientMode = "auto",
    precision: Precision = "default",
    tiles: TileConfig | None = None,
) -> Plan:
    """Says what `cut_binary_cross_entropy` would do with arrays of these shapes.

    Args:
      activations: `[..., D]` array or `jax.ShapeDtypeStruct`.
      embeddings: `[V, D]`, likewise.
      targets: `[..., L]`, likewise.
      hardware: a `HardwareSpec`, the name of a TPU chip ("v4", "v5e", "v5p", "v6e", "7x"), "tpu"
        for an unknown one, "cpu" or "gpu".
      bias: `[V]`, likewise, or None.
      vocab_size: as for the loss.
      thresholds: of confusion counts, as for the loss with them; None if none are wanted.
      label_smoothing: as for the loss.
      pos_weight: as for the loss.
      focal_gamma: as for the loss.
      logit_cap: as for the loss.
      sharding: layout over a mesh, or None for one device.
      gradient_mode: as for the loss.
      precision: as for the loss.
      tiles: as for the loss.

    Returns:
      The plan for one device.

    Raises:
      ValueError: an option is unknown or the shapes do not fit together.
      TypeError: an argument has a wrong type.

    Example:
      >>> import jax, jax.numpy as jnp, cutbce_ops
      >>> shape = jax.ShapeDtypeStruct
      >>> plan = cutbce_ops.plan_cut_binary_cross_entropy(
      ...     shape((64, 256, 128), jnp.float32), shape((1_000_000, 128), jnp.float32),
      ...     shape((64, 256, 8), jnp.int32), hardware="v6e",
      ... )
      >>> plan.choice.implementation, plan.num_sweeps
      ('mosaic_tpu', 1)
    """
    checks.require_choice("gradient_mode", gradient_mode, GRADIENT_MODES)
    check_arrays(activations, embeddings, bias)
    checks.require_integer("targets", targets)
    options = Options(
        vocab_size, label_smoothing, None, logit_cap, sharding, precision, None, tiles, pos_weight,
        focal_gamma, None if thresholds is None else as_thresholds(thresholds),
    )  # fmt: skip
    config = options.sweep_config(embeddings)
    dim = embeddings.shape[-1]
    if targets.ndim != activations.ndim or targets.shape[:-1] != activations.shape[:-1]:
        raise ValueError(
            f"`targets` must have shape {checks.list_shape(activations.shape[:-1])} to match "
            f"`activations` {activations.shape}; got {targets.shape}."
        )
    num_positions, num_rows = _local_sizes(activations.shape, embeddings.shape[0], sharding)
    mode = "fused" if gradient_mode == "auto" else gradient_mode
    sweeps = [Wanted(loss=True, counts=thresholds is not None, gradients=mode == "fused")]
    if mode == "recompute":
        sweeps.append(Wanted(gradients=True))
    platform, chip = _platform(hardware)
    choice = choose(platform, num_positions, dim, bias is not None, config, sweeps[-1], chip)
    sizes = (num_positions, dim, bias is not None)
    if choice.implementation == "mosaic_tpu":
        kernels = [pallas_tpu.plan_kernel(*sizes, config, wanted, chip) for wanted in sweeps]
        used = TileConfig(kernels[-1].tiles.block_t, kernels[-1].tiles.block_v)
        num_sweeps = sum(kernel.num_chunks for kernel in kernels)
        vmem_bytes = max(kernel.vmem_bytes for kernel in kernels)
        tile_bytes = 0
    else:
        used = tiles or default_tiles("cpu" if platform == "cpu" else "accelerator")
        used = TileConfig(min(used.block_t, num_positions), min(used.block_v, num_rows))
        num_sweeps, vmem_bytes = len(sweeps), 0
        tile_bytes = 3 * FLOAT32_BYTES * used.block_t * used.block_v
    num_targets = targets.shape[-1]
    return Plan(
        choice=choice,
        gradient_mode=mode,
        tiles=used,
        num_positions=num_positions,
        num_rows=num_rows,
        num_sweeps=num_sweeps,
        vmem_bytes=vmem_bytes,
        inputs_bytes=_inputs_bytes(activations, embeddings, num_targets, num_rows, sharding),
        working_bytes=tile_bytes + _gradient_bytes(num_positions, num_rows, dim, num_targets),
        logits_bytes=FLOAT32_BYTES * num_positions * num_rows,
    )


def select_implementation(
    activations: Any,
    embeddings: Any,
    targets: Any,
    *,
    hardware: HardwareSpec | str,
    **options: Any,
) -> Choice:
    """What `implementation=None` picks for arrays of these shapes, and why not the others.

    Args:
      activations: `[..., D]` array or `jax.ShapeDtypeStruct`.
      embeddings: `[V, D]`, likewise.
      targets: `[..., L]`, likewise.
      hardware: as for `plan_cut_binary_cross_entropy`.
      **options: its other options.

    Returns:
      The choice; `print` shows the reasons.
    """
    return plan_cut_binary_cross_entropy(
        activations, embeddings, targets, hardware=hardware, **options
    ).choice


def _platform(hardware: HardwareSpec | str) -> tuple[str, HardwareSpec]:
    if isinstance(hardware, HardwareSpec):
        return "tpu", hardware
    checks.require_choice("hardware", hardware, (*CHIPS, "tpu", "cpu", "gpu"))
    if hardware in ("cpu", "gpu"):
        return hardware, ANY_TPU
    return "tpu", CHIPS.get(hardware, ANY_TPU)


def _local_sizes(
    activations: tuple[int, ...], num_rows: int, sharding: LossSharding | None
) -> tuple[int, int]:
    """Positions and rows that one device sweeps, fill for even shards included."""
    num_positions = math.prod(activations[:-1])
    if sharding is None:
        return num_positions, num_rows
    mine = math.ceil(num_positions / sharding.num_position_shards)
    gathered = math.prod(sharding.mesh.shape[axis] for axis in sharding.gathered_names)
    return mine * gathered, math.ceil(num_rows / sharding.num_vocabulary_shards)


def _inputs_bytes(activations: Any, embeddings: Any, num_targets: int, num_rows: int,
                  sharding: LossSharding | None) -> int:  # fmt: skip
    num_shards = 1 if sharding is None else sharding.num_position_shards
    mine = math.ceil(math.prod(activations.shape[:-1]) / num_shards)
    dim = embeddings.shape[1]
    positions = mine * (dim * activations.dtype.itemsize + num_targets * INT32_BYTES)
    return positions + num_rows * dim * embeddings.dtype.itemsize


def _gradient_bytes(num_positions: int, num_rows: int, dim: int, num_targets: int) -> int:
    """Both gradients in float32; and per position two operands, a sum of targets' rows, ids."""
    per_position = (2 * FLOAT32_BYTES + 2 * FLOAT32_BYTES) * dim + num_targets * INT32_BYTES
    return num_rows * dim * FLOAT32_BYTES + num_positions * per_position
