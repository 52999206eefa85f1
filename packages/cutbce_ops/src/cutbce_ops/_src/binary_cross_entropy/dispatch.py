"""Which implementation of the sweep runs: chosen by the platform a program is lowered for."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from jax import Array, lax

from cutbce_ops._src import hardware
from cutbce_ops._src.binary_cross_entropy import chunked_xla, pallas_tpu
from cutbce_ops._src.binary_cross_entropy.config import Implementation, SweepConfig
from cutbce_ops._src.binary_cross_entropy.sweep import Sweep, Wanted


@dataclasses.dataclass(frozen=True)
class Choice:
    """An implementation, and why the others were not taken.

    Attributes:
      implementation: "mosaic_tpu", "xla" or "gpu".
      refused: implementation to reason, for those that come before it in preference.
    """

    implementation: Implementation
    refused: dict[str, str]

    def __str__(self) -> str:
        reasons = "".join(f"\n  not {name}: {why}" for name, why in self.refused.items())
        return self.implementation + reasons


def choose(
    platform: str,
    num_positions: int,
    dim: int,
    has_bias: bool,
    config: SweepConfig,
    wanted: Wanted,
    chip: hardware.HardwareSpec,
) -> Choice:
    """What `implementation=None` runs on a platform: the TPU kernel where it fits, else XLA.

    The GPU kernel has to be asked for: it has not been measured against XLA yet.
    """
    refused = {}
    if platform != "tpu":
        refused["mosaic_tpu"] = f"the program is for {platform}, not for a TPU"
    else:
        try:
            pallas_tpu.plan_kernel(num_positions, dim, has_bias, config, wanted, chip)
            return Choice("mosaic_tpu", refused)
        except NotImplementedError as error:
            refused["mosaic_tpu"] = str(error)
    if platform in ("cuda", "rocm", "gpu"):
        refused["gpu"] = "it has not been measured against XLA yet; ask for it by name"
    return Choice("xla", refused)


def dense_sweep(
    activations: Array,
    embeddings: Array,
    bias: Array | None,
    d_per_position: Array | None,
    vocab_offset: Array | None,
    config: SweepConfig,
    wanted: Wanted,
) -> Sweep:
    """Sweeps all rows as negatives with the implementation that `config` asks for.

    Arguments and result are those of `chunked_xla.dense_sweep`.

    Raises:
      NotImplementedError: the implementation asked for by name cannot run the case.
    """
    arrays = (activations, embeddings, bias, d_per_position, vocab_offset)
    if config.implementation == "gpu":
        from cutbce_ops._src.binary_cross_entropy import pallas_gpu

        return pallas_gpu.sweep(*arrays, config, wanted)
    if config.implementation == "mosaic_tpu" and not hardware.may_target_tpu():
        raise NotImplementedError(
            '`implementation="mosaic_tpu"` needs a program for a TPU, and this one is for '
            f"{hardware.platform()}. Leave it None, or, to compile for a TPU that is not "
            "attached, put its mesh in scope (`cutbce_ops.tpu_lab.target`)."
        )
    tpu = partial(pallas_tpu.sweep, config=config, wanted=wanted, hardware=hardware.target_tpu())
    xla = partial(chunked_xla.dense_sweep, config=config, wanted=wanted)
    return on_platform(
        arrays, tpu, xla, takes_tpu_kernel(activations, bias, config, wanted), config
    )


def takes_tpu_kernel(
    activations: Array, bias: Array | None, config: SweepConfig, wanted: Wanted
) -> bool:
    """Whether a sweep of these arrays runs the TPU kernel where the program is for a TPU."""
    if not hardware.may_target_tpu():
        return False
    if config.implementation is not None:
        return config.implementation == "mosaic_tpu"
    num_positions, dim = activations.shape
    choice = choose(
        "tpu", num_positions, dim, bias is not None, config, wanted, hardware.target_tpu()
    )
    return choice.implementation == "mosaic_tpu"


def on_platform(
    arrays: tuple, tpu: Callable, xla: Callable, may_take_tpu: bool, config: SweepConfig
) -> Any:
    """Runs `tpu` in a program for a TPU and `xla` elsewhere; `takes_tpu_kernel` is the flag."""
    if not may_take_tpu:
        return xla(*arrays)
    if config.implementation == "mosaic_tpu" or hardware.target_platform() == "tpu":
        return tpu(*arrays)
    return lax.platform_dependent(*arrays, tpu=tpu, default=xla)
