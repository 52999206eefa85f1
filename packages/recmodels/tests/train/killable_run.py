"""Trains in its own process, which kills itself at a chosen file operation.

    python killable_run.py STORE RUN [PATTERN]

PATTERN is searched in "event path", for example "os.rename /…/.config.json.tmp-7"; the first match
inside the run directory ends the process with SIGKILL before the operation takes place. "#7" is the
seventh operation there, whatever it is.
"""

import os
import re
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from train_cases import small_recipe

import recmodels


def kill_at(pattern: str, run_dir: Path) -> None:
    """Arms the kill."""

    countdown = int(pattern[1:]) if pattern.startswith("#") else 1
    pattern = "" if pattern.startswith("#") else pattern

    def hook(event: str, arguments: tuple) -> None:
        nonlocal countdown
        if arguments and isinstance(arguments[0], (str, os.PathLike)):
            path = os.fspath(arguments[0])
            if str(path).startswith(str(run_dir)) and re.search(pattern, f"{event} {path}"):
                countdown -= 1
                if not countdown:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    store, run_dir = Path(sys.argv[1]), Path(sys.argv[2])
    if len(sys.argv) > 3:
        kill_at(sys.argv[3], run_dir)
    recmodels.train(small_recipe(), store, run_dir, progress=False)
