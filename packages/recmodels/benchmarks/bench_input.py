"""Rate of the training batches against what the trainer on this machine consumes.

    python packages/recmodels/benchmarks/bench_input.py
    python packages/recmodels/benchmarks/bench_input.py --shapes ml-1m --ranks 4
    python packages/recmodels/benchmarks/bench_input.py --shapes beauty --steps 0

Each shape is a generated store with the number of users, items and events of a published set. The
batches are read as the trainer reads them; then the recipe of the set is trained for some steps in
the same process, and the ratio of the two rates is printed. The input is no bottleneck while the
ratio is well above 1; 10 is what the trainer is held to.
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import recmodels


@dataclasses.dataclass(frozen=True)
class Shape:
    """A store to generate and the recipe that reads it."""

    recipe: str
    num_users: int
    num_items: int
    min_length: int  # fewest events of a user
    mean_length: float
    length_sigma: float  # of the logarithm of the number of events above the fewest


SHAPES = {
    "beauty": Shape("sasrec-beauty", 22_363, 12_101, 5, 8.9, 1.0),
    "ml-1m": Shape("sasrec-ml-1m", 6_040, 3_416, 18, 165.5, 1.1),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the shapes one after another and prints a line for each."""
    options = _parse(arguments)
    results = {}
    for name in options.shapes:
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            shape, store = SHAPES[name], Path(folder) / "store"
            make_store(shape, store)
            result = measure_input(shape, store, options)
            if options.steps:
                result["step_ms"] = measure_step_ms(shape, store, options.steps)
                result["ratio"] = result["batches_per_s"] * result["step_ms"] / 1000
        results[name] = result
        _print(name, result)
    if options.json:
        results["num_cpus"], results["numpy"] = os.cpu_count(), np.__version__
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def make_store(shape: Shape, out: Path) -> None:
    """Prepares a store with the numbers of users, items and events of a shape."""
    rng = np.random.default_rng(0)
    extra = np.exp(rng.normal(0, shape.length_sigma, shape.num_users))
    extra *= (shape.mean_length - shape.min_length) / extra.mean()
    user = np.repeat(np.arange(shape.num_users), shape.min_length + extra.astype(np.int64))
    item = np.exp(rng.random(len(user)) * np.log(shape.num_items)).astype(np.int64)
    path = out.with_name("events.parquet")
    pl.DataFrame({"user": user, "item": item}).write_parquet(path)
    recmodels.prepare(path, out, format="parquet", user="user", item="item")


def measure_input(shape: Shape, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Rate of the batches, or of one rank's share of them."""
    store, recipe = recmodels.SequenceStore.open(path), recmodels.get_recipe(shape.recipe)
    batches = recmodels.train_batches(store, recipe, rank=0, num_ranks=options.ranks)
    next(batches)
    times_s = []
    for _ in range(options.repeats):
        started = time.perf_counter()
        for _ in range(options.batches):
            next(batches)
        times_s.append((time.perf_counter() - started) / options.batches)
    per_batch_s = statistics.median(times_s)
    return {
        "recipe": recipe.name,
        "windows_per_batch": recipe.batch_size // options.ranks,
        "positions_per_window": recipe.max_length,
        "batches_per_s": 1 / per_batch_s,
        "windows_per_s": recipe.batch_size / options.ranks / per_batch_s,
        "batch_ms": [1000 * t for t in times_s],
    }


def measure_step_ms(shape: Shape, store: Path, num_steps: int) -> float:
    """Median milliseconds of a training step of the recipe."""
    # Nothing but steps: evaluation and checkpoints come after the last one.
    recipe = recmodels.get_recipe(shape.recipe).override(
        num_steps=num_steps,
        warmup_steps=1,
        log_every=max(num_steps // 5, 1),
        evaluate_every=num_steps,
        checkpoint_every=num_steps,
    )
    step_ms = recmodels.train(recipe, store, store.with_name("run"), progress=False).step_ms
    assert step_ms is not None  # the run is new, so it took steps
    return step_ms


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", type=int, default=100, metavar="N", help="of a repeat")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--ranks", type=int, default=1, metavar="R", help="read one share of R")
    parser.add_argument(
        "--steps", type=int, default=50, metavar="N", help="of training; 0: input only"
    )
    parser.add_argument("--work", type=Path, help="where to make temporary files")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there too")
    return parser.parse_args(arguments)


def _print(name: str, result: dict[str, Any]) -> None:
    spread = f"{min(result['batch_ms']):.2f} to {max(result['batch_ms']):.2f}"
    print(
        f"{name}: batches of {result['windows_per_batch']} windows of "
        f"{result['positions_per_window']}: {result['batches_per_s']:,.0f} batches/s, "
        f"{result['windows_per_s']:,.0f} windows/s ({spread} ms per batch)"
    )
    if "ratio" in result:
        print(
            f"  a training step takes {result['step_ms']:,.0f} ms: the input is "
            f"{result['ratio']:,.0f} times as fast"
        )


if __name__ == "__main__":
    main()
