"""Keeps off stderr what fails in Orbax's threads besides the exception that we get and report."""

import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def quiet_readers() -> Iterator[None]:
    """Around the reading of a checkpoint, many arrays at a time.

    When one cannot be read, the event loop that waits for all of them ends, and each of the others
    that arrives later has a traceback of its own, from a thread that is not ours, even after the
    block. So a block that fails leaves behind that nobody is told of these; of all else one is.
    """
    before = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if not _is_of_readers(unraisable):
            before(unraisable)

    sys.unraisablehook = hook
    logger = logging.getLogger("asyncio")
    if not any(isinstance(each, _Unawaited) for each in logger.filters):
        logger.addFilter(_Unawaited())
    yield
    if sys.unraisablehook is hook:
        sys.unraisablehook = before


class _Unawaited(logging.Filter):
    """Leaves out the failure of a task whose result nobody fetched, when it is of TensorStore."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not ("never retrieved" in message and "tensorstore" in message.lower())


def _is_of_readers(unraisable: "sys.UnraisableHookArgs") -> bool:
    """Whether nothing but Orbax and its event loop took part in what cannot be raised."""
    files = [Path(frame.filename).parts for frame in traceback.extract_tb(unraisable.exc_traceback)]
    return bool(files) and all("asyncio" in parts or "orbax" in parts for parts in files)
