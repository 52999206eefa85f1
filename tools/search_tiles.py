"""Searches tile sizes of the TPU kernels by compiling them and reading the static schedule.

    python tools/search_tiles.py [--chips v6e 7x] [--dims 128 256] [--modes fused forward backward]

No TPU is needed: the figures are the TPU compiler's, bundles per 2^18 logits in the inner loop.
From the best known tiles on, one size at a time is varied until nothing gets better. Every entry
found replaces the one in the chip's table (package data of cutbce_ops) as soon as it is known.
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from cutbce_ops import tpu_lab
from cutbce_ops._src.binary_cross_entropy.pallas_tpu_schedule import (
    MODES,
    bundles_per_unit,
    inner_loop,
)
from cutbce_ops._src.hardware import CHIPS
from cutbce_ops._src.tuning import DEFAULT_TILES, Mode, TpuTiles, sweep_tiles

TABLES = Path(__file__).parent.parent / "packages/cutbce_ops/src/cutbce_ops/data/tuning"
OPERATOR = "binary_cross_entropy"
CHOICES = {
    "unroll": (2, 4),
    "row_slice": (8, 16, 32),
    "block_v": (512, 1024, 2048),
    "block_t": (256, 512),
}


def bundles(tiles: TpuTiles, dim: int, mode: Mode, chip: str, compiler: tpu_lab.Compiler) -> float:
    """Bundles per 2^18 logits of the inner loop; infinity where the tiles do not fit the chip."""
    try:
        return bundles_per_unit(inner_loop(tiles, dim, mode, chip, compiler), tiles)
    except tpu_lab.TpuCompileError as error:
        print(f"  {tiles}: {str(error).splitlines()[0][:120]}", flush=True)
        return float("inf")


def search(chip: str, dim: int, mode: Mode, compiler: tpu_lab.Compiler) -> tuple[TpuTiles, float]:
    """The best tiles found and their bundles."""
    best = sweep_tiles(chip, dim, mode)
    known: dict[TpuTiles, float] = {}

    def measure(tiles: TpuTiles) -> float:
        if tiles not in known:
            known[tiles] = bundles(tiles, dim, mode, chip, compiler)
            print(f"  {chip} D={dim} {mode} {tiles}: {known[tiles]:.0f}", flush=True)
        return known[tiles]

    if measure(best) == float("inf"):
        best = DEFAULT_TILES
    improved = True
    while improved:
        before = best
        for name, values in CHOICES.items():
            candidates = [dataclasses.replace(best, **{name: value}) for value in values]
            best = min(candidates, key=measure)
        improved = best != before
    return best, measure(best)


def store(chip: str, dim: int, mode: Mode, tiles: TpuTiles, found: float) -> None:
    """Replaces the entry of the chip's table."""
    path = TABLES / chip / f"{OPERATOR}.json"
    entries = json.loads(path.read_text())["entries"] if path.exists() else []
    entries = [entry for entry in entries if (entry["dim"], entry["mode"]) != (dim, mode)]
    entries.append({"dim": dim, "mode": mode, **dataclasses.asdict(tiles), "bundles": round(found)})
    entries.sort(key=lambda entry: (entry["mode"], entry["dim"]))
    table = {
        "unit": "bundles per 2^18 logits in the inner loop, static schedule of the TPU compiler",
        "compiler": f"jax {jax.__version__}",
        "entries": entries,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(table, indent=1) + "\n")
    os.replace(temporary, path)


def main() -> int:
    """Command line of the search."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--dims", nargs="+", type=int, default=[128, 256])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    options = parser.parse_args()
    with tpu_lab.Compiler() as compiler:
        for chip in options.chips:
            for dim in options.dims:
                for mode in options.modes:
                    tiles, found = search(chip, dim, mode, compiler)
                    print(f"{chip} D={dim} {mode}: {tiles}, {found:.0f} bundles", flush=True)
                    if found < float("inf"):
                        store(chip, dim, mode, tiles, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
