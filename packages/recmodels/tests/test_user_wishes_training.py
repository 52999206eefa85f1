"""What users of such systems ask for, where training and evaluation answer it.

The numbers are those of the list of wishes; the data layer has tests of the same form.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from store_cases import slow_evaluation
from train_cases import NUM_ITEMS, chain_store, finished_run, small_recipe

from recmodels import SequenceStore, UserError, evaluate, prepare, train
from recmodels._src.bundle import write_bundle
from recmodels._src.evaluate import evaluate_params
from recmodels._src.models.registry import make_model
from recmodels._src.train.run_directory import RunDirectory
from recmodels._src.train.step import initial_state, make_train_step


def _params_that_love(row):
    """A model whose bias puts one row far above everything else."""
    params = dict(initial_state(small_recipe(), np.ones(NUM_ITEMS + 1, np.float32)).params)
    params["output_bias"] = params["output_bias"].at[row].set(1e6)
    return params


def _measure(params, store, **options):
    return evaluate_params(
        params, small_recipe(), store, part="test", step=0, ks=(1, 8), progress=False, **options
    ).model


def test_point_2_padding_is_never_recommended_nor_scored(tmp_path):
    store, _ = finished_run()
    # Were row 0 ranked, it would push every target down one place.
    loved, plain = _params_that_love(0), _params_that_love(0)
    plain["output_bias"] = plain["output_bias"].at[0].set(-1e6)
    assert _measure(loved, store, hide_seen=False) == _measure(plain, store, hide_seen=False)
    write_bundle(tmp_path / "bundle", small_recipe(), loved, store, step=0)
    assert not np.load(tmp_path / "bundle" / "item_embeddings.npy")[0].any()


def test_point_4_short_users_are_trained_on_counted_and_not_evaluated():
    store, result = finished_run()
    num_long = int((store.lengths >= 27).sum())
    assert result.test.num_users == num_long
    assert result.test.num_excluded_users == store.num_users - num_long > 0
    assert f"{store.num_users - num_long} user(s) with fewer than 27" in str(result.test)


def test_point_5_one_switch_for_seen_items_with_one_meaning(tmp_path):
    store, _ = finished_run()
    # A model that ranks by row, 1 first: the best row left for a user is then known.
    params = _params_that_love(0)
    params["output_bias"] = -1e4 * jnp.arange(NUM_ITEMS + 1.0)
    long_users = np.flatnonzero(store.lengths >= 27)
    pairs = [slow_evaluation(store.sequence(user), "next-8", "test") for user in long_users]
    shown = _measure(params, store, hide_seen=False)["hit@1"]
    assert shown == pytest.approx(np.mean([1 in targets for _, targets in pairs]))
    left = [set(range(1, NUM_ITEMS + 1)) - set(seen) for seen, _ in pairs]
    hidden = _measure(params, store, hide_seen=True)["hit@1"]
    hits = [min(rows) in targets for rows, (_, targets) in zip(left, pairs, strict=True)]
    assert hidden == pytest.approx(np.mean(hits))
    assert hidden != shown
    for hide_seen in (False, True):
        recipe = small_recipe(hide_seen=hide_seen)
        path = tmp_path / str(hide_seen)
        write_bundle(path, recipe, params, store, step=0)
        assert json.loads((path / "bundle.json").read_text())["hide_seen"] is hide_seen


def test_point_6_all_users_all_items_protocol_printed():
    store, result = finished_run()
    evaluation = evaluate(result.run_dir, progress=False)
    assert evaluation.num_users == (store.lengths >= 27).sum()
    assert evaluation.num_items == store.num_items
    assert "ranked among all 40 items, seen items not hidden" in str(evaluation)
    assert set(evaluation.model) == set(evaluation.popularity)


def test_point_7_batch_without_targets_gives_loss_0_and_moves_nothing_to_nan():
    recipe = small_recipe()
    state = initial_state(recipe, np.ones(NUM_ITEMS + 1, np.float32))
    history = jnp.zeros((8, 8), jnp.int32)
    targets = jnp.full((8, 8, 8), -1)
    step = jax.jit(make_train_step(recipe), static_argnums=3)
    for capacity in (None, 8):
        after, metrics = step(state, history, targets, capacity)
        assert float(metrics.loss) == 0.0
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(after))


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_point_7_fully_padded_history_is_finite_forward_and_backward(compute_dtype):
    recipe = small_recipe(num_layers=2, compute_dtype=compute_dtype)
    model = make_model(recipe)
    params = model.build(NUM_ITEMS + 1)
    vectors, mask = jnp.zeros((2, 8, 8)), jnp.zeros((2, 8), bool).at[1, 7].set(True)

    def total(params, vectors, key):
        output = model.encoder(params)(vectors, mask, key).astype(jnp.float32)
        return (output**2).sum()

    for key in (None, jax.random.key(0)):
        value, gradients = jax.value_and_grad(total, argnums=(0, 1))(params, vectors, key)
        assert bool(jnp.isfinite(value))
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradients))


def test_point_10_everything_a_resume_needs_is_in_the_checkpoint():
    # That a resumed run equals an unbroken one is shown in train/test_resume.py.
    _, result = finished_run()
    state = RunDirectory.open(result.run_dir).restore()
    assert int(state.step) == 60
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    assert len(moments) == 2 * len(jax.tree.leaves(state.params))
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in moments)
    # Batch k is a pure function of k, so the step is the data position as well.


def test_point_13_training_goes_on_with_a_grown_catalog(tmp_path):
    _, old = finished_run()
    # One item is gone, and new ones come before, between and after those that were known.
    ids = [-3, 5, *(item for item in range(0, 10 * NUM_ITEMS, 10) if item != 60), 1000]
    lines = [f"{user} {item}" for user in range(20) for item in np.roll(ids, 7 * user)[:30]]
    (tmp_path / "new").write_text("\n".join(lines) + "\n")
    prepare(tmp_path / "new", tmp_path / "store", format="pairs")
    store = SequenceStore.open(tmp_path / "store")
    known = np.isin(store.item_ids(), np.arange(0, 10 * NUM_ITEMS, 10))
    assert store.item_ids().tolist() == sorted(ids)
    states = []
    for start_from in (old.run_dir, None):
        recipe = small_recipe(num_steps=1, learning_rate=1e-12, ema_decay=0.9)
        run_dir = tmp_path / str(start_from is None)
        train(recipe, store, run_dir, start_from=start_from, progress=False)
        states.append(RunDirectory.open(run_dir).restore())
    was = RunDirectory.open(old.run_dir).restore().params
    rows = store.item_ids()[known] // 10 + 1
    for name in ("item_embeddings", "output_bias"):
        got, fresh = (np.asarray(state.params[name])[1:] for state in states)
        np.testing.assert_allclose(got[known], np.asarray(was[name])[rows], atol=1e-6)
        np.testing.assert_allclose(got[~known], fresh[~known], atol=1e-6)
    for got, want in zip(
        jax.tree.leaves(states[0].average["encoder"]), jax.tree.leaves(was["encoder"]), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-6)
    with pytest.raises(UserError, match=r"was started from .*, not from random parameters"):
        train(recipe, store, tmp_path / "False", progress=False)
    longer = recipe.override(max_length=9)
    with pytest.raises(UserError, match="is another: `max_length` is 8 there and 9 here"):
        train(longer, store, tmp_path / "x", start_from=old.run_dir, progress=False)
    with pytest.raises(UserError, match="is no finished run to start from"):
        train(recipe, store, tmp_path / "y", start_from=tmp_path / "none", progress=False)
    assert not (tmp_path / "x").exists()  # so that the corrected call finds no other run there
    assert not (tmp_path / "y").exists()


def test_point_11_the_bundle_alone_answers(tmp_path):
    store = chain_store(tmp_path / "store")
    _, result = finished_run()
    manifest = json.loads((result.bundle / "bundle.json").read_text())
    needed = {"item_embeddings.npy", "items.parquet", "query_encoder.stablehlo"}
    assert needed <= set(manifest["files"])
    vectors = np.load(result.bundle / "item_embeddings.npy")
    assert len(vectors) == manifest["vocab_size"] == store.num_items + 1  # map and weights agree
    assert vectors.shape[1] == manifest["vector_dim"]
