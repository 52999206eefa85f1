"""What would run, told without running it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

import cutbce_ops


def shapes(num_positions=16_384, num_rows=100_000, dim=128, dtype=jnp.float32):
    return (
        jax.ShapeDtypeStruct((num_positions, dim), dtype),
        jax.ShapeDtypeStruct((num_rows, dim), jnp.float32),
        jax.ShapeDtypeStruct((num_positions, 8), jnp.int32),
    )


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e", "7x", "tpu"])
def test_a_tpu_takes_its_kernel(chip: str):
    plan = cutbce_ops.plan_cut_binary_cross_entropy(*shapes(), hardware=chip)
    assert plan.choice.implementation == "mosaic_tpu"
    assert plan.vmem_bytes > 0
    assert plan.num_sweeps >= 1


def test_other_hardware_takes_xla_and_is_told_why():
    choice = cutbce_ops.select_implementation(*shapes(), hardware="cpu")
    assert str(choice) == "xla\n  not mosaic_tpu: the program is for cpu, not for a TPU"
    choice = cutbce_ops.select_implementation(*shapes(), hardware="gpu")
    assert choice.implementation == "xla"
    assert "not been measured" in choice.refused["gpu"]


def test_tiles_that_do_not_fit_leave_xla():
    choice = cutbce_ops.select_implementation(
        *shapes(), hardware="v4", tiles=cutbce_ops.TileConfig(8192, 8192)
    )
    assert choice.implementation == "xla"
    assert "bytes of VMEM" in choice.refused["mosaic_tpu"]


def test_recompute_sweeps_once_more_and_keeps_the_same_sizes():
    fused = cutbce_ops.plan_cut_binary_cross_entropy(*shapes(), hardware="v6e")
    recompute = cutbce_ops.plan_cut_binary_cross_entropy(
        *shapes(), hardware="v6e", gradient_mode="recompute"
    )
    assert (fused.num_sweeps, recompute.num_sweeps) == (1, 2)


def test_a_mesh_divides_rows_and_gathers_positions():
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    layout = cutbce_ops.LossSharding(mesh, ("data", "model"), "model")
    plan = cutbce_ops.plan_cut_binary_cross_entropy(
        *shapes(num_rows=100_001), hardware="v6e", sharding=layout
    )
    assert (plan.num_positions, plan.num_rows) == (16_384 // 4, 50_001)


def test_bytes_of_a_plan():
    plan = cutbce_ops.plan_cut_binary_cross_entropy(*shapes(), hardware="v6e")
    assert plan.inputs_bytes == 16_384 * (128 + 8) * 4 + 100_000 * 128 * 4
    assert plan.logits_bytes == 16_384 * 100_000 * 4
    assert plan.working_bytes < plan.logits_bytes / 50
    assert "6250.0 MiB" in str(plan)


def test_the_plan_of_xla_is_what_the_compiler_allocates():
    """The working memory is an upper estimate, and not a wild one."""
    num_positions, num_rows = 4096, 50_000
    arguments = shapes(num_positions, num_rows)

    def loss(activations, embeddings, targets):
        return cutbce_ops.cut_binary_cross_entropy(activations, embeddings, targets)

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    plan = cutbce_ops.plan_cut_binary_cross_entropy(*arguments, hardware="cpu")
    allocated = memory.temp_size_in_bytes + memory.output_size_in_bytes
    assert plan.working_bytes / 2 < allocated < plan.working_bytes * 2


def test_errors():
    with pytest.raises(ValueError, match=r"`hardware` must be one of 'v4', .*; got 'h100'"):
        cutbce_ops.plan_cut_binary_cross_entropy(*shapes(), hardware="h100")
    activations, _, targets = shapes()
    with pytest.raises(ValueError, match=r"must be equal \(D\); got \(16384, 128\) and \(5, 64\)"):
        cutbce_ops.plan_cut_binary_cross_entropy(
            activations, jax.ShapeDtypeStruct((5, 64), jnp.float32), targets, hardware="cpu"
        )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tiles": (8, 8)}, TypeError, r"`tiles` must be a TileConfig or None; got tuple"),
        ({"sharding": "data"}, TypeError, r"`sharding` must be a LossSharding or None; got str"),
        ({"vocab_size": 100_001}, ValueError, r"`vocab_size` must lie in \[1, 100000\]"),
        ({"thresholds": (0.5, 0.5)}, ValueError, "`thresholds` must be one probability"),
        ({"logit_cap": 0.0}, ValueError, "`logit_cap` must be finite and above 0.0"),
        ({"bias": jnp.ones(3)}, ValueError, r"`bias` must have shape \(100000,\)"),
    ],
)
def test_mistakes_in_the_options_of_a_plan(options, error, message):
    with pytest.raises(error, match=message):
        cutbce_ops.plan_cut_binary_cross_entropy(*shapes(), hardware="v6e", **options)


@pytest.mark.parametrize(
    "options", [{"focal_gamma": 2.0}, {"logit_cap": 30.0}, {"thresholds": (0.1, 0.5, 0.9)}]
)
def test_a_plan_knows_what_takes_more_memory_on_the_chip(options):
    plain = cutbce_ops.plan_cut_binary_cross_entropy(*shapes(), hardware="v6e")
    plan = cutbce_ops.plan_cut_binary_cross_entropy(*shapes(), hardware="v6e", **options)
    assert plan.choice.implementation == "mosaic_tpu"
    assert (plan.vmem_bytes, plan.tiles) != (plain.vmem_bytes, plain.tiles)


def test_the_tpu_kernel_is_refused_elsewhere_by_name():
    arrays = jnp.ones((4, 8)), jnp.ones((30, 8)), jnp.zeros((4, 2), jnp.int32)
    with pytest.raises(
        NotImplementedError, match=r'`implementation="mosaic_tpu"` needs .* for cpu'
    ):
        cutbce_ops.cut_binary_cross_entropy(*arrays, implementation="mosaic_tpu")
