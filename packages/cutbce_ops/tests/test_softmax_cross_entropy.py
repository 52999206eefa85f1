"""Softmax cross-entropy against the float64 oracle, on one device and over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case, Problem, make_problem
from jax.sharding import AxisType, PartitionSpec
from tolerances import assert_close, relative_l2

import cutbce_ops

CASES = [
    Case(weights="random"),
    Case(num_positions=29, vocab_size=1003, dim=13, bias=True, targets="outside", unused_rows=37),
    Case(vocab_size=1),
    Case(mean_logit=-14.0, weights="some_zero"),
    Case(logit_scale=100.0),
    Case(logit_cap=3.0, scale_option=2.0, bias=True),
]
LAYOUTS = [("data", None), (None, "data"), ("data", ("data", "model")), ("data", "model")]


def make(case: Case, dtype=jnp.float32) -> tuple[Problem, jnp.ndarray]:
    """A problem with one target per position; rows that are not in use hold NaN."""
    problem = make_problem(case, dtype)
    embeddings = problem.embeddings.at[case.vocab_size :].set(jnp.nan)
    bias = problem.bias
    if bias is not None:
        bias = bias.at[case.vocab_size :].set(jnp.nan)
    problem = Problem(case, problem.activations, embeddings, problem.targets, problem.weights, bias)
    return problem, problem.targets[:, 0]


def options_of(problem: Problem, **changes) -> dict:
    names = ("bias", "vocab_size", "logit_scale", "logit_cap", "tiles")
    return {name: problem.options()[name] for name in names} | changes


def truth_of(problem: Problem, targets, **changes) -> oracle.SoftmaxTruth:
    names = ("weights", "bias", "vocab_size", "scale", "cap")
    options = {name: problem.oracle_options()[name] for name in names} | changes
    return oracle.softmax_cross_entropy(problem.activations, problem.embeddings, targets, **options)


def value_and_gradients(problem: Problem, targets, **changes):
    def loss(activations, embeddings, bias):
        return cutbce_ops.cut_softmax_cross_entropy(
            activations, embeddings, targets, position_weights=problem.weights,
            **options_of(problem, bias=bias, **changes),
        )  # fmt: skip

    argnums = (0, 1) if problem.bias is None else (0, 1, 2)
    function = jax.jit(jax.value_and_grad(loss, argnums))
    return function(problem.activations, problem.embeddings, problem.bias)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, "float32") for case in CASES] + [(case, "bfloat16") for case in CASES[3:]],
    ids=lambda value: getattr(value, "name", value),
)
def test_loss_and_gradients_match_float64(case: Case, dtype: str):
    problem, targets = make(case, dtype)
    loss, gradients = value_and_gradients(problem, targets)
    truth = truth_of(problem, targets)
    assert loss.dtype == jnp.float32
    assert loss.shape == ()
    assert_close(loss, truth.loss, dtype, "loss")
    wanted = [truth.d_activations, truth.d_embeddings, truth.d_bias][: len(gradients)]
    for got, want in zip(gradients, wanted, strict=True):
        assert got.dtype == dtype
        # A logit x is known to 6e-8 |x| in float32, and so is the probability made of it.
        large = case.logit_scale > 10 or case.mean_logit < -10
        assert_close(got, want, dtype, "gradient", 4 if large else 1)


@pytest.mark.parametrize("case", [CASES[1], CASES[5]], ids=lambda case: case.name)
def test_per_position_loss_and_its_gradients(case: Case):
    problem, targets = make(case)
    cotangent = jnp.asarray(np.random.default_rng(5).normal(size=case.num_positions), jnp.float32)

    def loss(activations, embeddings):
        return cutbce_ops.cut_softmax_cross_entropy_per_position(
            activations, embeddings, targets, **options_of(problem)
        )

    value, pull_back = jax.vjp(loss, problem.activations, problem.embeddings)
    truth = truth_of(problem, targets, weights=cotangent, normalize=False)
    assert_close(value, truth.per_position, "float32", "per_position")
    d_activations, d_embeddings = pull_back(cotangent)
    assert_close(d_activations, truth.d_activations, "float32", "gradient")
    assert_close(d_embeddings, truth.d_embeddings, "float32", "gradient")


def test_gradients_equal_those_of_the_dense_formula():
    problem, targets = make(Case(bias=True, weights="random", vocab_size=97))
    _, gradients = value_and_gradients(problem, targets)

    def dense(activations, embeddings, bias):
        logits = activations @ embeddings.T + bias[None, :]
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        losses = jax.nn.logsumexp(logits, axis=1) - chosen
        return jnp.sum(problem.weights * losses) / jnp.sum(problem.weights)

    want = jax.grad(dense, (0, 1, 2))(problem.activations, problem.embeddings, problem.bias)
    for a, b in zip(gradients, want, strict=True):
        assert relative_l2(a, b) <= 2e-6


def test_learned_scale_weights_and_leading_axes():
    problem, targets = make(Case(scale_option=1.7, logit_cap=4.0, weights="random", bias=True))

    def loss(scale, weights):
        return cutbce_ops.cut_softmax_cross_entropy(
            problem.activations.reshape(2, 12, -1), problem.embeddings, targets.reshape(2, 12),
            position_weights=weights.reshape(2, 12), **options_of(problem, logit_scale=scale),
        )  # fmt: skip

    gradients = jax.grad(loss, (0, 1))(jnp.float32(1.7), problem.weights)
    truth = truth_of(problem, targets)
    assert_close(gradients[0], truth.d_scale, "float32", "gradient", 2)
    want = (truth.per_position - truth.loss) / np.asarray(problem.weights, np.float64).sum()
    np.testing.assert_allclose(gradients[1], want, atol=1e-6)


@pytest.mark.parametrize("logit", [1e4, -1e4])
def test_extreme_logits_stay_finite(logit: float):
    problem = Problem(
        Case(), jnp.full((24, 1), 100.0), jnp.full((640, 1), logit / 100).at[7].set(0.0),
        jnp.full((24, 1), 7), None, None,
    )  # fmt: skip
    targets = problem.targets[:, 0]
    loss, gradients = value_and_gradients(problem, targets)
    truth = truth_of(problem, targets)
    np.testing.assert_allclose(loss, truth.loss, rtol=4e-7)
    # 639 equal terms. Added up one after the other in float32, as XLA's product does here, they all
    # round the same way: 2.2e-6 by itself. Only another order (eight sums side by side: 6e-7) would
    # reach 1e-6, and the order is XLA's.
    np.testing.assert_allclose(gradients[0], truth.d_activations, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(gradients[1], truth.d_embeddings, rtol=1e-5, atol=1e-4)  # of 100


@pytest.mark.parametrize("why", ["no target", "zero weights"])
def test_nothing_to_learn_gives_zero(why: str):
    problem, targets = make(Case(weights="zero" if why == "zero weights" else "none"))
    targets = targets if why == "zero weights" else jnp.full_like(targets, -1)
    loss, gradients = value_and_gradients(problem, targets)
    assert float(loss) == 0
    assert not any(np.any(gradient) for gradient in gradients)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_sharded_matches_float64(mesh, layout):
    case = Case(num_positions=29, vocab_size=1003, bias=True, unused_rows=2, weights="random",
                targets="outside")  # fmt: skip
    problem, targets = make(case)
    sharding = cutbce_ops.LossSharding(mesh, *layout)
    loss, gradients = value_and_gradients(problem, targets, sharding=sharding)
    truth = truth_of(problem, targets)
    assert_close(loss, truth.loss, "float32", "loss")
    wanted = (truth.d_activations, truth.d_embeddings, truth.d_bias)
    for got, want in zip(gradients, wanted, strict=True):
        assert_close(got, want, "float32", "gradient")


@pytest.mark.parametrize("is_checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]], ids=str)
def test_inside_a_shard_map(mesh, layout, is_checked):
    problem, targets = make(Case(num_positions=32, vocab_size=320, bias=True, weights="random"))
    sharding = cutbce_ops.LossSharding(mesh, *layout)
    positions, rows = sharding.position_spec(), sharding.vocabulary_spec()

    def loss(activations, embeddings, bias, targets, weights):
        return cutbce_ops.cut_softmax_cross_entropy(
            activations, embeddings, targets, position_weights=weights, bias=bias,
            sharding=sharding,
        )  # fmt: skip

    on_shards = jax.shard_map(
        loss, mesh=mesh, in_specs=(positions, rows, rows, positions, positions),
        out_specs=PartitionSpec(), check_vma=is_checked,
    )  # fmt: skip
    value, gradients = jax.jit(jax.value_and_grad(on_shards, (0, 1, 2)))(
        problem.activations, problem.embeddings, problem.bias, targets, problem.weights
    )
    truth = truth_of(problem, targets)
    assert_close(value, truth.loss, "float32", "loss")
    wanted = (truth.d_activations, truth.d_embeddings, truth.d_bias)
    for got, want in zip(gradients, wanted, strict=True):
        assert_close(got, want, "float32", "gradient")


def test_shards_without_any_row(mesh):
    problem, targets = make(Case(num_positions=3, vocab_size=9, mean_logit=-30.0))
    sharding = cutbce_ops.LossSharding(mesh, "data", ("data", "model"))
    loss, gradients = value_and_gradients(problem, targets, sharding=sharding)
    truth = truth_of(problem, targets)
    assert_close(loss, truth.loss, "float32", "loss")
    assert_close(gradients[1], truth.d_embeddings, "float32", "gradient_rare", 4)


def test_errors():
    good = {"activations": jnp.ones((4, 3)), "embeddings": jnp.ones((10, 3)),
            "targets": jnp.zeros(4, jnp.int32)}  # fmt: skip
    for changes, error, message in (
        ({"targets": jnp.zeros((4, 2), jnp.int32)}, ValueError, r"`targets`.*\(4,\).*\(4, 2\)"),
        ({"implementation": "mosaic_tpu"}, NotImplementedError, "use None or 'xla'"),
        ({"logit_cap": -1.0}, ValueError, "`logit_cap` must be finite"),
        ({"position_weights": jnp.ones(3)}, ValueError, "`position_weights` must have shape"),
    ):
        with pytest.raises(error, match=message):
            cutbce_ops.cut_softmax_cross_entropy(**good | changes)
