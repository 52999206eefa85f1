"""The recommendations of a run against its bundle, which is what serving reads."""

import jax
import numpy as np
import polars as pl
import pytest
from train_cases import finished_run

from recmodels import UserError, recommend
from recmodels._src.cli import main


def _expected(run, store, k: int, *, hide_seen: bool) -> dict[int, list[int]]:
    # From the exported encoder and item vectors, one user at a time.
    encoder = jax.export.deserialize(
        bytearray((run.bundle / "query_encoder.stablehlo").read_bytes())
    )
    vectors = np.load(run.bundle / "item_embeddings.npy")
    lists = {}
    for user, user_id in enumerate(store.user_ids().tolist()):
        sequence = store.sequence(user)
        history = np.zeros((1, 8), np.int32)  # `max_length` of the recipe
        recent = sequence[-8:]
        history[0, 8 - len(recent) :] = recent
        query = np.asarray(encoder.call(vectors[history], history > 0))[0]
        scores = vectors @ query
        scores[0] = -np.inf
        if hide_seen:
            scores[sequence] = -np.inf
        best = [row for row in np.argsort(-scores, kind="stable")[:k] if scores[row] > -np.inf]
        lists[user_id] = store.item_ids()[np.array(best, int) - 1].tolist()
    return lists


def _read(path) -> dict[int, list[int]]:
    table = pl.read_csv(path)
    assert table.columns == ["user_id", "rank", "item_id"]
    lists: dict[int, list[int]] = {}
    for user_id, rank, item_id in table.iter_rows():
        lists.setdefault(user_id, []).append(item_id)
        assert rank == len(lists[user_id])
    return lists


@pytest.mark.parametrize("hide_seen", [False, True])
def test_lists_are_those_of_the_bundle(hide_seen):
    store, run = finished_run()
    result = recommend(run.run_dir, k=5, hide_seen=hide_seen, progress=False)
    assert result.path == run.run_dir / "recommendations.csv"
    expected = _expected(run, store, 5, hide_seen=hide_seen)
    assert _read(result.path) == {user: items for user, items in expected.items() if items}
    assert result.examples == list(expected.items())[:3]
    assert result.num_users == store.num_users


def test_more_items_than_there_are():
    store, run = finished_run()
    result = recommend(run.run_dir, k=1000, progress=False)
    assert {len(items) for items in _read(result.path).values()} == {store.num_items}


def test_training_ends_with_recommendations(capsys):
    store, run = finished_run()
    recipe = ["--recipe", "sasrec-demo"]
    missing = ["train", *recipe, "--data", str(store.path), "--out", "x", "--recommend", "0"]
    assert main(missing) == 2
    assert capsys.readouterr().err == "error: `k` must be at least 1; got 0\n"
    shown = str(recommend(run.run_dir, k=3, progress=False)).splitlines()
    assert (
        shown[0]
        == f"recommendations for {store.num_users} users: {run.run_dir}/recommendations.csv"
    )
    assert shown[1].startswith("  100: ")
    assert len(shown) == 4


def test_no_run(tmp_path):
    with pytest.raises(UserError, match="is not a training run"):
        recommend(tmp_path)
