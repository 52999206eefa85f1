"""What `bench_training.py` trains on: sizes of known data sets, filled with generated events."""

import dataclasses
from pathlib import Path

import numpy as np
import polars as pl

import recmodels
from recmodels import Recipe


@dataclasses.dataclass(frozen=True)
class Shape:
    """A data set's sizes and a recipe for it."""

    recipe: Recipe
    num_users: int
    num_items: int
    # Users have a minimum of events and a log-normal number more.
    min_length: int
    log_mean: float
    log_deviation: float


# Both halves of the comparison train the same model, so what counts is the sizes of the data sets
# that recommenders are published on: Amazon Beauty (5-core) has 22,363 users with 8.9 events each,
# nine in ten of whom fill no window of 20; MovieLens-1M has 6,040 users with 166 events.
SHAPES = {
    "beauty": Shape(
        Recipe(
            name="beauty", protocol="leave-one-out", num_targets=1, max_length=20, dropout=0.5,
            batch_size=256,
        ),
        num_users=22_363, num_items=12_101, min_length=5, log_mean=0.8, log_deviation=1.0,
    ),
    "ml-1m": Shape(
        Recipe(name="ml-1m", protocol="next-8", max_length=100, batch_size=64),
        num_users=6_040, num_items=3_416, min_length=20, log_mean=4.3, log_deviation=1.1,
    ),
    "large": Shape(
        Recipe(name="large", protocol="next-8", max_length=50, batch_size=16),
        num_users=10_000, num_items=100_000, min_length=20, log_mean=4.3, log_deviation=1.1,
    ),
}  # fmt: skip


def write_store(shape: Shape, folder: Path) -> Path:
    """Generates events, every item at least once, and prepares them; returns the store's path."""
    rng = np.random.default_rng(0)
    more = np.exp(rng.normal(shape.log_mean, shape.log_deviation, shape.num_users))
    lengths = shape.min_length + np.minimum(more, 2_000).astype(np.int64)
    num_events = int(lengths.sum())
    # Popularity by Zipf's law with exponent 1.
    items = (np.exp(rng.random(num_events) * np.log(shape.num_items + 1)) - 1).astype(np.int64)
    items[rng.choice(num_events, shape.num_items, replace=False)] = np.arange(shape.num_items)
    events = {"user": np.repeat(np.arange(shape.num_users), lengths), "item": items}
    pl.DataFrame(events).write_parquet(folder / "events.parquet")
    recmodels.prepare(
        folder / "events.parquet", folder / "store", format="parquet", user="user", item="item"
    )
    return folder / "store"
