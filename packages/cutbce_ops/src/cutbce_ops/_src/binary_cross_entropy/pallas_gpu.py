"""The sweep on GPUs: one Pallas kernel that holds positions and one that holds table rows.

A GPU has no large memory on chip where d_activations could wait for the whole table, so one
kernel cannot finish both gradients without atomic additions, whose order, and with it the last
bits of the result, changes from run to run. Two kernels, each with its gradient in registers, are
deterministic; they form the logits twice, four products for each logit instead of three.

Reasoned for an H100, D=128, bfloat16, in picoseconds for each logit: four products take 1.0 at
peak; issuing the elementwise part 2.7 (80 machine instructions, counted in what XLA compiles for
the chip), partly beneath the products; three products and the tiles of logits that
`chunked_xla.py` sends through memory, about 14 bytes, take 0.8 + 4.2. Atomic additions would spare
0.3 and cost 4 bytes of L2 traffic. Full float32 ("highest") has no tensor cores to use: there the
fourth product costs more than it spares, and "xla" should be faster. Nothing was timed on a GPU.

Triton rather than Mosaic GPU: it serves chips from Ampere on with one kernel, and can be lowered
and compiled where there is no GPU. JAX 0.12 warns that it will drop Triton one day.

Precision: "highest" multiplies float32 in full, "default" lets float32 operands go through the
tensor cores as TF32 (10 bits of mantissa; so does XLA), "bfloat16" rounds the operands first.
"""

import importlib
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from cutbce_ops._src import hardware
from cutbce_ops._src.binary_cross_entropy.config import SweepConfig
from cutbce_ops._src.binary_cross_entropy.pallas_gpu_tiles import (
    MAX_DIM,
    MIN_BLOCK,
    SHARED_BYTES,
    KernelTiles,
    explicit_tiles,
    kernel_tiles,
)
from cutbce_ops._src.binary_cross_entropy.products import matmul_operand
from cutbce_ops._src.binary_cross_entropy.sweep import Sweep, Wanted

DTYPES = ("float32", "bfloat16")


def why_not(activations: Any, embeddings: Any, config: SweepConfig) -> str | None:
    """Says why the kernels cannot run a case, or returns None when they can.

    Args:
      activations: `[T, D]` array or `jax.ShapeDtypeStruct`.
      embeddings: `[V, D]` array or `jax.ShapeDtypeStruct`.
      config: static options.
    """
    for name, array in (("activations", activations), ("embeddings", embeddings)):
        if jnp.dtype(array.dtype).name not in DTYPES:
            return f"`{name}` must be float32 or bfloat16 on this path; got {array.dtype}"
    dim = activations.shape[1]
    if dim > MAX_DIM:
        return f"the gradients of D > {MAX_DIM} do not fit the registers of a GPU; got D={dim}"
    if config.tiles is not None and (reason := _why_not_tiles(activations, embeddings, config)):
        return reason
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError as error:  # JAX has announced that it will go
        return f"this JAX has no Triton lowering of Pallas ({error})"
    return None


def sweep(
    activations: Array,
    embeddings: Array,
    bias: Array | None,
    d_per_position: Array | None,
    vocab_offset: Array | None,
    config: SweepConfig,
    wanted: Wanted,
    *,
    interpret: bool = False,
) -> Sweep:
    """Sweeps all rows as negatives; the other arguments are those of `chunked_xla.dense_sweep`.

    With `interpret`, set by tests, the kernels run in Pallas' interpreter on any backend. Raises
    NotImplementedError when `why_not` has a reason, or when the program is not for a GPU.
    """
    reason = why_not(activations, embeddings, config)
    if reason is not None:
        raise NotImplementedError(f'implementation="gpu": {reason}.')
    if not interpret and hardware.platform() in ("cpu", "tpu"):
        raise NotImplementedError(
            '`implementation="gpu"` needs a program for a GPU, and this one is for '
            f"{hardware.platform()}. Leave it None, or, to compile for a GPU that is not attached, "
            "put its mesh in scope (`jax.sharding.use_abstract_mesh`)."
        )
    # Imported here, since Pallas makes importing the package noticeably slower.
    from cutbce_ops._src.binary_cross_entropy import pallas_gpu_kernel as kernels

    by_position, by_row = _tiles(activations, embeddings, config)
    num_used = jnp.int32(config.vocab_size)
    if vocab_offset is not None:
        num_used = num_used - vocab_offset
    operands = kernels.Operands(
        num_used=jnp.clip(num_used, 0, embeddings.shape[0]).reshape(1),
        activations=matmul_operand(activations, config),
        embeddings=matmul_operand(embeddings, config),
        bias=bias,
        d_per_position=d_per_position if wanted.gradients else None,
    )
    swept = kernels.sweep_positions(operands, by_position, config, wanted, interpret)
    if not wanted.gradients:
        return swept
    gradients = kernels.sweep_rows(operands, by_row, config, interpret)
    return Sweep(swept.loss, swept.num_predicted, swept.d_activations, gradients.d_embeddings,
                 gradients.d_bias)  # fmt: skip


def _why_not_tiles(activations: Any, embeddings: Any, config: SweepConfig) -> str | None:
    for name in ("block_t", "block_v"):
        size = getattr(config.tiles, name)
        if size < MIN_BLOCK or size & (size - 1):
            return f"`{name}` must be a power of two of at least {MIN_BLOCK} on a GPU; got {size}"
    dim, itemsize = activations.shape[1], _itemsize(activations, embeddings, config)
    by_kernel = _tiles(activations, embeddings, config)
    needed = max(tiles.shared_bytes(dim, itemsize) for tiles in by_kernel)
    if needed <= SHARED_BYTES:
        return None
    return (
        f"{config.tiles} needs about {needed // 1024} KiB of shared memory at D={dim}; "
        f"an SM is taken to have {SHARED_BYTES // 1024}"
    )


def _itemsize(activations: Any, embeddings: Any, config: SweepConfig) -> int:
    fixed = {"bfloat16": 2, "highest": 4}
    default = max(jnp.dtype(array.dtype).itemsize for array in (activations, embeddings))
    return fixed.get(config.precision, default)


def _tiles(
    activations: Any, embeddings: Any, config: SweepConfig
) -> tuple[KernelTiles, KernelTiles]:
    """Tiles of the kernel that holds positions and of the one that holds rows."""
    (num_positions, dim), num_rows = activations.shape, embeddings.shape[0]
    if config.tiles is not None:
        return explicit_tiles(config.tiles, num_positions, num_rows)
    sized = partial(
        kernel_tiles, dim=dim, itemsize=_itemsize(activations, embeddings, config),
        is_full_float32=config.precision == "highest",
    )  # fmt: skip
    return sized(num_positions, num_rows), sized(num_rows, num_positions)
