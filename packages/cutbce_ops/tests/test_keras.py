"""`cutbce_ops.keras` against `Dense` and Keras' own loss on multi-hot targets."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

keras = pytest.importorskip("keras", reason="Keras is not installed (extra `keras`)")
import cutbce_ops.keras as ck  # noqa: E402  (Keras may be absent)

pytestmark = [
    # Keras asks for int64 and NumPy's old array protocol; neither is ours to mend.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.usefixtures("keras_rules"),
]

B, S, F, D, V, L = 6, 5, 7, 8, 61, 4
README = Path(__file__).parent.parent / "README.md"


@pytest.fixture
def keras_rules():
    """Keras relies on JAX's default promotion."""
    policy = keras.config.dtype_policy()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    keras.config.set_dtype_policy(policy)


def make_targets(seed: int = 0, shape: tuple[int, ...] = (B, S)) -> np.ndarray:
    """Rows with padding, a row beyond the table, and a duplicate in the first list."""
    targets = np.random.default_rng(seed).integers(-2, V + 1, (*shape, L)).astype("int32")
    targets[(0,) * len(shape)] = [3, 3, -1, 5]
    return targets


def multi_hot(targets: np.ndarray) -> np.ndarray:
    return (targets[..., None] == np.arange(V)).any(-2).astype("float32")


def make_features(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, S, F)).astype("float32")


def trained_pair(
    body: list[Any], last: Any, dense: Any, loss: Any, dense_loss: Any, optimizer: Any, **options
):
    """A cut model and its dense twin with equal weights; the body is cloned for the twin."""
    ours = keras.Sequential([*body, last])
    twin_body = [layer.__class__.from_config(layer.get_config()) for layer in body[1:]]
    twin = keras.Sequential([keras.Input(**options), *twin_body, dense])
    ours.compile(optimizer(), loss=loss)
    twin.compile(optimizer(), loss=dense_loss)
    weights = ours.get_weights()
    position = -2 if last.use_bias else -1
    weights[position] = weights[position].T
    twin.set_weights(weights)
    return ours, twin


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train; every field has the value that most cases use."""

    optimizer: Any = keras.optimizers.SGD
    lr: float = 2.0  # the loss is a mean over V: a visible step needs a large rate
    use_bias: bool = True
    masked: bool = False
    has_weights: bool = False  # one for each position
    loss: dict = dataclasses.field(default_factory=dict)
    dense_loss: dict = dataclasses.field(default_factory=dict)
    policy: str = "float32"
    tolerance: float = 2e-6


CASES = {
    "sgd": Case(),
    "adam": Case(optimizer=keras.optimizers.Adam, lr=0.01, tolerance=2e-5),
    "no_bias": Case(use_bias=False, loss={"gradient_mode": "recompute"}),
    "label_smoothing": Case(loss={"label_smoothing": 0.2}, dense_loss={"label_smoothing": 0.2}),
    "masked_and_weighted": Case(masked=True, has_weights=True),
    "mixed_bfloat16": Case(policy="mixed_bfloat16", tolerance=2e-2),
}


@pytest.mark.parametrize("name", CASES)
def test_training_equals_dense(name: str):
    case = CASES[name]
    keras.config.set_dtype_policy(case.policy)
    keras.utils.set_random_seed(0)
    if case.masked:
        inputs = {"shape": (S,), "dtype": "int32"}
        body = [keras.Input(**inputs), keras.layers.Embedding(20, D, mask_zero=True)]
        x = np.random.default_rng(0).integers(0, 3, (B, S)).astype("int32")
        assert 0 < (x == 0).sum() < x.size
    else:
        inputs = {"shape": (S, F)}
        body = [keras.Input(**inputs), keras.layers.Dense(D, activation="tanh")]
        x = make_features()
    ours, twin = trained_pair(
        body,
        ck.CutDense(V, use_bias=case.use_bias),
        keras.layers.Dense(V, use_bias=case.use_bias),
        ck.CutBinaryCrossentropy(**case.loss),
        keras.losses.BinaryCrossentropy(from_logits=True, **case.dense_loss),
        lambda: case.optimizer(case.lr),
        **inputs,
    )
    weights = None
    if case.has_weights:
        weights = np.random.default_rng(2).integers(0, 3, (B, S)).astype("float32") / 2
    for step in range(3):
        targets = make_targets(step)
        got = ours.train_on_batch(x, targets, sample_weight=weights)
        want = twin.train_on_batch(x, multi_hot(targets), sample_weight=weights)
        np.testing.assert_allclose(got, want, rtol=case.tolerance)
    moved = 0.0
    for got, want in zip(ours.trainable_variables, twin.trainable_variables, strict=True):
        got, want = np.asarray(got.value), np.asarray(want.value)
        want = want.T if got.shape != want.shape else want
        moved = max(moved, np.abs(want - np.mean(want)).max())
        np.testing.assert_allclose(got, want, atol=case.tolerance * np.abs(want).max(), rtol=0)
    assert moved > 1e-2


def test_fit_over_batches_with_a_weight_per_sample():
    keras.utils.set_random_seed(0)
    ours, twin = trained_pair(
        [keras.Input((F,))], ck.CutDense(V), keras.layers.Dense(V), ck.CutBinaryCrossentropy(),
        keras.losses.BinaryCrossentropy(from_logits=True), lambda: keras.optimizers.SGD(2.0),
        shape=(F,),
    )  # fmt: skip
    x, targets = make_features()[:, 0], make_targets(shape=(B,))
    weights = np.linspace(0, 2, B)
    options = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}  # ragged last batch
    got = ours.fit(x, targets, sample_weight=weights, **options).history
    want = twin.fit(x, multi_hot(targets), sample_weight=weights, **options).history
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=2e-6)
    got_later = ours.evaluate(x, targets, sample_weight=weights, verbose=0)
    want_later = twin.evaluate(x, multi_hot(targets), sample_weight=weights, verbose=0)
    np.testing.assert_allclose(got_later, want_later, rtol=2e-6)
    assert got["loss"][-1] < got["loss"][0]
    np.testing.assert_allclose(ours.get_weights()[0], twin.get_weights()[0].T, atol=1e-6)


def test_the_comparison_notices_a_missing_weight():
    model = keras.Sequential([keras.Input((S, F)), ck.CutDense(V)])
    model.compile("sgd", loss=ck.CutBinaryCrossentropy())
    x, targets, weights = make_features(), make_targets(), np.ones((B, S), "float32")
    weights[0, 0] = 0
    full = model.evaluate(x, targets, verbose=0)
    assert model.evaluate(x, targets, sample_weight=weights, verbose=0) < full * (1 - 1e-3)


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize(
    "reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight", None]
)
def test_reductions_with_a_mask(reduction: str | None, has_weights: bool):
    keras.utils.set_random_seed(0)
    embedding, head = keras.layers.Embedding(20, D, mask_zero=True), ck.CutDense(V)
    dense = keras.layers.Dense(V)
    ids, targets = np.random.default_rng(0).integers(0, 3, (B, S)).astype("int32"), make_targets()
    assert 0 < (ids == 0).sum() < ids.size
    activations = head(embedding(ids))
    dense.build((B, S, D))
    dense.set_weights([np.asarray(head.embeddings.value).T, np.zeros(V)])
    logits = dense(embedding(ids))
    weights = np.linspace(0, 3, B * S).reshape(B, S)
    cut = ck.CutBinaryCrossentropy(reduction=reduction)
    full = keras.losses.BinaryCrossentropy(from_logits=True, reduction=reduction)
    got, want = cut(targets, activations, weights), full(multi_hot(targets), logits, weights)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=2e-6)


def eager_case() -> tuple[Any, Any, np.ndarray]:
    head = ck.CutDense(V)
    activations = head(np.random.default_rng(0).normal(size=(B, S, D)).astype("float32"))
    return activations, head.logits(activations), make_targets()


def test_pos_weight():
    activations, logits, targets = eager_case()
    got = ck.CutBinaryCrossentropy(pos_weight=3.0)(targets, activations)
    logits, labels = np.asarray(logits, np.float64), multi_hot(targets)
    softplus = np.logaddexp(0, -logits), np.logaddexp(0, logits)
    want = np.mean(3 * labels * softplus[0] + (1 - labels) * softplus[1])
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_focal_loss_equals_that_of_keras():
    activations, logits, targets = eager_case()
    focal = keras.losses.BinaryFocalCrossentropy(gamma=1.5, from_logits=True, label_smoothing=0.1)
    got = ck.CutBinaryCrossentropy(focal_gamma=1.5, label_smoothing=0.1)(targets, activations)
    np.testing.assert_allclose(got, focal(multi_hot(targets), logits), rtol=2e-6)


def test_gradient_of_a_hand_written_step():
    model = keras.Sequential([keras.Input((S, F)), keras.layers.Dense(D), ck.CutDense(V)])
    loss, targets, x = ck.CutBinaryCrossentropy(), make_targets(), make_features()

    @jax.jit
    @jax.grad
    def cut(variables):
        # The loss is outside Keras' stateless scope, where variables hold what they held before.
        return loss(targets, model.stateless_call(variables, [], x)[0])

    @jax.jit
    @jax.grad
    def dense(variables):
        kernel, bias, embeddings, item_bias = variables
        logits = (x @ kernel + bias) @ embeddings.T + item_bias
        labels = multi_hot(targets)
        return keras.ops.mean(keras.ops.binary_crossentropy(labels, logits, from_logits=True))

    values = [variable.value for variable in model.trainable_variables]
    for got, want in zip(cut(values), dense(values), strict=True):
        assert np.abs(want).max() > 1e-4
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-8)


def test_confusion_metrics_equal_those_of_keras():
    keras.utils.set_random_seed(0)
    ours = keras.Sequential([keras.Input((S, F)), ck.CutDense(V, track_confusion=True)])
    ours.compile("sgd", loss=ck.CutBinaryCrossentropy())
    twin = keras.Sequential([keras.Input((S, F)), keras.layers.Dense(V)])
    twin.compile("sgd", loss=keras.losses.BinaryCrossentropy(from_logits=True), metrics=[
        keras.metrics.BinaryAccuracy(threshold=0.0), keras.metrics.Precision(thresholds=0.0),
        keras.metrics.Recall(thresholds=0.0),
    ])  # fmt: skip
    embeddings, bias = ours.get_weights()
    twin.set_weights([embeddings.T, bias])
    options = {"batch_size": B // 2, "epochs": 2, "shuffle": False, "verbose": 0}
    got = ours.fit(make_features(), make_targets(), **options).history
    want = twin.fit(make_features(), multi_hot(make_targets()), **options).history
    assert set(got) == {"loss", "binary_accuracy", "precision", "recall"}
    for name in got:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-6)


def test_nothing_is_kept_for_outputs_that_are_gone():
    from cutbce_ops._src.keras import scoring

    before = len(scoring._scorings)
    model = keras.Sequential([keras.Input((S, F)), ck.CutDense(V)])
    model.compile("sgd", loss=ck.CutBinaryCrossentropy())
    model.fit(make_features(), make_targets(), verbose=0)
    output = model(make_features())
    assert len(scoring._scorings) == before + 1
    del output
    assert len(scoring._scorings) == before


def test_the_readme_example_runs():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [block for block in blocks if "cutbce_ops.keras" in block]
    names: dict[str, Any] = {}
    exec(compile(example, str(README), "exec"), names)
    assert names["rows"].shape == (2, 10)
    assert (names["rows"] != 0).all()
