"""Training throughput and memory against PyTorch: the same model, data, loss and updates.

    python packages/recmodels/benchmarks/bench_training.py
    python packages/recmodels/benchmarks/bench_training.py --shapes beauty --rounds 9 --steps 20
    python packages/recmodels/benchmarks/bench_training.py --candidates cut-bce dense-bce

Six candidates: `cut-bce` and `dense-bce` are the trainer's own compiled step with the recipe field
`loss` of that name, `torch` is `torch_sasrec.py`, whose loss is a dense one. `cut-bce-bfloat16` has
the recipe field `precision` of that name, bfloat16 products in the loss, and `torch-bfloat16` runs
under PyTorch's autocast; the two stand for what either library offers users who accept bfloat16.
The trainer lets malloc keep freed memory, which PyTorch leaves to its users; `torch-kept-memory` is
`torch` with these settings, and tells what they do from what the rest does.
Each runs in a process of its own, which waits while another one is timed; a round is some steps of
every candidate in turn, so that a busy machine slows all of them, and medians over the rounds are
compared, in the same precision.

Before that, both models start from the same parameters and take the same steps without dropout, and
the benchmark stops unless their losses agree. What is timed is all that training does for a step:
with `recmodels` making the batch too, while PyTorch finds its batches in memory. CPU time is that
of all threads. Memory is the resident set, at rest between two steps after compilation and at its
peak in training. Needs Linux, for the memory.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, Any

CANDIDATES = (
    "cut-bce", "dense-bce", "torch", "torch-kept-memory", "cut-bce-bfloat16", "torch-bfloat16"
)  # fmt: skip
_BFLOAT16 = "-bfloat16"
# What `freed_memory_kept` sets, for a process that does not import it, and one arena for the
# threads that PyTorch runs.
_KEPT_MEMORY = {
    "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_ARENA_MAX": "1"
}  # fmt: skip
SHAPES = ("beauty", "ml-1m", "large")
_WORKER = Path(__file__).with_name("training_worker.py")
# What Python, XLA and PyTorch say when the memory limit stops them.
_OUT_OF_MEMORY = ("out of memory", "resource_exhausted", "can't allocate", "memoryerror")
_MIB = 2**20


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the asked shapes one after another and prints each when it is done."""
    options = _parse(arguments)
    result: dict[str, Any] = {"machine": _machine(), "rounds": options.rounds}
    result |= {"steps": options.steps, "load_before": os.getloadavg()[0], "shapes": {}}
    print(", ".join(f"{name} {value}" for name, value in result["machine"].items()), flush=True)
    print(f"{options.rounds} interleaved rounds of {options.steps} steps, float32 but where named")
    for name in options.shapes:
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            measured = measure_shape(name, Path(folder), options)
        result["shapes"][name] = measured
        _print_shape(name, measured, options.steps)
    result["load_after"] = os.getloadavg()[0]
    print(f"load average {result['load_before']:.1f} before, {result['load_after']:.1f} after")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def measure_shape(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every round and peak memory of every candidate on one shape."""
    _say(f"{name}: making the data")
    _prepare("data", name, folder, options)
    if "torch" in options.candidates:
        _say(f"{name}: comparing the two models")
        _prepare("comparison", name, folder, options)
    with contextlib.ExitStack() as stack:
        workers = []
        for candidate in options.candidates:
            _say(f"{name}: starting {candidate}")
            worker = _Worker(candidate, _command(candidate, name, folder, options))
            workers.append(stack.enter_context(worker))
            worker.wait_for_warmup()
        for number in range(options.rounds):
            _say(f"{name}: round {number + 1}/{options.rounds}")
            for worker in workers:
                worker.run_round()
        rows = {worker.name: worker.finish() for worker in workers}
    return json.loads((folder / "sizes.json").read_text()) | {"candidates": rows}


class _Worker:
    """A process that trains one candidate, a round whenever it is told to."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.rounds: list[dict[str, float]] = []  # wall and CPU seconds of each
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed in __exit__
        settings = _KEPT_MEMORY if name.endswith("-kept-memory") else {}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=os.environ | settings,
        )  # fmt: skip

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def wait_for_warmup(self) -> None:
        """Returns when the process has compiled, or has failed."""
        self._answer()

    def run_round(self) -> None:
        """Runs some steps, unless the process has failed."""
        seconds = self._ask("round")
        if seconds is not None:
            self.rounds.append(seconds)

    def finish(self) -> dict[str, Any]:
        """Everything measured, or that memory ran out; any other failure ends the benchmark."""
        memory = self._ask("memory")
        if memory is not None:
            names = ("wall_s", "cpu_s")
            return {name: [each[name] for each in self.rounds] for name in names} | memory
        self._process.wait()
        self._errors.seek(0)
        text = self._errors.read()
        if any(words in text.lower() for words in _OUT_OF_MEMORY):
            return {"failure": "out of memory"}
        raise SystemExit(f"{self.name} ended with {self._process.returncode}:\n{text}")

    def _ask(self, what: str) -> dict[str, float] | None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._answer()

    def _answer(self) -> dict[str, float] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None


def _prepare(task: str, shape: str, folder: Path, options: argparse.Namespace) -> None:
    # In a process of its own: a new process inherits the peak memory of the one that starts it.
    if subprocess.run(_command(task, shape, folder, options)).returncode:
        raise SystemExit(f"{shape}: {task} failed, see above")


def _command(task: str, shape: str, folder: Path, options: argparse.Namespace) -> list[str]:
    command = [sys.executable, str(_WORKER), task, shape, str(folder)]
    command += ["--steps", str(options.steps), "--rounds", str(options.rounds)]
    command += ["--memory-gib", str(options.memory_gib)]
    return [*command, "--torch-compile"] if options.torch_compile else command


def _machine() -> dict[str, Any]:
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":")[1].strip() for line in cpus if line.startswith("model name")]
    versions = {}
    for name in ("jax", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    cpu = models[0] if models else platform.machine()
    return {"CPU": cpu, "CPUs": os.cpu_count(), "Python": platform.python_version()} | versions


def _print_shape(name: str, measured: dict[str, Any], num_steps: int) -> None:
    print(
        f"\n{name}: V={measured['vocab_size']:,}, B={measured['batch_size']}, "
        f"N={measured['max_length']}, D={measured['hidden_dim']}, "
        f"{measured['num_layers']} layers, L={measured['num_targets']}, dropout "
        f"{measured['dropout']}; {measured['targeted_positions']:,.0f} of "
        f"{measured['batch_size'] * measured['max_length']:,} positions have a target"
    )
    print(
        f"{'':17} {'a step':>10} {'fastest':>10} {'slowest':>10} {'CPU time':>10} "
        f"{'sequences/s':>12} {'at rest':>10} {'peak':>10}"
    )
    for candidate, row in measured["candidates"].items():
        if "failure" in row:
            print(f"{candidate:17} {row['failure']}")
            continue
        step_ms = [1e3 * seconds / num_steps for seconds in row["wall_s"]]
        median_ms, cpu_s = statistics.median(step_ms), statistics.median(row["cpu_s"])
        print(
            f"{candidate:17} {median_ms:7.1f} ms {min(step_ms):7.1f} ms {max(step_ms):7.1f} ms "
            f"{1e3 * cpu_s / num_steps:7.1f} ms {1e3 * measured['batch_size'] / median_ms:12,.0f} "
            f"{row['rest_bytes'] / _MIB:6,.0f} MiB {row['peak_bytes'] / _MIB:6,.0f} MiB"
        )
    _print_ratios(measured["candidates"])


def _print_ratios(rows: dict[str, Any]) -> None:
    for other, row in rows.items():
        name = "cut-bce" + (_BFLOAT16 if other.endswith(_BFLOAT16) else "")
        ours = rows.get(name, {"failure": "not asked for"})
        if other == name or "failure" in ours or "failure" in row:
            continue
        wall, cpu = (
            statistics.median(row[figure]) / statistics.median(ours[figure])
            for figure in ("wall_s", "cpu_s")
        )
        by_round = [b / a for a, b in zip(ours["wall_s"], row["wall_s"], strict=True)]
        print(
            f"{name} trains {wall:.2f}x as fast as {other} ({min(by_round):.2f} to "
            f"{max(by_round):.2f} by round), which takes {cpu:.2f}x the CPU time and "
            f"{row['peak_bytes'] / ours['peak_bytes']:.2f}x the memory"
        )


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=CANDIDATES)
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps in a round")
    parser.add_argument(
        "--memory-gib", type=float, default=12.0, metavar="X", help="limit of every process"
    )
    parser.add_argument(
        "--torch-compile", action="store_true", help="run PyTorch compiled; needs a C++ compiler"
    )
    parser.add_argument("--work", type=Path, help="where to make temporary files")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
