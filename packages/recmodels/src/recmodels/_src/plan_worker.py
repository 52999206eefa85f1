"""Compiles training steps for a TPU slice that is not attached; run by `plan` in its own process.

The process gets its environment from `plan` before JAX is loaded. Every line of its input is a
request, and every answer one line after `ANSWER`, both JSON; a caller's mistake is answered with
`{"error": …}`, a step too large with `{"does_not_fit": …}`.
"""

import dataclasses
import json
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from cutbce_ops import tpu_lab
from recmodels._src.errors import UserError
from recmodels._src.models.side_inputs import SideInputs
from recmodels._src.plan_client import ANSWER
from recmodels._src.plan_flops import model_flops
from recmodels._src.recipe import Recipe
from recmodels._src.train.placement import Placement
from recmodels._src.train.resources import bytes_per_device, state_bytes

_NUM_SLOWEST = 10


def compile_step(
    recipe: Recipe,
    topology: str,
    num_items: int,
    compiler: tpu_lab.Compiler,
    categories: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """What the recipe's step needs on the slice, without allocating arrays.

    Args:
        recipe: what is trained.
        topology: the slice.
        num_items: size of the catalog.
        compiler: of the process.
        categories: their number and the most of one item, for a recipe that reads them.

    Raises:
        UserError: no such topology, or mesh or batch do not suit its chips.
    """
    num_categories, per_item = categories or (0, 0)
    placement = Placement.over(_chips(topology), recipe, num_items + 1, num_categories)
    batch = _batch(placement, recipe, per_item)
    try:
        report = _compile(placement, recipe, topology, compiler, batch)
    except tpu_lab.DoesNotFitError as error:
        message = " ".join(str(error).split())
        return {"does_not_fit": message, "mesh": placement.describe_mesh()}
    return _figures(placement, recipe, report, batch)


def _compile(
    placement: Placement,
    recipe: Recipe,
    topology: str,
    compiler: tpu_lab.Compiler,
    batch: tuple[Any, ...],
) -> tpu_lab.TpuReport:
    state, step = placement.state(recipe), placement.step(recipe)
    is_spread = placement.mesh is not None

    def step_of_all_positions(state: Any, history: Any, targets: Any, *side: Any) -> Any:
        return step(state, history, targets, None, *side)

    return tpu_lab.compile_for(
        step_of_all_positions,
        topology,
        state,
        *batch,
        out_shardings=placement.step_results(state) if is_spread else None,
        donate_argnums=0,
        mesh=placement.mesh,
        compiler=compiler,
    )


def _figures(
    placement: Placement, recipe: Recipe, report: tpu_lab.TpuReport, batch: tuple[Any, ...]
) -> dict[str, Any]:
    state = placement.state(recipe)
    flops = model_flops(recipe, state.params, placement.vocab_size)
    peak_flops_per_s = placement.num_devices * report.chip.bf16_flops_per_s
    return {
        "mesh": placement.describe_mesh(),
        "is_table_sharded": placement.is_table_sharded,
        "num_chips": placement.num_devices,
        "chip_bytes": report.chip.hbm_bytes,
        "classes_bytes": state_bytes(state) | {"batch": bytes_per_device(batch)},
        **dataclasses.asdict(report.memory),
        "collectives": [_collective(item) for item in report.collectives],
        "step_ms": report.step_seconds * 1e3,
        "sequences_per_s": recipe.batch_size / report.step_seconds,
        "model_flops": flops,
        "mfu": flops / (report.step_seconds * peak_flops_per_s),
        "untimed_kernels": sorted({each.name for each in report.kernels if each.seconds is None}),
        "bound": report.bound,
        "busy_ms": {name: seconds * 1e3 for name, seconds in report.busy_seconds.items()},
        "slowest": _slowest(report),
        "notes": list(report.notes),
    }


def _batch(
    placement: Placement, recipe: Recipe, categories_per_item: int
) -> tuple[jax.ShapeDtypeStruct | SideInputs, ...]:
    """History, targets and, if the recipe reads any, side inputs."""
    windows, num_targets = (recipe.batch_size, recipe.max_length), recipe.num_targets

    def struct(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)

    batch = (struct(windows, placement.batch), struct((*windows, num_targets), placement.batch))
    categories = gaps = None
    if recipe.item_categories:
        categories = struct((placement.num_rows, categories_per_item), placement.by_row)
    if recipe.time_gaps:
        gaps = struct((windows[0], windows[1] + num_targets), placement.batch)
    side = SideInputs(categories, gaps)
    return batch if side == SideInputs() else (*batch, side)


def _collective(estimate: tpu_lab.CollectiveEstimate) -> dict[str, Any]:
    one = estimate.collective
    return {
        "kind": one.kind,
        "shape": one.shape,
        "bytes": one.num_bytes,
        "count": one.count,
        "axes": list(one.axes),
        "ms": estimate.seconds * 1e3,
    }


def _slowest(report: tpu_lab.TpuReport) -> list[dict[str, Any]]:
    parts = [
        {"name": each.name, "source": "Pallas kernel", "count": each.count,
         "ms": each.count * each.seconds * 1e3}
        for each in report.kernels
        if each.seconds is not None
    ]  # fmt: skip
    parts += [
        {"name": each.name, "source": each.source, "count": each.count, "ms": each.seconds * 1e3}
        for each in report.operations
    ]
    return sorted(parts, key=lambda part: -part["ms"])[:_NUM_SLOWEST]


def _chips(topology: str) -> list[Any]:
    try:
        slice_ = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:  # libtpu raises several types for one mistake
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"`topology` {topology!r} is not known to libtpu ({reason}).") from error
    # In an order that keeps neighbours in the mesh near each other on the slice.
    mesh = topologies.make_mesh(slice_, (len(slice_.devices),), ("chips",))
    return list(mesh.devices.flat)


def answer(request: dict[str, Any], compiler: tpu_lab.Compiler) -> dict[str, Any]:
    """The answer to one request."""
    recipe = Recipe(**request["recipe"])
    try:
        return compile_step(
            recipe, request["topology"], request["num_items"], compiler, request["categories"]
        )
    except UserError as error:
        return {"error": str(error)}


def main() -> None:
    """Answers the requests on standard input until it ends."""
    with tpu_lab.Compiler() as compiler:
        for line in sys.stdin:
            print(ANSWER + json.dumps(answer(json.loads(line), compiler)), flush=True)


if __name__ == "__main__":
    main()
