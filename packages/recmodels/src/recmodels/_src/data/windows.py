"""Training windows: views of the store, cut when a batch is made, never stored."""

import dataclasses

import numpy as np

from recmodels._src.data.splits import PAD_ROW, PAD_TARGET, Split
from recmodels._src.data.store import SequenceStore
from recmodels._src.data.time_gaps import time_gaps


@dataclasses.dataclass(frozen=True)
class WindowTable:
    """Which input positions form each training window: 24 bytes for up to N positions.

    Invariant: the windows of a user partition its training inputs, so every training
    position occurs exactly once in an epoch.
    """

    user: np.ndarray
    """`[num_windows]` int64."""
    start: np.ndarray
    """`[num_windows]` int64: first input position within the user."""
    stop: np.ndarray
    """`[num_windows]` int64: one past the last input position."""

    def __len__(self) -> int:
        """Number of windows."""
        return len(self.user)


def windows(store: SequenceStore, split: Split, max_length: int) -> WindowTable:
    """Cuts each user's training inputs, from the end, into windows.

    Cutting from the end fills the newest windows; only a user's oldest may be short.

    Args:
      store: the sequences.
      split: which positions are training inputs.
      max_length: N, most positions in a window.

    Returns:
      The windows by user, oldest first within a user.
    """
    num_inputs = split.train_range(store.lengths).num_inputs
    num_windows = -(-num_inputs // max_length)
    user = np.repeat(np.arange(store.num_users), num_windows)
    # Windows still to come within the same user: 0 for the newest.
    later = np.cumsum(num_windows)[user] - 1 - np.arange(len(user))
    stop = num_inputs[user] - later * max_length
    return WindowTable(user=user, start=np.maximum(stop - max_length, 0), stop=stop)


def cut_windows(
    store: SequenceStore, split: Split, table: WindowTable, selected: np.ndarray, max_length: int
) -> dict[str, np.ndarray]:
    """Cuts the selected windows out of the store.

    Args:
      store: the sequences.
      split: gives the bound of the training targets.
      table: all windows.
      selected: `[B]` integer positions in `table`.
      max_length: N.

    Returns:
      `history` `[B, N]` int32 rows, right-aligned, 0 on padding; `targets` `[B, N, L]`
      int32, `targets[b, j]` the L items after `history[b, j]`, -1 on padding.
    """
    num_targets = split.num_targets
    absolute, valid = _events(store, split, table, selected, max_length)
    gathered = store.items[absolute]
    history = np.where(valid, gathered, PAD_ROW)[:, :max_length]
    following = np.where(valid, gathered, PAD_TARGET)[:, 1:]
    targets = np.lib.stride_tricks.sliding_window_view(following, num_targets, axis=1)
    targets = np.where(history[..., None] != PAD_ROW, targets, PAD_TARGET)
    return {"history": history, "targets": targets}


def cut_gaps(
    store: SequenceStore, split: Split, table: WindowTable, selected: np.ndarray, max_length: int
) -> np.ndarray:
    """Time gaps of the selected windows; the arguments are those of `cut_windows`.

    Returns:
      `[B, N + L]` int32 of the history and of the targets of its last position; see `time_gaps`.
    """
    absolute, valid = _events(store, split, table, selected, max_length)
    first = store.offsets[table.user[selected]][:, None]
    return time_gaps(store, np.where(valid, absolute, -1), first)


def _events(
    store: SequenceStore, split: Split, table: WindowTable, selected: np.ndarray, max_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """`[B, N + L]` places in the store, 0 on padding, and whether there is an event.

    The item of every history column, followed by the L-1 columns and one more that only targets
    reach: one gather serves both.
    """
    user, start = table.user[selected], table.start[selected, None]
    column = np.arange(max_length + split.num_targets)
    position = table.stop[selected, None] - max_length + column
    target_stop = split.train_range(store.lengths[user]).target_stop[:, None]
    valid = (position >= start) & (position < target_stop)
    return np.where(valid, store.offsets[user][:, None] + position, 0), valid
