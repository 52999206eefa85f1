"""Full-catalog ranking without a `[Q, V]` matrix: top-k and the ranks of given targets.

The table is swept in blocks of rows. Products are always full float32 ("highest"), because a rank
is exact or it is nothing. Of equal scores the lower row comes first; NaN is the lowest score.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from cutbce_ops._src import checks

# One block of scores: 64 queries take 4 MiB, small enough for the cache of a CPU.
BLOCK_ROWS = 16_384


def cut_top_k(
    queries: Array,
    embeddings: Array,
    k: int,
    *,
    bias: Array | None = None,
    exclude: Array | None = None,
    vocab_size: int | None = None,
) -> tuple[Array, Array]:
    """Best `k` rows of the table for each query by dot product, exactly.

    Args:
      queries: `[Q, D]` float.
      embeddings: `[V, D]` float.
      k: number of rows to return, 1 to `vocab_size`; static.
      bias: `[V]` float added to the scores, or None.
      exclude: `[Q, X]` integer rows that must not be returned (seen items, the padding row); rows
        outside the catalog (so also -1) are ignored.
      vocab_size: rows in use, None for all.

    Returns:
      Scores `[Q, k]` float32, descending, and rows `[Q, k]` int32. Where fewer than `k` rows
      remain after exclusion, scores end in -inf and rows in -1; a score that is NaN counts as -inf.

    Raises:
      ValueError: `k` exceeds the catalog, or shapes differ.
      TypeError: a dtype is wrong.

    Memory: O(Q (block + k)) beyond the inputs, with blocks of 16,384 rows.

    Example:
      >>> import jax.numpy as jnp, cutbce_ops
      >>> table = jnp.array([[1.0], [3.0], [2.0]])
      >>> scores, rows = cutbce_ops.cut_top_k(jnp.array([[1.0]]), table, 2)
      >>> rows.tolist()
      [[1, 2]]
    """
    vocab_size, exclude = _check(queries, embeddings, bias, exclude, vocab_size)
    queries, embeddings = jnp.asarray(queries), jnp.asarray(embeddings)
    k = checks.require_static_int("k", k)
    if not 1 <= k <= vocab_size:
        raise ValueError(f"`k` must lie in [1, {vocab_size}], the size of the catalog; got {k}.")
    num_queries = queries.shape[0]

    def add_block(best: tuple, start: Array, scores: Array) -> tuple:
        # Earlier (lower) rows stand first, and top_k prefers the first of equal scores.
        block_scores, block_columns = lax.top_k(scores, min(k, scores.shape[1]))
        all_scores = jnp.concatenate([best[0], block_scores], axis=1)
        all_rows = jnp.concatenate([best[1], block_columns + start], axis=1)
        scores, places = lax.top_k(all_scores, k)
        return scores, jnp.take_along_axis(all_rows, places, axis=1)

    nothing = (
        jnp.full((num_queries, k), -jnp.inf, jnp.float32),
        jnp.full((num_queries, k), -1, jnp.int32),
    )
    scores, rows = _for_each_block(
        add_block, nothing, queries, embeddings, bias, exclude, vocab_size
    )
    return scores, jnp.where(scores > -jnp.inf, rows, -1)


def cut_target_ranks(
    queries: Array,
    embeddings: Array,
    targets: Array,
    *,
    bias: Array | None = None,
    exclude: Array | None = None,
    vocab_size: int | None = None,
) -> Array:
    """Rank of each target among all rows, 0 for the best: what Hit@k, NDCG@k and MRR need.

    A rank is the number of rows, not excluded, that score higher than the target, or equally high
    from a lower row; a score that is NaN is the lowest. The table is swept twice, first for the
    scores of the targets, so that a target is compared with scores that were rounded like its own.

    Args:
      queries: `[Q, D]` float.
      embeddings: `[V, D]` float.
      targets: `[Q, L]` integer rows; rows outside the catalog (so also -1) are padding.
      bias: `[V]` float added to the scores, or None.
      exclude: `[Q, X]` integer rows that do not compete; an excluded target is ranked all the
        same, among the others.
      vocab_size: rows in use, None for all.

    Returns:
      `[Q, L]` int32; -1 for padding.

    Raises:
      ValueError: shapes differ.
      TypeError: a dtype is wrong.

    Memory: O(Q (block + L)) beyond the inputs, with blocks of 16,384 rows.

    Example:
      >>> import jax.numpy as jnp, cutbce_ops
      >>> table = jnp.array([[1.0], [3.0], [2.0]])
      >>> cutbce_ops.cut_target_ranks(jnp.array([[1.0]]), table, jnp.array([[1, 0, -1]])).tolist()
      [[0, 2, -1]]
    """
    vocab_size, exclude = _check(queries, embeddings, bias, exclude, vocab_size)
    queries, embeddings = jnp.asarray(queries), jnp.asarray(embeddings)
    checks.require_integer("targets", targets)
    _check_rows_matrix("targets", targets, queries)
    targets = checks.rows_or_padding(targets, vocab_size)

    def find_scores(found: Array, start: Array, scores: Array) -> Array:
        column = targets - start
        is_here = (column >= 0) & (column < scores.shape[1])
        here = jnp.take_along_axis(scores, jnp.clip(column, 0, scores.shape[1] - 1), axis=1)
        return jnp.where(is_here, here, found)

    unknown = jnp.full(targets.shape, -jnp.inf, jnp.float32)
    target_scores = _for_each_block(
        find_scores, unknown, queries, embeddings, bias, None, vocab_size
    )

    def count_better(ranks: Array, start: Array, scores: Array) -> Array:
        rows = start + jnp.arange(scores.shape[1], dtype=jnp.int32)

        def of_target(target: Array, score: Array) -> Array:  # [Q] each
            ties = (scores == score[:, None]) & (rows[None, :] < target[:, None])
            return jnp.sum((scores > score[:, None]) | ties, axis=1, dtype=jnp.int32)

        counts = lax.map(lambda pair: of_target(*pair), (targets.T, target_scores.T))
        return ranks + counts.T

    ranks = jnp.zeros(targets.shape, jnp.int32)
    ranks = _for_each_block(count_better, ranks, queries, embeddings, bias, exclude, vocab_size)
    return jnp.where(targets >= 0, ranks, -1)


def _for_each_block(visit: Callable, state, queries: Array, embeddings: Array,
                    bias: Array | None, exclude: Array | None, vocab_size: int):  # fmt: skip
    """Folds `visit(state, first row, scores [Q, rows])` over the table, excluded scores -inf."""
    block = min(BLOCK_ROWS, vocab_size)

    def visit_rows(state, start, num_rows: int):
        rows = lax.dynamic_slice_in_dim(embeddings, start, num_rows)
        scores = lax.dot_general(
            queries.astype(jnp.float32), rows.astype(jnp.float32), (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
        )  # fmt: skip
        if bias is not None:
            row_bias = lax.dynamic_slice_in_dim(bias, start, num_rows)
            scores = scores + row_bias.astype(jnp.float32)[None, :]
        if exclude is not None:
            column = exclude - start
            # A column outside the block must not wrap round from the end: send it past the end.
            column = jnp.where((column >= 0) & (column < num_rows), column, num_rows)
            query = jnp.arange(queries.shape[0])[:, None]
            scores = scores.at[query, column].set(-jnp.inf, mode="drop")
        # NaN is neither above nor below anything: left alone it would win every comparison.
        return visit(state, start, jnp.where(jnp.isnan(scores), -jnp.inf, scores))

    bias = None if bias is None else jnp.asarray(bias)
    state = lax.fori_loop(
        0, vocab_size // block, lambda i, state: visit_rows(state, i * block, block), state
    )
    tail = vocab_size % block
    return visit_rows(state, jnp.int32(vocab_size - tail), tail) if tail else state


def _check(
    queries: Array,
    embeddings: Array,
    bias: Array | None,
    exclude: Array | None,
    vocab_size: int | None,
) -> tuple[int, Array | None]:
    for name, array in (("queries", queries), ("embeddings", embeddings)):
        checks.require_float(name, array)
    if queries.ndim != 2 or embeddings.ndim != 2 or queries.shape[1] != embeddings.shape[1]:
        raise ValueError(
            "`queries` must have shape [Q, D] and `embeddings` [V, D]; "
            f"got {queries.shape} and {embeddings.shape}."
        )
    vocab_size = checks.resolve_vocab_size(vocab_size, embeddings.shape[0])
    if bias is not None:
        checks.require_float("bias", bias)
        checks.require_shape("bias", bias, embeddings.shape[:1], "the rows of `embeddings`")
    if exclude is None:
        return vocab_size, None
    checks.require_integer("exclude", exclude)
    _check_rows_matrix("exclude", exclude, queries)
    return vocab_size, checks.rows_or_padding(exclude, vocab_size)


def _check_rows_matrix(name: str, rows: Array, queries: Array) -> None:
    if rows.ndim != 2 or rows.shape[0] != queries.shape[0]:
        raise ValueError(
            f"`{name}` must have shape [{queries.shape[0]}, any] to match `queries`; "
            f"got {rows.shape}."
        )
