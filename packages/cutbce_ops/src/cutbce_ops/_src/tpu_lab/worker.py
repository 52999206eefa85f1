"""Compiles programs for slices that are not attached, in a process that only does that.

The schedules that the TPU compiler writes are switched on by the environment of a process before
libtpu loads, so they need a process of their own. It reads one request per line, JSON, and
answers each with one line; programs and HLO go through files.
"""

import json
import pathlib
import sys
from typing import Any

import jax
from jax import export

from cutbce_ops._src.tpu_lab.topology import concrete_mesh

ANSWER = "cutbce-tpu-lab-answer "
# The kernels' schedules and use of units; all passes together would be twenty times as much.
DUMP_FLAGS = (
    "--xla_jf_dump_to={folder}",
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=final_(bundles|hlo-static)",
)


def compile_program(request: dict[str, Any]) -> dict[str, Any]:
    """Compiles the program of a request; writes its HLO and returns its memory."""
    mesh = concrete_mesh(
        request["topology"],
        request["mesh_shape"],
        request["axis_names"],
        request["axis_types"],
        request["device_ids"],
    )
    exported = export.deserialize(bytearray(pathlib.Path(request["program"]).read_bytes()))
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, exported.in_shardings_jax(mesh), strict=True)
    ]
    if exported.nr_devices == 1:
        one = jax.sharding.SingleDeviceSharding(mesh.devices.flat[0])
        arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one) for a in arguments]
    results = exported.out_shardings_jax(mesh) if exported.nr_devices > 1 else None
    step = jax.jit(exported.call, donate_argnums=request["donated"], out_shardings=results)
    compiled = step.lower(*arguments).compile()
    pathlib.Path(request["hlo"]).write_text(compiled.as_text() or "", encoding="utf-8")
    return {"memory": _memory(compiled)}


def _memory(compiled: Any) -> dict[str, int]:
    stats = compiled.memory_analysis()
    return {
        "arguments_bytes": stats.argument_size_in_bytes,
        "outputs_bytes": stats.output_size_in_bytes,
        "aliased_bytes": stats.alias_size_in_bytes,
        "temporaries_bytes": stats.temp_size_in_bytes,
        "peak_bytes": stats.peak_memory_in_bytes,
    }


def main() -> None:
    """Answers requests until the input ends."""
    for line in sys.stdin:
        try:
            answer = compile_program(json.loads(line))
        except jax.errors.JaxRuntimeError as error:
            answer = {"refused": str(error)}
        except (ValueError, NotImplementedError) as error:
            answer = {"mistake": f"{type(error).__name__}: {error}"}
        print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
