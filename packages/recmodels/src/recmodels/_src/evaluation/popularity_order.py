"""Rankers that need no training: by popularity, and by a score with popularity behind it.

All order the whole catalog: items with a score by score, then all others by count. Equal scores
are ordered by count, equal counts by row.
"""

from collections.abc import Callable

import numpy as np
from scipy import sparse

from recmodels._src import metrics
from recmodels._src.data.splits import PAD_TARGET
from recmodels._src.evaluation.blocks import Ranked, UserBlock

Scores = Callable[[UserBlock], sparse.csr_matrix]
"""Positive scores `[b, V]` of a block of users, sparse."""


class PopularityRanker:
    """Everybody gets the most counted items.

    Args:
        item_counts: `[V]` training interactions per row.
    """

    def __init__(self, item_counts: np.ndarray) -> None:
        self._places = metrics.popularity_places(item_counts)
        self._order = _popularity_order(item_counts)

    def rank(self, block: UserBlock, list_length: int) -> Ranked:
        """See `Ranker`."""
        ranks = metrics.popularity_ranks(self._places, block.targets, block.hidden)
        rows = np.full((len(ranks), list_length), PAD_TARGET, np.int32)
        if list_length:
            for user in np.flatnonzero(block.is_user):
                hidden = block.hidden[user]
                first = self._order[: list_length + len(hidden)]
                left = first[~np.isin(first, hidden)][:list_length]
                rows[user, : len(left)] = left
        return Ranked(ranks, rows)


class ScoredRanker:
    """Items with a score first, all others by popularity.

    Args:
        item_counts: `[V]` training interactions per row.
        scores: `[b, V]` positive scores of a block of users, sparse.
    """

    def __init__(self, item_counts: np.ndarray, scores: Scores) -> None:
        self._places = metrics.popularity_places(item_counts)
        self._order = _popularity_order(item_counts)
        self._scores = scores
        self._is_taken = np.zeros(item_counts.size, bool)  # scratch, all False between users

    def rank(self, block: UserBlock, list_length: int) -> Ranked:
        """See `Ranker`."""
        scores = self._scores(block)
        ranks = np.full(block.targets.shape, metrics.PAD_RANK, np.int64)
        rows = np.full((len(ranks), list_length), PAD_TARGET, np.int32)
        for user in np.flatnonzero(block.is_user):
            hidden = block.hidden[user][block.hidden[user] > 0]
            own = slice(scores.indptr[user], scores.indptr[user + 1])
            scored = self._best_first(scores.indices[own], scores.data[own], hidden)
            ranks[user] = self._ranks(block.targets[user], scored, hidden)
            best = self._first(list_length, scored, hidden) if list_length else scored[:0]
            rows[user, : len(best)] = best
        return Ranked(ranks, rows)

    def _best_first(self, rows: np.ndarray, scores: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        self._is_taken[hidden] = True
        shown = ~self._is_taken[rows]
        self._is_taken[hidden] = False
        rows, scores = rows[shown], scores[shown]
        return rows[np.lexsort((self._places[rows], -scores))]

    def _ranks(self, targets: np.ndarray, scored: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        places = self._places[targets]
        taken = np.concatenate([self._places[scored], self._places[hidden]])
        by_popularity = len(scored) + places - (taken < places[:, None]).sum(1)
        is_target = scored == targets[:, None]
        if len(scored):
            by_popularity = np.where(is_target.any(1), is_target.argmax(1), by_popularity)
        return np.where(targets >= 0, by_popularity, metrics.PAD_RANK)

    def _first(self, num: int, scored: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        if len(scored) >= num:
            return scored[:num]
        taken = np.concatenate([scored, hidden])
        self._is_taken[taken] = True
        popular = self._order[: num + len(taken)]
        popular = popular[~self._is_taken[popular]]
        self._is_taken[taken] = False
        return np.concatenate([scored, popular])[:num]


def _popularity_order(item_counts: np.ndarray) -> np.ndarray:
    return (np.argsort(-item_counts[1:], kind="stable") + 1).astype(np.int32)
