"""A process of `bench_training.py`: makes the data, compares the models, or trains a candidate.

A candidate prints a line of JSON when it is warm, with the seconds of some steps for every line
"round", and with its memory for a line "memory".
"""

import argparse
import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from recmodels import Recipe

_WARMUP_STEPS = 3
_COMPARED_STEPS = 3
_LOSS_TOLERANCE = 1e-5  # relative; sums in another order differ by about 1e-7
_GIB = 2**30


class Training(Protocol):
    """A model in training."""

    def run(self, num_steps: int) -> list[float]:
        """Takes the next steps and returns their losses."""
        ...


def main() -> None:
    """Command line of the process."""
    options = _parse()
    if options.task == "data":
        write_data(options.shape, options.folder, _WARMUP_STEPS + options.rounds * options.steps)
    elif options.task == "comparison":
        compare(options.folder)
    else:
        limit = int(options.memory_gib * _GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        with _allocator(options):
            answer(make_training(options), options.steps)


def answer(training: Training, num_steps: int) -> None:
    """Trains and reports as the other process asks."""
    training.run(_WARMUP_STEPS)
    # Linux remembers the peak of the past, compilation included; 5 starts a new count.
    Path("/proc/self/clear_refs").write_text("5")
    rest_bytes = _memory_bytes("VmRSS")
    _print({})
    for line in sys.stdin:
        if line.strip() == "memory":
            _print({"rest_bytes": rest_bytes, "peak_bytes": _memory_bytes("VmHWM")})
            return
        started, started_cpu = time.perf_counter(), time.process_time()
        training.run(num_steps)
        cpu_s = time.process_time() - started_cpu  # of all threads
        _print({"wall_s": time.perf_counter() - started, "cpu_s": cpu_s})


def make_training(options: argparse.Namespace) -> Training:
    """The candidate of that name."""
    name = options.task.removesuffix("-kept-memory").removesuffix("-bfloat16")
    is_bfloat16 = options.task.endswith("-bfloat16")
    if name == "torch":
        # Without JAX, whose memory would count: the recipe comes as plain values.
        recipe = json.loads((options.folder / "recipe.json").read_text())
        recipe["precision"] = "bfloat16" if is_bfloat16 else "default"
        return _TorchTraining(recipe, options.folder, is_compiled=options.torch_compile)
    recipe = _read_recipe(options.folder).override(loss=name)
    return _OwnTraining(
        recipe.override(precision="bfloat16") if is_bfloat16 else recipe, options.folder
    )


def _allocator(options: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """The trainer's settings of malloc for its own step, and malloc as it is for PyTorch."""
    if options.task.startswith("torch"):
        return contextlib.nullcontext()
    from recmodels._src.train.allocator import freed_memory_kept

    return freed_memory_kept()


class _OwnTraining:
    """The trainer's loop without evaluation, records and checkpoints."""

    def __init__(self, recipe: "Recipe", folder: Path) -> None:
        import recmodels
        from recmodels._src.data.pipeline import training_window_lengths
        from recmodels._src.evaluate import training_counts
        from recmodels._src.train.loop import usual_capacity
        from recmodels._src.train.placement import Placement

        store = recmodels.SequenceStore.open(folder / "store")
        self.placement = Placement.of_this_machine(recipe, store.num_items + 1)
        self.batches = recmodels.train_batches(store, recipe)
        self.state = self.placement.initial_state(recipe, training_counts(store, recipe))
        self._step = self.placement.compile_step(recipe)
        self._usual_capacity = usual_capacity(training_window_lengths(store, recipe), recipe)

    def run(self, num_steps: int) -> list[float]:
        from recmodels._src.train.loop import loss_capacity

        losses = []
        for _ in range(num_steps):
            batch = next(self.batches)
            capacity = loss_capacity(batch["targets"], self._usual_capacity)
            self.state, metrics = self._step(
                self.state, batch["history"], batch["targets"], capacity
            )
            # Read a step late, as the trainer does: the next batch is made meanwhile.
            losses.append(metrics.loss)
            if len(losses) > 1:
                losses[-2] = float(losses[-2])
        losses[-1] = float(losses[-1])
        return losses


class _TorchTraining:
    """`torch_sasrec.py` on batches that are in memory as tensors."""

    def __init__(self, recipe: dict[str, Any], folder: Path, *, is_compiled: bool) -> None:
        from torch_sasrec import Trainer, as_tensors

        arrays = np.load(folder / "initial.npz")
        self._trainer = Trainer(recipe, arrays, is_compiled=is_compiled)
        stored = np.load(folder / "batches.npz")
        pairs = zip(stored["history"], stored["targets"], strict=True)
        self._batches = iter([as_tensors(history, targets) for history, targets in pairs])

    def run(self, num_steps: int) -> list[float]:
        return [self._trainer.step(*next(self._batches)) for _ in range(num_steps)]


def write_data(shape_name: str, folder: Path, num_batches: int) -> None:
    """Writes store, recipe, sizes, and for PyTorch batches and initial parameters."""
    import jax
    from training_shapes import SHAPES, write_store

    shape = SHAPES[shape_name]
    write_store(shape, folder)
    training = _OwnTraining(shape.recipe, folder)
    batches = [next(training.batches) for _ in range(num_batches)]
    arrays = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
    np.savez(folder / "batches.npz", **arrays)
    vocab_size = training.placement.vocab_size
    params = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(training.state.params):
        name = "/".join(str(entry.key) for entry in path)
        # Without the rows that fill up a large table.
        is_by_row = name in ("item_embeddings", "output_bias")
        params[name] = np.asarray(leaf)[:vocab_size] if is_by_row else np.asarray(leaf)
    np.savez(folder / "initial.npz", **params)
    recipe = shape.recipe.to_dict()
    (folder / "recipe.json").write_text(json.dumps(recipe))
    targeted_positions = (arrays["targets"] >= 0).any(-1).sum() / num_batches
    sizes = {"vocab_size": vocab_size, "targeted_positions": targeted_positions}
    (folder / "sizes.json").write_text(json.dumps(recipe | sizes))


def compare(folder: Path) -> None:
    """Ends the process with an error unless both models have the same losses in training.

    The first loss shows that model and loss are the same, the later ones gradients and updates.
    """
    recipe = _read_recipe(folder).override(dropout=0.0)
    ours = _OwnTraining(recipe, folder).run(_COMPARED_STEPS)
    theirs = _TorchTraining(recipe.to_dict(), folder, is_compiled=False).run(_COMPARED_STEPS)
    for step, (loss, other) in enumerate(zip(ours, theirs, strict=True), 1):
        error = abs(loss - other) / abs(other)
        print(
            f"step {step}: loss {loss:.9f}, with PyTorch {other:.9f}, {error:.1e} apart",
            file=sys.stderr,
        )
        if not error <= _LOSS_TOLERANCE:
            raise SystemExit("the two models differ, so their times mean nothing")


def _read_recipe(folder: Path) -> "Recipe":
    from recmodels import Recipe

    return Recipe(**json.loads((folder / "recipe.json").read_text()))


def _print(answer: dict[str, float]) -> None:
    print(json.dumps(answer), flush=True)


def _memory_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("task")
    parser.add_argument("shape")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--memory-gib", type=float, required=True)
    parser.add_argument("--torch-compile", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    # The libraries find every CPU by themselves; a GPU would make another comparison.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
