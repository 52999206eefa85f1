"""What `nox -s tests-gpu` runs with an NVIDIA GPU, and how it knows whether there is one.

python tools/tests_gpu.py find     prints the GPU and the extra of jax that serves its driver,
                                   or "tests-gpu: no GPU attached: ..."; exits 0 either way
python tools/tests_gpu.py run [pytest arguments]
"""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
OPS = "packages/cutbce_ops"
# Those that need one device. Sharding wants eight, and structure is read from CPU programs.
TESTS = ("test_gpu_kernel", "test_gpu_export", "test_binary_cross_entropy", "test_metrics",
         "test_ranking")  # fmt: skip
BENCHMARK = f"{OPS}/benchmarks/bench_gpu.py"
ON_GPU = {
    "JAX_PLATFORMS": "cuda,cpu",
    # These tests hold float32 to 1e-6; TF32, which products may use by default, gives 1e-3.
    "NVIDIA_TF32_OVERRIDE": "0",
    "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false",
}
CUDA_13_DRIVER = 580  # the first major version of the driver that runs CUDA 13
NO_GPU = "tests-gpu: no GPU attached: "


def find_gpu(device_folder: pathlib.Path = pathlib.Path("/dev")) -> str:
    """One line: the GPU and "jax[...]" for it, or `NO_GPU` and what is missing."""
    if not list(device_folder.glob("nvidia[0-9]*")):
        return f"{NO_GPU}there is no NVIDIA device file"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{NO_GPU}nvidia-smi does not run ({error})"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return f"{NO_GPU}nvidia-smi found none"
    name, driver = (part.strip() for part in lines[0].rsplit(",", 1))
    return f"tests-gpu: {name}, driver {driver}: jax[{cuda_extra(driver)}]"


def cuda_extra(driver_version: str) -> str:
    """The extra of jax whose CUDA the driver can run."""
    return "cuda13" if int(driver_version.split(".")[0]) >= CUDA_13_DRIVER else "cuda12"


def run(extra: list[str]) -> int:
    """Runs the tests, then the benchmark; returns the first status that is not 0."""
    files = [f"{OPS}/tests/{name}.py" for name in TESTS]
    markers = ("-m", "not slow and not tpu_compiler")
    for command, environment in (
        (["-m", "pytest", *files, *markers, *extra], ON_GPU),
        ([BENCHMARK], {"JAX_PLATFORMS": "cuda,cpu"}),  # with TF32, as users run it
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=os.environ | environment, check=False
        )
        if done.returncode:
            return done.returncode
    return 0


def main() -> None:
    """Command line of the tool."""
    match sys.argv[1:]:
        case ["find"]:
            print(find_gpu())
        case ["run", *extra]:
            sys.exit(run(extra))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
