"""Baselines against their definitions, one user and one item at a time."""

import collections
import fractions
import itertools
import math

import numpy as np
import pytest
from scipy import sparse
from store_cases import tiny_store

from recmodels._src import metrics
from recmodels._src.data.splits import Split
from recmodels._src.evaluation import item_knn, markov
from recmodels._src.evaluation.blocks import UserBlock, user_blocks
from recmodels._src.evaluation.popularity_order import PopularityRanker, ScoredRanker

NUM_ITEMS = 12
LEAVE_ONE_OUT = Split("leave-one-out", 1)


def _block(rng, num_users=9, num_hidden=5):
    user = np.arange(num_users)
    user[-1] = -1  # filling
    return UserBlock(
        user=user,
        history=rng.integers(0, NUM_ITEMS + 1, (num_users, 4)).astype(np.int32),
        targets=metrics.distinct(rng.integers(1, NUM_ITEMS + 1, (num_users, 3)).astype(np.int32)),
        hidden=metrics.distinct(
            rng.integers(1, NUM_ITEMS + 1, (num_users, num_hidden)).astype(np.int32)
        ),
    )


def _check(ranked, block, counts, scores, list_length):
    """Compares with a sorted list of everything that is not hidden."""
    for user in np.flatnonzero(block.is_user):
        hidden = set(block.hidden[user].tolist())
        order = sorted(
            set(range(1, NUM_ITEMS + 1)) - hidden,
            key=lambda row: (-scores[user, row], -counts[row], row),
        )
        shown = order[:list_length]
        assert ranked.rows[user].tolist() == shown + [-1] * (list_length - len(shown))
        for target, rank in zip(block.targets[user], ranked.ranks[user], strict=True):
            if target == -1:
                assert rank == -1
            elif target not in hidden:
                assert order[rank] == target


@pytest.mark.parametrize("list_length", [3, NUM_ITEMS])
@pytest.mark.parametrize("num_hidden", [0, 5, 40])
def test_order_is_score_then_count_then_row(num_hidden, list_length):
    rng = np.random.default_rng(num_hidden)
    counts = rng.integers(0, 3, NUM_ITEMS + 1)  # many ties
    block = _block(rng, num_hidden=num_hidden)
    # Half of the items have a score, and few different ones.
    scores = rng.integers(0, 4, (9, NUM_ITEMS + 1)) * rng.integers(0, 2, (9, NUM_ITEMS + 1))
    scores[:, 0] = 0
    ranker = ScoredRanker(counts, lambda _: sparse.csr_matrix(scores.astype(np.float32)))
    _check(ranker.rank(block, list_length), block, counts, scores, list_length)
    popularity = PopularityRanker(counts).rank(block, list_length)
    _check(popularity, block, counts, np.zeros_like(scores), list_length)


def _sequences(rng, num_users=15):
    return [rng.integers(1, NUM_ITEMS + 1, rng.integers(1, 12)).tolist() for _ in range(num_users)]


def _training_part(sequence):
    """Leave-one-out holds out two items of whoever has three."""
    return sequence[:-2] if len(sequence) >= 3 else sequence


def _blocks(store):
    options = {"max_length": 20, "hide_seen": False, "size": 4}
    return user_blocks(store, LEAVE_ONE_OUT, "test", **options)


def test_markov_counts_what_followed_the_last_item(tmp_path):
    sequences = [*_sequences(np.random.default_rng(3)), [NUM_ITEMS]]
    store = tiny_store(tmp_path / "store", sequences)
    followed = collections.Counter(
        pair for each in sequences for pair in itertools.pairwise(_training_part(each))
    )
    make = markov.make_scores(store, LEAVE_ONE_OUT)
    for block in _blocks(store):
        scores = make(block).toarray()
        for user in np.flatnonzero(block.is_user):
            last = sequences[block.user[user]][-2]  # the test input ends before the held-out item
            expected = [followed[last, row] for row in range(NUM_ITEMS + 1)]
            np.testing.assert_array_equal(scores[user], expected)


def test_item_knn_adds_cosines_to_the_recent_items(tmp_path):
    sequences = [*_sequences(np.random.default_rng(4)), [NUM_ITEMS]]
    store = tiny_store(tmp_path / "store", sequences)
    users_of = {
        row: {user for user, each in enumerate(sequences) if row in _training_part(each)}
        for row in range(1, NUM_ITEMS + 1)
    }

    def cosine(row, other):
        both = len(users_of[row] & users_of[other])
        return both / math.sqrt(len(users_of[row]) * len(users_of[other])) if both else 0.0

    make = item_knn.make_scores(store, LEAVE_ONE_OUT)
    for block in _blocks(store):
        scores = make(block).toarray()
        for user in np.flatnonzero(block.is_user):
            newest_first = sequences[block.user[user]][-2::-1]
            for row in range(1, NUM_ITEMS + 1):
                expected = sum(
                    cosine(own, row) / place
                    for place, own in enumerate(newest_first, start=1)
                    if own != row
                )
                assert scores[user, row] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("products", [1, 50, 10**6])
def test_neighbors_are_the_most_similar_however_the_products_are_cut(monkeypatch, products):
    monkeypatch.setattr(item_knn, "_PRODUCTS", products)
    has = (np.random.default_rng(5).random((20, 9)) < 0.3).astype(np.float32)
    has[:, 0] = 0  # padding
    num_users = [max(int(each), 1) for each in has.sum(0)]
    together = (has.T @ has).astype(int)
    np.fill_diagonal(together, 0)
    found = item_knn.cosine_neighbors(sparse.csr_matrix(has), 3).toarray()
    for row in range(9):
        # Exactly equal similarities prefer the lower row, whatever a float makes of them.
        square = [
            fractions.Fraction(int(together[row, other]) ** 2, num_users[row] * num_users[other])
            for other in range(9)
        ]
        best = sorted(range(9), key=lambda other: (-square[other], other))[:3]
        expected = np.zeros(9)
        expected[best] = [math.sqrt(square[other]) for other in best]
        np.testing.assert_allclose(found[row], expected, atol=1e-6)


def test_only_the_newest_training_items_count_as_together(tmp_path, monkeypatch):
    monkeypatch.setattr(item_knn, "_MAX_COUNTED_ITEMS", 2)
    store = tiny_store(tmp_path / "store", [[1, 2, 3, 4, 5], [3, 1, 1, 5]])
    (block,) = _blocks(store)
    # Of the first user items 2 and 3 count, of the second 3 and 1; both end on items of their own.
    neighbors = item_knn.make_scores(store, LEAVE_ONE_OUT)(block).toarray()
    assert neighbors[list(block.user).index(0), 1] == pytest.approx(1 / math.sqrt(2) / 2)


def test_too_much_to_count_is_left_out_with_a_reason(tmp_path, monkeypatch):
    store = tiny_store(tmp_path / "store", [[1, 2, 3, 4], [3]])
    assert markov.why_not(store) is None
    assert item_knn.why_not(store, LEAVE_ONE_OUT) is None
    monkeypatch.setattr(markov, "MAX_INTERACTIONS", 3)
    assert markov.why_not(store) == "more than 3 interactions"
    for limit, value, reason in (  # the training items are 1 2, and 3 of the short user
        ("MAX_PAIRS", 4, "more than 4 pairs of items that users have in training"),
        ("MAX_INTERACTIONS", 2, "more than 2 interactions"),
        ("MAX_ITEMS", 3, "more than 3 items"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(item_knn, limit, value + 1)
            assert item_knn.why_not(store, LEAVE_ONE_OUT) is None
            patch.setattr(item_knn, limit, value)
            assert item_knn.why_not(store, LEAVE_ONE_OUT) == reason
