import numpy as np
import pytest

from recmodels._src import metrics
from recmodels._src.evaluation.blocks import Ranked, UserBlock
from recmodels._src.evaluation.columns import RankedColumn
from recmodels._src.evaluation.random_order import RandomColumn

NUM_ITEMS, KS = 9, (1, 4, 9)
STRATA = np.array([2, 0, 0, 1, 1, 1, 2, 2, 2, 2], np.int8)


class _Shuffle:
    """Really orders the catalog at random."""

    def __init__(self, seed):
        self._generator = np.random.default_rng(seed)

    def rank(self, block, list_length):
        ranks = np.full(block.targets.shape, -1)
        rows = np.full((len(ranks), list_length), -1)
        for user in range(len(ranks)):
            free = np.setdiff1d(np.arange(1, NUM_ITEMS + 1), block.hidden[user])
            order = list(self._generator.permutation(free))
            shown = order[:list_length]
            rows[user, : len(shown)] = shown
            for column, target in enumerate(block.targets[user]):
                if target in order:
                    ranks[user, column] = order.index(target)
                elif target >= 0:  # hidden: any rank
                    ranks[user, column] = 0
        return Ranked(ranks, rows)


def _block():
    """Users with several, one and no target that can be found, and with little left to show."""
    return UserBlock(
        user=np.array([0, 1, 2, 3, 4, -1]),
        history=np.zeros((6, 1), np.int32),
        targets=np.array(
            [[1, 3, 9], [-1, -1, 4], [2, 5, 6], [-1, 7, 8], [-1, -1, 3], [-1, -1, -1]], np.int32
        ),
        hidden=np.array(
            [[-1] * 7, [-1, -1, -1, -1, -1, 1, 2], [-1, -1, -1, -1, 2, 5, 8],
             [1, 2, 3, 4, 5, 6, 9], [-1, -1, -1, -1, -1, -1, 3], [-1] * 7], np.int32),
    )  # fmt: skip


def test_expectations_equal_the_mean_of_many_random_orders():
    expected = RandomColumn(KS, NUM_ITEMS, STRATA)
    expected.add(_block())
    samples, lists = [], []
    for seed in range(1000):
        column = RankedColumn(_Shuffle(seed), KS, NUM_ITEMS, STRATA)
        column.add(_block())
        samples.append(column.user_metrics())
        lists.append(column.list_metrics())
    for name, values in expected.user_metrics().items():
        sampled = np.array([each[name] for each in samples])
        known = ~np.isnan(values)
        np.testing.assert_array_equal(np.isnan(sampled).all(0), ~known)
        _assert_mean(sampled[:, known], values[known])
    for name, value in expected.list_metrics().items():
        _assert_mean(np.array([[each[name]] for each in lists]), value)


def _assert_mean(sampled, expected):
    error = sampled.std(0) / np.sqrt(len(sampled))
    np.testing.assert_array_less(np.abs(sampled.mean(0) - expected), 4.5 * error + 1e-9)


def test_one_item_of_n_by_hand():
    column = RandomColumn((2,), 4, None)
    block = UserBlock(
        user=np.array([0]),
        history=np.zeros((1, 1), np.int32),
        targets=np.array([[3]], np.int32),
        hidden=np.empty((1, 0), np.int32),
    )
    column.add(block)
    found = metrics.mean_metrics(column.user_metrics())
    assert found["hit@2"] == found["recall@2"] == pytest.approx(1 / 2)
    assert found["ndcg@2"] == pytest.approx((1 + 1 / np.log2(3)) / 4)
    assert found["map@2"] == pytest.approx((1 + 1 / 2) / 4)
    assert found["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert column.list_metrics() == {}
