"""Trains in its own process, which kills itself at a chosen file operation, or finds the disk full.

    python killable_run.py STORE RUN [PATTERN]

PATTERN is searched in "event path", for example "os.rename /…/.config.json.tmp-7"; the first match
inside the run directory ends the process with SIGKILL before the operation takes place. "#7" is the
seventh operation there, whatever it is. With "full " before it the disk is full instead: that
operation and all that write after it fail.
"""

import errno
import os
import re
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from train_cases import small_recipe

import recmodels

_WRITING = ("open", "os.mkdir", "os.rename")


def stop_at(pattern: str, run_dir: Path) -> None:
    """Arms the kill, or the full disk."""
    is_full = pattern.startswith("full ")
    pattern = pattern.removeprefix("full ")
    countdown = int(pattern[1:]) if pattern.startswith("#") else 1
    pattern = "" if pattern.startswith("#") else pattern

    def hook(event: str, arguments: tuple) -> None:
        nonlocal countdown
        if not (arguments and isinstance(arguments[0], (str, os.PathLike))):
            return
        path = str(os.fspath(arguments[0]))
        if not path.startswith(str(run_dir)) or not re.search(pattern, f"{event} {path}"):
            is_later = countdown <= 0 and path.startswith(str(run_dir))
            if not (is_later and is_full and event in _WRITING and _writes(event, arguments)):
                return
        countdown -= 1
        if countdown <= 0 and not is_full:
            os.kill(os.getpid(), signal.SIGKILL)
        if countdown <= 0 and is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    sys.addaudithook(hook)


def _writes(event: str, arguments: tuple) -> bool:
    mode = arguments[1] if event == "open" else "w"
    return mode is not None and any(letter in mode for letter in "wax+")


if __name__ == "__main__":
    store, run_dir = Path(sys.argv[1]), Path(sys.argv[2])
    if len(sys.argv) > 3:
        stop_at(sys.argv[3], run_dir)
    recmodels.train(small_recipe(), store, run_dir, progress=False)
