"""Popularity on the real data sets gives the floors that were measured for them."""

import numpy as np
import pytest
from real_data import real_data

from recmodels import prepare
from recmodels._src import metrics
from recmodels._src.data.popularity import popularity_counts
from recmodels._src.data.splits import Split
from recmodels._src.data.store import SequenceStore
from recmodels._src.evaluation.columns import RankedColumn
from recmodels._src.evaluation.measure import Request, add_all_users
from recmodels._src.evaluation.popularity_order import PopularityRanker

_RATINGS = {"user": "user_id:token", "item": "item_id:token", "time": "timestamp:float"}
DATA_SETS = {
    "ml-100k": ("ml-100k/ml-100k.inter.gz", {"format": "tsv"} | _RATINGS),
    "amazon_beauty": ("amazon_beauty/Beauty.txt.gz", {"format": "user-lines"}),
}
# Leave-one-out HR@10 and NDCG@10, then next-8 Hit@8 ("any") and Recall@8 ("share").
FLOORS = {
    ("ml-100k", True): (0.0859, 0.0439, 0.3532, 0.0594),
    ("ml-100k", False): (0.0498, 0.0226, 0.1868, 0.0281),
    ("amazon_beauty", True): (0.0115, 0.0055, 0.0348, 0.0047),
    ("amazon_beauty", False): (0.0114, 0.0053, 0.0242, 0.0032),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Prepares each data set at most once."""
    folder, ready = tmp_path_factory.mktemp("stores"), {}

    def get(name):
        if name not in ready:
            file, options = DATA_SETS[name]
            prepare(real_data(file), folder / name, **options)
            ready[name] = SequenceStore.open(folder / name)
        return ready[name]

    return get


def _popularity(store, protocol, hide_seen):
    split = Split(protocol)
    ranker = PopularityRanker(popularity_counts(store, split))
    column = RankedColumn(ranker, (8, 10), store.num_items, None)
    request = Request(part="test", hide_seen=hide_seen, progress=False)
    add_all_users([column], store, split, request, max_length=20, block_size=128)
    return metrics.mean_metrics(column.user_metrics()), len(column.ranks)


@pytest.mark.parametrize(("name", "hide_seen"), FLOORS)
def test_popularity_floors(stores, name, hide_seen):
    store = stores(name)
    one, num_users = _popularity(store, "leave-one-out", hide_seen)
    many, num_long_users = _popularity(store, "next-8", hide_seen)
    hit, ndcg, any_of_8, share_of_8 = FLOORS[name, hide_seen]
    # Items of equal count can be ranked either way, which moves a handful of users.
    some, some_long = 6 / num_users, 4 / num_long_users
    np.testing.assert_allclose([one["hit@10"], one["ndcg@10"]], [hit, ndcg], atol=some)
    np.testing.assert_allclose(many["hit@8"], any_of_8, atol=some_long)
    np.testing.assert_allclose(many["recall@8"], share_of_8, atol=some_long / 4)
