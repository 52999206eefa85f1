"""The process that compiles for `plan`: started with the right environment, asked, and ended."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, TextIO

from recmodels._src.errors import UserError
from recmodels._src.recipe import Recipe

ANSWER = "recmodels-plan "  # starts an answer's line; libtpu may print as well
# The compiler must see neither the user's accelerators nor their compiler flags.
_FOREIGN_PREFIXES = ("JAX_", "XLA_", "TPU_", "LIBTPU_")
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # do not look for the metadata server of a TPU machine
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compiling needs no chip, so no lock on it either
}


class CompilerFailedError(RuntimeError):
    """The TPU compiler gave up for another reason than the caller's request."""


class DoesNotFitError(UserError):
    """The step needs more memory than a chip of the slice has; `mesh` is its mesh."""

    def __init__(self, message: str, mesh: str) -> None:
        super().__init__(message)
        self.mesh = mesh


@contextlib.contextmanager
def plan_client() -> "Iterator[PlanClient]":
    """A process with the TPU compiler, kept for several steps; it ends with the block.

    Raises:
        UserError: libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError('the TPU compiler is not installed; run: pip install "jax[tpu]"')
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN_PREFIXES)
    }
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(
            [sys.executable, "-m", "recmodels._src.plan_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=kept | _ENVIRONMENT,
            text=True,
        ) as process,
    ):
        yield PlanClient(process, log)


class PlanClient:
    """The caller's side of the process."""

    def __init__(self, process: "subprocess.Popen[str]", log: TextIO) -> None:
        self._process = process
        self._log = log  # its standard error

    def ask(
        self,
        recipe: Recipe,
        topology: str,
        num_items: int,
        categories: tuple[int, int] | None = None,
    ) -> dict[str, Any]:
        """What the recipe's step needs on the slice; see `plan_worker.compile_step`.

        Raises:
            DoesNotFitError: the step needs more memory than a chip has.
            UserError: another mistake of the caller.
            CompilerFailedError: the process ended without an answer.
        """
        request = {"recipe": recipe.to_dict(), "topology": topology}
        request |= {"num_items": num_items, "categories": categories}
        answer = self._exchange(json.dumps(request))
        if "error" in answer:
            raise UserError(answer["error"])
        if "does_not_fit" in answer:
            raise DoesNotFitError(
                f"{recipe.name} does not fit {topology}: {answer['does_not_fit'][:500]}",
                answer["mesh"],
            )
        return answer

    def _exchange(self, request: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the log says why it ended
            print(request, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        with contextlib.suppress(BrokenPipeError):  # of what it did not read
            self._process.stdin.close()
        status = self._process.wait()
        self._log.seek(0)
        last = self._log.read().strip().splitlines()[-1:] or [f"exit status {status}"]
        raise CompilerFailedError(f"the TPU compiler failed: {last[0]}")
