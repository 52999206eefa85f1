"""Item counts for the popularity baseline."""

import numpy as np

from recmodels._src.data.splits import Split
from recmodels._src.data.store import SequenceStore

_BLOCK = 2**22  # events; `bincount` makes an int64 copy of what it counts


def popularity_counts(
    store: SequenceStore, split: Split, *, include_short_users: bool = False
) -> np.ndarray:
    """How often each item occurs before the held-out items.

    Counted are the items of each evaluated user that precede the dev targets: the first
    n-2L-1 under `"next-8"`, all but the last two under `"leave-one-out"`.

    Args:
      store: the sequences.
      split: decides which items are held out.
      include_short_users: whether all items of the users that are too short to be evaluated
        count as well.

    Returns:
      `[num_items + 1]` int64 by row; 0 at the padding row.
    """
    evaluated = split.is_evaluated(store.lengths)
    num_counted = np.where(evaluated, 0, store.lengths if include_short_users else 0)
    num_counted[evaluated] = split.evaluation(store.lengths[evaluated], "dev").input_stop
    # +1 where a user's counted items start and -1 where they stop: the running sum is the mask.
    steps = np.zeros(store.num_interactions + 1, dtype=np.int8)
    np.add.at(steps, store.offsets[:-1], 1)
    np.add.at(steps, store.offsets[:-1] + num_counted, -1)
    is_counted = np.cumsum(steps, dtype=np.int8).astype(bool)
    counts = np.zeros(store.num_items + 1, dtype=np.int64)
    for start in range(0, store.num_interactions, _BLOCK):
        block = slice(start, min(start + _BLOCK, store.num_interactions))
        counted = store.items[block][is_counted[block]]
        counts += np.bincount(counted, minlength=store.num_items + 1)
    return counts
