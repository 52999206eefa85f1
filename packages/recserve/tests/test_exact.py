"""Exact search against a plain float64 NumPy statement."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recserve._src import exact
from recserve._src.errors import UserError
from recserve._src.exact import ExactSearcher

NOTHING = np.empty(0, np.int32)


def expected(query, vectors, k, hidden):
    """Returns rows and scores by sorting every row."""
    scores = (vectors.astype(np.float64) @ query.astype(np.float64)).astype(np.float32)
    rows = [row for row in range(1, len(vectors)) if row not in set(hidden.tolist())]
    rows = sorted(rows, key=lambda row: (-scores[row], row))[:k]
    return rows, scores[rows].tolist()


def table(items):
    """Returns `items` below a zero padding row."""
    return np.concatenate([np.zeros((1, items.shape[1])), items]).astype(np.float32)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_items=st.integers(1, 90),
    vector_dim=st.integers(1, 9),
    num_queries=st.integers(1, 70),
    num_levels=st.integers(1, 5),
    data=st.data(),
)
def test_equals_sorting_everything(seed, num_items, vector_dim, num_queries, num_levels, data):
    # Few integer levels make ties the rule; small blocks make them cross block boundaries.
    rng = np.random.default_rng(seed)
    vectors = table(rng.integers(-num_levels, num_levels + 1, (num_items, vector_dim)))
    shape = (num_queries, vector_dim)
    queries = rng.integers(-num_levels, num_levels + 1, shape).astype(np.float32)
    k = data.draw(st.integers(1, num_items))
    hidden = [
        np.unique(rng.integers(1, num_items + 1, rng.integers(0, num_items + 1))).astype(np.int32)
        for _ in range(num_queries)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "_BLOCK_ROWS", data.draw(st.integers(1, 100)))
        results = ExactSearcher(vectors).search(queries, k, hidden)
    for query, hidden_rows, result in zip(queries, hidden, results, strict=True):
        rows, scores = expected(query, vectors, k, hidden_rows)
        assert result.rows.tolist() == rows
        assert result.scores.tolist() == scores


@pytest.mark.parametrize("num_queries", [1, 3, 40])
@pytest.mark.parametrize("vector_dim", [33, 64, 257])
def test_equal_items_tie_by_lower_row(num_queries, vector_dim):
    # BLAS rounds the last rows of a table differently, so these copies do not tie in float32.
    rng = np.random.default_rng(1)
    vectors = table(np.repeat(rng.normal(size=(1, vector_dim)), 1003, axis=0))
    queries = rng.normal(size=(num_queries, vector_dim)).astype(np.float32)
    for result in ExactSearcher(vectors).search(queries, 20, [NOTHING] * num_queries):
        assert result.rows.tolist() == list(range(1, 21))
        assert len(set(result.scores.tolist())) == 1


def test_answer_does_not_depend_on_the_batch(toys):
    vectors = toys.vectors(5000, 33)
    queries = np.random.default_rng(2).normal(size=(67, 33)).astype(np.float32)
    searcher = ExactSearcher(vectors)
    together = searcher.search(queries, 50, [NOTHING] * len(queries))
    for query, result in zip(queries, together, strict=True):
        alone = searcher.search(query[None], 50, [NOTHING])[0]
        assert alone.rows.tolist() == result.rows.tolist()
        assert alone.scores.tolist() == result.scores.tolist()


def test_negative_scores_never_lose_to_the_padding_row():
    vectors = table(-np.ones((5, 3)))
    (result,) = ExactSearcher(vectors).search(np.ones((1, 3), np.float32), 5, [NOTHING])
    assert result.rows.tolist() == [1, 2, 3, 4, 5]
    assert result.scores.tolist() == [-3.0] * 5


def test_everything_hidden_gives_nothing():
    vectors = table(np.ones((4, 2)))
    hidden = [np.arange(1, 5, dtype=np.int32)]
    (result,) = ExactSearcher(vectors).search(np.ones((1, 2), np.float32), 3, hidden)
    assert len(result.rows) == len(result.scores) == 0


def test_no_query_gives_no_result():
    assert ExactSearcher(table(np.ones((4, 2)))).search(np.empty((0, 2), np.float32), 3, []) == []


def test_scores_that_could_overflow_are_refused():
    vectors = table(np.full((4, 2), 1e30))
    with pytest.raises(UserError, match="a score could overflow float32"):
        ExactSearcher(vectors).search(np.full((1, 2), 1e30, np.float32), 3, [NOTHING])
