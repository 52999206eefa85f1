"""Item counts for the popularity baseline."""

import numpy as np

from recmodels._src.data.splits import Split
from recmodels._src.data.store import SequenceStore


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
    position = np.arange(store.num_interactions) - np.repeat(store.offsets[:-1], store.lengths)
    counted = position < np.repeat(num_counted, store.lengths)
    return np.bincount(store.items[counted], minlength=store.num_items + 1)
