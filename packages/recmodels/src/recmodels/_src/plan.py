"""What a training step needs on a TPU slice, asked of the TPU compiler on a machine without one."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

from recmodels._src.errors import UserError
from recmodels._src.recipe import Recipe, get_recipe

ESTIMATE = "estimated by the TPU compiler, not run on a TPU"
_GIB = 1024**3
# The compiler must see neither the user's accelerators nor their compiler flags.
_FOREIGN_PREFIXES = ("JAX_", "XLA_", "TPU_", "LIBTPU_")
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # do not look for the metadata server of a TPU machine
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compiling needs no chip, so no lock on it either
}


class CompilerFailedError(RuntimeError):
    """The TPU compiler gave up for another reason than the caller's request."""


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """Per-chip memory, collectives and time of one training step, from the TPU compiler."""

    recipe: str  # name of the recipe
    topology: str  # slice the step was compiled for, e.g. "v6e:2x4"
    mesh: str  # chips along each axis, e.g. "data=4,model=2"; the batch is split over "data"
    num_chips: int  # chips of the slice
    num_items: int  # catalog without the padding row
    is_table_sharded: bool  # rows split over all chips; False: the table is on every chip
    arguments_bytes: int  # HBM per chip: state and batch
    outputs_bytes: int  # HBM per chip: new state and metrics
    aliased_bytes: int  # outputs that reuse the memory of an argument
    temporaries_bytes: int  # HBM per chip: everything in between
    peak_bytes: int  # highest use of HBM per chip
    collectives: list[dict[str, Any]]  # kind, shape, bytes, count, axes and ms of alike ones
    step_ms: float  # estimated time of a step, without the kernels of unknown time
    untimed_kernels: list[str]  # kernels that the compiler gives no time for
    bound: str  # the resource that is busy longest: a unit of the core, HBM or ICI (the links)
    busy_ms: dict[str, float]  # how long each resource would be busy by itself
    notes: list[str]  # what is missing from the time or was guessed

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.recipe} on {self.topology} ({self.mesh}), {self.num_items} items, "
            f"table {'sharded' if self.is_table_sharded else 'replicated'}: {ESTIMATE}",
            "HBM per chip",
        ]
        for name in ("arguments", "outputs", "aliased", "temporaries", "peak"):
            lines.append(f"  {name:12}{getattr(self, f'{name}_bytes') / _GIB:9.3f} GiB")
        lines.append("collectives of one step")
        for entry in self.collectives:
            shapes = entry["shape"].split(", ")
            shape = shapes[0] if len(shapes) == 1 else f"{len(shapes)} arrays"
            size = f"{entry['bytes'] / 1024**2:.3f} MiB"
            lines.append(
                f"  {entry['count']} x {entry['kind']} over {','.join(entry['axes']) or '?'} of "
                f"{shape}, {size} each, {entry['ms']:.3f} ms in all"
            )
        missing = " without " + ", ".join(self.untimed_kernels) if self.untimed_kernels else ""
        lines.append(
            f"one step: {self.step_ms:.2f} ms{missing}, bound by {self.bound} ({ESTIMATE})"
        )
        busy = sorted(self.busy_ms.items(), key=lambda item: -item[1])[:5]
        lines.append("  busy: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in busy))
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def plan(recipe: str | Recipe, *, topology: str, num_items: int) -> PlanReport:
    """Compiles the whole training step of a recipe for a TPU slice and reports what it needs.

    The step is the trainer's own: forward, loss, gradients, AdamW, state donated, laid out as the
    recipe's `mesh` and `table` say. It takes a minute or so and needs the `tpu-plan` extra, no TPU.

    Args:
        recipe: a recipe or the name of a built-in one.
        topology: TPU slice as libtpu names it, e.g. "v6e:2x4".
        num_items: size of the catalog.

    Returns:
        Memory per chip, collectives and estimated time.

    Raises:
        UserError: libtpu is missing, the slice is unknown, mesh or batch do not suit its chips, or
            the step does not fit.
        CompilerFailedError: the compiler failed.
    """
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    if num_items < 1:
        raise UserError(f"`num_items` must be at least 1; got {num_items}.")
    if importlib.util.find_spec("libtpu") is None:
        raise UserError('the TPU compiler is not installed; run: pip install "jax[tpu]"')
    request = {"recipe": recipe.to_dict(), "topology": topology, "num_items": num_items}
    answer = _ask_worker(request)
    if "error" in answer:
        raise UserError(answer["error"])
    if "does_not_fit" in answer:
        raise UserError(f"{recipe.name} does not fit {topology}: {answer['does_not_fit'][:500]}")
    return PlanReport(recipe=recipe.name, topology=topology, num_items=num_items, **answer)


def _ask_worker(request: dict[str, Any]) -> dict[str, Any]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN_PREFIXES)
    }
    done = subprocess.run(
        [sys.executable, "-m", "recmodels._src.plan_worker", json.dumps(request)],
        env=kept | _ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise CompilerFailedError(f"the TPU compiler failed: {last[0]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
