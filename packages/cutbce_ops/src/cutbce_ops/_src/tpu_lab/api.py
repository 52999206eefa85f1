"""The lab's functions: compile for a slice that is not attached, and report."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from cutbce_ops._src.tpu_lab.bundles import KernelLoop
from cutbce_ops._src.tpu_lab.compiler import Compiler
from cutbce_ops._src.tpu_lab.estimate import make_report
from cutbce_ops._src.tpu_lab.program import lower
from cutbce_ops._src.tpu_lab.report import TpuReport
from cutbce_ops._src.tpu_lab.topology import check_name


def compile_for(
    fn: Callable[..., Any],
    topology: str,
    *args: Any,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    mesh: Mesh | AbstractMesh | None = None,
    schedule: bool = True,
    loop_iterations: Mapping[str, Mapping[int, int]] | None = None,
    compiler: Compiler | None = None,
) -> TpuReport:
    """Compiles a function for TPUs that are not attached and reports what the compiler estimates.

    The function is traced and lowered here; a process of its own, with the environment that
    libtpu needs, compiles it. Nothing runs on a TPU, and nothing is set in this process.

    Args:
        fn: function of arrays; bind options with `functools.partial` or a closure.
        topology: chip and slice: `v6e:1x1`, `v6e:2x4`, `v6e:16x16`, `v5e:2x4`, `v4:2x2x1`,
            `v5p:2x2x1`, `tpu7x:2x2x1`, ... v4, v5p and 7x slices have three axes, v5e and v6e
            two. Without a mesh the program uses one device of it.
        *args: arrays, `jax.ShapeDtypeStruct`s or trees of them. Nothing is allocated for the
            latter. On a mesh, arguments without a sharding are replicated.
        in_shardings: `NamedSharding` or None for every argument, or a tree that ends earlier, as
            `jax.jit` takes it. Shardings may as well be those of the arguments themselves.
        out_shardings: the same for the results.
        donate_argnums: positions of arguments that the results may overwrite.
        mesh: the program's mesh, where no sharding of an argument or result carries it.
        schedule: whether to read the schedules of kernels and fusions (bundles, use of units).
        loop_iterations: `{kernel: {number of loop in the report: trips in one call}}` for loops
            whose trips the schedule does not show, or that are skipped most of the time.
        compiler: a process to use again, instead of starting one for this program.

    Returns:
        The report; `print` shows it as a table.

    Raises:
        TpuCompilerMissingError: libtpu, or flatbuffers, is not installed.
        DoesNotFitError: HBM or VMEM do not suffice; the message is the compiler's.
        TpuCompileError: the compiler refused the program.
        TypeError: a sharding is not a `NamedSharding`, or the topology is no text.
        ValueError: no such topology, it has fewer devices than the mesh, or `compiler` does not
            write the schedules that are asked for.
    """
    check_name(topology)
    if schedule and compiler is not None and not compiler.schedule:
        raise ValueError(
            "`compiler` was started with schedule=False, so it writes no schedules: start it with "
            "schedule=True, or give `schedule=False` here too."
        )
    program = lower(
        fn,
        topology,
        args,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=donate_argnums,
        mesh=mesh,
    )
    with _compiler(compiler, schedule) as running:
        answer, hlo = running.compile(program, topology)
        texts = running.schedules() if schedule else {}
    return make_report(topology, program, answer, hlo, texts, loop_iterations or {})


def measure_kernel(
    fn: Callable[..., Any], topology: str, *args: Any, compiler: Compiler | None = None
) -> list[KernelLoop]:
    """Inner loops of the Pallas kernels of a function, each by itself, in the program's order.

    Args:
        fn: function of arrays that calls kernels.
        topology: chip and slice, such as `v6e:1x1`.
        *args: arrays or `jax.ShapeDtypeStruct`s.
        compiler: a process to use again; a search over tiles shares one.

    Returns:
        The loops of the deepest level of every kernel.

    Raises:
        TpuCompilerMissingError: libtpu, or flatbuffers, is not installed.
        DoesNotFitError: VMEM does not suffice for a kernel.
        TpuCompileError: the compiler refused the program.
    """
    report = compile_for(fn, topology, *args, compiler=compiler)
    return [loop for kernel in report.kernels for loop in kernel.inner_loops]


@contextlib.contextmanager
def _compiler(given: Compiler | None, schedule: bool):
    if given is not None:
        yield given
        return
    with Compiler(schedule=schedule) as own:
        yield own
