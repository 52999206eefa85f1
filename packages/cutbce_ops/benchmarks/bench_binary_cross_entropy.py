"""Time and memory of the loss and both gradients: Keras, the published CutBCE, and this package.

    python bench_binary_cross_entropy.py [--positions T] [--vocab V] [--dim D] [--json FILE]
    python bench_binary_cross_entropy.py --scaling [--json FILE]

All candidates run interleaved in one process, so that a busy machine slows all of them; medians
are compared. Peak memory is measured for each candidate in a process of its own. `--scaling` runs
this package alone over a range of V instead, and fits a line to its times.
"""

import argparse
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Collection

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
from published import published_cut_bce

import cutbce_ops

NUM_TARGETS = 8
PUBLISHED_BLOCKS = (250, 500, 1000, 2000, 4000, 5000)
SCALING_VOCABS = (25_000, 50_000, 100_000, 200_000, 400_000, 800_000)


def keras_loss(activations, embeddings, targets):
    """`Dense(V)` and Keras' loss on multi-hot targets, made on the device from the ids."""
    import keras

    num_positions, vocab_size = activations.shape[0], embeddings.shape[0]
    labels = jnp.zeros((num_positions, vocab_size))
    labels = labels.at[jnp.arange(num_positions)[:, None], targets].set(1.0)
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    return cross_entropy(labels, activations @ embeddings.T)


def candidates(vocab_size: int) -> dict:
    """Name -> function of (activations, embeddings, targets) to the loss and both gradients."""
    blocks = [block for block in PUBLISHED_BLOCKS if vocab_size % block == 0]
    ours = cutbce_ops.cut_binary_cross_entropy
    losses = {
        "keras": keras_loss,
        **{f"published-{b}": lambda a, e, t, b=b: published_cut_bce(a, e, t, b) for b in blocks},
        "cutbce": ours,
        "cutbce-recompute": lambda a, e, t: ours(a, e, t, gradient_mode="recompute"),
        "cutbce-bfloat16": lambda a, e, t: ours(a, e, t, precision="bfloat16"),
    }
    functions = {name: jax.value_and_grad(loss, (0, 1)) for name, loss in losses.items()}
    functions["cutbce-counts"] = jax.value_and_grad(loss_and_counts, (0, 1), has_aux=True)
    return {name: jax.jit(function) for name, function in functions.items()}


def loss_and_counts(activations, embeddings, targets):
    """The loss, and confusion counts of every position at one threshold from the same sweep."""
    loss, output = cutbce_ops.cut_binary_cross_entropy_with_aux(activations, embeddings, targets)
    return loss, output.counts


def make_inputs(options: argparse.Namespace) -> tuple:
    """Random activations, table and targets of the asked size."""
    rng = np.random.default_rng(0)
    shape = (options.positions, options.dim)
    return (
        jnp.asarray(rng.normal(size=shape), jnp.float32),
        jnp.asarray(rng.normal(size=(options.vocab, options.dim)) * options.dim**-0.5, jnp.float32),
        jnp.asarray(rng.integers(0, options.vocab, (options.positions, NUM_TARGETS)), jnp.int32),
    )


def measure_times(
    options: argparse.Namespace, only: Collection[str] | None = None
) -> dict[str, list[float]]:
    """Seconds of every round for every candidate (or those named), interleaved."""
    inputs = make_inputs(options)
    functions = candidates(options.vocab)
    functions = {name: functions[name] for name in only or functions}
    for name, function in functions.items():
        print(f"compiling {name} ...", file=sys.stderr, flush=True)
        jax.block_until_ready(function(*inputs))
    times = {name: [] for name in functions}
    for round_number in range(options.rounds):
        print(f"round {round_number + 1}/{options.rounds}", file=sys.stderr, flush=True)
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*inputs))
            times[name].append(time.perf_counter() - start)
    return times


def peak_bytes_of(name: str, options: argparse.Namespace) -> int:
    """Growth of the resident set above the inputs while one candidate runs, in a new process."""
    command = [sys.executable, __file__, "--peak-of", name, "--positions", str(options.positions),
               "--vocab", str(options.vocab), "--dim", str(options.dim)]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(result.stdout)


def print_own_peak(options: argparse.Namespace) -> None:
    """The child of `peak_bytes_of`: prints how far the peak resident set rose."""
    inputs = jax.block_until_ready(make_inputs(options))
    function = candidates(options.vocab)[options.peak_of]
    function = function.lower(*inputs).compile()  # the compiler's own memory is not the loss's
    # Linux remembers the peak of the past (compilation included); 5 starts a new count.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _peak_kib()
    jax.block_until_ready(function(*inputs))
    print((_peak_kib() - before) * 1024)


def _peak_kib() -> int:
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def report(options: argparse.Namespace) -> dict:
    """Measures everything and returns it as plain data."""
    times = measure_times(options)
    rows = {
        name: {
            "median_ms": 1e3 * statistics.median(values),
            "fastest_ms": 1e3 * min(values),
            "slowest_ms": 1e3 * max(values),
            "peak_bytes": peak_bytes_of(name, options),
        }
        for name, values in times.items()
    }
    return environment(options) | {"vocab": options.vocab, "candidates": rows}


def environment(options: argparse.Namespace) -> dict:
    """Sizes and machine, as they stand in every result."""
    return {
        "positions": options.positions, "dim": options.dim, "targets": NUM_TARGETS,
        "rounds": options.rounds, "device": str(jax.devices()[0]), "cpus": os.cpu_count(),
        "machine": platform.machine(), "jax": jax.__version__,
    }  # fmt: skip


def report_scaling(options: argparse.Namespace) -> dict:
    """Time and memory over V for both precisions, with a line fitted to the median times."""
    names = ("cutbce", "cutbce-bfloat16")
    series = {name: [] for name in names}
    for vocab in SCALING_VOCABS:
        sized = argparse.Namespace(**vars(options) | {"vocab": vocab})
        print(f"V={vocab}", file=sys.stderr, flush=True)
        times = measure_times(sized, names)
        outputs_bytes = 4 * options.dim * (vocab + options.positions)
        for name, values in times.items():
            extra_bytes = peak_bytes_of(name, sized) - outputs_bytes
            median_ms = 1e3 * statistics.median(values)
            series[name].append(
                {"vocab": vocab, "median_ms": median_ms, "extra_bytes": extra_bytes}
            )
    fits = {name: fit_line(rows) for name, rows in series.items()}
    return environment(options) | {"scaling": series, "fits": fits}


def fit_line(rows: list[dict]) -> dict:
    """Least squares of the median time as a line in V."""
    vocab = np.array([row["vocab"] for row in rows], float)
    median_ms = np.array([row["median_ms"] for row in rows])
    slope, intercept = np.polyfit(vocab, median_ms, 1)
    residual = median_ms - (slope * vocab + intercept)
    r_squared = 1 - residual.var() / median_ms.var()
    return {"ms_per_1000_rows": 1e3 * slope, "intercept_ms": intercept, "r_squared": r_squared}


def heading(result: dict) -> str:
    """Sizes and machine in one line."""
    return (
        f"loss and both gradients, T={result['positions']}, D={result['dim']}, "
        f"L={result['targets']}, float32 arguments; {result['device']}, {result['cpus']} CPUs, "
        f"jax {result['jax']}, {result['rounds']} interleaved rounds"
    )


def print_scaling(result: dict) -> None:
    """Prints time and memory beside inputs and outputs over V, and the fitted lines."""
    print(heading(result))
    for name, rows in result["scaling"].items():
        print(f"{name:18} {'V':>9} {'median':>9} {'beside inputs and outputs':>26}")
        for row in rows:
            print(
                f"{'':18} {row['vocab']:9} {row['median_ms']:6.0f} ms "
                f"{row['extra_bytes'] / 2**20:22.0f} MiB"
            )
        fit = result["fits"][name]
        print(
            f"{'':18} {fit['intercept_ms']:.1f} ms + {fit['ms_per_1000_rows']:.3f} ms per 1000 "
            f"rows, R^2 = {fit['r_squared']:.5f}"
        )


def print_table(result: dict) -> None:
    """Prints medians, spread, memory and the ratios that matter."""
    rows = result["candidates"]
    print(f"V={result['vocab']}, {heading(result)}")
    print(f"{'':18} {'median':>9} {'fastest':>9} {'slowest':>9} {'peak memory':>12}")
    for name, row in rows.items():
        print(
            f"{name:18} {row['median_ms']:6.0f} ms {row['fastest_ms']:6.0f} ms "
            f"{row['slowest_ms']:6.0f} ms {row['peak_bytes'] / 2**20:8.0f} MiB"
        )
    published = min(
        (name for name in rows if name.startswith("published")),
        key=lambda name: rows[name]["median_ms"],
    )
    for name in ("cutbce", "cutbce-bfloat16"):
        for other in (published, "keras"):
            ratio = rows[other]["median_ms"] / rows[name]["median_ms"]
            print(f"{name} is {ratio:.2f}x as fast as {other}")
    ratio = rows["cutbce-counts"]["median_ms"] / rows["cutbce"]["median_ms"]
    print(f"cutbce-counts takes {ratio:.3f}x the time of cutbce")


def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--scaling", action="store_true", help="measure over a range of V instead")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        print_own_peak(options)
        return
    result = report_scaling(options) if options.scaling else report(options)
    print_scaling(result) if options.scaling else print_table(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
