"""Sharded equals unsharded, for every way of laying positions and rows over 8 devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, make_problem
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tolerances import relative_l2

import cutbce_ops

LAYOUTS = [
    ("data", None),
    (None, "data"),
    ("data", "data"),
    ("data", "model"),
    ("data", ("data", "model")),
    (("data", "model"), ("data", "model")),
    (("data", "model"), "model"),
    (("model", "data"), "data"),
    (None, None),
]
CASES = [
    Case(num_positions=29, vocab_size=1003, bias=True, weights="random", targets="outside"),
    Case(num_positions=3, vocab_size=9, bias=True),  # some shards hold no row and no position
    Case(vocab_size=600, unused_rows=40, bias=True, label_smoothing=0.1, pos_weight=3.0),
]


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def run(problem, sharding, mode):
    def loss(activations, embeddings, bias):
        return cutbce_ops.cut_binary_cross_entropy_with_aux(
            activations, embeddings, problem.targets, position_weights=problem.weights,
            sharding=sharding, gradient_mode=mode, **problem.options(bias=bias),
        )  # fmt: skip

    argnums = (0, 1) if problem.bias is None else (0, 1, 2)
    function = jax.jit(jax.value_and_grad(loss, argnums, has_aux=True))
    return function(problem.activations, problem.embeddings, problem.bias)


@functools.cache
def unsharded(case: Case):
    return run(make_problem(case), None, "fused")


# Every layout with the case that divides nothing; the other cases where both axes are split.
COMBINATIONS = [(layout, CASES[0], "fused") for layout in LAYOUTS]
COMBINATIONS += [(layout, case, "fused") for layout in LAYOUTS[4:7:2] for case in CASES[1:]]
COMBINATIONS += [(layout, CASES[0], "recompute") for layout in LAYOUTS[:7:3]]


@pytest.mark.parametrize(
    ("layout", "case", "mode"), COMBINATIONS, ids=lambda value: getattr(value, "name", str(value))
)
def test_sharded_equals_unsharded(mesh, layout, case, mode):
    problem = make_problem(case)
    (want_loss, want), want_gradients = unsharded(case)
    sharding = cutbce_ops.LossSharding(mesh, *layout)
    (loss, got), gradients = run(problem, sharding, mode)
    np.testing.assert_allclose(loss, want_loss, rtol=4e-7)
    np.testing.assert_allclose(got.per_position, want.per_position, rtol=2e-6)
    jax.tree.map(np.testing.assert_array_equal, got.counts, want.counts)
    for a, b in zip(gradients, want_gradients, strict=True):
        assert relative_l2(a, b) <= 1e-6


def compiled_text(mesh, layout) -> str:
    num_positions, num_rows, dim = 64, 4096, 32
    sharding = cutbce_ops.LossSharding(mesh, *layout)

    def place(spec: PartitionSpec, shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def loss(activations, embeddings, targets):
        return cutbce_ops.cut_binary_cross_entropy(
            activations, embeddings, targets, sharding=sharding
        )

    table_spec = NamedSharding(mesh, sharding.vocabulary_spec())
    positions = sharding.position_spec()
    step = jax.jit(
        jax.grad(loss, (0, 1)), out_shardings=(NamedSharding(mesh, positions), table_spec)
    )
    return step.lower(
        place(positions, (num_positions, dim)),
        place(sharding.vocabulary_spec(), (num_rows, dim)),
        place(positions, (num_positions, 8), jnp.int32),
    ).compile().as_text()  # fmt: skip


def collective_sizes(text: str) -> list[tuple[str, int]]:
    """(kind, elements) of every collective's result in the compiled program."""
    found = []
    for line in text.splitlines():
        kind = re.search(
            r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all)(-start)?\(", line
        )
        if kind:
            for dims in re.findall(r"\w+\[([\d,]*)\]", kind.group(1)):
                found.append((kind.group(2), int(np.prod([int(d) for d in dims.split(",") if d]))))
    return found


@pytest.mark.parametrize("layout", [("data", "data"), (("data", "model"),) * 2], ids=str)
def test_a_sharded_table_never_travels(mesh, layout):
    collectives = collective_sizes(compiled_text(mesh, layout))
    assert collectives, "positions must travel"
    assert max(size for _, size in collectives) <= 64 * 32  # the activations, never the table


def test_a_replicated_table_has_its_gradient_summed(mesh):
    collectives = collective_sizes(compiled_text(mesh, ("data", None)))
    assert ("all-reduce", 4096 * 32) in collectives


@pytest.mark.parametrize("layout", [(None, "data"), ("data", "data")], ids=str)
def test_unused_rows_may_hold_nan(mesh, layout):
    problem = make_problem(Case(unused_rows=64))
    embeddings = problem.embeddings.at[640:].set(jnp.nan)

    def loss(activations, embeddings):
        sharding = cutbce_ops.LossSharding(mesh, *layout)
        return cutbce_ops.cut_binary_cross_entropy(
            activations, embeddings, problem.targets, vocab_size=640, sharding=sharding
        )

    gradients = jax.jit(jax.grad(loss, (0, 1)))(problem.activations, embeddings)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_sharding_errors(mesh):
    with pytest.raises(ValueError, match=r"`mesh` has explicit axes.*AxisType.Auto"):
        cutbce_ops.LossSharding(jax.make_mesh((8,), ("data",)), "data")
    with pytest.raises(ValueError, match=r"`position_axes` names \['rows'\].*\('data', 'model'\)"):
        cutbce_ops.LossSharding(mesh, "rows", None)
    with pytest.raises(ValueError, match=r"`vocabulary_axes` repeats an axis"):
        cutbce_ops.LossSharding(mesh, None, ("data", "data"))
