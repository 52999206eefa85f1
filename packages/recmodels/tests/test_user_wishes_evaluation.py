"""What users of such systems ask of an evaluation; the numbers are those of the list of wishes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from store_cases import slow_evaluation
from train_cases import NUM_ITEMS, finished_run, small_recipe

from recmodels import evaluate
from recmodels._src.data.splits import Split
from recmodels._src.evaluate import evaluate_params
from recmodels._src.evaluation import model
from recmodels._src.evaluation.blocks import user_blocks
from recmodels._src.train.step import initial_state


def test_point_5_hidden_items_are_in_no_list_of_any_column():
    store, result = finished_run()
    run_recipe = small_recipe(num_steps=60)
    params = initial_state(run_recipe, np.ones(NUM_ITEMS + 1, np.float32)).params
    ranker = model.ModelRanker(params, run_recipe, NUM_ITEMS + 1, 0)
    split = Split("next-8")
    options = {"max_length": 20, "hide_seen": True, "size": 64}
    for block in user_blocks(store, split, "test", **options):
        ranked = ranker.rank(block, NUM_ITEMS)
        for user in np.flatnonzero(block.is_user):
            seen, _ = slow_evaluation(store.sequence(block.user[user]), "next-8", "test")
            shown = ranked.rows[user][ranked.rows[user] >= 0]
            # The whole history is hidden, not only what the model reads; all else is shown.
            assert set(shown.tolist()) == set(range(1, NUM_ITEMS + 1)) - set(seen)
    hidden = evaluate(result.run_dir, hide_seen=True, progress=False)
    shown = evaluate(result.run_dir, hide_seen=False, progress=False)
    for name in ("popularity", "markov", "item-knn", "random"):
        assert hidden.columns[name] != shown.columns[name]


def test_point_6_a_metric_counts_all_users_and_all_items():
    # Were a few hundred items drawn, or easy users only, a random order would look better.
    store, result = finished_run()
    found = evaluate(result.run_dir, hide_seen=False, progress=False)
    assert found.num_users == (store.lengths >= 27).sum()
    assert found.columns["random"]["recall@8"] == pytest.approx(8 / NUM_ITEMS)
    # "Any" and "share" are different numbers and have different names.
    assert found.model["recall@8"] < found.model["hit@8"]


def test_point_8_memory_of_an_evaluation_does_not_grow_with_the_catalog():
    def temporary_bytes(num_rows):
        shape = jax.ShapeDtypeStruct
        program = model._rank.lower(
            shape((128, 8), jnp.float32),
            shape((num_rows, 8), jnp.float32),
            shape((num_rows,), jnp.float32),
            shape((128, 8), jnp.int32),
            shape((128, 65), jnp.int32),
            list_length=10,
            vocab_size=num_rows,
            sharding=None,
        ).compile()
        return program.memory_analysis().temp_size_in_bytes

    small, large = temporary_bytes(200_000), temporary_bytes(2_000_000)
    assert large <= 1.1 * small
    assert large < 128 * 2_000_000 * 4 / 10  # a tenth of all scores of a block


def test_the_same_items_for_everybody_are_noticed():
    store, _ = finished_run()
    params = dict(initial_state(small_recipe(), np.ones(NUM_ITEMS + 1, np.float32)).params)
    params["output_bias"] = -1e4 * jnp.arange(NUM_ITEMS + 1.0)  # 1, 2, 3, … for every user
    found = evaluate_params(
        params, small_recipe(), store, part="test", step=0, hide_seen=False, ks=(4,),
        detail="full", progress=False,
    )  # fmt: skip
    assert found.model["overlap@4"] == 1.0
    assert found.model["coverage@4"] == 4 / NUM_ITEMS
