"""Memory promises, read from the program itself: no logits, no partial sums for every block."""

import math

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest

import cutbce_ops

T, V, D, L = 512, 40_000, 128, 8  # a TPU kernel pads narrower vectors
BLOCK_V = 250
NUM_BLOCKS = V // BLOCK_V
# The largest things allowed: the table (and its gradient) and one tile of logits. A partial
# gradient for every block, [NUM_BLOCKS, T, D], is twice as large, and [T, V] eight times.
LARGEST_ALLOWED = max(V * D, T * BLOCK_V)


def all_shapes(jaxpr) -> list[tuple[int, ...]]:
    """Shapes of every intermediate, loop bodies, branches and custom derivatives included."""
    shapes = []
    for equation in jaxpr.eqns:
        shapes += [variable.aval.shape for variable in equation.outvars]
        for value in equation.params.values():
            for item in value if isinstance(value, (list, tuple)) else [value]:
                inner = item.jaxpr if isinstance(item, jex.ClosedJaxpr) else item
                if isinstance(inner, jex.Jaxpr):
                    shapes += all_shapes(inner)
    return shapes


def problem():
    return jnp.zeros((T, D)), jnp.zeros((V, D)), jnp.zeros((T, L), jnp.int32)


def softmax_loss(activations, embeddings, targets):
    return cutbce_ops.cut_softmax_cross_entropy(
        activations, embeddings, targets[:, 0], tiles=cutbce_ops.TileConfig(T, BLOCK_V)
    )


def loss_of(mode: str):
    if mode == "softmax":
        return softmax_loss

    def loss(activations, embeddings, targets):
        return cutbce_ops.cut_binary_cross_entropy(
            activations, embeddings, targets, label_smoothing=0.1 if mode == "smoothed" else 0.0,
            gradient_mode="recompute" if mode == "recompute" else "fused",
            tiles=cutbce_ops.TileConfig(T, BLOCK_V),
        )  # fmt: skip

    return loss


def dense_loss(activations, embeddings, targets):
    logits = activations @ embeddings.T
    return jax.nn.softplus(logits).mean() - jnp.take_along_axis(logits, targets, 1).sum() / V


def partial_per_block_loss(activations, embeddings, targets):
    """Linear in the logits, blockwise, with [NUM_BLOCKS, T, D] stored for the backward pass."""

    def block(_, rows):
        return None, rows.sum(axis=0)[None, :] * activations

    _, partials = jax.lax.scan(block, None, embeddings.reshape(NUM_BLOCKS, BLOCK_V, D))
    return partials.sum()


@pytest.mark.parametrize("mode", ["fused", "recompute", "smoothed", "softmax"])
def test_nothing_grows_with_positions_times_vocabulary(mode: str):
    gradient = jax.make_jaxpr(jax.value_and_grad(loss_of(mode), (0, 1)))(*problem())
    largest = max(math.prod(shape) for shape in all_shapes(gradient.jaxpr))
    assert largest <= LARGEST_ALLOWED


@pytest.mark.parametrize("loss", [dense_loss, partial_per_block_loss])
def test_the_check_notices(loss):
    gradient = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(*problem())
    assert max(math.prod(shape) for shape in all_shapes(gradient.jaxpr)) > LARGEST_ALLOWED


@pytest.mark.parametrize("mode", ["fused", "recompute", "softmax"])
def test_compiled_memory_is_the_gradient_and_a_tile(mode: str):
    compiled = jax.jit(jax.value_and_grad(loss_of(mode), (0, 1))).lower(*problem()).compile()
    memory = compiled.memory_analysis()
    table_bytes, tile_bytes = V * D * 4, T * BLOCK_V * 4
    partials_bytes = NUM_BLOCKS * T * D * 4
    # Outputs hold the gradients; beside them a second table (in transit) and a few tiles.
    assert memory.temp_size_in_bytes <= table_bytes + 8 * tile_bytes < partials_bytes


def test_ranking_never_holds_all_scores():
    queries, table = jnp.zeros((64, 8)), jnp.zeros((100_000, 8))
    for function in (
        lambda q, e: cutbce_ops.cut_top_k(q, e, 10),
        lambda q, e: cutbce_ops.cut_target_ranks(q, e, jnp.zeros((64, 8), jnp.int32)),
    ):
        jaxpr = jax.make_jaxpr(function)(queries, table).jaxpr
        inner = [math.prod(shape) for shape in all_shapes(jaxpr)]
        assert max(inner) <= 64 * 16_384


def test_many_queries_are_ranked_in_chunks():
    """V = 10^7 and Q = 4096: 152 GiB of scores, of which 64 MiB exist at a time."""
    # In float32: XLA's CPU backend before jax 0.11 widens a bfloat16 table as a whole.
    table = jax.ShapeDtypeStruct((10_000_000, 64), jnp.float32)
    queries = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    rows = jax.ShapeDtypeStruct((4096, 200), jnp.int32)
    for function in (
        lambda q, e, r: cutbce_ops.cut_top_k(q, e, 100, exclude=r),
        lambda q, e, r: cutbce_ops.cut_target_ranks(q, e, r[:, :8], exclude=r),
    ):
        shapes = all_shapes(jax.make_jaxpr(function)(queries, table, rows).jaxpr)
        assert max(math.prod(shape) for shape in shapes) <= 1024 * 16_384
        memory = jax.jit(function).lower(queries, table, rows).compile().memory_analysis()
        assert memory.temp_size_in_bytes <= 256 * 2**20
