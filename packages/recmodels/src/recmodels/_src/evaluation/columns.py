"""One column of the table of results: collects the answers of a ranker over all users."""

from typing import Protocol

import numpy as np

from recmodels._src import metrics
from recmodels._src.evaluation.blocks import Ranker, UserBlock


class Column(Protocol):
    """Collects blocks of users; afterwards gives their metrics."""

    def add(self, block: UserBlock) -> None:
        """Adds the users of a block."""
        ...

    def user_metrics(self) -> dict[str, np.ndarray]:
        """`[U]` float64 by name, in the order of the blocks; see `metrics.user_metrics`."""
        ...

    def list_metrics(self) -> dict[str, float]:
        """coverage@k and overlap@k; see `list_metrics`."""
        ...


class RankedColumn:
    """Ranks of the held-out items and statistics of the lists of one ranker.

    Args:
        ranker: orders the catalog.
        ks: list lengths of the metrics.
        num_items: size of the catalog.
        strata: `[V]` stratum of each row for stratified metrics; None leaves these and the metrics
            of whole lists out, and the lists are then never made.
    """

    def __init__(
        self, ranker: Ranker, ks: tuple[int, ...], num_items: int, strata: np.ndarray | None
    ) -> None:
        self._ranker = ranker
        self._ks = ks
        self._num_items = num_items
        self._strata = strata
        self._list_length = 0 if strata is None else max(ks)
        self._ranks: list[np.ndarray] = []
        self._target_strata: list[np.ndarray] = []
        self._num_lists = np.zeros((len(ks), num_items + 1 if self._list_length else 0), np.int64)

    def add(self, block: UserBlock) -> None:
        """See `Column`."""
        ranked = self._ranker.rank(block, self._list_length)
        # A held-out item that is hidden can never be recommended: behind every other item.
        is_hidden = metrics.contained(block.targets, block.hidden)
        ranks = np.where(is_hidden, self._num_items, ranked.ranks)
        self._ranks.append(ranks[block.is_user])
        if self._strata is not None:
            self._target_strata.append(self._strata[block.targets[block.is_user]])
            for number, k in enumerate(self._ks):
                rows = ranked.rows[block.is_user, :k]
                self._num_lists[number] += np.bincount(
                    rows[rows >= 0], minlength=self._num_items + 1
                )

    @property
    def ranks(self) -> np.ndarray:
        """`[U, L]` int64 0-based ranks, -1 on padding, in the order of the blocks."""
        return np.concatenate(self._ranks)

    def user_metrics(self) -> dict[str, np.ndarray]:
        """See `Column`."""
        values = metrics.user_metrics(self.ranks, self._ks)
        if self._strata is not None:
            strata = np.concatenate(self._target_strata)
            values |= metrics.stratified_hits(self.ranks, strata, self._ks)
        return values

    def list_metrics(self) -> dict[str, float]:
        """See `Column`."""
        if not self._list_length:
            return {}
        return metrics.list_metrics(self._num_lists[:, 1:], len(self.ranks), self._ks)
