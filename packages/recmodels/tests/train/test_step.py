import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from train_cases import NUM_ITEMS, small_recipe

from recmodels._src.models.base import output_table
from recmodels._src.models.registry import make_model
from recmodels._src.train.optimizer import (
    decayed,
    learning_rate,
    make_optimizer,
    scale_by_rowwise_adagrad,
)
from recmodels._src.train.step import initial_state, make_train_step

VOCAB = NUM_ITEMS + 1


def _batch(seed=0, batch=8, length=8, num_targets=8):
    rng = np.random.default_rng(seed)
    history = rng.integers(1, VOCAB, (batch, length)).astype(np.int32)
    targets = rng.integers(1, VOCAB, (batch, length, num_targets)).astype(np.int32)
    for row in range(batch):
        padded = int(rng.integers(0, length))  # left padding, as the pipeline makes it
        history[row, :padded], targets[row, :padded] = 0, -1
    targets[..., -1, 3:] = -1
    return jnp.asarray(history), jnp.asarray(targets)


def _counts():
    return np.arange(VOCAB, dtype=np.float32)


def _step(recipe, state, history, targets, capacity=None):
    return jax.jit(make_train_step(recipe), static_argnums=3)(state, history, targets, capacity)


def _dense_step(recipe, state, history, targets):
    """The same step from textbook parts: dense labels, plain autodiff through the table."""
    model = make_model(recipe)

    def objective(params):
        vectors = params["item_embeddings"][history]
        key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
        activations = model.encoder(params)(vectors, history > 0, key)
        logits = activations @ output_table(params).T + params["output_bias"]
        labels = (targets[..., None] == jnp.arange(VOCAB)).any(-2)
        per_position = optax.sigmoid_binary_cross_entropy(logits, labels).sum(-1)
        weights = (targets >= 0).any(-1)
        return (per_position * weights).sum() / weights.sum()

    loss, gradients = jax.value_and_grad(objective)(state.params)
    updates, _ = make_optimizer(recipe).update(gradients, state.optimizer, state.params)
    return loss / VOCAB, optax.tree.norm(gradients), optax.apply_updates(state.params, updates)


@pytest.mark.parametrize(
    ("capacity", "tie_embeddings"), [(None, True), (64, True), (63, True), (63, False)]
)
def test_step_equals_dense_step(capacity, tie_embeddings):
    # Which numbers dropout draws depends on how many positions are computed.
    dropout = 0.2 if capacity in (None, 64) else 0.0
    recipe = small_recipe(weight_decay=0.1, tie_embeddings=tie_embeddings, dropout=dropout)
    history, targets = _batch()
    assert (targets >= 0).any(-1).sum() <= 63
    state = initial_state(recipe, _counts())
    loss, norm, params = jax.jit(_dense_step, static_argnums=0)(recipe, state, history, targets)
    after, metrics = _step(recipe, state, history, targets, capacity)
    np.testing.assert_allclose(metrics.loss, loss, rtol=2e-6)
    np.testing.assert_allclose(metrics.gradient_norm, norm, rtol=1e-5)
    for got, want in zip(jax.tree.leaves(after.params), jax.tree.leaves(params), strict=True):
        # Adam's first update divides by the size of the gradient, so tiny ones lose digits.
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert int(after.step) == 1


def test_rows_that_nobody_read_or_predicted_still_learn():
    recipe = small_recipe()
    history, targets = _batch()
    history, targets = jnp.where(history == 7, 8, history), jnp.where(targets == 7, 8, targets)
    state = initial_state(recipe, _counts())
    after, _ = _step(recipe, state, history, targets)
    moved = np.abs(after.params["item_embeddings"] - state.params["item_embeddings"]).max(1)
    assert moved[7] > 0  # it is a negative of every position: no sampling


def test_dropout_depends_on_the_step_only():
    recipe = small_recipe(dropout=0.5)
    history, targets = _batch()
    state = initial_state(recipe, _counts())
    step = jax.jit(make_train_step(recipe), static_argnums=3)
    states = [state._replace(step=jnp.int32(number)) for number in (0, 1, 0)]
    losses = [float(step(each, history, targets, None)[1].loss) for each in states]
    assert losses[0] == losses[2] != losses[1]


def test_optimizer_decays_matrices_only():
    params = initial_state(small_recipe(), _counts()).params
    flat = jax.tree_util.tree_leaves_with_path(decayed(params))
    names = {jax.tree_util.keystr(path, simple=True, separator="/") for path, keep in flat if keep}
    weights = ("qkv", "attention_out", "mlp_in", "mlp_out")
    assert names == {"item_embeddings"} | {f"encoder/blocks/0/{name}/kernel" for name in weights}


def test_learning_rate_schedule():
    recipe = small_recipe(
        num_steps=110, warmup_steps=10, learning_rate=1.0, final_learning_rate_ratio=0.2
    )
    rates = [float(learning_rate(recipe, step)) for step in (0, 4, 9, 60, 110, 500)]
    np.testing.assert_allclose(rates, [0.1, 0.5, 1.0, 0.6, 0.2, 0.2], rtol=1e-5)


def test_bfloat16_trains_on_float32_weights():
    recipe = small_recipe(compute_dtype="bfloat16")
    history, targets = _batch()
    state = initial_state(recipe, _counts())
    after, metrics = _step(recipe, state, history, targets)
    _, exact = _step(recipe.override(compute_dtype="float32"), state, history, targets)
    np.testing.assert_allclose(metrics.loss, exact.loss, rtol=5e-3)
    assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {jnp.dtype("float32")}


def test_eight_devices_equal_one():
    script = """
        import jax, numpy as np
        from test_step import VOCAB, _batch, _counts, small_recipe
        from recmodels._src.train.placement import Placement
        history, targets = _batch()
        for options in (
            {},
            {"model": "bert4rec", "tie_embeddings": False, "table": "sharded"},
        ):
            recipe, results = small_recipe(dropout=0.3, **options), []
            for placement in (Placement(VOCAB, VOCAB), Placement.of_this_machine(recipe, VOCAB)):
                state = placement.initial_state(recipe, _counts())
                step = placement.compile_step(recipe)
                for _ in range(2):
                    state, metrics = step(state, history, targets, None)
                results.append((jax.tree.leaves(state.params), metrics))
            assert len(placement.mesh.devices) == 8
            assert placement.is_table_sharded == ("table" in options)
            for one, eight in zip(results[0][0], results[1][0], strict=True):
                # A sharded table has unused rows at its end.
                np.testing.assert_allclose(one, eight[: len(one)], rtol=1e-3, atol=1e-5)
                assert not np.any(eight[len(one) :])
            np.testing.assert_allclose(results[0][1].loss, results[1][1].loss, rtol=1e-5)
    """
    folder = Path(__file__).parent
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join(
            [str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")]
        ),
    }
    code = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(code, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_parts_of_a_batch_add_up_to_the_whole():
    recipe = small_recipe(dropout=0.0)
    history, targets = _batch()
    state = initial_state(recipe, _counts())
    whole, expected = _step(recipe, state, history, targets)
    parts, metrics = _step(recipe.override(accumulate_steps=4), state, history, targets)
    np.testing.assert_allclose(metrics.loss, expected.loss, rtol=1e-6)
    np.testing.assert_allclose(metrics.gradient_norm, expected.gradient_norm, rtol=1e-5)
    for got, want in zip(jax.tree.leaves(parts.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_average_of_the_weights():
    recipe = small_recipe(ema_decay=0.5)
    state = initial_state(recipe, _counts())
    assert state.result is state.average
    expected = jax.tree.map(np.asarray, state.params)
    for number in range(12):
        state, _ = _step(recipe, state, *_batch(seed=number))
        decay = min(0.5, (1 + number) / (10 + number))
        expected = jax.tree.map(
            lambda old, new, decay=decay: decay * old + (1 - decay) * np.asarray(new),
            expected,
            state.params,
        )
    for got, want in zip(jax.tree.leaves(state.average), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert initial_state(small_recipe(), _counts()).average is None


@pytest.mark.parametrize(
    ("name", "most"), [("adafactor", VOCAB + 8 + 8), ("rowwise-adagrad", VOCAB)]
)
def test_table_optimizers_keep_less_and_learn(name, most):
    recipe = small_recipe(table_optimizer=name, dropout=0.0, learning_rate=0.05)
    state = initial_state(recipe, _counts())
    leaves = jax.tree_util.tree_leaves_with_path(state.optimizer)
    of_table = [leaf for path, leaf in leaves if "item_embeddings" in jax.tree_util.keystr(path)]
    assert 0 < sum(leaf.size for leaf in of_table) <= most  # AdamW keeps 2 * VOCAB * 8
    first = state.params
    history, targets = _batch()
    step = jax.jit(make_train_step(recipe))
    losses = []
    for _ in range(20):
        state, metrics = step(state, history, targets)
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.9 * losses[0]
    moved = np.abs(state.params["item_embeddings"] - first["item_embeddings"]).max(1)
    assert (moved[1:] > 0).all()


@pytest.mark.parametrize("name", ["adamw", "adafactor", "rowwise-adagrad"])
def test_unused_rows_change_no_step(name):
    """Of which a table that is spread over a mesh has up to 1,023."""
    recipe = small_recipe(table_optimizer=name, dropout=0.0, weight_decay=0.1)
    history, targets = _batch()
    tables = []
    for num_rows in (VOCAB, 4 * VOCAB):
        state = initial_state(recipe, _counts(), num_rows=num_rows)
        step = jax.jit(make_train_step(recipe, vocab_size=VOCAB))
        for _ in range(3):
            state, _ = step(state, history, targets)
        tables.append(state.params["item_embeddings"])
    np.testing.assert_allclose(tables[1][:VOCAB], tables[0], rtol=1e-5, atol=1e-6)
    assert not np.any(tables[1][VOCAB:])


def test_rowwise_adagrad_by_hand():
    scale = scale_by_rowwise_adagrad()
    gradients = [jnp.array([[3.0, 4.0], [0.0, 0.0]]), jnp.array([[1.0, 1.0], [2.0, 0.0]])]
    state = scale.init(gradients[0])
    first, state = scale.update(gradients[0], state)
    second, state = scale.update(gradients[1], state)
    np.testing.assert_allclose(first, [[3 / 12.5**0.5, 4 / 12.5**0.5], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(second, [[13.5**-0.5] * 2, [2**0.5, 0]], rtol=1e-6)
