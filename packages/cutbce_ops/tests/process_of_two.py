"""One of two processes that share a mesh of 8 CPU devices; run by test_distributed.py.

    python process_of_two.py PORT PROCESS_ID

Compares every result with that of one device, and prints "equal" at the end.
"""

import sys

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from layouts import Inputs, assert_equal, everything, specs

import cutbce_ops

LAYOUTS = [
    (("data", "model"), ("data", "model")),
    (("data", "model"), "model"),
]


def main(port: str, process_id: str) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, int(process_id))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    assert mesh.size == 8
    assert len(mesh.local_devices) == 4
    inputs = Inputs.random(16, 200)
    want = everything(inputs)
    for layout in LAYOUTS:
        sharding = cutbce_ops.LossSharding(mesh, *layout)
        placed = jax.tree.map(
            lambda array, spec: jax.make_array_from_callback(
                array.shape, NamedSharding(mesh, spec), np.asarray(array).__getitem__
            ),
            inputs, specs(sharding),
        )  # fmt: skip
        got = everything(placed, sharding)
        assert_equal(multihost_utils.process_allgather(got, tiled=True), want)
    print("equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
