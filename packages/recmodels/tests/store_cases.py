"""Small sequence stores and an independent, slow statement of the splits, for tests."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from recmodels._src.atomic import atomic_folder
from recmodels._src.data.categories import CategoryPairs, match_categories
from recmodels._src.data.store import SequenceStore
from recmodels._src.data.store_writer import SequenceParts, write_store


@dataclasses.dataclass(frozen=True)
class Options:
    """The fields of a recipe that the pipeline reads."""

    protocol: str = "next-8"
    num_targets: int = 8
    max_length: int = 16
    batch_size: int = 4
    seed: int = 0
    time_gaps: bool = False


def tiny_store(
    path: Path,
    sequences: Sequence[Sequence[int] | np.ndarray],
    *,
    times: Sequence[Sequence[int] | np.ndarray] | None = None,
    categories: Sequence[Sequence[str]] | None = None,
) -> SequenceStore:
    """Writes and opens a store with these rows, one sequence per user.

    Args:
      path: the folder.
      sequences: rows of each user.
      times: seconds of each user's events; None leaves only their order.
      categories: names of each item, row 1 first; None writes a store without.
    """
    items = np.array([row for sequence in sequences for row in sequence], dtype=np.int32)
    lengths = np.array([len(sequence) for sequence in sequences])
    num_items = int(items.max())
    stamps = [range(n) for n in lengths] if times is None else times
    parts = SequenceParts(
        parts=[(items, np.concatenate([np.asarray(each, np.int64) for each in stamps]))],
        lengths=lengths,
        item_counts=np.bincount(items, minlength=num_items + 1)[1:],
        timestamps_kind="order" if times is None else "seconds",
        user_ids=pl.Series(np.arange(len(lengths)) + 100),
        item_ids=pl.Series(np.arange(num_items) * 10),
    )
    found = None
    if categories is not None:
        pairs = [(10 * n, name) for n, names in enumerate(categories) for name in names]
        pairs = pl.DataFrame(pairs, schema=["item", "category"], orient="row")
        found = match_categories(CategoryPairs("tiny", pairs, 0), parts.item_ids)
    with atomic_folder(path, overwrite=True) as folder:
        write_store(
            folder, parts, source={"name": "tiny"}, filters={}, skipped={}, categories=found
        )
    return SequenceStore.open(path)


def distinct_store(path: Path, lengths: Sequence[int]) -> SequenceStore:
    """A store in which every event has an item of its own.

    The item then says which event it is, so that a leak shows whatever the indexing.
    """
    bounds = np.concatenate([[0], np.cumsum(lengths)]) + 1
    return tiny_store(path, [range(a, b) for a, b in itertools.pairwise(bounds)])


def slow_training_pairs(sequence: Sequence[int], protocol: str) -> list[tuple[int, list[int]]]:
    """(input item, its targets) of one user with L = 8, written from the definition."""
    x, n = list(sequence), len(sequence)
    if protocol == "next-8" and n >= 27:
        return [(x[j], x[j + 1 : j + 9]) for j in range(n - 26)]
    if protocol == "leave-one-out" and n >= 3:
        x = x[:-2]
    return [(x[j], x[j + 1 : j + 9]) for j in range(len(x) - 1)]


def slow_evaluation(
    sequence: Sequence[int], protocol: str, part: str
) -> tuple[list[int], list[int]]:
    """(input, targets) of one evaluated user with L = 8, written from the definition."""
    x, n = list(sequence), len(sequence)
    if protocol == "next-8":
        return (x[: n - 8], x[n - 8 :]) if part == "test" else (x[: n - 17], x[n - 17 : n - 9])
    return (x[:-1], x[-1:]) if part == "test" else (x[:-2], [x[-2]])
