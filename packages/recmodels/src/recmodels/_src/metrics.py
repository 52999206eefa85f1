"""Ranking metrics of full-catalog evaluation, from the ranks of the held-out items.

Every function takes `ranks` `[U, L]`: the 0-based rank of each distinct held-out item of a user
among all recommendable items, -1 where a user has fewer than L distinct ones.
"""

import numpy as np

PAD_RANK = -1
STRATA = ("head", "mid", "tail")
"""Thirds of the training interactions, from the most popular items on."""

_NEVER = np.iinfo(np.int64).max - 1  # a rank behind every other


def ranking_metrics(ranks: np.ndarray, ks: tuple[int, ...]) -> dict[str, float]:
    """Means over users of `user_metrics`; all 0 when there is no user."""
    return {name: _mean(values) for name, values in user_metrics(ranks, ks).items()}


def user_metrics(ranks: np.ndarray, ks: tuple[int, ...]) -> dict[str, np.ndarray]:
    """hit@k, recall@k, ndcg@k and map@k for every k, and mrr, of each user.

        hit@k    = 1 if any held-out item is among the top k
        recall@k = share of the held-out items among the top k
        ndcg@k   = sum of 1/log2(rank+2) over hits / the same sum if all of them led the list
        map@k    = sum over hits of the share of hits among the first rank+1 items
                   / the same sum if all of them led the list, which is min(held-out items, k)
        mrr      = 1 / (1 + best rank), no cut-off

    Args:
        ranks: `[U, L]` 0-based ranks, -1 on padding.
        ks: list lengths.

    Returns:
        `[U]` float64 by name, in a fixed order; 0 for a user without a held-out item.
    """
    ordered = np.sort(np.where(ranks == PAD_RANK, _NEVER, ranks), axis=1)
    valid = ordered != _NEVER
    num_targets = np.maximum(valid.sum(1), 1)
    gains = np.where(valid, 1 / np.log2(ordered + 2.0), 0.0)
    # In ascending order the i-th hit has i+1 hits among the first rank+1 items.
    precisions = (np.arange(ranks.shape[1]) + 1.0) / (ordered + 1.0)
    values: dict[str, np.ndarray] = {}
    for k in ks:
        hits = valid & (ordered < k)
        most = np.minimum(num_targets, k)
        values[f"hit@{k}"] = hits.any(1).astype(np.float64)
        values[f"recall@{k}"] = hits.sum(1) / num_targets
        values[f"ndcg@{k}"] = (gains * hits).sum(1) / ideal_gain(most)
        values[f"map@{k}"] = (precisions * hits).sum(1) / most
    best = ordered.min(1, initial=_NEVER)
    values["mrr"] = np.where(valid.any(1), 1.0 / (best + 1.0), 0.0)
    return values


def stratified_hits(
    ranks: np.ndarray, strata: np.ndarray, ks: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Hit@k of each user by how popular the held-out items are, see `popularity_strata`.

        hit@k-head = 1 if any held-out item of the head is among the top k

    Args:
        ranks: `[U, L]` 0-based ranks, -1 on padding.
        strata: `[U, L]` number of the stratum of each held-out item, any on padding.
        ks: list lengths.

    Returns:
        `[U]` float64 by name; NaN for a user without a held-out item in the stratum.
    """
    values: dict[str, np.ndarray] = {}
    for k in ks:
        for number, name in enumerate(STRATA):
            inside = (ranks != PAD_RANK) & (strata == number)
            hits = (inside & (ranks < k)).any(1).astype(np.float64)
            values[f"hit@{k}-{name}"] = np.where(inside.any(1), hits, np.nan)
    return values


def popularity_strata(item_counts: np.ndarray) -> np.ndarray:
    """Thirds of the training interactions: 0 head, 1 mid, 2 tail.

    Items are ordered by count, equal ones by row. An item belongs to the head if the items before
    it have less than a third of all interactions, to the mid if less than two thirds, else to the
    tail, where items without any interaction are too.

    Args:
        item_counts: `[V]` training interactions per row; row 0 is padding.

    Returns:
        `[V]` int8, an index into `STRATA`; the padding row is in the tail.
    """
    order = np.argsort(-item_counts[1:], kind="stable") + 1
    counts = item_counts[order]
    before = np.cumsum(counts) - counts
    total = counts.sum()
    strata = np.full(item_counts.size, len(STRATA) - 1, np.int8)
    strata[order] = np.minimum(3 * before // max(total, 1), 2)
    strata[order[counts == 0]] = 2
    return strata


def list_metrics(num_lists: np.ndarray, num_users: int, ks: tuple[int, ...]) -> dict[str, float]:
    """What the top-k lists of all users have in common.

        coverage@k = share of the catalog that is in the list of at least one user
        overlap@k  = share of a list that is also in the list of another user, mean over all pairs
                     of users: 1 if everybody gets the same items

    Args:
        num_lists: `[len(ks), num_items]` number of top-k lists that each item is in.
        num_users: number of lists.
        ks: their lengths.

    Returns:
        Values by name; overlap is left out when there are not two users.
    """
    values: dict[str, float] = {}
    for k, counts in zip(ks, num_lists.astype(np.float64), strict=True):
        values[f"coverage@{k}"] = float((counts > 0).mean())
        if num_users > 1:
            # An item in n lists is common to n(n-1)/2 pairs of them.
            common = (counts * (counts - 1)).sum() / (num_users * (num_users - 1))
            values[f"overlap@{k}"] = float(common / k)
    return values


def mean_metrics(values: dict[str, np.ndarray]) -> dict[str, float]:
    """Mean of each metric over the users it is defined for; without any it is left out."""
    return {
        name: float(np.nanmean(each)) for name, each in values.items() if not np.isnan(each).all()
    }


def distinct(rows: np.ndarray) -> np.ndarray:
    """The rows of each user with repeats replaced by -1 and all -1 moved to the front."""
    ordered = np.sort(rows, axis=1)
    repeats = np.zeros_like(ordered, dtype=bool)
    repeats[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return np.sort(np.where(repeats, -1, ordered), axis=1)


def contained(items: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Whether each item is among the rows of its user; -1 is never contained."""
    return ((items[:, :, None] == rows[:, None, :]) & (items[:, :, None] >= 0)).any(-1)


def popularity_places(item_counts: np.ndarray) -> np.ndarray:
    """`[V]` 0-based place of each row among all by count, equal counts by row; padding last."""
    places = np.empty(item_counts.size, np.int64)
    places[np.argsort(-item_counts[1:], kind="stable") + 1] = np.arange(item_counts.size - 1)
    places[0] = item_counts.size
    return places


def popularity_ranks(places: np.ndarray, targets: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Ranks of the targets when every user gets the most counted items.

    Args:
        places: `[V]` result of `popularity_places`.
        targets: `[U, L]` distinct rows, -1 on padding.
        hidden: `[U, X]` distinct rows never recommended to the user, -1 on padding.

    Returns:
        `[U, L]` 0-based ranks among the rows that are not hidden; equal counts by lower row.
    """
    target_places = places[np.maximum(targets, 0)]
    hidden_places = np.where(hidden > 0, places[np.maximum(hidden, 0)], places.size)
    ahead = (hidden_places[:, None, :] < target_places[:, :, None]).sum(-1)
    return np.where(targets >= 0, target_places - ahead, PAD_RANK)


def ideal_gain(num_hits: np.ndarray) -> np.ndarray:
    """DCG of lists that begin with `num_hits` hits: the sum of 1/log2(rank+2) over them."""
    table = np.concatenate(
        [[0.0], np.cumsum(1 / np.log2(np.arange(num_hits.max(initial=1)) + 2.0))]
    )
    return table[num_hits]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0
