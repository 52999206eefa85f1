import math

import numpy as np
import pytest

from recmodels._src import metrics


def _slow(ranks, k):
    """hit, recall, ndcg, reciprocal rank of one user, from the definitions."""
    ranks = [rank for rank in ranks if rank >= 0]
    hits = [rank for rank in ranks if rank < k]
    ideal = sum(1 / math.log2(place + 2) for place in range(min(len(ranks), k)))
    gain = sum(1 / math.log2(rank + 2) for rank in hits)
    return bool(hits), len(hits) / len(ranks), gain / ideal, 1 / (1 + min(ranks))


@pytest.mark.parametrize("k", [1, 3, 8, 50])
def test_metrics_equal_their_definition(k):
    rng = np.random.default_rng(0)
    ranks = np.stack([rng.permutation(40)[:8] for _ in range(20)])
    ranks[::3, 5:] = -1
    found = metrics.ranking_metrics(ranks, (k,))
    slow = np.mean([_slow(row, k) for row in ranks], axis=0)
    names = (f"hit@{k}", f"recall@{k}", f"ndcg@{k}", "mrr")
    np.testing.assert_allclose([found[name] for name in names], slow, rtol=1e-12)


def test_perfect_and_hopeless_lists():
    perfect = metrics.ranking_metrics(np.array([[1, 0, -1]]), (2,))
    assert perfect == {"hit@2": 1.0, "recall@2": 1.0, "ndcg@2": 1.0, "map@2": 1.0, "mrr": 1.0}
    hopeless = metrics.ranking_metrics(np.array([[99]]), (2,))
    assert hopeless == {"hit@2": 0.0, "recall@2": 0.0, "ndcg@2": 0.0, "map@2": 0.0, "mrr": 0.01}


def test_distinct_keeps_each_row_once():
    rows = np.array([[3, 3, 5, -1], [7, 7, 7, 7]])
    np.testing.assert_array_equal(metrics.distinct(rows), [[-1, -1, 3, 5], [-1, -1, -1, 7]])


def test_popularity_ranks_equal_a_sorted_list():
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 5, 30)  # many ties
    counts[0] = 10**9  # were the padding row ranked, it would lead every list
    targets = metrics.distinct(rng.integers(1, 30, (10, 4)))
    hidden = metrics.distinct(rng.integers(1, 30, (10, 6)))
    places = metrics.popularity_places(counts)
    found = metrics.popularity_ranks(places, targets, hidden)
    for user in range(10):
        free = [row for row in range(1, 30) if row not in hidden[user] or row in targets[user]]
        for target, rank in zip(targets[user], found[user], strict=True):
            if target < 0:
                assert rank == -1
                continue
            shown = [row for row in free if row == target or row not in hidden[user]]
            assert sorted(shown, key=lambda row: (-counts[row], row)).index(target) == rank
