"""The GPU session knows whether there is a GPU, and its benchmark says what it could not run."""

import json
import os
import subprocess
import sys

import pytest
import tests_gpu


def pretend_nvidia_smi(monkeypatch: pytest.MonkeyPatch, output: str, status: int = 0) -> None:
    def answer(command, **_):
        assert command[0] == "nvidia-smi"
        return subprocess.CompletedProcess(command, status, stdout=output, stderr="")

    monkeypatch.setattr(tests_gpu.subprocess, "run", answer)


def test_a_machine_without_device_files_has_no_gpu(tmp_path):
    assert tests_gpu.find_gpu(tmp_path) == (
        "tests-gpu: no GPU attached: there is no NVIDIA device file"
    )


def test_device_files_without_a_driver_are_no_gpu(tmp_path, monkeypatch):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tests_gpu.find_gpu(tmp_path).startswith(f"{tests_gpu.NO_GPU}nvidia-smi does not run")
    pretend_nvidia_smi(monkeypatch, "No devices were found\n", 6)
    assert tests_gpu.find_gpu(tmp_path) == f"{tests_gpu.NO_GPU}nvidia-smi found none"


@pytest.mark.parametrize(
    ("driver", "extra"), [("580.65.06", "cuda13"), ("590.1", "cuda13"), ("575.57", "cuda12")]
)
def test_the_driver_chooses_the_cuda_of_jax(tmp_path, monkeypatch, driver: str, extra: str):
    (tmp_path / "nvidia0").touch()
    pretend_nvidia_smi(monkeypatch, f"NVIDIA A100-SXM4, 80GB, {driver}\nanother, {driver}\n")
    found = tests_gpu.find_gpu(tmp_path)
    assert found == f"tests-gpu: NVIDIA A100-SXM4, 80GB, driver {driver}: jax[{extra}]"


def test_files_exist():
    for path in (tests_gpu.BENCHMARK, *(f"{tests_gpu.OPS}/tests/{n}.py" for n in tests_gpu.TESTS)):
        assert (tests_gpu.ROOT / path).is_file(), path


def test_the_benchmark_says_what_it_could_not_run(tmp_path):
    out = tmp_path / "figures.json"
    sizes = ("--positions", "16", "--vocab", "200", "--dim", "8", "--rounds", "1")
    subprocess.run(
        [sys.executable, tests_gpu.ROOT / tests_gpu.BENCHMARK, *sizes, "--json", str(out)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True, capture_output=True,
    )  # fmt: skip
    candidates = json.loads(out.read_text())["candidates"]
    assert candidates["xla"]["median_ms"] > 0
    assert candidates["xla"]["loss"] == pytest.approx(0.7, abs=0.2)
    assert "needs a program for a GPU" in candidates["gpu"]["not_run"]
    assert candidates["torch"]["not_run"]
