"""Time and memory of the loss and both gradients: Keras, the published CutBCE, and this package.

    python bench_binary_cross_entropy.py [--positions T] [--vocab V] [--dim D] [--json FILE]

All candidates run interleaved in one process, so that a busy machine slows all of them; medians
are compared. Peak memory is measured for each candidate in a process of its own.
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

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
from published import published_cut_bce

import cutbce_ops

NUM_TARGETS = 8
PUBLISHED_BLOCKS = (250, 500, 1000, 2000, 4000, 5000)


def keras_loss(activations, embeddings, targets):
    """`Dense(V)` and Keras' loss on multi-hot targets, made on the device from the ids."""
    import keras

    num_positions, vocab_size = activations.shape[0], embeddings.shape[0]
    labels = jnp.zeros((num_positions, vocab_size))
    labels = labels.at[jnp.arange(num_positions)[:, None], targets].set(1.0)
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    return cross_entropy(labels, activations @ embeddings.T)


def candidates(vocab_size: int) -> dict:
    """Name -> loss(activations, embeddings, targets)."""
    blocks = [block for block in PUBLISHED_BLOCKS if vocab_size % block == 0]
    ours = cutbce_ops.cut_binary_cross_entropy
    return {
        "keras": keras_loss,
        **{f"published-{b}": lambda a, e, t, b=b: published_cut_bce(a, e, t, b) for b in blocks},
        "cutbce": ours,
        "cutbce-recompute": lambda a, e, t: ours(a, e, t, gradient_mode="recompute"),
        "cutbce-bfloat16": lambda a, e, t: ours(a, e, t, precision="bfloat16"),
    }


def make_inputs(options: argparse.Namespace) -> tuple:
    """Random activations, table and targets of the asked size."""
    rng = np.random.default_rng(0)
    shape = (options.positions, options.dim)
    return (
        jnp.asarray(rng.normal(size=shape), jnp.float32),
        jnp.asarray(rng.normal(size=(options.vocab, options.dim)) * options.dim**-0.5, jnp.float32),
        jnp.asarray(rng.integers(0, options.vocab, (options.positions, NUM_TARGETS)), jnp.int32),
    )


def gradient_of(loss):
    return jax.jit(jax.value_and_grad(loss, (0, 1)))


def measure_times(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every round for every candidate, interleaved."""
    inputs = make_inputs(options)
    functions = {name: gradient_of(loss) for name, loss in candidates(options.vocab).items()}
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
    function = gradient_of(candidates(options.vocab)[options.peak_of])
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
    return {
        "positions": options.positions, "vocab": options.vocab, "dim": options.dim,
        "targets": NUM_TARGETS, "rounds": options.rounds, "device": str(jax.devices()[0]),
        "cpus": os.cpu_count(), "machine": platform.machine(), "jax": jax.__version__,
        "candidates": rows,
    }  # fmt: skip


def print_table(result: dict) -> None:
    """Prints medians, spread, memory and the two ratios that matter."""
    rows = result["candidates"]
    print(
        f"loss and both gradients, T={result['positions']}, V={result['vocab']}, "
        f"D={result['dim']}, L={result['targets']}, float32; {result['device']}, "
        f"{result['cpus']} CPUs, jax {result['jax']}, {result['rounds']} interleaved rounds"
    )
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


def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        print_own_peak(options)
        return
    result = report(options)
    print_table(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
