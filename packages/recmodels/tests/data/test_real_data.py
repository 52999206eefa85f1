"""The real data sets give the counts that their descriptions state."""

import dataclasses
import gzip
from typing import Any

import numpy as np
import pytest
from real_data import real_data

from recmodels._src.data.pipeline import evaluation_batches
from recmodels._src.data.popularity import popularity_counts
from recmodels._src.data.prepare import prepare
from recmodels._src.data.splits import Split
from recmodels._src.data.store import SequenceStore


@dataclasses.dataclass(frozen=True)
class DataSet:
    """How a data set is read, and its published or measured counts."""

    file: str
    options: dict[str, Any]
    users: int
    items: int
    interactions: int
    lengths: tuple[int, int, int, int]
    num_next_8: int


INTER = {"user": "user_id:token", "item": "item_id:token", "time": "timestamp:float"}
RATINGS = {"user": "1", "item": "2", "time": "4", "has_header": False}
DATA_SETS = {
    "ml-1m": DataSet("ml-1m/ml-1m.txt.gz", {"format": "pairs"}, 6_040, 3_416, 999_611,
                     (18, 96, 400, 2_277), 5_485),
    "amazon_beauty": DataSet("amazon_beauty/Beauty.txt.gz", {"format": "user-lines"}, 22_363,
                             12_101, 198_502, (5, 6, 14, 204), 661),
    "ml-100k": DataSet("ml-100k/ml-100k.inter.gz", {"format": "tsv"} | INTER, 943, 1_682, 100_000,
                       (20, 65, 245, 737), 787),
    "ml-latest-small": DataSet("ml-latest-small/ratings.csv.gz", {"format": "csv"} | RATINGS, 706,
                               8_552, 100_023, (20, 67, 329, 2_268), 599),
    "amazon_games": DataSet("amazon_games/Video.txt.gz", {"format": "pairs"}, 31_013, 23_715,
                            287_107, (1, 6, 15, 860), 1_033),
}  # fmt: skip

# Popularity over the training items of evaluated users, from the description of the data:
# next-8 hit rate at 8 ("any"), seen items not hidden and hidden.
POPULARITY_HITS = {
    "ml-1m": (0.1041, 0.1980),
    "ml-100k": (0.1868, 0.3532),
    "ml-latest-small": (0.1386, 0.2087),
    "amazon_beauty": (0.0242, 0.0348),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Prepares each data set at most once."""
    folder, ready = tmp_path_factory.mktemp("stores"), {}

    def get(name):
        if name not in ready:
            data_set = DATA_SETS[name]
            report = prepare(real_data(data_set.file), folder / name, **data_set.options)
            ready[name] = (SequenceStore.open(folder / name), report)
        return ready[name]

    return get


@pytest.mark.parametrize("name", DATA_SETS)
def test_counts(stores, name):
    store, report = stores(name)
    expected = DATA_SETS[name]
    assert (store.num_users, store.num_items) == (expected.users, expected.items)
    assert store.num_interactions == expected.interactions
    assert tuple(report.lengths.values()) == expected.lengths
    assert report.num_evaluated["next-8"] == expected.num_next_8
    assert report.skipped == {}


@pytest.mark.parametrize("name", POPULARITY_HITS)
def test_popularity_baseline(stores, name):
    store, _ = stores(name)
    split = Split("next-8")
    popularity = popularity_counts(store, split)
    order = np.argsort(-popularity[1:], kind="stable") + 1
    hits = []
    for batch in evaluation_batches(store, split, "test", 1, 64):
        for user, targets, seen in zip(batch["user"], batch["targets"], batch["seen"], strict=True):
            if user == -1:
                continue
            unseen = order[~np.isin(order, seen)]
            hits.append([np.isin(top[:8], targets).any() for top in (order, unseen)])
    # Items of equal count can be ranked either way, which moves a handful of users.
    tolerance = 4 / len(hits)
    np.testing.assert_allclose(np.mean(hits, axis=0), POPULARITY_HITS[name], atol=tolerance)


def test_sparse_ids_come_back(stores):
    store, _ = stores("ml-latest-small")
    ids = store.item_ids()
    assert ids.dtype == np.int64
    assert (ids[0], ids[-1]) == (1, 129_651)


def test_ties_keep_file_order(stores):
    # Line by line in plain Python, as the description of the data reads it.
    store, _ = stores("ml-100k")
    rows = {}
    with gzip.open(real_data(DATA_SETS["ml-100k"].file), "rt") as file:
        next(file)
        for line in file:
            user, item, _, time = line.split("\t")
            rows.setdefault(int(user), []).append((int(time), int(item)))
    item_ids = store.item_ids()
    for user, user_id in enumerate(store.user_ids()):
        expected = [item for _, item in sorted(rows[user_id], key=lambda row: row[0])]
        assert item_ids[store.sequence(user) - 1].tolist() == expected
