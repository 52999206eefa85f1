"""Events on disk in several parts, each small enough to be sorted in memory."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

EVENT = np.dtype([("user", "<u4"), ("item", "<u4"), ("time", "<i8")])
"""One event: numbers of its user and item, and its time (0 when there is none)."""


class EventFiles:
    """Parts 0, 1, 2, ... of events in a folder; a part is read whole, and keeps its order."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder, empty.

        Args:
          folder: a path that does not exist.
        """
        folder.mkdir()
        self._folder = folder
        self._num_parts = 0

    def __len__(self) -> int:
        """Number of parts."""
        return self._num_parts

    def append(self, part: int, events: np.ndarray) -> None:
        """Adds events at the end of a part, which may be new.

        Args:
          part: 0-based.
          events: `[n]` of type `EVENT`.
        """
        with self._path(part).open("ab") as file:
            events.tofile(file)
        self._num_parts = max(self._num_parts, part + 1)

    def read(self, part: int) -> np.ndarray:
        """All events of a part, `[n]` of type `EVENT`; none if nothing was added to it."""
        path = self._path(part)
        return np.fromfile(path, EVENT) if path.exists() else np.empty(0, EVENT)

    def replace(self, part: int, events: np.ndarray) -> None:
        """Gives a part other events, `[n]` of type `EVENT`."""
        events.tofile(self._path(part))

    def drain(self) -> Iterator[np.ndarray]:
        """The events of each part in turn; what was yielded is no longer on disk."""
        for part in range(self._num_parts):
            events = self.read(part)
            self._path(part).unlink(missing_ok=True)
            yield events

    def _path(self, part: int) -> Path:
        return self._folder / str(part)
