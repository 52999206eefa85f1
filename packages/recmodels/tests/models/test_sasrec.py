import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import random_params
from train_cases import small_recipe

from recmodels._src.models.registry import make_model
from recmodels._src.train.step import initial_state

VOCAB = 30


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request):
    recipe = small_recipe(num_layers=2, compute_dtype=request.param)
    return recipe, random_params(recipe, VOCAB)


def _encode(model, history, dropout_key=None, table=None):
    recipe, params = model
    table = params["item_embeddings"] if table is None else table
    encode = jax.jit(lambda params, *inputs: make_model(recipe).encoder(params)(*inputs))
    output = encode(params, table[history], history > 0, dropout_key)
    return np.asarray(output.astype(jnp.float32))


def _history(rng, padded=2):
    history = rng.integers(1, VOCAB, (3, 8))
    history[:, :padded] = 0
    return history


def test_a_position_sees_no_later_item(model):
    history = _history(np.random.default_rng(0))
    changed = history.copy()
    changed[:, 5] = changed[:, 5] % (VOCAB - 1) + 1
    before, after = _encode(model, history), _encode(model, changed)
    np.testing.assert_array_equal(before[:, 2:5], after[:, 2:5])
    assert (np.abs(before - after)[:, 5:].max(-1) > 1e-2).all()


def test_padding_has_no_influence(model):
    history = _history(np.random.default_rng(1))
    table = model[1]["item_embeddings"]
    other = np.concatenate([np.full((1, 8), 100.0, np.float32), table[1:]])
    np.testing.assert_array_equal(
        _encode(model, history)[:, 2:], _encode(model, history, table=other)[:, 2:]
    )


def test_dropout_only_with_a_key(model):
    history = _history(np.random.default_rng(2))
    first, second = _encode(model, history), _encode(model, history)
    np.testing.assert_array_equal(first, second)
    dropped = [_encode(model, history, jax.random.key(seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert np.abs(dropped[0] - dropped[2]).max() > 1e-2
    assert np.abs(dropped[0] - first).max() > 1e-2


def test_number_of_weights():
    recipe = small_recipe(hidden_dim=8, num_layers=2, max_length=8)
    params = make_model(recipe).build(VOCAB)
    norm, attention, mlp = 2 * 8, (8 * 24 + 24) + (8 * 8 + 8), (8 * 32 + 32) + (32 * 8 + 8)
    expected = VOCAB * 8 + VOCAB + 8 * 8 + 2 * (2 * norm + attention + mlp) + norm
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == expected


def test_without_output_bias_there_is_none():
    assert "output_bias" not in make_model(small_recipe(output_bias=False)).build(VOCAB)


def test_fresh_model_predicts_the_popularity_prior():
    recipe = small_recipe(num_targets=2)
    counts = np.array([0, 50, 30, 10, 10, 0], np.float32)
    state = initial_state(recipe, counts)
    predicted = np.asarray(jax.nn.sigmoid(state.params["output_bias"]))
    # 2 targets per position: an item with 10 of 100 interactions is one of them 0.2 of the time.
    np.testing.assert_allclose(predicted[2:5], [0.5, 0.2, 0.2], rtol=1e-5)
    np.testing.assert_allclose(predicted[[0, 5]], 0.01, rtol=1e-5)
    history = np.array([[0, 0, 1, 2, 3, 4, 1, 2]])
    activations = _encode((recipe, make_model(recipe).build(6)), history)
    logits = activations[0, -1] @ state.params["item_embeddings"].T
    assert np.abs(logits).max() < 0.3  # what the encoder adds before training
