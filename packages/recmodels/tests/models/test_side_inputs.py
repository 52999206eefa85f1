"""Category and gap vectors: sizes, gradients, what depends on what."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from model_cases import random_params
from train_cases import NUM_ITEMS, small_recipe

from recmodels._src.models.base import output_table
from recmodels._src.models.registry import make_model
from recmodels._src.models.side_inputs import (
    NUM_GAP_BUCKETS,
    SideInputs,
    gap_buckets,
    mean_of_categories,
    with_side_inputs,
)
from recmodels._src.train.optimizer import decayed, make_optimizer
from recmodels._src.train.step import TrainState, initial_state, make_train_step

VOCAB, NUM_CATEGORIES, SPAN = NUM_ITEMS + 1, 5, 2
_TABLES = ("item_embeddings", "category_embeddings", "gap_embeddings")
BOTH = {"item_categories": True, "time_gaps": True}


def _recipe(**values):
    return small_recipe(num_targets=SPAN, dropout=0.0, **(BOTH | values))


def _side(seed=0, batch=8, length=8):
    rng = np.random.default_rng(seed)
    categories = rng.integers(0, NUM_CATEGORIES + 1, (VOCAB, 3)).astype(np.int32)
    categories[0] = 0
    gaps = rng.integers(-1, 10**6, (batch, length + SPAN)).astype(np.int32)
    return SideInputs(jnp.asarray(categories), jnp.asarray(gaps))


def _batch(seed=0, batch=8, length=8):
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, VOCAB, (batch, length + SPAN)).astype(np.int32)
    for row in range(1, batch):
        rows[row, : int(rng.integers(0, length))] = 0
    history = rows[:, :length]
    targets = np.stack([rows[:, 1 + n : length + 1 + n] for n in range(SPAN)], axis=-1)
    targets = np.where(history[..., None] > 0, targets, -1)
    return jnp.asarray(history), jnp.asarray(targets)


def _state(recipe):
    params = random_params(recipe, VOCAB, num_categories=NUM_CATEGORIES)
    params = jax.tree.map(jnp.asarray, params)
    optimizer = jax.jit(make_optimizer(recipe).init)(params)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer)


@pytest.mark.parametrize("name", ["sasrec", "bert4rec"])
@pytest.mark.parametrize(("categories", "gaps"), [(True, False), (False, True), (True, True)])
def test_number_of_weights(name, categories, gaps):
    def size(recipe):
        params = jax.eval_shape(lambda: make_model(recipe).build(VOCAB, NUM_CATEGORIES))
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    recipe = small_recipe(model=name, item_categories=categories, time_gaps=gaps)
    added = categories * (NUM_CATEGORIES + 1) * 8 + gaps * 33 * 8
    assert size(recipe) == size(small_recipe(model=name)) + added


def test_other_weights_start_as_without():
    counts = np.ones(VOCAB, np.float32)
    without = initial_state(small_recipe(), counts).params
    both = initial_state(small_recipe(**BOTH), counts, num_categories=NUM_CATEGORIES).params
    for name in without:
        for got, want in zip(*map(jax.tree.leaves, (both[name], without[name])), strict=True):
            np.testing.assert_array_equal(got, want)


def test_buckets():
    gaps = np.array([-1, 0, 1, 2, 3, 4, 59, 60, 3599, 86400, 2**30 - 1, 2**30, 2**31 - 1], np.int32)
    expected = [0 if g < 0 else 1 if g == 0 else 2 + int(g).bit_length() - 1 for g in gaps]
    assert gap_buckets(jnp.asarray(gaps)).tolist() == expected
    assert max(expected) == NUM_GAP_BUCKETS - 1


def test_mean_of_categories():
    table = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    found = mean_of_categories(jnp.asarray(table), jnp.array([[1, 0], [3, 2], [0, 0]]))
    expected = np.stack([table[1], table[2:].mean(0), np.zeros(2)])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@functools.partial(jax.jit, static_argnums=0)
def _dense_step(recipe, state, history, targets, side):
    """The same step from plain autodiff through all tables and dense labels."""
    model = make_model(recipe)

    def objective(params):
        step_key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
        batch = model.training_batch(history, targets, jax.random.fold_in(step_key, 2), side.gaps)
        assert batch.gaps is not None
        categories = side.item_categories[batch.rows]
        count = jnp.maximum((categories > 0).sum(-1, keepdims=True), 1)
        of_categories = params["category_embeddings"].at[0].set(0)[categories].sum(-2) / count
        bucket = jnp.where(
            batch.gaps > 0,
            2 + jnp.floor(jnp.log2(jnp.maximum(batch.gaps, 1) + 0.5)),
            batch.gaps + 1,
        ).astype(jnp.int32)
        vectors = params["item_embeddings"][batch.rows] + of_categories
        vectors = vectors + params["gap_embeddings"][bucket]
        activations = model.training_activations(params, batch, vectors, step_key, recompute=False)
        logits = activations @ output_table(params).T + params["output_bias"]
        labels = (batch.targets[..., None] == jnp.arange(VOCAB)).any(-2)
        per_position = optax.sigmoid_binary_cross_entropy(logits, labels).sum(-1)
        weights = (batch.targets >= 0).any(-1)
        return (per_position * weights).sum() / weights.sum()

    loss, gradients = jax.value_and_grad(objective)(state.params)
    updates, _ = make_optimizer(recipe).update(gradients, state.optimizer, state.params)
    return loss / VOCAB, gradients, optax.apply_updates(state.params, updates)


@pytest.mark.parametrize(
    ("name", "capacity", "num_parts"), [("sasrec", 63, 1), ("sasrec", None, 4), ("bert4rec", 63, 1)]
)
def test_step_equals_dense_step(name, capacity, num_parts):
    recipe = _recipe(model=name)
    state, batch, side = _state(recipe), _batch(), _side()
    step = make_train_step(recipe.override(accumulate_steps=num_parts))
    after, metrics = jax.jit(step, static_argnums=3)(state, *batch, capacity, side)
    loss, gradients, params = _dense_step(recipe, state, *batch, side)
    for table in ("category_embeddings", "gap_embeddings"):
        assert np.abs(gradients[table]).max() > 1e-3
    assert not np.any(gradients["category_embeddings"][0])
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(metrics.gradient_norm, optax.tree.norm(gradients), rtol=1e-5)
    for table in _TABLES:
        np.testing.assert_allclose(after.params[table], params[table], rtol=1e-4, atol=1e-5)


def test_optimizer_decays_categories_but_no_gaps():
    decays = decayed(jax.eval_shape(lambda: make_model(_recipe()).build(VOCAB, NUM_CATEGORIES)))
    assert decays["category_embeddings"]
    assert not decays["gap_embeddings"]


@functools.partial(jax.jit, static_argnums=0)
def _read(recipe, params, history, targets, side):
    """The batch that the model makes, and its activations."""
    model, key = make_model(recipe), jax.random.key(0)
    batch = model.training_batch(history, targets, key, side.gaps)
    categories = side.item_categories[batch.rows]
    vectors = params["item_embeddings"][batch.rows]
    vectors = with_side_inputs(params, vectors, categories, batch.gaps)
    return batch, model.training_activations(params, batch, vectors, key, recompute=False)


def _with_gaps(side, places, gap=12345):
    return side._replace(gaps=side.gaps.at[:, places].set(gap))


def test_a_later_gap_changes_no_earlier_position():
    recipe, side, place = _recipe(), _side(), 5
    inputs = recipe, _state(recipe).params, *_batch()
    one, other = (
        np.asarray(_read(*inputs, each)[1])[0]  # of a window without padding
        for each in (side, _with_gaps(side, slice(place, None)))
    )
    np.testing.assert_array_equal(one[:place], other[:place])
    assert np.abs(one[place:] - other[place:]).max() > 1e-3


def test_the_gap_of_a_masked_position_is_not_read():
    recipe, side = _recipe(model="bert4rec", mask_end_share=1.0), _side()
    inputs = recipe, _state(recipe).params, *_batch()
    batch, expected = _read(*inputs, side)
    assert batch.is_masked[:, -SPAN:].all()
    masked = _with_gaps(side, slice(-SPAN, None))
    np.testing.assert_array_equal(_read(*inputs, masked)[1], expected)
    newest = _with_gaps(side, -SPAN - 1)  # of the events that are read
    assert np.abs(_read(*inputs, newest)[1] - expected).max() > 1e-3


def test_gaps_stay_beside_their_items():
    # BERT4Rec moves a window with fewer targets than L to the right.
    recipe = _recipe(model="bert4rec")
    history = jnp.array([[0, 0, 0, 0, 0, 1, 2, 3]])
    targets = jnp.full((1, 8, SPAN), -1).at[0, -1].set(jnp.array([4, -1]))
    gaps = jnp.array([[-1, -1, -1, -1, -1, 10, 20, 30, 40, -1]])
    side = _side()._replace(gaps=gaps)
    batch, _ = _read(recipe, _state(recipe).params, history, targets, side)
    assert batch.gaps.tolist() == [[-1, -1, -1, -1, -1, -1, 10, 20, 30, 40]]
