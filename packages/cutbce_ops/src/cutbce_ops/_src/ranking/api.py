"""Public functions: full-catalog ranking without a `[Q, V]` matrix."""

import jax.numpy as jnp
from jax import Array

from cutbce_ops._src import checks
from cutbce_ops._src.ranking import sharded
from cutbce_ops._src.ranking.blocks import Queries, Rows, sorted_exclusion
from cutbce_ops._src.sharded import num_global_rows
from cutbce_ops._src.sharding import LossSharding


def cut_top_k(
    queries: Array,
    embeddings: Array,
    k: int,
    *,
    bias: Array | None = None,
    exclude: Array | None = None,
    vocab_size: int | None = None,
    sharding: LossSharding | None = None,
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
      sharding: layout over a device mesh, see `LossSharding`; its `position_axes` split the
        queries. None for one device.

    Returns:
      Scores `[Q, k]` float32, descending, and rows `[Q, k]` int32. Where fewer than `k` rows
      remain after exclusion, scores end in -inf and rows in -1; a score that is NaN counts as -inf.

    Raises:
      ValueError: `k` exceeds the catalog, or shapes differ.
      TypeError: a dtype is wrong.

    Memory: O(Q k) and one block of at most 1,024 x 16,384 scores (64 MiB) beyond the inputs.

    Example:
      >>> import jax.numpy as jnp, cutbce_ops
      >>> table = jnp.array([[1.0], [3.0], [2.0]])
      >>> scores, rows = cutbce_ops.cut_top_k(jnp.array([[1.0]]), table, 2)
      >>> rows.tolist()
      [[1, 2]]
    """
    rows, exclude = _check(queries, embeddings, bias, exclude, vocab_size, sharding)
    k = checks.require_static_int("k", k)
    if not 1 <= k <= rows.vocab_size:
        raise ValueError(
            f"`k` must lie in [1, {rows.vocab_size}], the size of the catalog; got {k}."
        )
    scores, numbers = sharded.top_k(Queries(jnp.asarray(queries), exclude), rows, k, sharding)
    return scores, jnp.where(scores > -jnp.inf, numbers, -1)


def cut_target_ranks(
    queries: Array,
    embeddings: Array,
    targets: Array,
    *,
    bias: Array | None = None,
    exclude: Array | None = None,
    vocab_size: int | None = None,
    sharding: LossSharding | None = None,
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
      sharding: layout over a device mesh, see `LossSharding`; its `position_axes` split the
        queries. None for one device.

    Returns:
      `[Q, L]` int32; -1 for padding.

    Raises:
      ValueError: shapes differ.
      TypeError: a dtype is wrong.

    Memory: O(Q L) and one block of at most 1,024 x 16,384 scores (64 MiB) beyond the inputs.

    Example:
      >>> import jax.numpy as jnp, cutbce_ops
      >>> table = jnp.array([[1.0], [3.0], [2.0]])
      >>> cutbce_ops.cut_target_ranks(jnp.array([[1.0]]), table, jnp.array([[1, 0, -1]])).tolist()
      [[0, 2, -1]]
    """
    rows, exclude = _check(queries, embeddings, bias, exclude, vocab_size, sharding)
    checks.require_integer("targets", targets)
    _check_rows_matrix("targets", targets, queries)
    targets = checks.rows_or_padding(targets, rows.vocab_size)
    ranks = sharded.target_ranks(Queries(jnp.asarray(queries), exclude, targets), rows, sharding)
    return jnp.where(targets >= 0, ranks, -1)


def _check(
    queries: Array,
    embeddings: Array,
    bias: Array | None,
    exclude: Array | None,
    vocab_size: int | None,
    sharding: LossSharding | None,
) -> tuple[Rows, Array | None]:
    """The rows to rank, and the lists of excluded ones as the sweep wants them."""
    for name, array in (("queries", queries), ("embeddings", embeddings)):
        checks.require_float(name, array)
    if queries.ndim != 2 or embeddings.ndim != 2 or queries.shape[1] != embeddings.shape[1]:
        raise ValueError(
            "`queries` must have shape [Q, D] and `embeddings` [V, D]; "
            f"got {queries.shape} and {embeddings.shape}."
        )
    if 0 in embeddings.shape:
        raise ValueError(f"`embeddings` must not be empty; got {embeddings.shape}.")
    if sharding is not None and not isinstance(sharding, LossSharding):
        raise TypeError(
            f"`sharding` must be a LossSharding or None; got {type(sharding).__name__}."
        )
    num_rows = num_global_rows(embeddings, sharding)
    vocab_size = checks.resolve_vocab_size(vocab_size, num_rows)
    if bias is not None:
        checks.require_float("bias", bias)
        checks.require_shape("bias", bias, embeddings.shape[:1], "the rows of `embeddings`")
        bias = jnp.asarray(bias)
    if exclude is not None:
        checks.require_integer("exclude", exclude)
        _check_rows_matrix("exclude", exclude, queries)
        is_empty = exclude.shape[1] == 0
        rows = checks.rows_or_padding(exclude, vocab_size)
        exclude = None if is_empty else sorted_exclusion(rows)
    return Rows(jnp.asarray(embeddings), bias, None, vocab_size), exclude


def _check_rows_matrix(name: str, rows: Array, queries: Array) -> None:
    if rows.ndim != 2 or rows.shape[0] != queries.shape[0]:
        raise ValueError(
            f"`{name}` must have shape [{queries.shape[0]}, any] to match `queries`; "
            f"got {rows.shape}."
        )
