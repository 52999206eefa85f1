"""Values and gradients against the float64 oracle, for every case, dtype and gradient mode."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import CASES, Case, Problem, make_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from tolerances import assert_close, relative_l2

import cutbce_ops

MODES = ("fused", "recompute")
THRESHOLDS = (0.04, 0.5, 0.97)  # the outer two lie beyond a logit cap of 3


def value_and_gradients(problem: Problem, **options):
    def loss(activations, embeddings, bias):
        return cutbce_ops.cut_binary_cross_entropy(
            activations, embeddings, problem.targets, position_weights=problem.weights,
            **problem.options(bias=bias, **options),
        )  # fmt: skip

    argnums = (0, 1) if problem.bias is None else (0, 1, 2)
    function = jax.jit(jax.value_and_grad(loss, argnums))
    return function(problem.activations, problem.embeddings, problem.bias)


def truth_of(problem: Problem) -> oracle.Truth:
    return oracle.binary_cross_entropy(
        problem.activations, problem.embeddings, problem.targets, **problem.oracle_options()
    )


def is_rare(case: Case) -> str:
    return "gradient_rare" if case.mean_logit < -10 else "gradient"


def is_shaped(case: Case) -> bool:
    return bool(case.label_smoothing or case.pos_weight or case.focal_gamma)


# Recomputing is the derivative of the per-position loss, which runs every case by itself below.
# The loop over odd sizes is the same for both dtypes.
COMBINATIONS = [(case, "float32", "fused") for case in CASES]
COMBINATIONS += [(case, "bfloat16", "fused") for case in CASES if case.num_targets == 8]
COMBINATIONS += [(case, "float32", "recompute") for case in CASES if case.weights != "none"]


@pytest.mark.parametrize(
    ("case", "dtype", "mode"), COMBINATIONS, ids=lambda value: getattr(value, "name", value)
)
def test_loss_and_gradients_match_float64(case: Case, dtype: str, mode: str):
    problem = make_problem(case, dtype)
    loss, gradients = value_and_gradients(problem, gradient_mode=mode)
    truth = truth_of(problem)
    assert loss.dtype == jnp.float32
    assert loss.shape == ()
    assert_close(loss, truth.loss, dtype, "loss", factor=2 if case.logit_scale > 10 else 1)
    wanted = [truth.d_activations, truth.d_embeddings, truth.d_bias][: len(gradients)]
    for got, want in zip(gradients, wanted, strict=True):
        assert got.dtype == dtype
        assert_close(got, want, dtype, is_rare(case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_per_position_loss_and_its_gradients(case: Case):
    problem = make_problem(case)
    cotangent = jnp.asarray(np.random.default_rng(5).normal(size=case.num_positions), jnp.float32)

    def loss(activations, embeddings):
        return cutbce_ops.cut_binary_cross_entropy_per_position(
            activations, embeddings, problem.targets, **problem.options()
        )

    value, pull_back = jax.vjp(loss, problem.activations, problem.embeddings)
    truth = truth_of(problem)
    assert_close(value, truth.per_position, "float32", "per_position")
    weighted = problem.oracle_options() | {"weights": cotangent}
    weighted = oracle.binary_cross_entropy(
        problem.activations, problem.embeddings, problem.targets, **weighted
    )
    total = float(np.asarray(cotangent, np.float64).sum())
    d_activations, d_embeddings = pull_back(cotangent)
    # The oracle averages; a cotangent does not.
    assert_close(d_activations, weighted.d_activations * total, "float32", is_rare(case), 2)
    assert_close(d_embeddings, weighted.d_embeddings * total, "float32", is_rare(case), 2)


@pytest.mark.parametrize(
    "case",  # counts do not depend on the labels and factors of the loss
    [case for case in CASES if case.logit_cap or not is_shaped(case)],
    ids=lambda case: case.name,
)
def test_counts_are_exact(case: Case):
    problem = make_problem(case)
    loss, output = cutbce_ops.cut_binary_cross_entropy_with_aux(
        problem.activations, problem.embeddings, problem.targets,
        position_weights=problem.weights, thresholds=THRESHOLDS, **problem.options(),
    )  # fmt: skip
    truth = oracle.binary_cross_entropy(
        problem.activations, problem.embeddings, problem.targets, thresholds=THRESHOLDS,
        **problem.oracle_options(),
    )  # fmt: skip
    assert output.counts.thresholds == THRESHOLDS
    is_counted = np.ones(case.num_positions, int)
    if problem.weights is not None:
        is_counted = np.asarray(problem.weights != 0).astype(int)
    for name in ("tp", "fp", "fn", "tn"):
        got = getattr(output.counts, name)
        assert got.dtype == jnp.int32
        want = getattr(truth, name) * is_counted[:, None]
        np.testing.assert_array_equal(got, want, err_msg=name)
    assert float(loss) == float(output.loss)
    assert_close(output.per_position, truth.per_position, "float32", "per_position")


@pytest.mark.parametrize("mode", MODES)
def test_gradient_by_position_weights(mode: str):
    problem = make_problem(Case(weights="random", label_smoothing=0.2))

    def loss(weights):
        return cutbce_ops.cut_binary_cross_entropy(
            problem.activations, problem.embeddings, problem.targets, position_weights=weights,
            gradient_mode=mode, **problem.options(),
        )  # fmt: skip

    gradient = jax.grad(loss)(problem.weights)
    want = truth_of(problem).d_weights
    # A difference of nearly equal losses: absolute accuracy is that of the losses.
    np.testing.assert_allclose(gradient, want, atol=2e-8)


def test_one_threshold_gives_one_count_per_position():
    problem = make_problem(Case(num_positions=6))
    shaped = (problem.activations.reshape(2, 3, 16), problem.embeddings,
              problem.targets.reshape(2, 3, 8))  # fmt: skip
    one, several = (
        cutbce_ops.cut_binary_cross_entropy_with_aux(*shaped, thresholds=thresholds)[1].counts
        for thresholds in (0.3, (0.3, 0.6))
    )
    assert one.thresholds == 0.3
    assert one.tp.shape == (2, 3)
    assert several.tp.shape == (2, 3, 2)
    for name in ("tp", "fp", "fn", "tn"):
        np.testing.assert_array_equal(getattr(one, name), getattr(several, name)[..., 0])


@pytest.mark.parametrize("mode", MODES)
def test_logit_scale_can_be_learned(mode: str):
    case = Case(bias=True, scale_option=1.7, logit_cap=4.0, weights="random")
    problem = make_problem(case)

    def loss(scale):
        return cutbce_ops.cut_binary_cross_entropy(
            problem.activations, problem.embeddings, problem.targets, gradient_mode=mode,
            position_weights=problem.weights, **problem.options(logit_scale=scale),
        )  # fmt: skip

    value, gradient = jax.value_and_grad(loss)(jnp.float32(1.7))
    truth = truth_of(problem)
    assert_close(value, truth.loss, "float32", "loss")
    assert_close(gradient, truth.d_scale, "float32", "gradient")


@pytest.mark.parametrize("mode", MODES)
def test_cotangent_scales_the_gradients(mode: str):
    problem = make_problem(Case())

    def loss(activations, embeddings, scale):
        return scale * cutbce_ops.cut_binary_cross_entropy(
            activations, embeddings, problem.targets, gradient_mode=mode, **problem.options()
        )

    gradients = jax.grad(loss, (0, 1))(problem.activations, problem.embeddings, -3.0)
    truth = truth_of(problem)
    assert_close(gradients[0], -3 * truth.d_activations, "float32", "gradient")
    assert_close(gradients[1], -3 * truth.d_embeddings, "float32", "gradient")


def test_leading_axes_are_positions():
    problem = make_problem(Case(num_positions=24, weights="random"))
    flat = cutbce_ops.cut_binary_cross_entropy_with_aux(
        problem.activations, problem.embeddings, problem.targets, position_weights=problem.weights
    )
    shaped = cutbce_ops.cut_binary_cross_entropy_with_aux(
        problem.activations.reshape(2, 3, 4, 16), problem.embeddings,
        problem.targets.reshape(2, 3, 4, 8), position_weights=problem.weights.reshape(2, 3, 4),
    )  # fmt: skip
    assert float(flat[0]) == float(shaped[0])
    assert shaped[1].per_position.shape == (2, 3, 4)
    np.testing.assert_array_equal(shaped[1].counts.tn.reshape(-1), flat[1].counts.tn)


def test_auxiliary_output_carries_no_gradient():
    problem = make_problem(Case())

    def inspected(activations):
        _, output = cutbce_ops.cut_binary_cross_entropy_with_aux(
            activations, problem.embeddings, problem.targets
        )
        return output.loss + output.per_position.sum()

    assert not np.any(jax.grad(inspected)(problem.activations))


def test_value_and_grad_with_aux():
    problem = make_problem(Case(weights="random"))

    def loss(activations):
        return cutbce_ops.cut_binary_cross_entropy_with_aux(
            activations, problem.embeddings, problem.targets, position_weights=problem.weights
        )

    (value, output), gradient = jax.value_and_grad(loss, has_aux=True)(problem.activations)
    assert float(value) == float(output.loss)
    assert_close(gradient, truth_of(problem).d_activations, "float32", "gradient")


def test_zero_activations_give_log_two_whatever_the_targets():
    problem = make_problem(Case())
    loss = cutbce_ops.cut_binary_cross_entropy(
        jnp.zeros_like(problem.activations), problem.embeddings, problem.targets
    )
    np.testing.assert_allclose(loss, np.log(2), rtol=2e-7)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("logit", [1e4, -1e4])
@pytest.mark.parametrize("gamma", [0.0, 2.0])
def test_extreme_logits_stay_finite(logit: float, gamma: float, mode: str):
    problem = make_problem(Case(dim=1, num_targets=2, focal_gamma=gamma), seed=1)
    problem = Problem(
        problem.case, jnp.full((24, 1), 100.0), jnp.full((640, 1), logit / 100), problem.targets,
        None, None,
    )  # fmt: skip
    loss, gradients = value_and_gradients(problem, gradient_mode=mode)
    truth = truth_of(problem)
    assert_close(loss, truth.loss, "float32", "loss", 2)
    for got, want in zip(gradients, (truth.d_activations, truth.d_embeddings), strict=True):
        assert np.isfinite(got).all()
        assert_close(got, want, "float32", "gradient")


@pytest.mark.parametrize("probability", [1e-3, 1e-6, 1e-9, 1e-12])
def test_tiny_probabilities_keep_relative_accuracy(probability: float):
    """The loss at probability p is -log(1 - p), about p; log(1 - p) in float32 would return 0."""
    logit = np.float32(np.log(probability))
    activations, embeddings = jnp.ones((1, 1)), jnp.full((1000, 1), logit)
    loss = cutbce_ops.cut_binary_cross_entropy(activations, embeddings, jnp.full((1, 1), -1))
    want = np.logaddexp(0, np.float64(logit))
    assert abs(float(loss) - want) / want < 1e-6  # XLA's exponential is good to 6e-7


def test_dense_reference_in_float32_is_worse():
    """The naive float32 formula fails the bound that ours keeps, so the bound can fail."""
    problem = make_problem(Case(mean_logit=-14.0, targets="padding"))
    logits = problem.activations @ problem.embeddings.T
    naive = -jnp.log(1 - jax.nn.sigmoid(logits)).mean()
    truth = truth_of(problem)
    assert relative_l2(naive, truth.loss) > 2e-5
    ours = cutbce_ops.cut_binary_cross_entropy(
        problem.activations, problem.embeddings, problem.targets
    )
    assert_close(ours, truth.loss, "float32", "loss", 3)


@pytest.mark.parametrize("fault", ["dropped block", "flipped sign", "missing weight", "zero"])
def test_comparator_notices(fault: str):
    problem = make_problem(Case(weights="random"))
    want = truth_of(problem).d_embeddings
    got = want.copy()
    if fault == "dropped block":
        got[-128:] = 0
    elif fault == "flipped sign":
        got = -got
    elif fault == "zero":
        got = np.zeros_like(got)
    else:
        unweighted = problem.oracle_options() | {"weights": None}
        got = oracle.binary_cross_entropy(
            problem.activations, problem.embeddings, problem.targets, **unweighted
        ).d_embeddings
    with pytest.raises(AssertionError, match="exceeds"):
        assert_close(got, want, "bfloat16", "gradient")


def test_precision_bfloat16_rounds_operands_only():
    problem = make_problem(Case())
    rounded = Problem(
        problem.case, problem.activations.astype(jnp.bfloat16).astype(jnp.float32),
        problem.embeddings.astype(jnp.bfloat16).astype(jnp.float32), problem.targets, None, None,
    )  # fmt: skip
    loss, gradients = value_and_gradients(problem, precision="bfloat16")
    truth = truth_of(rounded)
    assert gradients[0].dtype == jnp.float32
    assert_close(loss, truth.loss, "bfloat16", "loss")
    assert_close(gradients[1], truth.d_embeddings, "bfloat16", "gradient")
    full, _ = value_and_gradients(problem, precision="default")
    assert float(full) != float(loss)


@pytest.mark.parametrize("mode", MODES)
def test_repeat_run_is_identical(mode: str):
    problem = make_problem(Case(bias=True, weights="random"))
    first = jax.tree.leaves(value_and_gradients(problem, gradient_mode=mode))
    second = jax.tree.leaves(value_and_gradients(problem, gradient_mode=mode))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_under_jit_vmap_and_remat():
    problem = make_problem(Case())

    def loss(activations):
        return cutbce_ops.cut_binary_cross_entropy(
            activations, problem.embeddings, problem.targets, **problem.options()
        )

    plain = jax.grad(loss)(problem.activations)
    remat = jax.grad(jax.checkpoint(loss))(problem.activations)
    np.testing.assert_allclose(remat, plain, rtol=1e-6)
    both = jnp.stack([problem.activations, 2 * problem.activations])
    mapped = jax.vmap(jax.grad(loss))(both)
    np.testing.assert_allclose(mapped[0], plain, rtol=1e-4, atol=1e-9)


@settings(max_examples=8)
@given(block_t=st.integers(1, 40), block_v=st.integers(1, 700), seed=st.integers(0, 3))
def test_tile_sizes_change_nothing(block_t: int, block_v: int, seed: int):
    problem = make_problem(Case(num_positions=11, vocab_size=97), seed=seed)
    tiles = cutbce_ops.TileConfig(block_t, block_v)
    loss, gradients = value_and_gradients(problem, tiles=tiles)
    truth = truth_of(problem)
    assert_close(loss, truth.loss, "float32", "loss")
    assert_close(gradients[1], truth.d_embeddings, "float32", "gradient")


@settings(max_examples=8)
@given(seed=st.integers(0, 100))
def test_order_and_repetition_of_targets_change_nothing(seed: int):
    problem = make_problem(Case(num_targets=4, targets="outside"), seed=seed)
    rng = np.random.default_rng(seed)
    shuffled = rng.permuted(np.asarray(problem.targets), axis=1)
    repeated = jnp.asarray(np.concatenate([shuffled, shuffled[:, :2]], axis=1))
    loss = [
        jax.jit(cutbce_ops.cut_binary_cross_entropy)(
            problem.activations, problem.embeddings, targets
        )
        for targets in (problem.targets, repeated)
    ]
    np.testing.assert_allclose(loss[0], loss[1], rtol=3e-7)


@pytest.mark.parametrize("cut", [1, 128, 300, 639])
def test_loss_adds_up_over_parts_of_the_vocabulary(cut: int):
    problem = make_problem(Case())
    parts = [
        (problem.embeddings[:cut], problem.targets),
        (problem.embeddings[cut:], jnp.where(problem.targets >= cut, problem.targets - cut, -1)),
    ]
    sums = [
        len(rows)
        * cutbce_ops.cut_binary_cross_entropy_per_position(problem.activations, rows, targets)
        for rows, targets in parts
    ]
    whole = 640 * cutbce_ops.cut_binary_cross_entropy_per_position(
        problem.activations, problem.embeddings, problem.targets
    )
    np.testing.assert_allclose(sums[0] + sums[1], whole, rtol=2e-6)


def test_rows_beyond_vocab_size_get_no_gradient():
    problem = make_problem(Case(unused_rows=50, bias=True))
    _, gradients = value_and_gradients(problem)
    assert not np.any(gradients[1][640:])
    assert not np.any(gradients[2][640:])


@pytest.mark.parametrize("layout", [None, ("data", ("data", "model"))], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(unused_rows=37, label_smoothing=0.3, pos_weight=2.0, bias=True, weights="random"),
        Case(unused_rows=37, focal_gamma=2.0, logit_cap=3.0, bias=True, vocab_size=1003),
    ],
    ids=lambda case: case.name,
)
def test_unused_rows_may_hold_nan_whatever_the_loss(case: Case, layout):
    problem = make_problem(case)
    problem = dataclasses.replace(
        problem,
        embeddings=problem.embeddings.at[case.vocab_size :].set(jnp.nan),
        bias=problem.bias.at[case.vocab_size :].set(jnp.nan),
    )
    sharding = None
    if layout is not None:
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        sharding = cutbce_ops.LossSharding(mesh, *layout)
    loss, gradients = value_and_gradients(problem, sharding=sharding)
    truth = truth_of(problem)
    assert_close(loss, truth.loss, "float32", "loss")
    wanted = (truth.d_activations, truth.d_embeddings, truth.d_bias)
    for got, want in zip(gradients, wanted, strict=True):
        assert_close(got, want, "float32", "gradient")


def test_padding_positions_get_no_gradient():
    problem = make_problem(Case(weights="some_zero"))
    _, gradients = value_and_gradients(problem)
    assert not np.any(gradients[0][::3])


def test_ids_of_64_bits_do_not_wrap_into_the_catalog():
    problem = make_problem(Case(num_targets=1))
    wrapping = np.full((24, 1), 2**32 + 3, np.int64)  # 3 in the low 32 bits
    none = jnp.full((24, 1), -1)
    got, want = (
        cutbce_ops.cut_binary_cross_entropy(problem.activations, problem.embeddings, targets)
        for targets in (wrapping, none)
    )
    assert float(got) == float(want)
