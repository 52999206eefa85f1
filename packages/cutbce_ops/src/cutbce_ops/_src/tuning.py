"""Tile sizes found by compiling for each chip: one table per chip and operator, as package data.

`tools/search_tiles.py` writes the tables; they hold what the compiler's static schedule says.
"""

import dataclasses
import functools
import importlib.resources
import json
from typing import Any, Literal

Mode = Literal["fused", "forward", "backward"]


@dataclasses.dataclass(frozen=True)
class TpuTiles:
    """How the TPU kernel of the sweep cuts its work.

    Attributes:
      block_v: table rows per grid step.
      block_t: positions per tile of logits.
      unroll: tiles per loop body.
      row_slice: rows that the elementwise stage handles at a time.
    """

    block_v: int
    block_t: int
    unroll: int
    row_slice: int

    def __post_init__(self) -> None:
        for name, unit in (("block_v", 128), ("block_t", 128), ("unroll", 2), ("row_slice", 8)):
            value = getattr(self, name)
            if value < unit or value % unit:
                raise ValueError(f"`{name}` must be a positive multiple of {unit}; got {value}.")
        if self.block_v % self.row_slice:
            raise ValueError(
                f"`block_v` must be a multiple of `row_slice`; "
                f"got {self.block_v} and {self.row_slice}."
            )


DEFAULT_TILES = TpuTiles(block_v=1024, block_t=256, unroll=2, row_slice=16)


@functools.cache
def load_table(chip: str, operator: str) -> tuple[dict[str, Any], ...]:
    """Entries of one tuning table; none for a chip without a table."""
    folder = importlib.resources.files("cutbce_ops") / "data" / "tuning" / chip
    path = folder / f"{operator}.json"
    if not path.is_file():
        return ()
    return tuple(json.loads(path.read_text(encoding="utf-8"))["entries"])


def sweep_tiles(chip: str, dim: int, mode: Mode) -> TpuTiles:
    """Tiles for the sweep: those of the smallest tuned D that is not below `dim`, else the largest.

    Args:
      chip: name of the chip.
      dim: D.
      mode: which results the sweep computes.
    """
    entries = [e for e in load_table(chip, "binary_cross_entropy") if e["mode"] == mode]
    if not entries:
        return DEFAULT_TILES
    entries.sort(key=lambda entry: entry["dim"])
    chosen = next((e for e in entries if e["dim"] >= dim), entries[-1])
    return TpuTiles(**{f.name: chosen[f.name] for f in dataclasses.fields(TpuTiles)})
