"""What `nox -s tests-tpu` runs: with a TPU the tests on the chip, and everywhere the TPU compiler.

    python tools/tests_tpu.py [--slow] [pytest arguments]

With `--slow` also the largest programs are compiled, which takes minutes each.

The first and the last line say which of the two happened.
"""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
COMPILED_PACKAGES = ("cutbce_ops", "recmodels")
COMPILER_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # do not look for chips
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compiling needs no chip, so no lock on one
}
PROBE_SECONDS = 120  # libtpu keeps asking for a while on a machine that has no TPU


def has_tpu() -> bool:
    """Whether JAX finds a TPU, asked in a process of its own, since the answer is final in one."""
    device_files = [*pathlib.Path("/dev").glob("accel*"), *pathlib.Path("/dev").glob("vfio/[0-9]*")]
    if not device_files:  # spares a machine without chips the long search
        return False
    probe = "import jax; assert jax.devices('tpu')"
    try:
        done = subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def run_pytest(package: str, markers: str, environment: dict[str, str], extra: list[str]) -> int:
    """Exit status of the tests of one package that carry the markers."""
    command = [sys.executable, "-m", "pytest", f"packages/{package}", "-m", markers, *extra]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False).returncode


def main() -> None:
    """Runs what this machine can run; exits with the first failure's status."""
    extra = sys.argv[1:]
    compiled = "tpu_compiler and not slow"
    if "--slow" in extra:
        extra.remove("--slow")
        compiled = "tpu_compiler"
    attached = has_tpu()
    summary = (
        "tests-tpu: a TPU is attached: tests run on the chip, and compile for slices"
        if attached
        else "tests-tpu: no TPU is attached: compiling for slices, nothing runs on one"
    )
    print(summary, flush=True)
    statuses = []
    if attached:
        on_chip = {"JAX_PLATFORMS": "tpu,cpu"}
        statuses.append(run_pytest("cutbce_ops", "not slow and not tpu_compiler", on_chip, extra))
    for package in COMPILED_PACKAGES:
        statuses.append(run_pytest(package, compiled, COMPILER_ENVIRONMENT, extra))
    print(summary, flush=True)
    sys.exit(next((status for status in statuses if status), 0))


if __name__ == "__main__":
    main()
