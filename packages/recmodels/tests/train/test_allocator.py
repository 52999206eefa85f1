"""Memory that a step frees is used by the next one, and goes back to the system at the end."""

import ctypes
import os
import resource
import subprocess
import sys

import numpy as np
import pytest

from recmodels._src.train.allocator import freed_memory_kept

_BYTES = 2**26
_PAGES = _BYTES // 4096  # or fewer, where the system gives larger ones

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"),
    reason="only malloc of the GNU C library has these settings",
)

# What a step does: temporaries that are larger than malloc keeps by itself.
_PROGRAM = """
import contextlib, resource, sys
import jax, jax.numpy as jnp
from recmodels._src.train.allocator import freed_memory_kept

def faults_of_a_call(function, argument):
    for _ in range(3):
        function(argument).block_until_ready()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        function(argument).block_until_ready()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10

def step(matrix):
    table = jnp.sin(matrix[0, :, None] * matrix[1])
    return (table @ matrix.T).sum() + (matrix @ table).sum()

with freed_memory_kept() if sys.argv[1] == "kept" else contextlib.nullcontext():
    print(faults_of_a_call(jax.jit(step), jnp.ones((8, 4096))))
"""


@pytest.fixture(autouse=True)
def environment_without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)


def _faults_of_an_allocation() -> float:
    def allocate() -> None:
        np.zeros(_BYTES, np.uint8).fill(1)

    for _ in range(2):
        allocate()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        allocate()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10


def test_freed_memory_is_used_again_within_and_returned_afterwards() -> None:
    usual = _faults_of_an_allocation()
    with freed_memory_kept():
        kept = _faults_of_an_allocation()
        resident_within = _resident_bytes()
    assert kept < usual / 10
    assert _resident_bytes() < resident_within - _BYTES // 2
    assert _faults_of_an_allocation() > usual / 2


def test_it_ends_with_an_error_too() -> None:
    usual = _faults_of_an_allocation()
    with pytest.raises(KeyError), freed_memory_kept():
        raise KeyError
    assert _faults_of_an_allocation() > usual / 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_ARENA_MAX", "4"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1048576")],
)
def test_settings_of_the_environment_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    usual = _faults_of_an_allocation()
    monkeypatch.setenv(name, value)
    with freed_memory_kept():
        assert _faults_of_an_allocation() > usual / 2


def test_a_compiled_step_uses_it() -> None:
    kept, usual = (float(_run(mode)) for mode in ("kept", "usual"))
    assert kept < usual / 10


def _run(mode: str) -> str:
    command = [sys.executable, "-c", _PROGRAM, mode]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
