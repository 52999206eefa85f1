"""How fast the TPU kernel's inner loop is, read from the compiler's static schedule.

Shared by the search for tiles, the budgets in the tests and the benchmark. Needs libtpu.
"""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp

from cutbce_ops import tpu_lab
from cutbce_ops._src.binary_cross_entropy import pallas_tpu
from cutbce_ops._src.binary_cross_entropy.pallas_tpu_call import call_kernel
from cutbce_ops._src.binary_cross_entropy.pallas_tpu_kernel import KernelConfig
from cutbce_ops._src.hardware import HardwareSpec
from cutbce_ops._src.tuning import Mode, TpuTiles

LOGITS = 2**18  # the unit: bundles for so many logits
MODES = get_args(Mode)
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x4", "v5p": "v5p:2x2x1", "v6e": "v6e:2x4",
              "7x": "tpu7x:2x2x1"}  # fmt: skip
# The loop body depends neither on the number of positions nor on the size of the table.
NUM_POSITIONS, NUM_POSITIONS_V4 = 4096, 2048
NUM_BLOCKS = 4


def inner_loop(
    tiles: TpuTiles,
    dim: int,
    mode: Mode,
    chip: str,
    compiler: tpu_lab.Compiler,
    *,
    with_counts: bool = False,
) -> tpu_lab.KernelLoop:
    """The kernel's inner loop over whole blocks, without bias, in the default precision.

    Args:
      tiles: how the kernel cuts its work.
      dim: D, a multiple of 128.
      mode: which results the kernel computes.
      chip: name of the chip.
      compiler: the process to compile in.
      with_counts: whether positive logits are counted too.

    Returns:
      The loop, of `tiles.unroll` tiles a trip.

    Raises:
      tpu_lab.DoesNotFitError: the tiles do not fit the chip.
      tpu_lab.TpuCompileError: the compiler refuses the kernel.
    """
    hardware = HardwareSpec.of(chip)
    config = KernelConfig(
        num_positions=NUM_POSITIONS_V4 if chip == "v4" else NUM_POSITIONS,
        dim=dim,
        **dataclasses.asdict(tiles),
        bfloat16_elements=hardware.has_bfloat16_elements,
        highest=False,
        with_loss=mode != "backward",
        with_counts=with_counts,
        with_gradients=mode != "forward",
        has_bias=False,
        accumulate=False,
        logit_thresholds=(0.0,) if with_counts else (),
        pointwise=None,
        interpret=False,
    )
    operand = jax.ShapeDtypeStruct((config.num_positions, dim), jnp.bfloat16)
    arrays = {
        "num_rows": jax.ShapeDtypeStruct((1,), jnp.int32),
        "logit_operand": operand,
        "gradient_operand": operand,
        "table": jax.ShapeDtypeStruct((NUM_BLOCKS * tiles.block_v, dim), jnp.float32),
    }
    vmem_limit_bytes = hardware.vmem_bytes - pallas_tpu.RESERVED_VMEM_BYTES
    loops = tpu_lab.measure_kernel(
        lambda arrays: call_kernel(config, arrays, vmem_limit_bytes),
        TOPOLOGIES[chip],
        arrays,
        compiler=compiler,
    )
    # Whole blocks come first; then ragged ones and large losses. Small loops only clear memory.
    most = max(loop.bundles for loop in loops)
    return next(loop for loop in loops if loop.bundles >= most / 2)


def bundles_per_unit(loop: tpu_lab.KernelLoop, tiles: TpuTiles) -> float:
    """Bundles of the loop for 2^18 logits."""
    return loop.bundles * LOGITS / (tiles.block_v * tiles.block_t * tiles.unroll)
