"""Ranking over a mesh: every device ranks its own rows; candidates and counts travel, not scores.

Queries that share their axes with rows are gathered, since each must meet every row. A top-k
exchanges `k` candidates for each query and row shard; ranks exchange the targets' scores and the
counts.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array, lax

from cutbce_ops._src import sharded
from cutbce_ops._src.ranking import blocks
from cutbce_ops._src.ranking.blocks import Queries, Rows
from cutbce_ops._src.sharding import LossSharding


def top_k(
    queries: Queries, rows: Rows, k: int, sharding: LossSharding | None
) -> tuple[Array, Array]:
    """Best `k` rows of the whole table, on one device or over a mesh; see `blocks.top_k`."""
    if sharding is None:
        _require_one_device(queries, rows)
        queries, rows = sharded.vary_alike((queries, rows))
        return blocks.top_k(queries, rows, k)

    def of_shard(queries: Queries, rows: Rows) -> tuple[Array, Array]:
        found = blocks.top_k(queries, rows, min(k, rows.num_rows))
        scores, numbers = jax.tree.map(
            partial(sharded.exchange_candidates, sharding=sharding), found
        )
        # Shards come in any order here, so equal scores are ordered by row as a second key.
        scores, numbers = lax.sort((-scores, numbers), dimension=1, num_keys=2)
        return -scores[:, :k], numbers[:, :k]

    return _on_shards(of_shard, queries, rows, sharding)


def target_ranks(queries: Queries, rows: Rows, sharding: LossSharding | None) -> Array:
    """Number `[Q, L]` of rows of the whole table that come before each target."""
    if sharding is None:
        _require_one_device(queries, rows)
        queries, rows = sharded.vary_alike((queries, rows))
        return _ranks(queries, rows)

    def of_shard(queries: Queries, rows: Rows) -> Array:
        counts = _ranks(queries, rows, sharding.vocabulary_names)
        return sharded.reduce_positions(counts, sharding)

    return _on_shards(of_shard, queries, rows, sharding)


def _require_one_device(queries: Queries, rows: Rows) -> None:
    sharded.require_no_placement(queries=queries.vectors, embeddings=rows.embeddings)


def _ranks(queries: Queries, rows: Rows, row_axes: tuple[str, ...] = ()) -> Array:
    found = sharded.max_over(blocks.target_scores(queries, rows), row_axes)
    return blocks.count_better(dataclasses.replace(queries, target_scores=found), rows)


def _on_shards(of_shard: Callable, queries: Queries, rows: Rows, sharding: LossSharding) -> Any:
    """Lays queries and rows out, lets every device rank its rows, and cuts the fill off."""
    given = queries.vectors
    queries = jax.tree.map(partial(sharded.lay_out_positions, sharding=sharding), queries)
    embeddings, bias = jax.tree.map(
        partial(sharded.lay_out_rows, sharding=sharding), (rows.embeddings, rows.bias)
    )

    def body(queries: Queries, embeddings: Array, bias: Array | None) -> Any:
        queries, embeddings, bias = sharded.vary_alike((queries, embeddings, bias), sharding.names)
        queries = jax.tree.map(partial(sharded.gather_positions, sharding=sharding), queries)
        offset = sharded.first_row(embeddings.shape[0], sharding)
        found = of_shard(queries, Rows(embeddings, bias, offset, rows.vocab_size))
        return jax.tree.map(
            partial(sharded.same_everywhere, axes=sharding.position_replica_names), found
        )

    run = sharded.run_on_shards(
        body, sharding,
        (sharding.position_spec(), sharding.vocabulary_spec(), sharding.vocabulary_spec()),
        sharding.position_spec(),
    )  # fmt: skip
    found = run(queries, embeddings, bias)
    return jax.tree.map(partial(sharded.restore_positions, like=given, sharding=sharding), found)
