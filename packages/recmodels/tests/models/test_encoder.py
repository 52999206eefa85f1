"""The encoder against its textbook formulas, and its sizes by hand, for every option."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import random_params
from train_cases import small_recipe

from recmodels import UserError
from recmodels._src.models.layers import rotated
from recmodels._src.models.registry import make_model

VOCAB = 30

OPTIONS = [
    {},
    {"norm": "post", "activation": "relu"},
    {"positions": "rotary", "mlp_ratio": 2},
    {"norm": "post", "positions": "rotary"},
]


def _norm(values, weights):
    centered = values - values.mean(-1, keepdims=True)
    deviation = np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
    return centered / deviation * weights["scale"] + weights["bias"]


def _linear(values, weights):
    return values @ weights["kernel"] + weights["bias"]


def _turn(vector, position):
    """As complex numbers: column k and column k + K / 2 are one of them."""
    half = len(vector) // 2
    turned = (vector[:half] + 1j * vector[half:]) * np.exp(
        1j * position * 10_000.0 ** (-np.arange(half) / half)
    )
    return np.concatenate([turned.real, turned.imag])


def _attend(recipe, values, visible, weights):
    """One sequence, one head and one position after another."""
    output, width = np.zeros_like(values), recipe.hidden_dim // recipe.num_heads
    query, key, value = np.split(_linear(values, weights["qkv"]), 3, axis=1)
    for head in range(recipe.num_heads):
        columns = slice(head * width, (head + 1) * width)
        q, k = query[:, columns], key[:, columns]
        if recipe.positions == "rotary":
            q, k = ([_turn(row, at) for at, row in enumerate(rows)] for rows in (q, k))
        for i in range(len(values)):
            scores = np.array([np.dot(q[i], k[j]) / width**0.5 for j in range(len(values))])
            shares = np.exp(scores) * visible[i]
            output[i, columns] = shares @ value[:, columns] / shares.sum()
    return _linear(output, weights["attention_out"])


def _textbook(recipe, encoder, vectors, visible):
    gelu = lambda x: 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))  # noqa: E731
    activate = gelu if recipe.activation == "gelu" else lambda x: np.maximum(x, 0)
    stream = vectors + encoder.get("positions", 0)
    is_pre = recipe.norm == "pre"
    stream = stream if is_pre else _norm(stream, encoder["input_norm"])
    for layer in range(recipe.num_layers):
        block = encoder["blocks"][layer]
        halves = {
            "attention_norm": lambda x, block=block: _attend(recipe, x, visible, block),
            "mlp_norm": lambda x, block=block: _linear(
                activate(_linear(x, block["mlp_in"])), block["mlp_out"]
            ),
        }
        for name, half in halves.items():
            if is_pre:
                stream = stream + half(_norm(stream, block[name]))
            else:
                stream = _norm(stream + half(stream), block[name])
    return _norm(stream, encoder["final_norm"]) if is_pre else stream


@pytest.mark.parametrize("name", ["sasrec", "bert4rec"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_encoder_equals_the_textbook(name, options):
    recipe = small_recipe(model=name, num_layers=2, num_targets=2, **options)
    model = make_model(recipe)
    rng, params = np.random.default_rng(0), random_params(recipe, VOCAB)
    length = 8 if name == "sasrec" else 10
    vectors, mask = rng.normal(size=(length, 8)), np.arange(length) >= 2
    encode = jax.jit(lambda params, *inputs: model.encoder(params)(*inputs))
    output = encode(params, vectors[None].astype(np.float32), mask[None])[0]
    visible = np.broadcast_to(mask, (length, length))
    if name == "sasrec":
        visible = np.tril(visible)
    encoder = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["encoder"])
    expected = _textbook(
        recipe, encoder, np.where(mask[:, None], vectors, 0), visible | ~mask[:, None]
    )
    np.testing.assert_allclose(output[2:], expected[2:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["sasrec", "bert4rec"])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3]], ids=str)
def test_packed_equals_padded(name, options):
    recipe = small_recipe(model=name, num_layers=2, num_targets=2, **options)
    model, rng = make_model(recipe), np.random.default_rng(0)
    length = 8 if name == "sasrec" else 10
    mask = jnp.asarray(np.arange(length) >= np.array([[3], [0], [length], [7]]))  # one is empty
    vectors = jnp.asarray(rng.normal(size=(4, length, 8)).astype(np.float32))
    weights = jnp.asarray(rng.normal(size=(4, length, 8)).astype(np.float32)) * mask[..., None]

    def total(params, vectors, capacity):
        activations = model.encoder(params)(vectors, mask, capacity=capacity)
        return (activations * weights).sum(), activations

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True), static_argnums=2)
    params, num_real = random_params(recipe, VOCAB), int(mask.sum())
    (_, padded), expected = run(params, vectors, None)
    for capacity in (num_real, num_real + 3):
        (_, packed), gradients = run(params, vectors, capacity)
        np.testing.assert_allclose(
            np.asarray(packed)[mask], np.asarray(padded)[mask], rtol=1e-5, atol=1e-5
        )
        for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["sasrec", "bert4rec"])
@pytest.mark.parametrize("options", [*OPTIONS, {"tie_embeddings": False}], ids=str)
def test_number_of_weights(name, options):
    recipe = small_recipe(model=name, num_layers=2, num_targets=3, output_bias=False, **options)
    params = jax.eval_shape(lambda: make_model(recipe).build(VOCAB))
    width = 8 * recipe.mlp_ratio
    norm, attention = 2 * 8, (8 * 24 + 24) + (8 * 8 + 8)
    mlp = (8 * width + width) + (width * 8 + 8)
    expected = VOCAB * 8 * (1 if recipe.tie_embeddings else 2)
    expected += 2 * (2 * norm + attention + mlp) + norm
    if recipe.positions == "learned":
        expected += (8 if name == "sasrec" else 8 + 3) * 8
    if name == "bert4rec":
        expected += 8  # the mask's vector
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == expected


def test_rotated_products_depend_on_the_distance_only():
    query, key = np.random.default_rng(0).normal(size=(2, 6)).astype(np.float32)
    along = [np.asarray(rotated(jnp.tile(each, (1, 9, 1, 1))))[0, :, 0] for each in (query, key)]
    products = along[0] @ along[1].T
    for distance in range(-8, 9):
        np.testing.assert_allclose(np.ptp(np.diagonal(products, distance)), 0, atol=1e-5)
    assert np.ptp(products[0]) > 0.1
    np.testing.assert_allclose(products[0, 0], query @ key, rtol=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"positions": "rotary", "num_heads": 8}, r"`positions` must be learned .* \(8 / 8\)"),
        ({"model": "gru"}, "`model` must be one of sasrec, bert4rec; got 'gru'"),
        ({"norm": "both"}, "`norm` must be one of pre, post"),
        ({"activation": "tanh"}, "`activation` must be one of gelu, relu"),
        ({"mlp_ratio": 0}, "`mlp_ratio` must be at least 1; got 0"),
        ({"mask_share": 0.0}, "`mask_share` must be above 0 and below 1; got 0.0"),
        ({"mask_end_share": 1.5}, "`mask_end_share` must be between 0 and 1; got 1.5"),
    ],
)
def test_bad_options(values, message):
    with pytest.raises(UserError, match=message):
        small_recipe(**values)
