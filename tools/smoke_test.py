"""Tests installed wheels, from outside the source tree.

    python -I tools/smoke_test.py ops-alone    # cutbce-ops is all that is installed
    python -I tools/smoke_test.py all          # all three packages are

Prints what it found and exits 1 at the first thing that is wrong.
"""

import importlib
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

MAX_IMPORT_S = 1.0  # beyond `import jax`
# JAX, NumPy and what JAX requires. What `import jax` loads on top, where it happens to be
# installed, is JAX's affair.
ALLOWED_MODULES = {"cutbce_ops", "jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum", "scipy"}
_STEP_LIMIT_S = 120


class SmokeTestFailedError(Exception):
    """Something does not work; the message says what."""


def check_installed(package: str) -> None:
    """Fails when `package` comes from a source tree rather than from this environment."""
    where = importlib.import_module(package).__file__ or ""
    installed = sysconfig.get_path("purelib")
    if not Path(where).is_relative_to(installed):
        raise SmokeTestFailedError(f"{package} comes from {where}, not from {installed}")


def check_import_time(module: str = "cutbce_ops", limit_s: float = MAX_IMPORT_S) -> None:
    """Fails when `import module` takes long once JAX is there; the median of three counts."""
    code = (
        "import time, jax; started = time.perf_counter(); "
        f"import {module}; print(time.perf_counter() - started)"
    )
    import_s = statistics.median(float(_python(code)) for _ in range(3))
    print(f"import {module}: {import_s:.3f} s beyond jax")
    if import_s > limit_s:
        raise SmokeTestFailedError(f"that is more than {limit_s} s")


def check_imported_modules(module: str = "cutbce_ops") -> None:
    """Fails when `import module` loads libraries beyond JAX and NumPy."""
    code = (
        "import sys, jax, numpy; before = set(sys.modules); "
        f"import {module}; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(*sorted(new - sys.stdlib_module_names))"
    )
    found = set(_python(code).split())
    strange = found - ALLOWED_MODULES
    if strange:
        raise SmokeTestFailedError(f"import {module} loads {', '.join(sorted(strange))}")
    print(f"import {module}: no libraries beyond JAX and NumPy")


def _python(code: str) -> str:
    return _run([sys.executable, "-I", "-c", code])


def check_operators() -> None:
    """Runs the loss with its gradients and the ranking on a case whose answers are known."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import cutbce_ops

    activations = jnp.ones((3, 4))
    targets = jnp.array([[0, 1], [2, -1], [-1, -1]], jnp.int32)
    loss, d_embeddings = jax.value_and_grad(cutbce_ops.cut_binary_cross_entropy, argnums=1)(
        activations, jnp.zeros((5, 4)), targets
    )
    # All logits are 0, so every item costs log 2 and pulls with sigmoid(0) - target = 1/2 or -1/2.
    signs = np.array([[-1, -1, 1, 1, 1], [1, 1, -1, 1, 1], [1, 1, 1, 1, 1]])
    expected = np.repeat(0.5 * signs.sum(0)[:, None] / (3 * 5), 4, axis=1)
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)
    np.testing.assert_allclose(d_embeddings, expected, rtol=1e-5)
    _, rows = cutbce_ops.cut_top_k(jnp.eye(4)[:2], jnp.eye(4) * jnp.arange(1.0, 5.0)[:, None], 1)
    np.testing.assert_array_equal(rows, [[0], [1]])
    print("loss, gradient and top-k: right")


def run_commands(folder: Path, scripts: Path) -> None:
    """Goes from generated interactions to recommendations with the installed commands.

    Args:
      folder: empty folder to work in.
      scripts: folder that holds the commands `recmodels` and `recserve`.

    Raises:
      SmokeTestFailedError: a command is missing or fails, or the answer is not 8 items.
    """
    recmodels, recserve = (str(scripts / name) for name in ("recmodels", "recserve"))
    store, run, index = (str(folder / name) for name in ("store", "run", "index"))
    _step(recmodels, "prepare", "--synthetic", "--num-users", "60", "--num-items", "300",
          "--out", store)  # fmt: skip
    _step(recmodels, "train", "--recipe", "sasrec-demo", "--data", store, "--out", run,
          "--num-steps", "4", "--log-every", "2", "--evaluate-every", "4", "--checkpoint-every",
          "4", "--batch-size", "8", "--max-length", "16", "--hidden-dim", "16")  # fmt: skip
    _step(recmodels, "evaluate", run)
    bundle = str(Path(run) / "bundle")
    _step(recserve, "build", bundle, "--out", index, "--searcher", "scann")
    answer = json.loads(_step(recserve, "query", index, "--history", "", "-k", "8", "--json"))
    if len(set(answer["item_ids"])) != 8:
        raise SmokeTestFailedError(f"`recserve query` must give 8 items; got {answer}")


def _step(command: str, *arguments: str) -> str:
    print(f"{Path(command).name} {arguments[0]}", flush=True)
    return _run([command, *arguments])


def _run(command: list[str]) -> str:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_STEP_LIMIT_S
        )
    except FileNotFoundError as error:
        raise SmokeTestFailedError(f"{command[0]} is missing") from error
    except subprocess.TimeoutExpired as error:
        raise SmokeTestFailedError(f"{error.cmd} ran longer than {error.timeout} s") from error
    if done.returncode:
        raise SmokeTestFailedError(f"{command} exits with {done.returncode}:\n{done.stderr}")
    return done.stdout


def main(arguments: list[str]) -> int:
    """Runs the test called `ops-alone` or `all`; returns 0, 1 (it failed) or 2 (no such test)."""
    if arguments not in (["ops-alone"], ["all"]):
        print("error: the only argument is ops-alone or all", file=sys.stderr)
        return 2
    try:
        check_installed("cutbce_ops")
        check_import_time()
        check_imported_modules()
        check_operators()
        if arguments == ["all"]:
            check_installed("recmodels")
            check_installed("recserve")
            with tempfile.TemporaryDirectory() as folder:
                run_commands(Path(folder), Path(sys.executable).parent)
    except (AssertionError, SmokeTestFailedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
