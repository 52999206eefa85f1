"""Static options of the operator: tile sizes, precision, and what a sweep needs to know."""

import dataclasses
from typing import Literal

import numpy as np

from cutbce_ops._src.binary_cross_entropy.pointwise import PointwiseLoss as PointwiseLoss

Implementation = Literal["mosaic_tpu", "xla", "gpu"]
GradientMode = Literal["auto", "fused", "recompute"]
Precision = Literal["default", "bfloat16", "highest"]

IMPLEMENTATIONS = ("mosaic_tpu", "xla", "gpu")
GRADIENT_MODES = ("auto", "fused", "recompute")
PRECISIONS = ("default", "bfloat16", "highest")
# Large enough for fast products, small enough that a core's cache holds most of its half of a tile;
# measured on 2 cores at T=512..5,696, D=64 and 128.
CPU_BLOCK_T, CPU_BLOCK_V = 1024, 2000
# Accelerators want large products; a tile of float32 logits is then at most 64 MiB.
ACCELERATOR_BLOCK_T, ACCELERATOR_BLOCK_V = 4096, 4096


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Size of the tile of logits that exists at one time.

    Attributes:
      block_t: positions per tile, at least 1. Fewer positions than this make one smaller tile.
      block_v: table rows per tile, at least 1.
    """

    block_t: int
    block_v: int

    def __post_init__(self) -> None:
        for name in ("block_t", "block_v"):
            value = getattr(self, name)
            is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            if not is_integer or value < 1:
                raise ValueError(f"`{name}` must be an integer of at least 1; got {value!r}.")


def default_tiles(platform: Literal["cpu", "accelerator"]) -> TileConfig:
    """Returns the tile sizes used when the caller gives none."""
    if platform == "cpu":
        return TileConfig(CPU_BLOCK_T, CPU_BLOCK_V)
    return TileConfig(ACCELERATOR_BLOCK_T, ACCELERATOR_BLOCK_V)


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """Everything static about one sweep over the table.

    Attributes:
      vocab_size: rows of the whole (global) table that are in use.
      pointwise: the loss of one logit.
      precision: see `cut_binary_cross_entropy`.
      tiles: tile sizes, or None for the platform's default.
      implementation: what the caller asked for; None leaves the choice to `dispatch.py`.
      logit_thresholds: a sweep that counts does so above each of them; raw logits, ascending.
    """

    vocab_size: int
    pointwise: PointwiseLoss
    precision: Precision
    tiles: TileConfig | None
    implementation: Implementation | None = None
    logit_thresholds: tuple[float, ...] = (0.0,)
