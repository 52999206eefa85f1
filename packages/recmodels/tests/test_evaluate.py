import itertools
import json
import re
import shutil

import numpy as np
import polars as pl
import pytest
from store_cases import slow_evaluation, tiny_store
from train_cases import NUM_ITEMS, finished_run, small_recipe

from recmodels import Evaluation, UserError, evaluate, train
from recmodels._src.bundle import item_vectors
from recmodels._src.evaluate import make_query_function
from recmodels._src.train.metrics_log import read_metrics
from recmodels._src.train.run_directory import RunDirectory


def _slow_lists(run, store, part, hide_seen):
    """From the definition: score everything, hide, sort. One user at a time."""
    params = run.restore().result
    vectors = item_vectors(params, NUM_ITEMS + 1)
    queries = make_query_function(run.recipe)
    for user in np.flatnonzero(store.lengths >= 27):
        seen, targets = slow_evaluation(store.sequence(user), "next-8", part)
        history = np.zeros((1, run.recipe.max_length), np.int32)
        history[0, -len(seen) :] = seen[-run.recipe.max_length :]
        scores = vectors @ np.append(np.asarray(queries(params, history))[0], 1.0)
        hidden = {0, *seen} if hide_seen else {0}
        order = [row for row in np.argsort(-scores, kind="stable") if row not in hidden]
        yield int(user), order, targets


@pytest.mark.parametrize("part", ["dev", "test"])
@pytest.mark.parametrize("hide_seen", [False, True])
def test_evaluation_equals_one_user_at_a_time(part, hide_seen):
    store, result = finished_run()
    run = RunDirectory.open(result.run_dir)
    found = evaluate(result.run_dir, part=part, hide_seen=hide_seen, ks=(3,), progress=False)
    lists = list(_slow_lists(run, store, part, hide_seen))
    hits = [any(target in order[:3] for target in targets) for _, order, targets in lists]
    best = [
        min(order.index(row) if row in order else store.num_items for row in targets)
        for _, order, targets in lists
    ]
    tops = [set(order[:3]) for _, order, _ in lists]
    common = [len(a & b) / 3 for a, b in itertools.combinations(tops, 2)]
    assert found.model["hit@3"] == pytest.approx(np.mean(hits))
    assert found.model["mrr"] == pytest.approx(np.mean([1 / (1 + rank) for rank in best]))
    assert found.model["coverage@3"] == len(set().union(*tops)) / NUM_ITEMS
    assert found.model["overlap@3"] == pytest.approx(np.mean(common))
    kept = pl.read_parquet(
        result.run_dir / "ranks" / f"{part}-{'hidden' if hide_seen else 'shown'}.parquet"
    )
    assert kept["user_id"].to_list() == store.user_ids()[kept["user"].to_numpy()].tolist()
    ranks = dict(zip(kept["user"], kept["ranks"].to_numpy(), strict=True))
    assert [min(rank for rank in ranks[user] if rank >= 0) for user, *_ in lists] == best


def test_baselines_stand_in_the_same_table():
    _, result = finished_run()
    found = evaluate(result.run_dir, progress=False)
    names = ["model", "popularity", "markov", "item-knn", "random"]
    assert list(found.columns) == names
    text = str(found)
    assert re.search(r"model\s+popularity\s+markov\s+item-knn\s+random\n", text)
    for metrics in found.columns.values():
        assert set(metrics) == set(found.model)
    # Users walk along a ring: the last item says almost everything, popularity nothing.
    hits = {name: found.columns[name]["hit@8"] for name in names}
    assert hits["markov"] > hits["popularity"]
    assert found.columns["random"]["recall@8"] == pytest.approx(8 / NUM_ITEMS)
    assert found == Evaluation(**json.loads(json.dumps(found.to_dict())))


def test_intervals_hold_the_means_and_are_printed():
    _, result = finished_run()
    found = evaluate(result.run_dir, baselines="none", progress=False)
    assert found.columns.keys() == {"model"}
    of_lists = {"coverage@8", "overlap@8", "coverage@10", "overlap@10"}
    assert found.intervals.keys() == found.model.keys() - of_lists
    for name, (low, high) in found.intervals.items():
        assert low <= found.model[name] <= high
        line = rf"\n{name} +{found.model[name]:.4f}  \[{low:.4f}, {high:.4f}\]\n"
        assert re.search(line, str(found))
    low, high = found.intervals["mrr"]
    assert low < high


def test_strata_are_counted():
    _, result = finished_run()
    found = evaluate(result.run_dir, baselines="none", progress=False)
    assert sum(size["num_items"] for size in found.strata.values()) == NUM_ITEMS
    assert all(0 < size["num_users"] <= found.num_users for size in found.strata.values())
    head = found.strata["head"]
    assert f"head {head['num_items']} items, {head['num_users']} users; mid" in str(found)


def test_training_evaluates_ranks_beside_popularity_only():
    _, result = finished_run()
    dev = [line for line in read_metrics(result.run_dir) if line["split"] == "dev"][-1]
    kinds = {name.split("@")[0] for name in dev} - {"step", "split"}
    assert kinds == {"hit", "recall", "ndcg", "map", "mrr"}


def test_what_cannot_be_counted_is_left_out_with_a_reason(monkeypatch):
    _, result = finished_run()
    monkeypatch.setattr("recmodels._src.evaluation.item_knn.MAX_ITEMS", 39)
    found = evaluate(result.run_dir, progress=False)
    assert list(found.columns) == ["model", "popularity", "markov", "random"]
    assert str(found).endswith("item-knn is left out: more than 39 items")


def test_a_run_that_cannot_be_written_to_is_evaluated_all_the_same(tmp_path):
    _, result = finished_run()
    run = tmp_path / "run"
    shutil.copytree(result.run_dir, run, ignore=shutil.ignore_patterns("ranks"))
    (run / "ranks").touch()  # a file where the folder should be
    with pytest.warns(UserWarning, match="ranks are not kept: .*ranks"):
        found = evaluate(run, baselines="none", progress=False)
    assert found.num_users == 54


def test_unknown_choices():
    _, result = finished_run()
    with pytest.raises(UserError, match="`baselines` must be one of none, popularity, all; got 'x"):
        evaluate(result.run_dir, baselines="x")


def test_protocol_is_printed_beside_the_numbers():
    _, result = finished_run()
    text = str(evaluate(result.run_dir, progress=False))
    protocol = ("test of next-8", "step 60", "54 users", "8 held-out", "all 40 items")
    for part in (*protocol, "seen items not hidden", "7 user(s) with fewer than 27", "popularity"):
        assert part in text


@pytest.mark.parametrize("k", [0, 41])
def test_k_outside_the_catalog(k):
    _, result = finished_run()
    with pytest.raises(UserError, match=rf"`k` must be between 1 and .* 40; got {k}"):
        evaluate(result.run_dir, ks=(k,), progress=False)


def test_no_run_no_checkpoint_no_store(tmp_path):
    with pytest.raises(UserError, match=r"is not a training run: it has no config\.json"):
        evaluate(tmp_path)
    store, result = finished_run()
    config = (result.run_dir / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match="has no complete checkpoint yet"):
        evaluate(tmp_path)
    (tmp_path / "config.json").write_text(config.replace(str(store.path), str(tmp_path / "gone")))
    with pytest.raises(UserError, match=r"gone is not a sequence store; .* with --data"):
        evaluate(tmp_path)


@pytest.mark.parametrize(("num_items", "ks"), [(5, (5,)), (9, (8, 9)), (10, (8, 10))])
def test_a_small_catalog_cuts_the_default_list_lengths(tmp_path, num_items, ks):
    store = tiny_store(tmp_path / "store", [range(1, num_items + 1)] * 3)
    recipe = small_recipe(protocol="leave-one-out", num_targets=1, num_steps=2)
    result = train(recipe, store, tmp_path / "run", progress=False)
    names = [name for name in result.test.model if name.startswith("hit@") and "-" not in name]
    assert names == [f"hit@{k}" for k in ks]
    with pytest.raises(UserError, match=f"the number of items {num_items}; got 11"):
        evaluate(result.run_dir, ks=(11,), progress=False)
