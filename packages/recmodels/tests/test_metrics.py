import itertools
import math

import numpy as np
import pytest

from recmodels._src import metrics


def _slow(ranks, k):
    """hit, recall, ndcg, average precision, reciprocal rank of one user, from the definitions."""
    ranks = [rank for rank in ranks if rank >= 0]
    hits = [rank for rank in ranks if rank < k]
    ideal = sum(1 / math.log2(place + 2) for place in range(min(len(ranks), k)))
    gain = sum(1 / math.log2(rank + 2) for rank in hits)
    precisions = [sum(other <= rank for other in hits) / (rank + 1) for rank in hits]
    average_precision = sum(precisions) / min(len(ranks), k)
    return bool(hits), len(hits) / len(ranks), gain / ideal, average_precision, 1 / (1 + min(ranks))


@pytest.mark.parametrize("k", [1, 3, 8, 50])
def test_metrics_equal_their_definition(k):
    rng = np.random.default_rng(0)
    ranks = np.stack([rng.permutation(40)[:8] for _ in range(20)])
    ranks[::3, 5:] = -1
    found = metrics.ranking_metrics(ranks, (k,))
    slow = np.mean([_slow(row, k) for row in ranks], axis=0)
    names = (f"hit@{k}", f"recall@{k}", f"ndcg@{k}", f"map@{k}", "mrr")
    np.testing.assert_allclose([found[name] for name in names], slow, rtol=1e-12)


def test_metrics_by_hand():
    # Held-out items at places 1, 3 and 9 of the list; two of them are among the first three.
    found = metrics.ranking_metrics(np.array([[8, 0, 2]]), (3,))
    assert found["hit@3"] == 1.0
    assert found["recall@3"] == pytest.approx(2 / 3)
    assert found["ndcg@3"] == pytest.approx((1 + 0.5) / (1 + 1 / math.log2(3) + 0.5))
    assert found["map@3"] == pytest.approx((1 / 1 + 2 / 3) / 3)
    assert found["mrr"] == 1.0


def test_one_held_out_item_makes_recall_hit_and_map_reciprocal_rank():
    found = metrics.ranking_metrics(np.array([[0], [3], [7]]), (5,))
    assert found["recall@5"] == found["hit@5"] == pytest.approx(2 / 3)
    assert found["map@5"] == pytest.approx((1 + 1 / 4) / 3)


def test_strata_are_thirds_of_the_interactions():
    # In the order of counts: row 2 (5), 1 (3), 4 (3), 3 (1), 5 (0); thirds end at 4 and 8 of 12.
    counts = np.array([99, 3, 5, 1, 3, 0])
    strata = metrics.popularity_strata(counts)
    assert [metrics.STRATA[number] for number in strata[1:]] == [
        *("mid", "head", "tail", "tail", "tail")
    ]
    assert metrics.popularity_strata(np.array([0, 0, 0])).tolist() == [2, 2, 2]


def test_an_item_that_begins_before_a_third_belongs_to_it():
    # 0, 3, 6, 9 interactions lie before the items; a third is 4, two thirds are 8.
    strata = metrics.popularity_strata(np.array([0, 3, 3, 3, 3]))
    assert strata[1:].tolist() == [0, 0, 1, 2]


def test_stratified_hits_by_hand():
    ranks = np.array([[0, 9, -1], [4, 5, 1], [7, 8, 9]])
    strata = np.array([[0, 2, 0], [0, 0, 1], [2, 2, 2]], np.int8)
    found = metrics.stratified_hits(ranks, strata, (2,))
    np.testing.assert_array_equal(found["hit@2-head"], [1, 0, np.nan])
    np.testing.assert_array_equal(found["hit@2-mid"], [np.nan, 1, np.nan])
    np.testing.assert_array_equal(found["hit@2-tail"], [0, np.nan, 0])
    means = metrics.mean_metrics(found)
    assert means == {"hit@2-head": 0.5, "hit@2-mid": 1.0, "hit@2-tail": 0.0}


def test_a_stratum_without_users_has_no_metric():
    found = metrics.stratified_hits(np.array([[0]]), np.array([[2]], np.int8), (1,))
    assert metrics.mean_metrics(found) == {"hit@1-tail": 1.0}


def test_coverage_and_overlap_equal_all_pairs_of_lists():
    rng = np.random.default_rng(2)
    lists = [rng.permutation(12)[:4] for _ in range(7)]
    num_lists = np.bincount(np.concatenate(lists), minlength=12)
    found = metrics.list_metrics(num_lists[None], 7, (4,))
    pairs = [len(set(a) & set(b)) / 4 for a, b in itertools.combinations(lists, 2)]
    assert found["coverage@4"] == len(set(np.concatenate(lists))) / 12
    assert found["overlap@4"] == pytest.approx(np.mean(pairs))


def test_the_same_list_for_everybody_overlaps_fully():
    num_lists = np.array([[50, 50, 0, 0]])
    assert metrics.list_metrics(num_lists, 50, (2,)) == {"coverage@2": 0.5, "overlap@2": 1.0}
    assert metrics.list_metrics(num_lists // 50, 1, (2,)) == {"coverage@2": 0.5}


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
