import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import random_params
from store_cases import distinct_store
from train_cases import NUM_ITEMS, chain_store, small_recipe

from recmodels import train
from recmodels._src.data.pipeline import train_batches
from recmodels._src.data.splits import Split
from recmodels._src.models.registry import make_model

VOCAB = 30


def _recipe(**values):
    return small_recipe(model="bert4rec", dropout=0.0, **values)


def _model(**values):
    recipe = _recipe(**values)
    return make_model(recipe), random_params(recipe, VOCAB)


def _batch(model, history, targets, seed=0):
    """One compilation instead of one for every operation."""
    return jax.tree.map(
        np.asarray, jax.jit(model.training_batch)(history, targets, jax.random.key(seed))
    )


def _windows(lengths, num_targets, *, max_length=8, seed=0):
    """Windows of that many items each, of which all but the last can be read by SASRec."""
    rng = np.random.default_rng(seed)
    history = np.zeros((len(lengths), max_length), np.int32)
    targets = np.full((*history.shape, num_targets), -1, np.int32)
    for row, length in enumerate(lengths):
        items = rng.permutation(VOCAB - 1)[:length] + 1
        num_inputs = min(length - 1, max_length)
        items = items[: num_inputs + num_targets]
        history[row, max_length - num_inputs :] = items[:num_inputs]
        for place in range(num_inputs):
            following = items[place + 1 : place + 1 + num_targets]
            targets[row, max_length - num_inputs + place, : len(following)] = following
    return history, targets


def _items(history, targets):
    """All items of each window, right-aligned in N + L columns."""
    rows = np.zeros((len(history), history.shape[1] + targets.shape[2]), np.int32)
    for row, window, last in zip(rows, history, targets[:, -1], strict=True):
        items = [*window[window > 0], *last[last >= 0]]
        row[len(row) - len(items) :] = items
    return rows


def _spans(batch, row):
    """{positions of a span: its target set} of one window."""
    spans = {}
    for position, targets in zip(batch.positions[row], batch.targets[row], strict=True):
        if targets.max() >= 0:
            spans.setdefault(tuple(targets), []).append(int(position))
    return {tuple(at): {t for t in targets if t >= 0} for targets, at in spans.items()}


@pytest.mark.parametrize(("num_targets", "mask_share"), [(1, 0.2), (3, 0.7)])
def test_spans_hide_their_items_and_predict_them_as_a_set(num_targets, mask_share):
    model, _ = _model(num_targets=num_targets, mask_share=mask_share)
    lengths = np.tile(np.arange(2, 12), 8)
    history, targets = _windows(lengths, num_targets)
    items = _items(history, targets)
    batch = _batch(model, history, targets)
    np.testing.assert_array_equal(batch.rows, np.where(batch.is_masked, 0, items))
    for row in range(len(items)):
        num_items, spans = (items[row] > 0).sum(), _spans(batch, row)
        assert spans
        masked = sorted(position for span in spans for position in span)
        assert masked == np.flatnonzero(batch.is_masked[row]).tolist()  # all of them, once
        assert len(items[row]) - num_items not in masked  # the oldest stays, so something is seen
        for span, predicted in spans.items():
            assert len(span) == min(num_targets, num_items - 1)
            assert span == tuple(range(span[0], span[0] + len(span)))
            assert predicted == set(items[row, list(span)])
        wanted = np.ceil(mask_share * (num_items - 1) / num_targets - 1e-9)
        assert len(spans) <= max(wanted, 1)
    num_positions = (targets >= 0).any(-1).sum()
    assert batch.is_masked.sum() <= model.loss_capacity(int(num_positions), len(items))


def test_masks_fall_everywhere_and_the_end_alone_as_often_as_asked():
    model, _ = _model(num_targets=2, mask_end_share=0.3)
    history, targets = _windows([11] * 2000, 2)
    share = _batch(model, history, targets).is_masked.mean(0)  # of 10 positions, the oldest never
    assert share[0] == 0.0
    assert (share[1:] > 0.08).all()
    # One span in a window: at the end 0.3 of the time, and a ninth of the rest.
    np.testing.assert_allclose(share[-1], 0.3 + 0.7 * 0.5 * 0.25, atol=0.04)
    always, _ = _model(num_targets=2, mask_end_share=1.0)
    masked = _batch(always, history, targets).is_masked
    np.testing.assert_array_equal(masked, np.broadcast_to(np.arange(10) >= 8, masked.shape))


def test_other_steps_mask_other_positions():
    model, _ = _model(num_targets=1)
    history, targets = _windows([9] * 8, 1)
    masks = [_batch(model, history, targets, seed).is_masked for seed in (0, 0, 1)]
    np.testing.assert_array_equal(masks[0], masks[1])
    assert (masks[0] != masks[2]).any()


@pytest.mark.parametrize("protocol", ["leave-one-out", "next-8"])
def test_point_6_no_held_out_item_is_read_or_predicted(tmp_path, protocol):
    lengths = [30, 6, 41, 2]
    store = distinct_store(tmp_path / "store", lengths)
    recipe = _recipe(protocol=protocol, num_targets=2, max_length=4, batch_size=16)
    split, seen = Split(protocol, 2), set()
    batches, make = train_batches(store, recipe), jax.jit(make_model(recipe).training_batch)
    for step in range(40):
        window = next(batches)
        batch = make(window["history"], window["targets"], jax.random.key(step))
        seen |= set(np.asarray(batch.rows).ravel()) | set(np.asarray(batch.targets).ravel())
    stop = split.train_range(np.array(lengths)).target_stop
    allowed = {store.sequence(user)[at] for user in range(4) for at in range(stop[user])}
    assert seen - {0, -1} == allowed  # the last one that may be a target occurs too


def _activations(model, params, batch):
    def run(params, vectors):
        key = jax.random.key(0)
        return model.training_activations(params, batch, vectors, key, recompute=False)

    return np.asarray(jax.jit(run)(params, params["item_embeddings"][batch.rows]))


def test_a_masked_item_changes_nothing_but_its_targets():
    model, params = _model(num_targets=3)
    history, targets = _windows([12] * 4, 3)
    before = _batch(model, history, targets)
    items = _items(history, targets)
    masked = int(np.flatnonzero(before.is_masked[0])[0])
    replaced = items[0, masked]
    other = np.setdiff1d(np.arange(1, VOCAB), items[0])[0]
    change = lambda rows: np.where(rows == replaced, other, rows)  # noqa: E731
    history, targets = (np.concatenate([change(a[:1]), a[1:]]) for a in (history, targets))
    after = _batch(model, history, targets)
    assert (before.targets != after.targets).any()
    np.testing.assert_array_equal(
        _activations(model, params, before), _activations(model, params, after)
    )


def test_masked_positions_see_both_sides_and_no_padding():
    model, params = _model(num_targets=1, num_layers=1)
    vectors = np.random.default_rng(0).normal(size=(1, 9, 8)).astype(np.float32)
    mask = jnp.arange(9)[None] >= 2
    encode = jax.jit(lambda vectors: model.encoder(params)(vectors, mask)[0, 5])
    before = np.asarray(encode(vectors))
    moved = []
    for place in range(9):
        changed = vectors.copy()
        changed[0, place, 0] += 1
        moved.append(np.abs(np.asarray(encode(changed)) - before).max())
    assert moved[0] == moved[1] == 0.0
    assert min(moved[2:]) > 1e-4


@pytest.mark.parametrize("num_targets", [1, 3])
def test_a_query_asks_what_training_with_a_masked_end_taught(num_targets):
    model, params = _model(num_targets=num_targets, mask_end_share=1.0, max_length=8)
    history, targets = _windows([12, 12, 9 + num_targets - 1], num_targets)
    batch = _batch(model, history, targets)
    predicts = (batch.targets >= 0).any(-1)
    assert (predicts.sum(1) == num_targets).all()
    activations = _activations(model, params, batch)
    taught = activations[predicts].reshape(len(history), num_targets, -1).mean(1)
    vectors = params["item_embeddings"][history]
    queries = jax.jit(model.queries)(params, vectors, history > 0)
    np.testing.assert_allclose(queries, taught, rtol=1e-5, atol=1e-5)


def test_point_7_rows_of_padding_are_finite_forward_and_backward():
    model, params = _model(num_targets=2, norm="post", compute_dtype="bfloat16")
    history, targets = np.zeros((2, 8), np.int32), np.full((2, 8, 2), -1, np.int32)
    batch = _batch(model, history, targets)
    assert not batch.is_masked.any()
    assert (batch.targets == -1).all()

    def total(params):
        vectors = params["item_embeddings"][batch.rows]
        taught = model.training_activations(
            params, batch, vectors, jax.random.key(0), recompute=True
        )
        asked = model.queries(params, vectors[:, :8], jnp.zeros((2, 8), bool))
        return (taught.astype(jnp.float32) ** 2).sum() + (asked**2).sum()

    value, gradients = jax.jit(jax.value_and_grad(total))(params)
    assert bool(jnp.isfinite(value))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradients))


def test_trains_from_store_to_bundle_and_beats_popularity(tmp_path):
    store = chain_store(tmp_path / "store")
    recipe = small_recipe(
        model="bert4rec",
        protocol="leave-one-out",
        num_targets=1,
        loss="cut-softmax",
        tie_embeddings=False,
        mask_share=0.4,
        hidden_dim=16,
        dropout=0.0,
        batch_size=32,
        num_steps=80,
        evaluate_every=80,
        checkpoint_every=80,
        log_every=20,
        learning_rate=3e-2,
    )
    result = train(recipe, store, tmp_path / "run", progress=False)
    assert result.loss_curve[-1][1] < np.log(NUM_ITEMS) - 0.8
    assert result.test.model["hit@8"] > 2 * result.test.popularity["hit@8"]
    assert (result.bundle / "bundle.json").exists()
