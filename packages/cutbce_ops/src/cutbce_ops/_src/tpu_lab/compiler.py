"""The process that compiles: started with the right environment, asked, and ended."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any, Self

import jax

from cutbce_ops._src.tpu_lab.errors import DoesNotFitError, TpuCompileError
from cutbce_ops._src.tpu_lab.program import Program
from cutbce_ops._src.tpu_lab.topology import check_name, require
from cutbce_ops._src.tpu_lab.worker import ANSWER, DUMP_FLAGS

_BUNDLES = "final_bundles.txt"
_UTILIZATION = "final_hlo-static-per-bundle-utilization.txt"
# Only of the child: it must not look for chips, may share libtpu, and needs no other platform.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_LOG_DIR": "disabled",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # what comes from a cache writes no schedule
}


class Compiler:
    """A process with the TPU compiler, kept for several programs.

    Starting one takes seconds, so a search over many candidates shares one:

        with tpu_lab.Compiler() as compiler:
            for tile in tiles:
                compile_for(kernel(tile), "v6e:1x1", x, compiler=compiler)
    """

    def __init__(self, *, schedule: bool = True) -> None:
        """Starts the process.

        Args:
            schedule: whether the compiler writes the schedules of kernels, at some seconds a
                program; without them reports have no bundles.

        Raises:
            TpuCompilerMissingError: libtpu, or flatbuffers, is not installed.
        """
        require("libtpu", "flatbuffers")
        self.schedule = schedule
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="cutbce-tpu-lab-"))
        self._dump = self._folder / "dump"
        self._log = (self._folder / "log.txt").open("w+", encoding="utf-8", errors="replace")
        environment = os.environ | _ENVIRONMENT
        # The child finds the same packages, wherever this process found them.
        environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        environment["JAX_ENABLE_X64"] = str(jax.config.read("jax_enable_x64"))
        if schedule:
            flags = " ".join(DUMP_FLAGS).format(folder=self._dump)
            given = environment.get("LIBTPU_INIT_ARGS", "")
            environment["LIBTPU_INIT_ARGS"] = f"{given} {flags}".strip()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cutbce_ops._src.tpu_lab.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
        )

    def __enter__(self) -> Self:
        """Returns itself; the process ends with the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the process."""
        self.close()

    def close(self) -> None:
        """Ends the process and removes its files."""
        self._process.kill()  # it holds nothing worth an orderly end
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what a dead process did not read
                    stream.close()
        self._process.wait()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def compile(self, program: Program, topology: str) -> tuple[dict[str, Any], str]:
        """Compiles a lowered program for a slice.

        Args:
            program: from `lower`.
            topology: chip and slice, such as `v6e:2x4`.

        Returns:
            Memory and device as the worker answers, and the optimised HLO.

        Raises:
            DoesNotFitError: HBM or VMEM do not suffice.
            TpuCompileError: the compiler refused the program, or ended.
            ValueError: no such slice, or it has too few devices.
        """
        check_name(topology)
        shutil.rmtree(self._dump, ignore_errors=True)
        self._dump.mkdir()
        path, hlo = self._folder / "program.bin", self._folder / "hlo.txt"
        path.write_bytes(program.exported)
        answer = self._ask(
            {
                "topology": topology,
                "program": str(path),
                "hlo": str(hlo),
                "donated": program.donated,
                "mesh_shape": program.mesh_shape,
                "axis_names": program.axis_names,
                "axis_types": program.axis_types,
                "device_ids": program.device_ids,
            }
        )
        if "mistake" in answer:
            raise ValueError(answer["mistake"])
        if refused := answer.get("refused"):
            kind = DoesNotFitError if "RESOURCE_EXHAUSTED" in refused else TpuCompileError
            raise kind(f"The TPU compiler refused the program for {topology}: {refused}")
        return answer, hlo.read_text(encoding="utf-8")

    def schedules(self) -> dict[str, tuple[str, str]]:
        """Texts of bundles and use of units of the last program, by the instruction's name."""
        found = {}
        for path in sorted(self._dump.glob(f"*{_BUNDLES}")):
            if "schedule-analysis" in path.name:
                continue
            stem = path.name.removesuffix(_BUNDLES).rsplit("-", 2)[0]  # time-name-number-label
            beside = [
                other
                for other in self._dump.glob(f"*{_UTILIZATION}")
                if other.name.removesuffix(_UTILIZATION).rsplit("-", 2)[0] == stem
            ]
            name = stem.partition("-")[2]
            if beside:
                found[name] = (path.read_text(errors="replace"), beside[0].read_text())
        return found

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        try:
            pipe_in.write(json.dumps(request) + "\n")
            pipe_in.flush()
        except BrokenPipeError:
            pass  # the log says why it ended
        for line in pipe_out:  # libtpu may print as well
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        self._log.seek(0)
        tail = self._log.read()[-2000:]
        status = self._process.wait()
        raise TpuCompileError(
            f"The compiling process ended without an answer (exit status {status}; a negative one "
            f"is a signal):\n{tail}"
        )
