"""Where each user's training items are in the store."""

import dataclasses

import numpy as np

from recmodels._src.data.splits import Split
from recmodels._src.data.store import SequenceStore


@dataclasses.dataclass(frozen=True)
class TrainingItems:
    """The items that a model may be trained on: of user u those at `first[u]` to `stop[u] - 1`."""

    first: np.ndarray
    """`[num_users]` int64 place of each user's first item in the store."""
    stop: np.ndarray
    """`[num_users]` int64 one past the last."""

    @classmethod
    def of(cls, store: SequenceStore, split: Split) -> "TrainingItems":
        """Everything before the first dev target, and all items of users too short for one."""
        stop = store.lengths.copy()
        evaluated = split.is_evaluated(stop)
        stop[evaluated] = split.evaluation(stop[evaluated], "dev").input_stop
        first = store.offsets[:-1]
        return cls(first, first + stop)

    def newest(self, most: int) -> "TrainingItems":
        """At most the `most` newest items of each user."""
        return TrainingItems(np.maximum(self.first, self.stop - most), self.stop)

    @property
    def lengths(self) -> np.ndarray:
        """`[num_users]` int64 number of these items of each user."""
        return self.stop - self.first

    def places(self) -> np.ndarray:
        """`[sum of lengths]` int64 places of all these items in the store, user by user."""
        lengths = self.lengths
        before = np.cumsum(lengths) - lengths
        return np.arange(lengths.sum()) + np.repeat(self.first - before, lengths)
