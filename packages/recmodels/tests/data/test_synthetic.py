"""The generator: published schema, repeatable, worth learning."""

import numpy as np
import polars as pl
import pytest

from recmodels._src.data.popularity import popularity_counts
from recmodels._src.data.prepare import prepare_synthetic
from recmodels._src.data.splits import Split
from recmodels._src.data.store import SequenceStore
from recmodels._src.data.synthetic import write_synthetic_interactions
from recmodels._src.errors import UserError


@pytest.fixture(scope="module")
def listens(tmp_path_factory) -> pl.DataFrame:
    """Generated events."""
    path = tmp_path_factory.mktemp("synthetic") / "listens.parquet"
    write_synthetic_interactions(path, num_users=300, num_items=2_000, seed=5)
    return pl.read_parquet(path)


def test_schema_is_the_published_one(listens):
    assert dict(listens.schema) == {
        "uid": pl.UInt32,
        "timestamp": pl.UInt32,
        "item_id": pl.UInt32,
        "is_organic": pl.UInt8,
        "played_ratio_pct": pl.UInt16,
        "track_length_seconds": pl.UInt32,
    }
    assert listens.columns[:3] == ["uid", "timestamp", "item_id"]
    assert sum(listens.null_count().row(0)) == 0


def test_rows_are_sorted_with_ties_on_a_5_second_clock(listens):
    assert listens.select("uid", "timestamp").equals(
        listens.sort("uid", "timestamp").select("uid", "timestamp")
    )
    assert (listens["timestamp"] % 5 == 0).all()
    assert listens["timestamp"].min() >= 0
    assert listens["timestamp"].max() <= 26_000_000
    ties = ((listens["timestamp"].diff() == 0) & (listens["uid"].diff() == 0)).mean()
    assert 0.03 < ties < 0.2  # 12.1 % in the published data


def test_sessions_have_gaps(listens):
    gap = listens.select(pl.col("timestamp").cast(pl.Int64).diff().over("uid"))
    gap = gap["timestamp"].drop_nulls()
    assert 0.05 < (gap >= 1800).mean() < 0.15  # a session has about 11 events
    assert gap.median() <= 300


def test_ids_are_sparse_and_tracks_keep_their_length(listens):
    assert listens["uid"].n_unique() == 300
    assert listens["uid"].max() > 500_000
    assert listens["item_id"].max() > 5_000_000
    assert (
        listens.group_by("item_id")
        .agg(pl.col("track_length_seconds").n_unique())["track_length_seconds"]
        .to_list()
        == [1] * listens["item_id"].n_unique()
    )
    length = listens["track_length_seconds"]
    assert (length % 5 == 0).all()
    assert length.min() >= 5
    assert length.max() <= 2495
    played = listens["played_ratio_pct"]
    assert played.min() == 0
    assert 100 < played.max() <= 159
    assert abs((played == 0).mean() - 0.074) < 0.02


def test_popularity_is_long_tailed(listens):
    counts = np.sort(listens["item_id"].value_counts()["count"].to_numpy())[::-1]
    tenth = counts[: len(counts) // 10].sum() / counts.sum()
    assert 0.4 < tenth < 0.8


def test_same_seed_same_events(tmp_path, listens):
    for seed, same in ((5, True), (6, False)):
        write_synthetic_interactions(tmp_path / "a", num_users=300, num_items=2_000, seed=seed)
        assert pl.read_parquet(tmp_path / "a").equals(listens) == same


def _hit_rates(store: SequenceStore) -> tuple[float, float]:
    # Hit@8 ("any", seen hidden, test) of popularity and of counts of what followed the last
    # item in training: the simplest thing a model can learn.
    split = Split("next-8")
    popularity = popularity_counts(store, split).astype(float)
    popularity[0] = -1
    followers = np.zeros((store.num_items + 1, store.num_items + 1), dtype=np.float32)
    train = split.train_range(store.lengths)
    for user in range(store.num_users):
        x = store.sequence(user)[: train.target_stop[user]]
        for lag in range(1, 9):
            np.add.at(followers, (x[:-lag], x[lag:]), 1)
    hits = []
    for user in np.flatnonzero(split.is_evaluated(store.lengths)):
        x = store.sequence(user)
        seen, targets = x[:-8], x[-8:]
        scores = np.stack([popularity, followers[seen[-1]] + 1e-6 * popularity])
        scores[:, seen] = -np.inf
        hits.append(np.isin(np.argsort(-scores, axis=1)[:, :8], targets).any(axis=1))
    return tuple(np.mean(hits, axis=0))


def test_the_current_item_tells_far_more_than_popularity(tmp_path):
    prepare_synthetic(tmp_path / "s", num_users=600, num_items=3_000)
    by_popularity, by_last_item = _hit_rates(SequenceStore.open(tmp_path / "s"))
    assert by_popularity < 0.25
    assert by_last_item > 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_users": 0}, "`num_users` must be between 1 and 500000; got 0"),
        ({"num_items": 99}, "`num_items` must be between 100 and 4695311; got 99"),
        ({"seed": -1}, "`seed` must be between 0 and 4294967295; got -1"),
        ({"median_length": 1}, "`median_length` must be between 2 and 1000000; got 1"),
    ],
)
def test_sizes_out_of_range(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        write_synthetic_interactions(tmp_path / "a", **options)
    assert list(tmp_path.iterdir()) == []


def test_one_user_and_smallest_catalog(tmp_path):
    write_synthetic_interactions(tmp_path / "a", num_users=1, num_items=100, median_length=2)
    assert pl.read_parquet(tmp_path / "a").height >= 2
