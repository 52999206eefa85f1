import numpy as np
import pytest
from store_cases import slow_evaluation, tiny_store
from train_cases import NUM_ITEMS, finished_run, small_recipe

from recmodels import UserError, evaluate, train
from recmodels._src.bundle import item_vectors
from recmodels._src.evaluate import make_query_function
from recmodels._src.train.run_directory import RunDirectory


def _slow_hit_and_mrr(run, store, part, hide_seen, k):
    """From the definition: score everything, hide, sort, look. One user at a time."""
    params = run.restore().params
    vectors = item_vectors(params, NUM_ITEMS + 1)
    queries = make_query_function(run.recipe)
    hits, reciprocal = [], []
    for user in np.flatnonzero(store.lengths >= 27):
        seen, targets = slow_evaluation(store.sequence(user), "next-8", part)
        history = np.zeros((1, run.recipe.max_length), np.int32)
        history[0, -len(seen) :] = seen[-run.recipe.max_length :]
        scores = vectors @ np.append(np.asarray(queries(params, history))[0], 1.0)
        scores[0] = -np.inf
        if hide_seen:
            scores[seen] = -np.inf
        order = list(np.argsort(-scores, kind="stable"))
        hits.append(any(t in order[:k] and scores[t] > -np.inf for t in targets))
        shown = [order.index(t) if scores[t] > -np.inf else store.num_items for t in targets]
        reciprocal.append(1 / (1 + min(shown)))
    return np.mean(hits), np.mean(reciprocal)


@pytest.mark.parametrize("part", ["dev", "test"])
@pytest.mark.parametrize("hide_seen", [False, True])
def test_evaluation_equals_one_user_at_a_time(part, hide_seen):
    store, result = finished_run()
    run = RunDirectory.open(result.run_dir)
    found = evaluate(result.run_dir, part=part, hide_seen=hide_seen, ks=(3,), progress=False)
    slow = _slow_hit_and_mrr(run, store, part, hide_seen, 3)
    np.testing.assert_allclose((found.model["hit@3"], found.model["mrr"]), slow, rtol=1e-6)


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
    assert [name for name in result.test.model if name.startswith("hit@")] == [
        f"hit@{k}" for k in ks
    ]
    with pytest.raises(UserError, match=f"the number of items {num_items}; got 11"):
        evaluate(result.run_dir, ks=(11,), progress=False)
