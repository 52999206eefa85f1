"""Schedules of this package's TPU kernels and of the published algorithm, side by side.

    python bench_tpu_schedule.py [--chips v6e v5e] [--dims 128 256] [--search] [--json FILE]

Every figure is estimated by the TPU compiler, not run on a TPU; needs libtpu, `pip install
"cutbce-ops[tpu-lab]"`. The first table counts bundles (issue cycles) of the inner loop for 2^18
logits, the second gives estimated milliseconds of one call: loss and both gradients, all included.
The published algorithm compares every row with each of the L targets, so it is shown for one
target and for `--targets`; this package's loop does not depend on L.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from published_tpu import (
    PublishedBlocks,
    backward_kernel,
    forward_scan,
    published_cut_bce_tpu,
)

import cutbce_ops
from cutbce_ops import tpu_lab
from cutbce_ops._src.binary_cross_entropy import pallas_tpu
from cutbce_ops._src.binary_cross_entropy.pallas_tpu_schedule import (
    LOGITS,
    MODES,
    TOPOLOGIES,
    bundles_per_unit,
    inner_loop,
)
from cutbce_ops._src.hardware import HardwareSpec
from cutbce_ops._src.tuning import sweep_tiles

NUM_POSITIONS, NUM_BLOCKS = 4096, 4  # for the inner loops
# The best found with --search, where the rest of the call favours large blocks too: fewer parts of
# the gradient to sum, and fewer steps of the scan. Other chips take those of the first.
BLOCKS = {"v6e": PublishedBlocks(4096, 4096, 512), "v5e": PublishedBlocks(4096, 2048, 1024)}
FORWARD_CHOICES = (1024, 2048, 4096)
BACKWARD_CHOICES = ((1024, 512), (1024, 1024), (2048, 512), (2048, 1024), (4096, 512))


@dataclasses.dataclass(frozen=True)
class Loop:
    """A row of the first table.

    Attributes:
      chip, dim: what it was compiled for.
      name: what it is.
      bundles: for 2^18 logits.
      busiest: share of the slots of the units that it uses most.
      blocks: block sizes.
    """

    chip: str
    dim: int
    name: str
    bundles: float
    busiest: dict[str, float]
    blocks: str


@dataclasses.dataclass(frozen=True)
class Call:
    """A row of the second table: one call, loss and both gradients.

    Attributes:
      chip, dim: what it was compiled for.
      name: what it is.
      milliseconds: of the whole call.
      kernel_milliseconds: of its Pallas kernels.
      temporaries_bytes: HBM beside arguments and results.
    """

    chip: str
    dim: int
    name: str
    milliseconds: float
    kernel_milliseconds: float
    temporaries_bytes: int


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def busiest(utilization: dict[str, float]) -> dict[str, float]:
    """The three units used most."""
    return dict(sorted(utilization.items(), key=lambda item: -item[1])[:3])


def our_loops(chip: str, dim: int, compiler: tpu_lab.Compiler) -> Iterable[Loop]:
    """Inner loops of this package's kernels at their tuned tiles."""
    for mode in MODES:
        tiles = sweep_tiles(chip, dim, mode)
        blocks = f"{tiles.block_v} x {tiles.block_t}, unroll {tiles.unroll}"
        for with_counts in (False, True) if mode != "backward" else (False,):
            loop = inner_loop(tiles, dim, mode, chip, compiler, with_counts=with_counts)
            name = f"ours, {mode}" + (" and counts" if with_counts else "")
            bundles = bundles_per_unit(loop, tiles)
            yield Loop(chip, dim, name, bundles, busiest(dict(loop.utilization)), blocks)


def published_forward(
    chip: str, dim: int, num_targets: int, block_v: int, compiler: tpu_lab.Compiler
) -> Loop:
    """The fusion that holds a step of the forward scan."""
    report = tpu_lab.compile_for(
        lambda a, e, t: forward_scan(a, e, t, block_v), TOPOLOGIES[chip],
        shape(NUM_POSITIONS, dim), shape(NUM_BLOCKS * block_v, dim),
        shape(NUM_POSITIONS, num_targets, dtype=jnp.int32), compiler=compiler,
    )  # fmt: skip
    step = scan_step(report, NUM_BLOCKS)
    cycles, utilization = fusion_cycles(report, step.name, compiler)
    bundles = cycles * LOGITS / (NUM_POSITIONS * block_v)
    name = f"published, forward scan, L={num_targets}"
    return Loop(chip, dim, name, bundles, busiest(utilization), f"{block_v} rows")


def scan_step(report: tpu_lab.TpuReport, num_steps: int) -> tpu_lab.OperationEstimate:
    """The slowest operation that runs once for each step of the scan."""
    return next(item for item in report.operations if item.count == num_steps)


def fusion_cycles(
    report: tpu_lab.TpuReport, name: str, compiler: tpu_lab.Compiler
) -> tuple[int, dict[str, float]]:
    """Bundles of one run of a fusion, and the use of units in its longest loop.

    Its trips are those that the compiler notes in the HLO: the cycles that it notes there, too, are
    a cost model's, up to 40 % off the schedule.
    """
    schedule = tpu_lab.parse_schedule(*compiler.schedules()[name])
    line = next(line for line in report.hlo.splitlines() if f"%{name} = " in line)
    bounds = re.search(r'"iteration_bounds":\[([^]]*)\]', line)
    trips = math.prod(int(bound) for bound in re.findall(r"\d+", bounds[1])) if bounds else 1
    outside, *loops = schedule.loops
    longest = max(loops or [outside], key=lambda loop: loop.bundles)
    cycles = outside.bundles + trips * sum(loop.bundles for loop in loops)
    return cycles, dict(longest.utilization)


def published_backward(
    chip: str, dim: int, num_targets: int, blocks: PublishedBlocks, compiler: tpu_lab.Compiler
) -> Loop:
    """A step of the backward kernel's grid, without what runs once for each block of the table."""
    report = tpu_lab.compile_for(
        lambda a, e, t, s: backward_kernel(
            a, e, t, blocks, vmem_limit_bytes=vmem_limit_bytes(chip), scale=s
        ),
        TOPOLOGIES[chip],
        shape(NUM_POSITIONS, dim, dtype=jnp.bfloat16), shape(NUM_BLOCKS * blocks.block_v, dim),
        shape(NUM_POSITIONS, num_targets, dtype=jnp.int32), shape(), compiler=compiler,
    )  # fmt: skip
    loop = report.kernels[0].inner_loops[0]
    bundles = loop.bundles - loop.conditional_bundles
    name = f"published, backward kernel, L={num_targets}"
    return Loop(
        chip, dim, name, bundles * LOGITS / (blocks.block_v * blocks.block_t),
        busiest(dict(loop.utilization)), f"{blocks.block_v} x {blocks.block_t}",
    )  # fmt: skip


def vmem_limit_bytes(chip: str) -> int:
    return HardwareSpec.of(chip).vmem_bytes - pallas_tpu.RESERVED_VMEM_BYTES


def search(chip: str, dim: int, num_targets: int, compiler: tpu_lab.Compiler) -> PublishedBlocks:
    """The published algorithm's best block sizes among the choices."""

    def forward(block_v: int) -> float:
        return published_forward(chip, dim, num_targets, block_v, compiler).bundles

    def backward(sizes: tuple[int, int]) -> float:
        blocks = PublishedBlocks(0, *sizes)
        try:
            found = published_backward(chip, dim, num_targets, blocks, compiler).bundles
        except tpu_lab.TpuCompileError:
            return float("inf")
        print(f"{chip} D={dim}: {sizes} {found:.0f} bundles", file=sys.stderr, flush=True)
        return found

    forward_v = min(FORWARD_CHOICES, key=forward)
    return PublishedBlocks(forward_v, *min(BACKWARD_CHOICES, key=backward))


def our_call(chip: str, dim: int, options: argparse.Namespace, compiler: tpu_lab.Compiler) -> Call:
    """The public loss with both gradients; its kernels state how often their loops run."""
    report = tpu_lab.compile_for(
        lambda *arrays: value_and_gradients(cutbce_ops.cut_binary_cross_entropy, *arrays),
        TOPOLOGIES[chip],
        *call_shapes(dim, options.targets, options),
        compiler=compiler,
    )
    seconds = [kernel.count * (kernel.seconds or math.nan) for kernel in report.kernels]
    if not math.isfinite(sum(seconds)):
        raise RuntimeError(f"a kernel has no time: {report.notes}")
    return Call(
        chip,
        dim,
        "ours, fused",
        1e3 * report.step_seconds,
        1e3 * sum(seconds),
        report.memory.temporaries_bytes,
    )


def published_call(
    chip: str, dim: int, num_targets: int, blocks: PublishedBlocks, options: argparse.Namespace,
    compiler: tpu_lab.Compiler,
) -> Call:  # fmt: skip
    """The published algorithm; what its kernel does once for each block is counted so."""

    def loss(a: Any, e: Any, t: Any) -> Any:
        return published_cut_bce_tpu(a, e, t, blocks, vmem_limit_bytes=vmem_limit_bytes(chip))

    report = tpu_lab.compile_for(
        lambda *arrays: value_and_gradients(loss, *arrays),
        TOPOLOGIES[chip], *call_shapes(dim, num_targets, options), compiler=compiler,
    )  # fmt: skip
    (kernel,) = report.kernels
    once = max(loop.conditional_bundles for loop in kernel.loops)
    cycles = (kernel.cycles_unconditional or 0) + once * -(-options.vocab // blocks.block_v)
    traffic = kernel.hbm_bytes / report.chip.hbm_bytes_per_s
    seconds = max(cycles / report.chip.clock_hz, traffic)
    total = report.step_seconds - (kernel.seconds or 0.0) + seconds
    step = scan_step(report, options.vocab // blocks.forward_v)
    cycles, _ = fusion_cycles(report, step.name, compiler)
    total += step.count * cycles / report.chip.clock_hz - step.seconds
    return Call(
        chip,
        dim,
        f"published, L={num_targets}",
        1e3 * total,
        1e3 * seconds,
        report.memory.temporaries_bytes,
    )


def value_and_gradients(loss: Any, activations: Any, embeddings: Any, targets: Any) -> Any:
    return jax.value_and_grad(lambda a, e: loss(a, e, targets), (0, 1))(activations, embeddings)


def call_shapes(dim: int, num_targets: int, options: argparse.Namespace) -> tuple[Any, ...]:
    positions = options.positions
    return (
        shape(positions, dim),
        shape(options.vocab, dim),
        shape(positions, num_targets, dtype=jnp.int32),
    )


def measure(options: argparse.Namespace) -> tuple[list[Loop], list[Call]]:
    """All rows of both tables."""
    loops, calls = [], []
    with tpu_lab.Compiler() as compiler:
        for chip, dim in ((chip, dim) for chip in options.chips for dim in options.dims):
            print(f"{chip}, D={dim} ...", file=sys.stderr, flush=True)
            blocks = BLOCKS.get(chip, BLOCKS["v6e"])
            if options.search:
                blocks = search(chip, dim, options.targets, compiler)
            loops += our_loops(chip, dim, compiler)
            for num_targets in sorted({1, options.targets}):
                loops.append(published_forward(chip, dim, num_targets, blocks.forward_v, compiler))
                loops.append(published_backward(chip, dim, num_targets, blocks, compiler))
            if dim != options.dims[0]:
                continue
            calls.append(our_call(chip, dim, options, compiler))
            for num_targets in sorted({1, options.targets}):
                calls.append(published_call(chip, dim, num_targets, blocks, options, compiler))
    return loops, calls


def print_tables(loops: Sequence[Loop], calls: Sequence[Call], options: argparse.Namespace) -> None:
    """Prints both tables as Markdown."""
    label = tpu_lab.TpuReport.label
    print(
        f"Inner loop, bundles per 2^18 logits, T={NUM_POSITIONS} ({label}, jax {jax.__version__})"
    )
    print("\n| chip | D | loop | bundles | busiest units | blocks |\n|---|---|---|---|---|---|")
    for row in loops:
        units = ", ".join(f"{unit} {100 * share:.0f} %" for unit, share in row.busiest.items())
        print(
            f"| {row.chip} | {row.dim} | {row.name} | {row.bundles:.0f} | {units} | {row.blocks} |"
        )
    sizes = f"T={options.positions}, V={options.vocab}, float32 arguments"
    print(f"\nLoss and both gradients, one call, {sizes} ({label})")
    print("\n| chip | D | | call | kernels in it | temporaries |\n|---|---|---|---|---|---|")
    for row in calls:
        print(
            f"| {row.chip} | {row.dim} | {row.name} | {row.milliseconds:.2f} ms "
            f"| {row.kernel_milliseconds:.2f} ms | {row.temporaries_bytes / 2**20:.0f} MiB |"
        )


def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--chips", nargs="+", choices=TOPOLOGIES, default=["v6e", "v5e"])
    parser.add_argument("--dims", nargs="+", type=int, default=[128, 256],
                        help="D of the loops; the calls are those of the first")  # fmt: skip
    parser.add_argument("--positions", type=int, default=16_384)
    parser.add_argument("--vocab", type=int, default=100_000)
    parser.add_argument("--targets", type=int, default=8)
    parser.add_argument("--search", action="store_true",
                        help="try block sizes for the published algorithm first")  # fmt: skip
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # programs are only traced in this process
    loops, calls = measure(options)
    print_tables(loops, calls, options)
    if options.json:
        result = {
            "label": tpu_lab.TpuReport.label,
            "jax": jax.__version__,
            "positions": options.positions,
            "vocab": options.vocab,
            "loops": [dataclasses.asdict(row) for row in loops],
            "calls": [dataclasses.asdict(row) for row in calls],
        }
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
