"""Top-k and ranks against a full sort in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cutbce_ops
from cutbce_ops._src.ranking import blocks


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 37)  # several blocks and a ragged last one
    monkeypatch.setattr(blocks, "BLOCK_QUERIES", 4)  # and two chunks of queries


def make(num_queries=6, vocab_size=200, dim=8, num_excluded=9, seed=0):
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(rng.normal(size=(num_queries, dim)), jnp.float32),
        jnp.asarray(rng.normal(size=(vocab_size, dim)), jnp.float32),
        jnp.asarray(rng.normal(size=vocab_size), jnp.float32),
        jnp.asarray(rng.integers(-3, vocab_size + 3, (num_queries, num_excluded)), jnp.int32),
    )


@pytest.mark.parametrize("k", [1, 8, 40, 150])
def test_top_k_equals_a_full_sort(k: int):
    queries, table, bias, exclude = make()
    scores, rows = cutbce_ops.cut_top_k(
        queries, table, k, bias=bias, exclude=exclude, vocab_size=190
    )
    want = oracle.scores(queries, table, bias, exclude, 190)
    order = np.argsort(-want, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(rows, order)
    np.testing.assert_allclose(scores, np.take_along_axis(want, order, 1), rtol=1e-5, atol=1e-5)


def test_top_k_without_enough_rows_ends_in_minus_one():
    queries, table, _, _ = make(num_queries=1, vocab_size=40)
    exclude = jnp.arange(37)[None]
    scores, rows = cutbce_ops.cut_top_k(queries, table, 5, exclude=exclude)
    assert sorted(rows[0, :3].tolist()) == [37, 38, 39]
    assert rows[0, 3:].tolist() == [-1, -1]
    assert scores[0, 3:].tolist() == [-np.inf, -np.inf]


def test_equal_scores_are_ordered_by_row():
    queries, table = jnp.ones((1, 1)), jnp.ones((100, 1))
    _, rows = cutbce_ops.cut_top_k(queries, table, 60)
    assert rows[0].tolist() == list(range(60))
    targets = jnp.array([[0, 36, 37, 99]])
    ranks = cutbce_ops.cut_target_ranks(queries, table, targets)
    assert ranks.tolist() == [[0, 36, 37, 99]]


@pytest.mark.parametrize("with_exclusion", [False, True])
def test_ranks_equal_positions_in_a_full_sort(with_exclusion: bool):
    queries, table, bias, exclude = make()
    exclude = exclude if with_exclusion else None
    targets = jnp.asarray(np.random.default_rng(3).integers(-2, 202, (6, 5)), jnp.int32)
    ranks = cutbce_ops.cut_target_ranks(queries, table, targets, bias=bias, exclude=exclude)
    own = oracle.scores(queries, table, bias)
    others = oracle.scores(queries, table, bias, exclude)
    for query in range(6):
        for place in range(5):
            target = int(targets[query, place])
            rank = int(ranks[query, place])
            if 0 <= target < 200:
                assert rank == (others[query] > own[query, target]).sum()
            else:
                assert rank == -1
    assert ranks.dtype == jnp.int32


@functools.partial(jax.jit, static_argnums=4)
def ranks_of_top_k(queries, table, bias, exclude, k):
    _, rows = cutbce_ops.cut_top_k(queries, table, k, bias=bias, exclude=exclude)
    return rows, cutbce_ops.cut_target_ranks(queries, table, rows, bias=bias, exclude=exclude)


@settings(max_examples=5)
@given(seed=st.integers(0, 50), k=st.sampled_from([1, 7, 60]))
def test_ranks_agree_with_top_k(seed: int, k: int):
    queries, table, bias, exclude = make(vocab_size=60, seed=seed)
    rows, ranks = ranks_of_top_k(queries, table, bias, exclude, k)
    want = np.where(np.asarray(rows) >= 0, np.arange(k)[None, :], -1)
    np.testing.assert_array_equal(ranks, want)


def test_nan_is_the_lowest_score():
    queries, table, _, _ = make()
    table = table.at[5].set(jnp.nan)
    queries = queries.at[2].set(jnp.nan)
    targets = jnp.full((6, 1), 5)
    ranks = cutbce_ops.cut_target_ranks(queries, table, targets)
    assert ranks[0, 0] == 199  # every other row is better
    _, rows = cutbce_ops.cut_top_k(queries, table, 200)
    assert 5 not in rows[0, :199]
    assert (rows[2] == -1).all()


def test_bfloat16_tables_are_ranked_in_float32():
    queries, table, _, _ = make()
    half = table.astype(jnp.bfloat16)
    _, rows = cutbce_ops.cut_top_k(queries, half, 20)
    want = oracle.scores(queries, half.astype(jnp.float32))
    np.testing.assert_array_equal(rows, np.argsort(-want, axis=1, kind="stable")[:, :20])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": 0}, ValueError, r"`k` must lie in \[1, 200\], the size of the catalog; got 0"),
        ({"k": 201}, ValueError, r"`k` must lie in \[1, 200\].*got 201"),
        ({"k": 2.0}, TypeError, "`k` must be a static Python int.*got float"),
        (
            {"queries": jnp.zeros((6, 0)), "embeddings": jnp.zeros((200, 0))},
            ValueError,
            r"`embeddings` must not be empty; got \(200, 0\)",
        ),
        ({"embeddings": jnp.zeros((0, 8)), "bias": None}, ValueError, "`embeddings` must not be"),
        ({"vocab_size": 201}, ValueError, r"`vocab_size` must lie in \[1, 200\]"),
        ({"exclude": jnp.zeros((5, 2), jnp.int32)}, ValueError, r"`exclude`.*\[6, any\].*\(5, 2\)"),
        ({"exclude": jnp.zeros((6, 2))}, TypeError, "`exclude` must hold integer"),
        ({"queries": jnp.zeros((6, 7))}, ValueError, r"got \(6, 7\) and \(200, 8\)"),
        ({"bias": jnp.zeros(3)}, ValueError, r"`bias` must have shape \(200,\)"),
    ],
)
def test_top_k_errors(changes, error, message):
    queries, table, bias, _ = make()
    arguments = {"queries": queries, "embeddings": table, "k": 3, "bias": bias} | changes
    with pytest.raises(error, match=message):
        cutbce_ops.cut_top_k(**arguments)


def test_target_ranks_errors():
    queries, table, _, _ = make()
    with pytest.raises(ValueError, match=r"`targets` must have shape \[6, any\]"):
        cutbce_ops.cut_target_ranks(queries, table, jnp.zeros((4, 2), jnp.int32))
    with pytest.raises(TypeError, match="`targets` must hold integer"):
        cutbce_ops.cut_target_ranks(queries, table, jnp.zeros((6, 2)))


def test_excluded_rows_do_not_tie_with_a_nan_target():
    queries, table, _, _ = make()
    table = table.at[5].set(jnp.nan)
    exclude = jnp.tile(jnp.arange(3), (6, 1))
    ranks = cutbce_ops.cut_target_ranks(queries, table, jnp.full((6, 1), 5), exclude=exclude)
    assert ranks[:, 0].tolist() == [196] * 6  # every other row that competes


def test_a_chunk_filled_up_with_queries_comes_to_an_end():
    """5 queries in chunks of 3: the sixth excludes rows that lie before every later block."""
    queries, table, bias, exclude = make(num_queries=5)
    rows, ranks = ranks_of_top_k(queries, table, bias, exclude, 8)
    want = oracle.scores(queries, table, bias, exclude)
    np.testing.assert_array_equal(rows, np.argsort(-want, axis=1, kind="stable")[:, :8])
    assert ranks.tolist() == [list(range(8))] * 5


def test_an_exclusion_list_without_columns_excludes_nothing():
    queries, table = jnp.ones((3, 8)), jnp.ones((30, 8))
    nothing = jnp.ones((3, 0), jnp.int32)
    _, rows = cutbce_ops.cut_top_k(queries, table, 3, exclude=nothing)
    assert rows.tolist() == [[0, 1, 2]] * 3
    ranks = cutbce_ops.cut_target_ranks(queries, table, jnp.full((3, 1), 4), exclude=nothing)
    assert ranks.tolist() == [[4]] * 3
