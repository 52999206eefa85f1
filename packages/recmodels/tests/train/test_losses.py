import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from train_cases import NUM_ITEMS, small_recipe

import cutbce_ops
from recmodels import UserError
from recmodels._src.train.losses import make_loss, row_scores
from recmodels._src.train.step import initial_state, make_train_step

VOCAB = NUM_ITEMS + 1
KEY = jax.random.key(3)


def _case(num_targets=3, seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "item_embeddings": rng.normal(size=(VOCAB, 8)).astype(np.float32),
        "output_bias": rng.normal(size=VOCAB).astype(np.float32),
    }
    targets = rng.integers(1, VOCAB, (20, num_targets)).astype(np.int32)
    targets[::4, -1] = -1 if num_targets > 1 else targets[::4, -1]
    weights = (rng.random(20) > 0.2).astype(np.float32)
    activations = rng.normal(size=(20, 8)).astype(np.float32)
    return jax.tree.map(jnp.asarray, (params, activations, targets, weights))


def _value_and_grad(name, case, **values):
    recipe = small_recipe(loss=name, num_targets=case[2].shape[1], **values)
    loss = make_loss(recipe, vocab_size=VOCAB)
    return jax.value_and_grad(loss, argnums=(0, 1))(*case, KEY)


def _assert_close(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cut_equals_dense(smoothing):
    case = _case()
    results = [
        _value_and_grad(name, case, label_smoothing=smoothing) for name in ("cut-bce", "dense-bce")
    ]
    _assert_close(*results)


def test_softmax_equals_optax():
    case = _case(num_targets=1)

    def expected(params, activations):
        logits = activations @ params["item_embeddings"].T + params["output_bias"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, case[2][:, 0])
        return (losses * case[3]).sum() / case[3].sum()

    _assert_close(
        _value_and_grad("cut-softmax", case),
        jax.value_and_grad(expected, argnums=(0, 1))(*case[:2]),
    )


def _sampled(params, activations, targets, weights, num_negatives, beta):
    """Textbook form, one position at a time."""
    negatives = jax.random.randint(KEY, (len(targets), num_negatives), 1, VOCAB)
    total = 0.0
    for position, weight in enumerate(weights):
        wanted = [int(row) for row in targets[position] if row >= 0]
        drawn = [int(row) for row in negatives[position] if int(row) not in wanted]
        score = params["item_embeddings"] @ activations[position] + params["output_bias"]
        loss = sum(beta * jax.nn.softplus(-score[row]) for row in wanted)
        loss += sum(jax.nn.softplus(score[row]) for row in drawn)
        total += weight * loss / max(len(wanted) + len(drawn), 1)
    return total / weights.sum()


@pytest.mark.parametrize(("name", "calibration"), [("sampled-bce", 0.75), ("gbce", 0.75)])
def test_sampled_losses(name, calibration):
    case = _case()
    sampled_share = 5 / (NUM_ITEMS - 1)
    beta = 1.0
    if name == "gbce":
        beta = sampled_share * (calibration * (1 - 1 / sampled_share) + 1 / sampled_share)
        assert 0.2 < beta < 0.5
    want = _sampled(*case, 5, beta)
    got, gradients = _value_and_grad(name, case, num_negatives=5)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients))


def test_fully_calibrated_gbce_weighs_targets_by_the_sampled_share():
    case = _case(num_targets=1)
    far_below = case[0] | {"output_bias": jnp.full(VOCAB, -50.0)}  # negatives cost nothing
    case = (far_below, *case[1:])
    plain = _value_and_grad("sampled-bce", case, num_negatives=4)[0]
    gbce = _value_and_grad("gbce", case, num_negatives=4, gbce_calibration=1.0)[0]
    np.testing.assert_allclose(gbce / plain, 4 / (NUM_ITEMS - 1), rtol=1e-4)


def test_row_scores_gradient():
    (params, activations, targets, _), key = _case(), jax.random.key(0)
    rows = jnp.maximum(targets, 0)
    weights = jax.random.normal(key, rows.shape)

    def direct(activations, table):
        return (jnp.einsum("td,tkd->tk", activations, table[rows]) * weights).sum()

    def by_columns(activations, table):
        return (row_scores(activations, table, rows) * weights).sum()

    arguments = (activations, params["item_embeddings"])
    _assert_close(*(jax.grad(f, argnums=(0, 1))(*arguments) for f in (direct, by_columns)))


def test_a_batch_without_targets_costs_nothing():
    params, activations, targets, weights = _case(num_targets=1)
    empty = (params, activations, jnp.full_like(targets, -1), jnp.zeros_like(weights))
    for name in ("cut-bce", "cut-softmax", "dense-bce", "sampled-bce", "gbce"):
        loss, gradients = _value_and_grad(name, empty)
        assert loss == 0
        assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients))


def test_losses_of_all_logits_refuse_a_sharded_table():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))
    sharding = cutbce_ops.LossSharding(mesh, "data", "data")
    with pytest.raises(UserError, match="`loss` gbce needs the whole table on every device"):
        make_loss(small_recipe(loss="gbce"), vocab_size=VOCAB, sharding=sharding)


@pytest.mark.parametrize("name", ["cut-softmax", "gbce"])
def test_a_step_with_it_learns(name):
    negatives = {"num_negatives": 8} if name == "gbce" else {}
    recipe = small_recipe(loss=name, num_targets=1, dropout=0.0, learning_rate=0.05, **negatives)
    rng = np.random.default_rng(0)
    history = jnp.asarray(rng.integers(1, VOCAB, (8, 8)).astype(np.int32))
    targets = (history % NUM_ITEMS + 1)[..., None]
    state = initial_state(recipe, np.ones(VOCAB, np.float32))
    step = jax.jit(make_train_step(recipe))
    losses = []
    for _ in range(30):
        state, metrics = step(state, history, targets)
        losses.append(float(metrics.loss))
    assert np.mean(losses[-5:]) < 0.85 * losses[0]
