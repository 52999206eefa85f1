"""Sharded equals unsharded, for every way of laying positions and rows over 8 devices."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, make_problem
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from layouts import (
    LAYOUTS,
    TOP_K,
    Inputs,
    assert_equal,
    assert_equal_learning,
    everything,
    learning,
    loss_and_aux,
    ranking,
    specs,
)
from tolerances import relative_l2

import cutbce_ops
from cutbce_ops._src import sharded


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@functools.cache
def unsharded(num_positions: int, num_rows: int, vocab_size: int | None = None):
    return everything(Inputs.random(num_positions, num_rows), None, vocab_size)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_automatic_axes(mesh, layout):
    """Positions, rows and catalog divide over nothing."""
    got = everything(Inputs.random(29, 1003), cutbce_ops.LossSharding(mesh, *layout), 1001)
    assert_equal(got, unsharded(29, 1003, 1001))


@pytest.mark.parametrize("layout", LAYOUTS[4:7:2], ids=str)
def test_more_shards_than_rows_and_positions(mesh, layout):
    got = everything(Inputs.random(3, 9), cutbce_ops.LossSharding(mesh, *layout))
    assert_equal(got, unsharded(3, 9))


@pytest.mark.parametrize("layout", LAYOUTS[1:7:5], ids=str)
def test_recomputed_gradients(mesh, layout):
    sharding = cutbce_ops.LossSharding(mesh, *layout)
    got = everything(Inputs.random(29, 1003), sharding, 1001, "recompute")
    assert_equal(got, unsharded(29, 1003, 1001))


@pytest.mark.parametrize("layout", [*LAYOUTS[:3], LAYOUTS[6]], ids=str)
def test_explicit_axes(layout):
    """Arrays whose types say how they are placed; gradients come back placed alike."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    sharding = cutbce_ops.LossSharding(mesh, *layout)
    inputs = Inputs.random(32, 1000)
    placed = jax.tree.map(
        lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec)),
        inputs, specs(sharding),
    )  # fmt: skip
    with jax.set_mesh(mesh):
        got = everything(placed, sharding)
    assert_equal(got, unsharded(32, 1000))
    for name, gradient in got["gradients"].items():
        assert jax.typeof(gradient).sharding == jax.typeof(getattr(placed, name)).sharding, name


@pytest.mark.parametrize("batch_axes", ["data", ("data", "model")], ids=str)
def test_explicit_axes_with_a_batch_of_sequences(batch_axes):
    """`[B, S, D]` split over B, a table that no axis divides, positions split further."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    sharding = cutbce_ops.LossSharding(mesh, ("data", "model"), "data")
    inputs = Inputs.random(40, 1003)
    batches = jax.tree.map(
        lambda array: jax.device_put(
            array.reshape(8, 5, *array.shape[1:]), NamedSharding(mesh, PartitionSpec(batch_axes))
        ),
        dataclasses.replace(inputs, embeddings=None, bias=None),
    )
    whole = NamedSharding(mesh, PartitionSpec())
    batches = dataclasses.replace(
        batches,
        embeddings=jax.device_put(inputs.embeddings, whole),
        bias=jax.device_put(inputs.bias, whole),
    )
    with jax.set_mesh(mesh):
        got = jax.jit(learning, static_argnums=1)(batches, sharding)
    want = unsharded(40, 1003)
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=4e-7)
    assert got["aux"].counts.tp.shape == (8, 5)
    np.testing.assert_array_equal(got["aux"].counts.tp.reshape(-1), want["aux"].counts.tp)
    for name, gradient in got["gradients"].items():
        want_gradient = want["gradients"][name].reshape(gradient.shape)
        assert relative_l2(gradient, want_gradient) <= (3e-5 if name == "weights" else 1e-6)
        assert jax.typeof(gradient).sharding == jax.typeof(getattr(batches, name)).sharding, name


def in_shard_map(mesh, sharding, is_checked, inputs):
    """Everything, from within the caller's own `shard_map`; gradients are taken outside it."""
    positions = sharding.position_spec()
    over_mesh = functools.partial(jax.shard_map, mesh=mesh, check_vma=is_checked)

    @functools.partial(
        over_mesh, in_specs=(specs(sharding),), out_specs=(PartitionSpec(), positions)
    )
    def loss_of_shard(inputs):
        loss, aux = loss_and_aux(inputs, sharding)
        return loss, {"per_position": aux.per_position, "counts": aux.counts}

    def loss(floats, inputs):
        return loss_of_shard(dataclasses.replace(inputs, **floats))

    names = ("activations", "embeddings", "bias", "weights")
    floats = {name: getattr(inputs, name) for name in names}
    (value, aux), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(floats, inputs)
    ranked = over_mesh(
        functools.partial(ranking, sharding=sharding),
        in_specs=(specs(sharding),), out_specs=positions,
    )  # fmt: skip
    aux = types.SimpleNamespace(**aux)
    return {"loss": value, "aux": aux, "gradients": gradients} | jax.jit(ranked)(inputs)


@pytest.mark.parametrize("is_checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2], *LAYOUTS[4:7:2]], ids=str)
def test_manual_axes(mesh, layout, is_checked):
    """Arguments are local shards; JAX's own rules sum the gradients of replicas."""
    sharding = cutbce_ops.LossSharding(mesh, *layout)
    got = in_shard_map(mesh, sharding, is_checked, Inputs.random(32, 1000))
    assert_equal(got, unsharded(32, 1000))


@pytest.mark.parametrize("is_checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("mode", ["fused", "recompute"])
def test_a_shard_map_without_a_sharding(mesh, mode, is_checked):
    """Each device has the loss of its own positions; the mean over devices is the caller's."""
    inputs = Inputs.random(32, 1000)
    inputs = dataclasses.replace(inputs, weights=None)
    sharding = cutbce_ops.LossSharding(mesh, "data", None)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(specs(sharding),), out_specs=PartitionSpec(),
        check_vma=is_checked,
    )  # fmt: skip
    def mean_loss(inputs):
        return jax.lax.pmean(loss_and_aux(inputs, None, None, mode)[0], "data")

    def loss(activations, embeddings, function):
        changed = dataclasses.replace(inputs, activations=activations, embeddings=embeddings)
        return function(changed)

    arguments = (inputs.activations, inputs.embeddings)
    gradient = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    got = gradient(*arguments, mean_loss)
    want = gradient(*arguments, lambda inputs: loss_and_aux(inputs, None)[0])
    np.testing.assert_allclose(got[0], want[0], rtol=4e-7)
    for a, b in zip(got[1], want[1], strict=True):
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


@pytest.mark.parametrize("layout", [("data", "model"), (("data", "model"), "model")], ids=str)
def test_groups_that_hold_the_whole_table_sum_shards_of_its_gradient(mesh, layout):
    """Rows split over the 2 devices of a group, 4 groups: half a table is summed, none gathered."""
    collectives = collective_sizes(compiled_text(mesh, layout))
    assert ("all-reduce", 4096 // 2 * 32) in collectives
    assert max(size for _, size in collectives) == 4096 // 2 * 32
    assert all(size <= 64 * 32 for kind, size in collectives if kind != "all-reduce")


def test_a_table_stored_in_shards_is_gathered_for_a_replicated_sweep(mesh):
    """`vocabulary_axes=None` with a sharded table: same results, gradient stored in shards."""
    sharding = cutbce_ops.LossSharding(mesh, "data", None)
    inputs = Inputs.random(32, 1000)
    stored = NamedSharding(mesh, PartitionSpec("data"))
    table = jax.device_put(inputs.embeddings, stored)

    def loss(embeddings):
        return loss_and_aux(dataclasses.replace(inputs, embeddings=embeddings), sharding)[0]

    gradient = jax.jit(jax.grad(loss), out_shardings=stored)(table)
    assert gradient.sharding == stored
    assert relative_l2(gradient, unsharded(32, 1000)["gradients"]["embeddings"]) <= 1e-6


def test_a_large_gradient_is_summed_in_blocks(mesh, monkeypatch):
    monkeypatch.setattr(sharded, "SUM_BLOCK_BYTES", 4096)  # 128 rows of 8, a ragged last block
    layout = cutbce_ops.LossSharding(mesh, ("data", "model"), None)
    got = learning(Inputs.random(32, 1000), layout)
    assert_equal_learning(got, unsharded(32, 1000))


@pytest.mark.parametrize("layout", [(None, "data"), ("data", "model")], ids=str)
def test_scores_never_travel(mesh, layout):
    """A top-k exchanges k candidates for each query and shard; ranks one score and one count."""
    sharding = cutbce_ops.LossSharding(mesh, *layout)
    placed = jax.tree.map(
        lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec)),
        Inputs.random(32, 1000), specs(sharding),
    )  # fmt: skip
    text = jax.jit(ranking, static_argnums=1).lower(placed, sharding).compile().as_text()
    collectives = collective_sizes(text)
    assert collectives
    assert max(size for _, size in collectives) <= 32 * TOP_K * sharding.num_vocabulary_shards


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
    kinds = (AxisType.Auto, AxisType.Explicit)
    mixed = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    with pytest.raises(ValueError, match=r"`mesh` must not mix.*'data': .*Auto.*all the same"):
        cutbce_ops.LossSharding(mixed, "data")
    with pytest.raises(ValueError, match=r"`position_axes` names \['rows'\].*\('data', 'model'\)"):
        cutbce_ops.LossSharding(mesh, "rows", None)
    with pytest.raises(ValueError, match=r"`vocabulary_axes` repeats an axis"):
        cutbce_ops.LossSharding(mesh, None, ("data", "data"))
    with pytest.raises(TypeError, match=r"`mesh` must be a jax.sharding.Mesh .*; got NoneType"):
        cutbce_ops.LossSharding(None)
    for wrong in (1, ("data", 2)):
        with pytest.raises(TypeError, match=r"`position_axes` must be the name .*; got \(?['1]"):
            cutbce_ops.LossSharding(mesh, wrong)


def test_explicit_axes_need_a_sharding():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    inputs = Inputs.random(32, 1000)
    split = jax.device_put(inputs.activations, NamedSharding(mesh, PartitionSpec("data")))
    with pytest.raises(ValueError, match=r"`activations` is split over explicit mesh axes.*pass a"):
        cutbce_ops.cut_binary_cross_entropy(split, inputs.embeddings, inputs.targets)
    with pytest.raises(ValueError, match=r"`queries` is split over explicit mesh axes.*pass a"):
        cutbce_ops.cut_top_k(split, inputs.embeddings, 3)


def test_a_shard_map_over_half_of_the_axes(mesh):
    sharding = cutbce_ops.LossSharding(mesh, "data", "model")
    inputs = Inputs.random(32, 1000)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"),
        axis_names={"data"},
    )  # fmt: skip
    def loss(activations):
        targets = inputs.targets[: activations.shape[0]]
        return cutbce_ops.cut_binary_cross_entropy_per_position(
            activations, inputs.embeddings, targets, sharding=sharding
        )

    with pytest.raises(ValueError, match=r"only \['data'\] belong to the shard_map"):
        jax.jit(loss)(inputs.activations)
