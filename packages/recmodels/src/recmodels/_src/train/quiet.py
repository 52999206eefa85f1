"""Keeps off stderr what Orbax's threads print of a failure that we get as an exception and report.

Where one of many arrays cannot be read or written, the event loop that waits for all of them ends,
and each of the others has a traceback of its own, hundreds of lines in all, some of them only when
the call has long returned.
"""

import functools
import logging
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType


@functools.cache
def leave_out_noise_of_orbax() -> None:
    """From now on; what anything but Orbax and its event loop took part in is told as before."""
    tell_of_unraisable, tell_of_thread = sys.unraisablehook, threading.excepthook

    def on_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
        if not _is_of_orbax(unraisable.exc_traceback):
            tell_of_unraisable(unraisable)

    def on_thread(failure: threading.ExceptHookArgs) -> None:
        if not _is_of_orbax(failure.exc_traceback):
            tell_of_thread(failure)

    sys.unraisablehook, threading.excepthook = on_unraisable, on_thread
    logging.getLogger("asyncio").addFilter(_is_told_by_asyncio)
    logging.getLogger("absl").addFilter(_is_told_by_absl)


def _is_of_orbax(trace: TracebackType | None) -> bool:
    files = [Path(frame.filename) for frame in traceback.extract_tb(trace)]
    return bool(files) and all(
        {"asyncio", "concurrent", "orbax"} & set(file.parts) or file.name == "threading.py"
        for file in files
    )


def _is_told_by_asyncio(record: logging.LogRecord) -> bool:
    # A failure of a task whose result nobody fetched; that of TensorStore tells a lot.
    message = record.getMessage().lower()
    is_of_orbax = any(name in message for name in ("orbax", "tensorstore", "ocdbt"))
    return not ("never retrieved" in message and is_of_orbax)


def _is_told_by_absl(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "orbax" not in Path(record.pathname).parts
