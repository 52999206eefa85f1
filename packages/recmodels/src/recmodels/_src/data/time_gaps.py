"""Time gaps: how long an event came after the user's event before it."""

import numpy as np

from recmodels._src.data.store import SequenceStore

NO_GAP = -1
"""On padding and on a user's first event."""
_LONGEST = 2**31 - 1


def time_gaps(store: SequenceStore, event: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Seconds between events and the user's event before each.

    A gap says nothing of any later event.

    Args:
      store: gives the times; see `SequenceStore.check_has_times`.
      event: `[...]` int64 places of the events in `store.items`, -1 on padding.
      first: places of the first events of their users, of a shape that goes with `event`.

    Returns:
      `[...]` int32, at most 2**31 - 1; `NO_GAP` on padding and on first events.
    """
    has_gap = event > first
    event = np.where(has_gap, event, 1)
    if len(store.timestamps) < 2:
        return np.full(event.shape, NO_GAP, np.int32)
    gaps = store.timestamps[event] - store.timestamps[event - 1]
    return np.where(has_gap, np.clip(gaps, 0, _LONGEST), NO_GAP).astype(np.int32)
