"""One device's part of the ranking: its rows against its queries, one block of scores at a time.

Products are always full float32 ("highest"), because a rank is exact or it is nothing. Of equal
scores the lower row comes first; NaN is the lowest score.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

# A block of scores, queries x rows, is at most 64 MiB; 64 queries take 4 MiB, which fits the cache
# of a CPU.
BLOCK_QUERIES = 1024
BLOCK_ROWS = 16_384
_LAST = 2**31 - 1  # sorts behind every row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Queries:
    """What one query brings along; leading axis Q throughout.

    Attributes:
      vectors: `[Q, D]` float.
      exclude: `[Q, X]` int32 global rows that do not compete, ascending, then `_LAST`; or None.
      targets: `[Q, L]` int32 global rows, negative = padding; or None.
      target_scores: `[Q, L]` float32 or None.
    """

    vectors: Array
    exclude: Any = None
    targets: Any = None
    target_scores: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one device.

    Attributes:
      embeddings: `[V, D]` float.
      bias: `[V]` float or None.
      offset: `[]` int32, global number of row 0; None for a whole table.
      vocab_size: global number of rows in use (static).
    """

    embeddings: Array
    bias: Any
    offset: Any
    vocab_size: int = dataclasses.field(metadata={"static": True})

    @property
    def num_rows(self) -> int:
        """Rows to visit: of a whole table those in use, of a shard all, the unused ones masked."""
        num_rows = self.embeddings.shape[0]
        return min(num_rows, self.vocab_size) if self.offset is None else num_rows

    @property
    def first(self) -> Array:
        """`[]` int32 global number of row 0."""
        return jnp.int32(0) if self.offset is None else self.offset


def sorted_exclusion(exclude: Array | None) -> Array | None:
    """Turns `[Q, X]` rows (negative = none) into the form that `Queries` wants."""
    if exclude is None:
        return None
    return jnp.sort(jnp.where(exclude < 0, _LAST, exclude), axis=1)


def top_k(queries: Queries, rows: Rows, k: int) -> tuple[Array, Array]:
    """Best `k` of these rows for each query: scores `[Q, k]`, descending, and global rows.

    Where fewer than `k` rows compete, scores end in -inf with any row.
    """

    def of_chunk(queries: Queries) -> tuple[Array, Array]:
        def add_block(best: tuple, start: Array, scores: Array) -> tuple:
            # Earlier (lower) rows stand first, and top_k prefers the first of equal scores.
            block_scores, columns = lax.top_k(scores, min(k, scores.shape[1]))
            all_scores = jnp.concatenate([best[0], block_scores], axis=1)
            all_rows = jnp.concatenate([best[1], rows.first + start + columns], axis=1)
            best_scores, places = lax.top_k(all_scores, k)
            return best_scores, jnp.take_along_axis(all_rows, places, axis=1)

        shape = (queries.vectors.shape[0], k)
        nothing = (
            jnp.full_like(queries.vectors, -jnp.inf, jnp.float32, shape),
            jnp.full_like(queries.vectors, -1, jnp.int32, shape),
        )
        return _for_each_block(add_block, nothing, queries, rows, off=-jnp.inf)

    return _for_each_chunk(of_chunk, queries)


def target_scores(queries: Queries, rows: Rows) -> Array:
    """Scores `[Q, L]` of the targets among these rows, -inf for all others.

    They come out of the same blocks as the scores that they are compared with later, so that both
    are rounded alike.
    """

    def of_chunk(queries: Queries) -> Array:
        local = queries.targets - rows.first

        def find(found: Array, start: Array, scores: Array) -> Array:
            column = local - start
            is_here = (column >= 0) & (column < scores.shape[1])
            column = jnp.clip(column, 0, scores.shape[1] - 1)
            return jnp.where(is_here, jnp.take_along_axis(scores, column, axis=1), found)

        unknown = jnp.full_like(queries.vectors, -jnp.inf, jnp.float32, queries.targets.shape)
        competing = dataclasses.replace(queries, exclude=None)
        return _for_each_block(find, unknown, competing, rows, off=-jnp.inf)

    return _for_each_chunk(of_chunk, queries)


def count_better(queries: Queries, rows: Rows) -> Array:
    """Number `[Q, L]` int32 of these rows that compete and come before the target."""

    def of_chunk(queries: Queries) -> Array:
        def add_block(counts: Array, start: Array, scores: Array) -> Array:
            columns = jnp.arange(scores.shape[1], dtype=jnp.int32)

            def of_target(target: Array, score: Array) -> Array:  # [Q] each
                is_lower_row = columns[None, :] < (target - rows.first - start)[:, None]
                ties = (scores == score[:, None]) & is_lower_row
                return jnp.sum((scores > score[:, None]) | ties, axis=1, dtype=jnp.int32)

            pairs = (queries.targets.T, queries.target_scores.T)
            return counts + lax.map(lambda pair: of_target(*pair), pairs).T

        zero = jnp.full_like(queries.vectors, 0, jnp.int32, queries.targets.shape)
        # NaN is neither above nor equal to anything: rows that are off are never counted.
        return _for_each_block(add_block, zero, queries, rows, off=jnp.nan)

    return _for_each_chunk(of_chunk, queries)


def _for_each_chunk(visit: Callable, queries: Queries) -> Any:
    """Applies `visit` to equal chunks of queries, one after another, and joins the results."""
    num_queries = queries.vectors.shape[0]
    num_chunks = math.ceil(num_queries / BLOCK_QUERIES)
    if num_chunks <= 1:
        return visit(queries)
    chunk = math.ceil(num_queries / num_chunks)
    fill = num_chunks * chunk - num_queries

    def cut(array: Array) -> Array:
        filled = jnp.pad(array, ((0, fill), (0, 0)))
        return filled.reshape(num_chunks, chunk, array.shape[1])

    found = lax.map(visit, jax.tree.map(cut, queries))
    return jax.tree.map(lambda array: array.reshape(-1, array.shape[-1])[:num_queries], found)


def _for_each_block(visit: Callable, state: Any, queries: Queries, rows: Rows, off: float) -> Any:
    """Folds `visit(state, local first row, scores [Q, rows])`; rows that are out score `off`."""
    num_rows = rows.num_rows
    block = min(BLOCK_ROWS, num_rows)
    cursor = None if queries.exclude is None else _count_below(queries.exclude, rows.first)

    def visit_rows(carry: tuple, start: Array, size: int) -> tuple:
        state, cursor = carry
        scores = _scores(queries.vectors, rows, start, size)
        # NaN is neither above nor below anything: left alone it would win every comparison.
        scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
        if rows.offset is not None:
            in_catalog = rows.offset + start + jnp.arange(size) < rows.vocab_size
            scores = jnp.where(in_catalog[None, :], scores, off)
        if queries.exclude is not None:
            scores, cursor = _take_out(scores, queries.exclude, cursor, rows.first + start, off)
        return visit(state, start, scores), cursor

    carry = lax.fori_loop(
        0, num_rows // block, lambda i, carry: visit_rows(carry, i * block, block), (state, cursor)
    )
    tail = num_rows % block
    if tail:
        carry = visit_rows(carry, jnp.int32(num_rows - tail), tail)
    return carry[0]


def _scores(vectors: Array, rows: Rows, start: Array, size: int) -> Array:
    block = lax.dynamic_slice_in_dim(rows.embeddings, start, size)
    scores = lax.dot_general(
        vectors.astype(jnp.float32), block.astype(jnp.float32), (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
    )  # fmt: skip
    if rows.bias is None:
        return scores
    bias = lax.dynamic_slice_in_dim(rows.bias, start, size)
    return scores + bias.astype(jnp.float32)[None, :]


def _take_out(
    scores: Array, exclude: Array, cursor: Array, first: Array, off: float
) -> tuple[Array, Array]:
    """Sets the scores of excluded rows to `off` and moves each query's cursor past the block.

    The lists are sorted, so each block looks at its own entries only. Writing the whole list into
    every block would cost [Q, X] scattered writes for each, more than the products do.
    """
    num_queries, size = scores.shape
    query = jnp.arange(num_queries)

    def entry(cursor: Array) -> Array:
        # A cursor past the end of its list reads `_LAST`: without that the loop would not end.
        next_row = jnp.take_along_axis(
            exclude, cursor[:, None], axis=1, mode="fill", fill_value=_LAST
        )
        return next_row[:, 0] - first

    def any_left(state: tuple) -> Array:
        return jnp.any(entry(state[1]) < size)

    def take_one(state: tuple) -> tuple:
        scores, cursor = state
        column = entry(cursor)
        is_here = column < size
        column = jnp.where(is_here, column, size)  # past the end: dropped
        scores = scores.at[query, column].set(off, mode="drop", unique_indices=True)
        return scores, cursor + is_here.astype(jnp.int32)

    return lax.while_loop(any_left, take_one, (scores, cursor))


def _count_below(exclude: Array, first: Array) -> Array:
    """Where the list of each query reaches the rows from `first` on: `[Q]` int32."""
    return jnp.sum(exclude < first, axis=1, dtype=jnp.int32)
