"""Compiles a training step for a TPU slice that is not attached; run by `plan` in its own process.

The process gets its environment from `plan` before JAX is loaded. It reads the request from its
one argument and prints the answer, both JSON; a caller's mistake is answered with `{"error": …}`.
"""

import json
import math
import re
import sys
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from recmodels._src.errors import UserError
from recmodels._src.recipe import Recipe
from recmodels._src.train.placement import DATA_AXIS, Placement
from recmodels._src.train.step import initial_state

_COLLECTIVE = re.compile(
    r"= (?P<shape>\S.*?) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_ARRAY = re.compile(r"(?P<dtype>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<dims>[\d,]*)\]")
_BOOL_BITS = 8  # a "pred" takes a byte


def compile_step(recipe: Recipe, topology: str, num_items: int) -> dict[str, Any]:
    """Memory per chip and collectives of the recipe's step on the slice, without allocating arrays.

    Raises:
        UserError: no such topology, or the batch does not divide over its chips.
    """
    mesh = _mesh(topology)
    placement = Placement.over(mesh, recipe)
    history = jax.ShapeDtypeStruct((recipe.batch_size, recipe.max_length), np.int32)
    targets = jax.ShapeDtypeStruct((*history.shape, recipe.num_targets), np.int32)
    counts = jax.ShapeDtypeStruct((num_items + 1,), np.float32)
    state = jax.eval_shape(lambda counts: initial_state(recipe, counts), counts)
    step = placement.compile_step(recipe)
    compiled = step.lower(state, history, targets, None).compile()  # type: ignore[attr-defined]
    memory = compiled.memory_analysis()
    return {
        "num_chips": mesh.size,
        "arguments_bytes": memory.argument_size_in_bytes,
        "outputs_bytes": memory.output_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporaries_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "collectives": collectives(compiled.as_text()),
    }


def collectives(hlo: str) -> list[dict[str, Any]]:
    """Collectives in optimised HLO text: kind, result shape, bytes of one, and how many."""
    found = Counter((match["kind"], _short(match["shape"])) for match in _COLLECTIVE.finditer(hlo))
    return [
        {"kind": kind, "shape": shape, "bytes": _num_bytes(shape), "count": count}
        for (kind, shape), count in sorted(
            found.items(), key=lambda entry: -_num_bytes(entry[0][1])
        )
    ]


def _short(shape: str) -> str:
    return ", ".join(match[0] for match in _ARRAY.finditer(shape))


def _num_bytes(shape: str) -> int:
    total = 0
    for match in _ARRAY.finditer(shape):
        dims = [int(size) for size in match["dims"].split(",") if size]
        total += math.prod(dims) * int(match["bits"] or _BOOL_BITS) // 8
    return total


def _mesh(topology: str) -> jax.sharding.Mesh:
    try:
        slice_ = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:  # libtpu raises several types for one mistake
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"`topology` {topology!r} is not known to libtpu ({reason}).") from error
    return topologies.make_mesh(slice_, (len(slice_.devices),), (DATA_AXIS,))


def main() -> None:
    """Answers the request in the first argument."""
    request = json.loads(sys.argv[1])
    try:
        answer = compile_step(
            Recipe(**request["recipe"]), request["topology"], request["num_items"]
        )
    except UserError as error:
        answer = {"error": str(error)}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        answer = {"does_not_fit": " ".join(str(error).split())}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
