"""What the TPU compiler makes of the kernel: budgets for its inner loop and for whole calls.

Static schedules, not run on a TPU. Bundles are per 2^18 logits.
"""

import pytest
from test_tpu_compiler import pytestmark as pytestmark

from cutbce_ops._src.tuning import load_table, sweep_tiles

# Bundles that a loop must not exceed, whatever the tuning tables say: (chip, D, mode).
LIMITS = {
    ("v6e", 128, "fused"): 900,
    ("v6e", 256, "fused"): 1030,
    ("v5e", 128, "fused"): 1580,
    ("v5e", 256, "fused"): 2900,
    ("7x", 128, "fused"): 850,
    ("7x", 256, "fused"): 960,
    # Within 10 % of the schedules known before: 490 and 690, 558 and 826, ...
    ("v6e", 128, "forward"): 539,
    ("v6e", 128, "backward"): 759,
    ("v6e", 256, "forward"): 613,
    ("v6e", 256, "backward"): 908,
    ("v5e", 128, "forward"): 653,
    ("v5e", 128, "backward"): 1652,
    ("v5e", 256, "forward"): 1149,
    ("v5e", 256, "backward"): 3055,
    ("7x", 128, "forward"): 594,
    ("7x", 128, "backward"): 800,
    ("7x", 256, "forward"): 609,
    ("7x", 256, "backward"): 963,
}
REGRESSION = 1.05  # of what the tuning table has on record
COST_OF_COUNTS = 1.10


@pytest.fixture(scope="module")
def compiler():
    from cutbce_ops import tpu_lab

    with tpu_lab.Compiler() as running:
        yield running


def measured(chip: str, dim: int, mode: str, compiler, **options) -> float:
    from cutbce_ops._src.binary_cross_entropy import pallas_tpu_schedule

    tiles = sweep_tiles(chip, dim, mode)
    loop = pallas_tpu_schedule.inner_loop(tiles, dim, mode, chip, compiler, **options)
    return pallas_tpu_schedule.bundles_per_unit(loop, tiles)


@pytest.mark.parametrize(("chip", "dim", "mode"), LIMITS, ids=str)
def test_inner_loop(chip: str, dim: int, mode: str, compiler):
    on_record = next(
        entry["bundles"]
        for entry in load_table(chip, "binary_cross_entropy")
        if (entry["dim"], entry["mode"]) == (dim, mode)
    )
    bundles = measured(chip, dim, mode, compiler)
    assert bundles <= LIMITS[chip, dim, mode]
    assert bundles <= REGRESSION * on_record


@pytest.mark.parametrize("mode", ["fused", "forward"])
@pytest.mark.parametrize("chip", ["v6e", "v5e", "7x"])
def test_counting_costs_little(chip: str, mode: str, compiler):
    without = measured(chip, 128, mode, compiler)
    assert measured(chip, 128, mode, compiler, with_counts=True) <= COST_OF_COUNTS * without


@pytest.mark.parametrize("chip", ["v4", "v5p"])
def test_other_chips_compile(chip: str, compiler):
    assert measured(chip, 128, "fused", compiler) > 0
