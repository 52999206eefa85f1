"""`cutbce_ops.keras` in every kind of model: saving, serving, tied tables, memory, errors."""

import importlib
import math
import os
import subprocess
import sys
import types
from typing import Any

import jax
import numpy as np
import pytest
from test_structure import all_shapes

keras = pytest.importorskip("keras", reason="Keras is not installed (extra `keras`)")
import cutbce_ops.keras as ck  # noqa: E402  (Keras may be absent)
from cutbce_ops._src.keras.requirements import require_keras  # noqa: E402

pytestmark = [
    # Keras uses NumPy's old array protocol, which is not ours to mend.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.usefixtures("keras_rules"),
]

B, S, D, V, L = 4, 5, 8, 61, 3


@pytest.fixture
def keras_rules():
    """Keras relies on JAX's default promotion."""
    policy = keras.config.dtype_policy()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    keras.config.set_dtype_policy(policy)


def make_data(seed: int = 0, num_items: int = V) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    histories = rng.integers(0, num_items, (B, S)).astype("int32")
    return histories, rng.integers(-1, num_items, (B, S, L)).astype("int32")


def sequential() -> Any:
    return keras.Sequential(
        [keras.Input((S,), dtype="int32"), keras.layers.Embedding(V, D), ck.CutDense(V)]
    )


def functional_tied() -> Any:
    table = keras.layers.Embedding(V, D, mask_zero=True)
    history = keras.Input((S,), dtype="int32")
    hidden = keras.layers.Dense(D, activation="tanh")(table(history))
    return keras.Model(history, ck.CutDense(embedding=table, track_confusion=True)(hidden))


@keras.saving.register_keras_serializable(package="cutbce_ops_tests")
class Subclassed(keras.Model):
    """A model whose configuration does not mention its head."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = keras.layers.Embedding(V, D)
        self.head = ck.CutDense(embedding=self.table)

    def call(self, histories):
        return self.head(self.table(histories))


KINDS = {"sequential": sequential, "functional_tied": functional_tied, "subclassed": Subclassed}


@pytest.mark.parametrize("kind", KINDS)
def test_models_train_save_and_go_on(kind: str, tmp_path):
    keras.utils.set_random_seed(0)
    model = KINDS[kind]()
    loss = ck.CutBinaryCrossentropy(label_smoothing=0.1)
    model.compile(keras.optimizers.Adam(0.01), loss=loss)
    histories, targets = make_data()
    losses = model.fit(histories, targets, batch_size=2, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0] - 1e-3
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        loaded.predict(histories, verbose=0), model.predict(histories, verbose=0)
    )
    assert loaded.count_params() == model.count_params()
    assert loaded.loss.label_smoothing == 0.1
    for seed in (1, 2):
        np.testing.assert_array_equal(
            loaded.train_on_batch(*make_data(seed)), model.train_on_batch(*make_data(seed))
        )
    for got, want in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_tied_table_is_one_variable_with_both_gradients():
    keras.utils.set_random_seed(0)
    model = functional_tied()
    assert model.count_params() == V * D + D * D + D + V
    head = model.layers[-1]
    assert head.embeddings is model.layers[1].embeddings
    model.compile(keras.optimizers.SGD(1.0), loss=ck.CutBinaryCrossentropy())
    before = np.asarray(head.embeddings.value)
    model.train_on_batch(*make_data())
    # Every row of an output table gets a gradient, also those that no history holds.
    assert (np.abs(np.asarray(head.embeddings.value) - before).max(axis=1) > 0).all()


def test_saving_keeps_a_tied_table_tied(tmp_path):
    model = functional_tied()
    model.compile("sgd", loss=ck.CutBinaryCrossentropy())
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.layers[-1].embeddings is loaded.layers[1].embeddings


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_serving_model_ranks_and_saves(policy: str, tmp_path):
    keras.config.set_dtype_policy(policy)
    model = functional_tied()
    head = model.layers[-1]
    head.bias.assign(np.linspace(-2, 2, V))
    exclude = keras.Input((S, 2), dtype="int32")
    ranked = ck.CutTopK(head, 5)(model.outputs[0], exclude)
    serving = keras.Model([model.inputs[0], exclude], ranked)
    histories, _ = make_data()
    hidden = np.random.default_rng(3).integers(0, V, (B, S, 2)).astype("int32")
    hidden[..., 1] = -1
    scores, rows = serving.predict([histories, hidden], verbose=0)
    logits = np.array(head.logits(model.predict(histories, verbose=0)), np.float32)
    np.put_along_axis(logits, hidden[..., :1], -np.inf, axis=-1)
    assert rows.shape == (B, S, 5)
    tolerance = 1e-5 if policy == "float32" else 2e-2
    want = -np.sort(-logits, axis=-1)[..., :5]
    np.testing.assert_allclose(scores, want, rtol=tolerance, atol=tolerance)
    taken = np.take_along_axis(logits, rows, axis=-1)
    np.testing.assert_allclose(taken, want, rtol=tolerance, atol=tolerance)
    assert serving.count_params() == model.count_params()
    serving.save(tmp_path / "serving.keras")
    loaded = keras.saving.load_model(tmp_path / "serving.keras")
    assert loaded.count_params() == serving.count_params()
    np.testing.assert_array_equal(loaded.predict([histories, hidden], verbose=0)[1], rows)


OBJECTS = {
    "own_table": lambda: ck.CutDense(
        7, use_bias=True, embeddings_initializer=keras.initializers.RandomNormal(stddev=0.5),
        embeddings_regularizer="l2", embeddings_constraint="max_norm",
        bias_initializer=keras.initializers.Constant(-3.0), bias_regularizer="l1",
        bias_constraint="non_neg", track_confusion=True, name="own", dtype="mixed_bfloat16",
    ),
    "no_bias": lambda: ck.CutDense(7, use_bias=False),
    "tied": lambda: ck.CutDense(embedding=keras.layers.Embedding(7, 3)),
    "loss": lambda: ck.CutBinaryCrossentropy(
        label_smoothing=0.1, pos_weight=2.0, focal_gamma=1.0, gradient_mode="recompute",
        precision="highest", reduction="sum", name="other", dtype="float16",
    ),
    "top_k": lambda: ck.CutTopK(ck.CutDense(7, name="head"), 3, name="best"),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_configurations_make_equal_objects(name: str):
    thing = OBJECTS[name]()
    copy = thing.__class__.from_config(thing.get_config())
    assert copy.get_config() == thing.get_config()
    assert set(thing.get_config()) >= set(_own_arguments(thing.__class__))


def _own_arguments(cls: type) -> list[str]:
    code = cls.__init__.__code__
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    return [name for name in names if name != "kwargs"]


def test_initial_values_regularizers_and_constraints_are_used():
    head = ck.CutDense(
        V, embeddings_initializer="ones", embeddings_regularizer=keras.regularizers.L2(0.5),
        bias_initializer=keras.initializers.Constant(-3.0), bias_constraint="non_neg",
    )  # fmt: skip
    model = keras.Sequential([keras.Input((D,)), head])
    np.testing.assert_allclose(np.asarray(model(np.ones((1, D), "float32"))), 1)
    np.testing.assert_allclose(float(sum(model.losses)), 0.5 * V * D)
    np.testing.assert_allclose(np.asarray(head.logits(np.ones((1, D), "float32"))), D - 3)
    model.compile(keras.optimizers.SGD(0.1), loss=ck.CutBinaryCrossentropy())
    model.train_on_batch(np.ones((2, D), "float32"), np.zeros((2, 1), "int32"))
    assert (np.asarray(head.bias.value) >= 0).all()
    initial = np.asarray(sequential().layers[-1].embeddings.value)
    assert 0 < np.abs(initial).max() <= math.sqrt(6 / (V + D))  # Glorot, as Dense has it


# Large enough that the logits outgrow the table, whose rows some backends pad to 128 features.
NUM_ITEMS, LONG, PADDED_D = 20_000, 128, 128
NUM_LOGITS = B * LONG * NUM_ITEMS


def largest_in_a_train_step(last: Any, loss: Any, targets: np.ndarray) -> int:
    """Size of the largest array in one step of `fit`, optimizer and metrics included."""
    table = keras.layers.Embedding(9, D)
    model = keras.Sequential([keras.Input((LONG,), dtype="int32"), table, last])
    model.compile("adam", loss=loss)
    data = np.zeros((B, LONG), "int32"), targets
    model._symbolic_build(data_batch=data)
    state = tuple(
        [variable.value for variable in variables]
        for variables in (
            model.trainable_variables, model.non_trainable_variables,
            model.optimizer.variables, model.metrics_variables,
        )
    )  # fmt: skip
    jaxpr = jax.make_jaxpr(model.train_step)(state, data).jaxpr
    return max(math.prod(shape) for shape in all_shapes(jaxpr))


@pytest.mark.parametrize("track_confusion", [False, True])
def test_a_training_step_holds_no_logits(track_confusion: bool):
    head = ck.CutDense(NUM_ITEMS, track_confusion=track_confusion)
    targets = np.zeros((B, LONG, L), "int32")
    largest = largest_in_a_train_step(head, ck.CutBinaryCrossentropy(), targets)
    assert largest <= 1.1 * NUM_ITEMS * PADDED_D < NUM_LOGITS / 3


def test_the_memory_check_notices_logits():
    labels = np.zeros((B, LONG, NUM_ITEMS), "float32")
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    assert largest_in_a_train_step(keras.layers.Dense(NUM_ITEMS), loss, labels) >= NUM_LOGITS


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ck.CutDense(), ValueError, "exactly one of `num_items`.*num_items=None"),
        (lambda: ck.CutDense(3, embedding=keras.layers.Embedding(3, 2)), ValueError, "exactly one"),
        (lambda: ck.CutDense(0), ValueError, "`num_items` must be at least 1; got 0"),
        (lambda: ck.CutDense(2.0), TypeError, "`num_items` must be a static Python int"),
        (lambda: ck.CutDense(embedding=3), TypeError, "`embedding` must be a keras.*; got int"),
        (lambda: ck.CutDense(3, use_bias=False, bias_regularizer="l2"), ValueError,
         "With use_bias=False the options `bias_initializer`"),
        (lambda: ck.CutDense(embedding=keras.layers.Embedding(3, 2), embeddings_regularizer="l2"),
         ValueError, "With embedding the options `embeddings_initializer`"),
        (lambda: ck.CutDense(embedding=keras.layers.Embedding(3, 2))(np.ones((1, 4), "float32")),
         ValueError, r"rows of `embedding` '.*' \(2\); got shape \(1, 4\)"),
        (lambda: ck.CutDense(3).embeddings, AttributeError, "before it is built"),
        (lambda: ck.CutBinaryCrossentropy(label_smoothing=2), ValueError, "`label_smoothing`"),
        (lambda: ck.CutBinaryCrossentropy(pos_weight=0), ValueError, "`pos_weight`"),
        (lambda: ck.CutBinaryCrossentropy(precision="int8"), ValueError, "`precision`"),
        (lambda: ck.CutBinaryCrossentropy(gradient_mode="x"), ValueError, "`gradient_mode`"),
        (lambda: ck.CutTopK(keras.layers.Dense(3), 2), TypeError, "`head` must be a CutDense"),
        (lambda: ck.CutTopK(ck.CutDense(3), 0), ValueError, "`k` must be at least 1; got 0"),
        (lambda: ck.CutBinaryCrossentropy().call(np.zeros((2, 1), "int32"), np.ones((2, 4))),
         ValueError, "must be the output of a CutDense layer itself"),
        (lambda: loss_of(ck.CutDense(3), targets=np.zeros((2, 1), "float32")), TypeError,
         "`y_true` must hold integer table rows"),
        (lambda: loss_of(ck.CutDense(3), targets=np.zeros((2,), "int32")), ValueError,
         r"`y_true` must have shape \[2, L\].*got \(2,\)"),
        (lambda: loss_of(ck.CutDense(65), targets=np.zeros((2, 65), "int32")), ValueError,
         r"`y_true` must list.*not mark them in a multi-hot.*got shape \(2, 65\)"),
        (lambda: loss_of(ck.CutDense(3, track_confusion=True), reduction=None), ValueError,
         "needs a loss with a reduction.*got reduction=None"),
    ],
)  # fmt: skip
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def loss_of(head, *, targets=None, **options):
    targets = np.zeros((2, 1), "int32") if targets is None else targets
    return ck.CutBinaryCrossentropy(**options)(targets, head(np.ones((2, 4), "float32")))


WRONG_TARGETS = (
    (lambda targets: targets[..., 0], ValueError, r"`y_true` must have shape \[.*5, L\]"),
    (lambda targets: targets[:, 1:], ValueError, r"`y_true` must have shape \[.*5, L\]"),
    (lambda targets: targets.astype("float32"), TypeError, "`y_true` must hold integer"),
)


@pytest.mark.parametrize("make_model", [sequential, functional_tied])
@pytest.mark.parametrize(("wrong", "error", "message"), WRONG_TARGETS)
def test_wrong_targets_leave_the_model_usable(make_model, wrong, error, message):
    histories, targets = make_data()
    model = make_model()
    model.compile("adam", loss=ck.CutBinaryCrossentropy())
    before = model.predict(histories, verbose=0)
    with pytest.raises(error, match=message):
        model.fit(histories, wrong(targets), verbose=0)
    np.testing.assert_array_equal(model.predict(histories, verbose=0), before)
    assert np.isfinite(model.fit(histories, targets, verbose=0).history["loss"]).all()


def generator(batches: list[Any]) -> Any:
    yield from batches


def trained_values(model: Any) -> list[np.ndarray]:
    return [np.asarray(v.value) for v in (*model.trainable_variables, *model.optimizer.variables)]


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG_TARGETS)
def test_wrong_targets_leave_a_trained_model_as_it_was(wrong, error, message):
    histories, targets = make_data()
    model = functional_tied()
    model.compile("adam", loss=ck.CutBinaryCrossentropy())
    model.fit(histories, targets, verbose=0)
    model.set_weights([2 * weights for weights in model.get_weights()])
    before = trained_values(model)
    for method in (model.fit, model.evaluate, model.fit):
        with pytest.raises(error, match=message):
            method(histories, wrong(targets), verbose=0)
        for got, want in zip(trained_values(model), before, strict=True):
            np.testing.assert_array_equal(got, want)
        assert all(variable.value is not None for variable in model.variables)
    assert np.isfinite(model.fit(histories, targets, verbose=0).history["loss"]).all()


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_a_wrong_later_batch_keeps_the_steps_before_it(steps_per_execution: int):
    keras.utils.set_random_seed(0)
    histories, targets = make_data()
    models = sequential(), sequential()
    models[1].set_weights(models[0].get_weights())
    for model in models:
        model.compile(
            "adam", loss=ck.CutBinaryCrossentropy(), steps_per_execution=steps_per_execution
        )
    good = [(histories, targets), (histories, targets[..., :2]), (histories, targets)]
    with pytest.raises(ValueError, match="`y_true` must have shape"):
        models[0].fit(generator([*good, (histories, targets[..., 0])]), shuffle=False, verbose=0)
    for batch in good:
        models[1].train_on_batch(*batch)
    for got, want in zip(*map(trained_values, models), strict=True):
        np.testing.assert_array_equal(got, want)


def test_validation_on_wrong_targets_keeps_the_training_before_it():
    histories, targets = make_data()
    model = sequential()
    model.compile("adam", loss=ck.CutBinaryCrossentropy())
    model.fit(histories, targets, verbose=0)
    with pytest.raises(ValueError, match="`y_true` must have shape"):
        model.fit(
            histories, targets, validation_data=(histories, targets[..., 0]), epochs=3, verbose=0
        )
    assert model.optimizer.iterations == 2
    assert np.isfinite(model.fit(histories, targets, verbose=0).history["loss"]).all()


def test_integer_multi_hot_targets_leave_a_new_model_usable():
    model = keras.Sequential([keras.Input((D,)), ck.CutDense(100)])
    model.compile("sgd", loss=ck.CutBinaryCrossentropy())
    features = np.ones((4, D), "float32")
    with pytest.raises(ValueError, match="not mark them in a multi-hot vector"):
        model.fit(features, np.zeros((4, 100), "int32"), verbose=0)
    assert np.isfinite(model.fit(features, np.zeros((4, L), "int32"), verbose=0).history["loss"])


def test_two_heads_track_under_names_of_their_own():
    features = keras.Input((D,))
    heads = {name: ck.CutDense(50, track_confusion=name, name=name) for name in ("films", "songs")}
    model = keras.Model(features, {name: head(features) for name, head in heads.items()})
    model.compile("sgd", loss={name: ck.CutBinaryCrossentropy() for name in heads})
    targets = {name: np.full((4, L), row, "int32") for name, row in (("films", 3), ("songs", -1))}
    history = model.fit(np.ones((4, D), "float32"), targets, verbose=0).history
    tracked = ("binary_accuracy", "precision", "recall")
    assert {f"{name}_{metric}" for name in heads for metric in tracked} <= set(history)
    with pytest.raises(TypeError, match=r"`track_confusion` must be True, False or text.*got 3"):
        ck.CutDense(50, track_confusion=3)


def test_a_list_as_long_as_a_small_catalog_is_no_multi_hot():
    assert np.isfinite(loss_of(ck.CutDense(3), targets=np.array([[0, 1, 2], [2, -1, -1]], "int32")))


def test_a_layer_after_the_head_is_an_error():
    model = keras.Sequential([keras.Input((D,)), ck.CutDense(V), keras.layers.Dropout(0.5)])
    model.compile("sgd", loss=ck.CutBinaryCrossentropy())
    with pytest.raises(ValueError, match="Make CutDense the last layer"):
        model.train_on_batch(np.ones((2, D), "float32"), np.zeros((2, L), "int32"))


def test_missing_keras(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", None)
    with pytest.raises(ImportError, match=r'pip install "cutbce-ops\[keras\]"'):
        require_keras()


@pytest.mark.parametrize(
    ("version", "backend", "message"),
    [
        ("3.10.0", "torch", "it runs on 'torch'. Set KERAS_BACKEND=jax before importing keras"),
        ("2.15.0", "tensorflow", "needs Keras 3; found version 2.15.0"),
    ],
)
def test_wrong_keras(monkeypatch, version: str, backend: str, message: str):
    fake = types.SimpleNamespace(
        __version__=version, backend=types.SimpleNamespace(backend=lambda: backend)
    )
    monkeypatch.setattr(importlib, "import_module", lambda name: fake)
    with pytest.raises(ImportError, match=message):
        require_keras()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True
    )


def test_keras_left_on_its_default_backend():
    result = run_python("import cutbce_ops.keras", KERAS_BACKEND="tensorflow")
    assert result.returncode != 0
    assert "set KERAS_BACKEND=jax before importing keras" in result.stderr.replace("Set ", "set ")
    assert "tensorflow" in result.stderr


def test_the_package_does_not_import_keras():
    result = run_python("import cutbce_ops, sys; print('keras' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr
