"""Ranking metrics of full-catalog evaluation, from the ranks of the held-out items.

Every function takes `ranks` `[U, L]`: the 0-based rank of each distinct held-out item of a user
among all recommendable items, -1 where a user has fewer than L distinct ones.
"""

import numpy as np

PAD_RANK = -1


def ranking_metrics(ranks: np.ndarray, ks: tuple[int, ...]) -> dict[str, float]:
    """Means over users of hit@k, recall@k, ndcg@k for every k, and of mrr.

        hit@k    = 1 if any held-out item is among the top k
        recall@k = share of the held-out items among the top k
        ndcg@k   = sum of 1/log2(rank+2) over hits / the same sum if all of them led the list
        mrr      = 1 / (1 + best rank), no cut-off

    Args:
        ranks: `[U, L]` 0-based ranks, -1 on padding.
        ks: list lengths.

    Returns:
        Values by name in a fixed order; all 0 when there is no user.
    """
    valid = ranks != PAD_RANK
    num_targets = np.maximum(valid.sum(1), 1)
    gains = np.where(valid, 1 / np.log2(np.maximum(ranks, 0) + 2.0), 0.0)
    values: dict[str, float] = {}
    for k in ks:
        hits = valid & (ranks < k)
        values[f"hit@{k}"] = _mean(hits.any(1))
        values[f"recall@{k}"] = _mean(hits.sum(1) / num_targets)
        values[f"ndcg@{k}"] = _mean((gains * hits).sum(1) / _ideal_gain(np.minimum(num_targets, k)))
    best = np.where(valid, ranks, np.iinfo(np.int64).max - 1).min(1, initial=np.iinfo(np.int64).max)
    values["mrr"] = _mean(np.where(valid.any(1), 1.0 / (best + 1.0), 0.0))
    return values


def distinct(rows: np.ndarray) -> np.ndarray:
    """The rows of each user with repeats replaced by -1 and all -1 moved to the front."""
    ordered = np.sort(rows, axis=1)
    repeats = np.zeros_like(ordered, dtype=bool)
    repeats[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return np.sort(np.where(repeats, -1, ordered), axis=1)


def contained(items: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Whether each item is among the rows of its user; -1 is never contained."""
    return ((items[:, :, None] == rows[:, None, :]) & (items[:, :, None] >= 0)).any(-1)


def popularity_ranks(
    item_counts: np.ndarray,
    targets: np.ndarray,
    hidden: np.ndarray,
) -> np.ndarray:
    """Ranks of the targets when every user gets the most counted items.

    Args:
        item_counts: `[V]` training interactions per row; row 0 is padding and takes no rank.
        targets: `[U, L]` distinct rows, -1 on padding.
        hidden: `[U, X]` distinct rows never recommended to the user, -1 on padding.

    Returns:
        `[U, L]` 0-based ranks among the rows that are not hidden; equal counts by lower row.
    """
    place = np.empty(item_counts.size, np.int64)
    place[np.argsort(-item_counts[1:], kind="stable") + 1] = np.arange(item_counts.size - 1)
    place[0] = item_counts.size  # behind everything
    target_places = place[np.maximum(targets, 0)]
    hidden_places = np.where(hidden > 0, place[np.maximum(hidden, 0)], item_counts.size)
    ahead = (hidden_places[:, None, :] < target_places[:, :, None]).sum(-1)
    return np.where(targets >= 0, target_places - ahead, PAD_RANK)


def _ideal_gain(num_hits: np.ndarray) -> np.ndarray:
    table = np.concatenate(
        [[0.0], np.cumsum(1 / np.log2(np.arange(num_hits.max(initial=1)) + 2.0))]
    )
    return table[num_hits]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0
