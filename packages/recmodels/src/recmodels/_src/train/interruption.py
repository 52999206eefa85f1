"""SIGTERM as a request to stop: machines that are taken away send it some seconds before."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interruption:
    """Within the context SIGTERM sets `requested` instead of ending the process.

    A second SIGTERM ends it, wherever it is.
    Outside the main thread, where Python takes no signal handlers, nothing changes.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._request)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        self.requested = True
