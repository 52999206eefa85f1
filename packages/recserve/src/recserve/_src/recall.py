"""How much approximate search finds of what exact search finds, and how long each takes."""

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recserve._src.errors import UserError
from recserve._src.exact import Neighbors
from recserve._src.recommender import Recommender, Searcher

_EXACT_TIMINGS = 100  # exact search is slow on a large catalog, and its time hardly varies
_WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class RecallReport:
    """Result of `measure_recall`."""

    searcher: str
    """What was measured: `"scann"` or `"exact"`."""
    query_source: str
    """`"user histories"` or, in a model without any, `"random item vectors"`."""
    num_queries: int
    """Queries measured."""
    k: int
    """Results per query."""
    seen_hidden: bool
    """Whether the items of each history were hidden, as in serving."""
    ann_recall_at_k: float
    """Share of the exact results that the searcher returned."""
    p50_ms: float
    """Median time of one single-query search; encoding the history is not part of it."""
    p99_ms: float
    """99th percentile of the same."""
    exact_p50_ms: float
    """Median time of one single-query exact search."""
    exact_p99_ms: float
    """99th percentile of the same."""


def measure_recall(
    index_path: str | os.PathLike[str],
    *,
    k: int = 8,
    num_queries: int = 1000,
    seed: int = 0,
    show_progress: bool = False,
) -> RecallReport:
    """Compares the searcher of an index folder with exact search, on queries like real ones.

    The queries are the encoded histories of users drawn at random, with seen items hidden as the
    model says; in a model without histories they are random item vectors.

    Args:
      index_path: folder that `build` has written.
      k: results per query.
      num_queries: queries to draw, without repetition; at most one per user or item.
      seed: of the draw.
      show_progress: show a progress bar on stderr if it is a terminal.

    Returns:
      Recall against exact search, and latencies in milliseconds.

    Raises:
      UserError: as `Recommender.open` and `Recommender.recommend`, or `num_queries` or
        `seed` is too small.
    """
    for name, value, least in (("num_queries", num_queries, 1), ("seed", seed, 0)):
        if value < least:
            raise UserError(f"`{name}` must be at least {least}; got {value}")
    recommender = Recommender.open(index_path)
    recommender.check_k(k)
    source, queries, hidden = _draw(recommender, num_queries, np.random.default_rng(seed))
    found, ann_ms = _timed(recommender.searcher, queries, k, hidden, show_progress)
    exact_searcher = recommender.exact_searcher
    some = slice(_EXACT_TIMINGS)
    _, exact_ms = _timed(exact_searcher, queries[some], k, hidden[some], show_progress)
    wanted = exact_searcher.search(queries, k, hidden)
    return RecallReport(
        searcher=recommender.searcher_kind,
        query_source=source,
        num_queries=len(queries),
        k=k,
        seen_hidden=any(len(rows) > 0 for rows in hidden),
        ann_recall_at_k=_recall(found, wanted),
        p50_ms=float(np.quantile(ann_ms, 0.5)),
        p99_ms=float(np.quantile(ann_ms, 0.99)),
        exact_p50_ms=float(np.quantile(exact_ms, 0.5)),
        exact_p99_ms=float(np.quantile(exact_ms, 0.99)),
    )


def _draw(
    recommender: Recommender, num_queries: int, rng: np.random.Generator
) -> tuple[str, NDArray[np.float32], list[NDArray[np.int32]]]:
    """Returns where the queries come from, `[Q, Dq]` queries, and the rows hidden from each."""
    catalog = recommender.catalog
    users = np.flatnonzero(np.diff(catalog.history_offsets))
    if not len(users):
        num_items = catalog.header.num_items
        rows = 1 + rng.choice(num_items, min(num_queries, num_items), replace=False)
        queries = catalog.item_vectors[rows]
        return "random item vectors", queries, [np.empty(0, np.int32)] * len(rows)
    chosen = rng.choice(users, min(num_queries, len(users)), replace=False)
    histories = [catalog.history(user) for user in chosen]
    times = catalog.times(chosen)
    queries, hidden = recommender.encode_rows(histories, times, exclude_seen=None)
    return "user histories", queries, hidden


def _timed(
    searcher: Searcher,
    queries: NDArray[np.float32],
    k: int,
    hidden: Sequence[NDArray[np.int32]],
    show_progress: bool,
) -> tuple[list[Neighbors], list[float]]:
    """Searches one query at a time and returns results and milliseconds."""
    from tqdm import tqdm  # here, because only measuring shows it

    for i in range(min(_WARM_UP, len(queries))):
        searcher.search(queries[i : i + 1], k, hidden[i : i + 1])
    results: list[Neighbors] = []
    times_ms: list[float] = []
    bar: Any = tqdm(range(len(queries)), disable=None if show_progress else True, leave=False)
    for i in bar:
        started = time.perf_counter()
        results += searcher.search(queries[i : i + 1], k, hidden[i : i + 1])
        times_ms.append((time.perf_counter() - started) * 1000)
    return results, times_ms


def _recall(found: Sequence[Neighbors], wanted: Sequence[Neighbors]) -> float:
    pairs = zip(found, wanted, strict=True)
    num_found = sum(len(np.intersect1d(some.rows, all_.rows)) for some, all_ in pairs)
    num_wanted = sum(len(neighbors.rows) for neighbors in wanted)
    return num_found / num_wanted if num_wanted else 1.0
