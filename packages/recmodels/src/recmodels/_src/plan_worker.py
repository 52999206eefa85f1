"""Compiles a training step for a TPU slice that is not attached; run by `plan` in its own process.

The process gets its environment from `plan` before JAX is loaded. It reads the request from its
one argument and prints the answer, both JSON; a caller's mistake is answered with `{"error": …}`.
"""

import dataclasses
import functools
import json
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from cutbce_ops import tpu_lab
from recmodels._src.errors import UserError
from recmodels._src.recipe import Recipe
from recmodels._src.train.placement import Placement


def compile_step(recipe: Recipe, topology: str, num_items: int) -> dict[str, Any]:
    """What the recipe's step needs on the slice, without allocating arrays.

    Raises:
        UserError: no such topology, or mesh or batch do not suit its chips.
        tpu_lab.DoesNotFitError: the step needs more memory than a chip has.
    """
    placement = Placement.over(_chips(topology), recipe, num_items + 1)
    state = placement.state(recipe)
    history = _batch((recipe.batch_size, recipe.max_length), placement)
    targets = _batch((*history.shape, recipe.num_targets), placement)
    is_spread = placement.mesh is not None
    report = tpu_lab.compile_for(
        functools.partial(placement.step(recipe), capacity=None),
        topology,
        state,
        history,
        targets,
        out_shardings=placement.step_results(state) if is_spread else None,
        donate_argnums=0,
        mesh=placement.mesh,
    )
    return {
        "mesh": placement.describe_mesh(),
        "is_table_sharded": placement.is_table_sharded,
        "num_chips": placement.num_devices,
        **dataclasses.asdict(report.memory),
        "collectives": [_collective(item) for item in report.collectives],
        "step_ms": report.step_seconds * 1e3,
        "untimed_kernels": [each.name for each in report.kernels if each.seconds is None],
        "bound": report.bound,
        "busy_ms": {name: seconds * 1e3 for name, seconds in report.busy_seconds.items()},
        "notes": list(report.notes),
    }


def _batch(shape: tuple[int, ...], placement: Placement) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.int32, sharding=placement.batch)


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


def _chips(topology: str) -> list[Any]:
    try:
        slice_ = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:  # libtpu raises several types for one mistake
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"`topology` {topology!r} is not known to libtpu ({reason}).") from error
    # In an order that keeps neighbours in the mesh near each other on the slice.
    mesh = topologies.make_mesh(slice_, (len(slice_.devices),), ("chips",))
    return list(mesh.devices.flat)


def main() -> None:
    """Answers the request in the first argument."""
    request = json.loads(sys.argv[1])
    try:
        answer = compile_step(
            Recipe(**request["recipe"]), request["topology"], request["num_items"]
        )
    except UserError as error:
        answer = {"error": str(error)}
    except tpu_lab.DoesNotFitError as error:
        answer = {"does_not_fit": " ".join(str(error).split())}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
