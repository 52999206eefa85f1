"""Time and memory of loss and gradients on a GPU: the XLA path, the Pallas kernels, and PyTorch.

    python bench_gpu.py [--positions T] [--vocab V] [--dim D] [--dtype DTYPE] [--json FILE]

PyTorch forms all logits and `binary_cross_entropy_with_logits` on multi-hot labels; it takes part
if it is installed. Every candidate has a process of its own, so that none holds the memory of
another; the table also names those that could not run, and why. Prints and writes JSON.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import numpy as np

NUM_TARGETS = 8
CANDIDATES = ("xla", "gpu", "torch")


def make_inputs(options: argparse.Namespace) -> tuple:
    """Random float32 activations and table, and targets, of the asked size."""
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(options.positions, options.dim)).astype(np.float32),
        (rng.normal(size=(options.vocab, options.dim)) * options.dim**-0.5).astype(np.float32),
        rng.integers(0, options.vocab, (options.positions, NUM_TARGETS)),
    )


def median_ms(step, options: argparse.Namespace) -> dict:
    """Median and spread of `step()`, which returns when its work is done."""
    first = time.perf_counter()
    step()
    compile_s = time.perf_counter() - first
    times = []
    for _ in range(options.rounds):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return {"median_ms": statistics.median(times), "fastest_ms": min(times),
            "slowest_ms": max(times), "first_call_s": compile_s}  # fmt: skip


def measure_cutbce(implementation: str, options: argparse.Namespace) -> dict:
    """This package with one implementation of the sweep."""
    import jax
    import jax.numpy as jnp

    import cutbce_ops

    activations, embeddings, targets = make_inputs(options)
    arrays = (jnp.asarray(activations, options.dtype), jnp.asarray(embeddings, options.dtype),
              jnp.asarray(targets, jnp.int32))  # fmt: skip

    def loss(activations, embeddings, targets):
        return cutbce_ops.cut_binary_cross_entropy(
            activations, embeddings, targets, implementation=implementation
        )

    function = jax.jit(jax.value_and_grad(loss, (0, 1)))
    result = median_ms(lambda: jax.block_until_ready(function(*arrays)), options)
    device = jax.local_devices()[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    value, gradients = function(*arrays)
    return result | {
        "peak_bytes": peak, "device": device.device_kind, "version": f"jax {jax.__version__}",
        "loss": float(value), "gradient_norms": [float(jnp.linalg.norm(g)) for g in gradients],
    }  # fmt: skip


def measure_torch(options: argparse.Namespace) -> dict:
    """All logits and multi-hot labels, with PyTorch's own loss."""
    import torch

    if not torch.cuda.is_available():
        return {"not_run": "this PyTorch finds no CUDA device"}
    torch.backends.cuda.matmul.allow_tf32 = True  # as XLA does by default
    dtype = getattr(torch, options.dtype)
    activations, embeddings, targets = (torch.from_numpy(a).cuda() for a in make_inputs(options))
    activations = activations.to(dtype).requires_grad_()
    embeddings = embeddings.to(dtype).requires_grad_()
    loss = None

    def step():
        nonlocal loss
        activations.grad = embeddings.grad = None
        logits = activations @ embeddings.T
        labels = torch.zeros_like(logits).scatter_(1, targets, 1.0)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        torch.cuda.synchronize()

    result = median_ms(step, options)
    return result | {
        "peak_bytes": torch.cuda.max_memory_allocated(), "device": torch.cuda.get_device_name(),
        "version": f"torch {torch.__version__}", "loss": float(loss),
        "gradient_norms": [float(t.grad.float().norm()) for t in (activations, embeddings)],
    }  # fmt: skip


def measure(name: str, options: argparse.Namespace) -> dict:
    """Figures of one candidate, or {"not_run": why}."""
    if name == "torch" and importlib.util.find_spec("torch") is None:
        return {"not_run": "PyTorch is not installed"}
    try:
        return measure_torch(options) if name == "torch" else measure_cutbce(name, options)
    except (NotImplementedError, ValueError, RuntimeError) as error:  # out of memory included
        return {"not_run": f"{type(error).__name__}: {error}".splitlines()[0]}


def measure_apart(name: str) -> dict:
    """`measure` in a new process that takes memory only as it needs it."""
    command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return {"not_run": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    parser.add_argument("--only", choices=CANDIDATES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options)))
        return
    sizes = {key: getattr(options, key) for key in ("positions", "vocab", "dim", "dtype", "rounds")}
    result = sizes | {"candidates": {name: measure_apart(name) for name in CANDIDATES}}
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
