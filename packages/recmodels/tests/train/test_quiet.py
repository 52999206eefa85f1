"""Of what threads print, only what is of Orbax alone is left out."""

import logging
import sys
import threading
import types

import pytest

from recmodels._src.train.quiet import leave_out_noise_of_orbax

_OURS = "/lib/asyncio/base_events.py", "/lib/orbax/serialization.py", "/lib/threading.py"


@pytest.fixture
def told(monkeypatch):
    """What the hooks from before are called with."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    monkeypatch.setattr(threading, "excepthook", told.append)
    for name in ("asyncio", "absl"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    leave_out_noise_of_orbax.__wrapped__()
    return told


@pytest.mark.parametrize("module", [sys, threading])
def test_hooks(told, module):
    hook = sys.unraisablehook if module is sys else threading.excepthook
    of_others = [_failure("/lib/numpy/core.py"), _failure(__file__)]
    for failure in (*map(_failure, _OURS), *of_others):
        hook(failure)
    assert told == of_others


def _failure(filename):
    """What a hook gets of an exception from a file."""
    namespace = {"sys": sys}
    exec(compile("frame = sys._getframe()", filename, "exec"), namespace)
    trace = types.TracebackType(None, namespace["frame"], 0, 1)
    return types.SimpleNamespace(exc_value=RuntimeError("x"), exc_traceback=trace)


@pytest.mark.parametrize(
    ("logger", "level", "text", "file", "is_told"),
    [
        ("asyncio", logging.ERROR, "Task exception was never retrieved: OCDBT", "a.py", False),
        ("asyncio", logging.ERROR, "Task exception was never retrieved: mine", "a.py", True),
        ("asyncio", logging.ERROR, "OCDBT is slow", "a.py", True),
        ("absl", logging.ERROR, "cannot write", "/lib/orbax/checkpoint.py", False),
        ("absl", logging.WARNING, "cannot write", "/lib/orbax/checkpoint.py", True),
        ("absl", logging.ERROR, "cannot write", "/lib/other.py", True),
    ],
)
def test_logs(told, logger, level, text, file, is_told):
    record = logging.LogRecord(logger, level, file, 1, text, (), None)
    assert bool(logging.getLogger(logger).filter(record)) == is_told
