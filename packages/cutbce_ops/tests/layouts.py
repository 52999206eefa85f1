"""One problem, computed whole: loss, gradients, counts, top-k and ranks, for any sharding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tolerances import relative_l2

import cutbce_ops

# (position axes, vocabulary axes) on a mesh with axes data and model.
LAYOUTS = [
    ("data", None),  # replicated table
    (None, "data"),
    ("data", "data"),  # a table stored in shards, positions travel
    ("data", "model"),
    ("data", ("data", "model")),
    (("data", "model"), ("data", "model")),
    (("data", "model"), "model"),  # rows split inside a group, replicated across groups
    (("model", "data"), "data"),
    (("data", "model"), None),
    (None, None),
]
TOP_K = 7


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of every operator; positions serve as queries."""

    activations: Any
    embeddings: Any
    bias: Any
    weights: Any
    targets: Any
    exclude: Any

    @classmethod
    def random(cls, num_positions: int, num_rows: int, dim: int = 8) -> "Inputs":
        rng = np.random.default_rng(0)
        table = rng.integers(-2, 3, (num_rows, dim)) / 4  # few values: many scores are equal
        ids = rng.integers(-2, num_rows + 2, (num_positions, 9))
        return cls(
            jnp.asarray(rng.integers(-4, 5, (num_positions, dim)) / 4, jnp.float32),
            jnp.asarray(table, jnp.float32),
            jnp.asarray(rng.integers(-3, 4, num_rows) / 8, jnp.float32),
            jnp.asarray(rng.random(num_positions), jnp.float32),
            jnp.asarray(ids[:, :4], jnp.int32),
            jnp.asarray(ids[:, 4:], jnp.int32),
        )


def specs(sharding: cutbce_ops.LossSharding) -> Inputs:
    """PartitionSpecs of all inputs."""
    positions, rows = sharding.position_spec(), sharding.vocabulary_spec()
    return Inputs(positions, rows, rows, positions, positions, positions)


def loss_and_aux(inputs: Inputs, sharding, vocab_size=None, mode="fused"):
    return cutbce_ops.cut_binary_cross_entropy_with_aux(
        inputs.activations, inputs.embeddings, inputs.targets, position_weights=inputs.weights,
        bias=inputs.bias, sharding=sharding, vocab_size=vocab_size, gradient_mode=mode,
        tiles=cutbce_ops.TileConfig(8, 64),
    )  # fmt: skip


def ranking(inputs: Inputs, sharding, vocab_size=None):
    queries = inputs.activations.reshape(-1, inputs.activations.shape[-1])
    options = {
        "bias": inputs.bias, "exclude": inputs.exclude, "sharding": sharding,
        "vocab_size": vocab_size,
    }  # fmt: skip
    top_k = cutbce_ops.cut_top_k(queries, inputs.embeddings, TOP_K, **options)
    ranks = cutbce_ops.cut_target_ranks(queries, inputs.embeddings, inputs.targets, **options)
    return {"top_k": top_k, "ranks": ranks}


def learning(inputs: Inputs, sharding=None, vocab_size=None, mode="fused") -> dict[str, Any]:
    """The loss and what comes with it; gradients by activations, embeddings, bias and weights."""
    names = ("activations", "embeddings", "bias", "weights")

    def loss(floats):
        changed = dataclasses.replace(inputs, **floats)
        return loss_and_aux(changed, sharding, vocab_size, mode)

    floats = {name: getattr(inputs, name) for name in names}
    (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(floats)
    return {"loss": value, "aux": aux, "gradients": gradients}


def everything(inputs: Inputs, sharding=None, vocab_size=None, mode="fused") -> dict[str, Any]:
    """All results, from two programs."""
    learned = jax.jit(learning, static_argnums=(1, 2, 3))(inputs, sharding, vocab_size, mode)
    ranked = jax.jit(ranking, static_argnums=(1, 2))(inputs, sharding, vocab_size)
    return learned | ranked


def assert_equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Integers and scores exactly (all products are exact here), sums up to their order."""
    assert_equal_learning(got, want)
    jax.tree.map(np.testing.assert_array_equal, got["top_k"], want["top_k"])
    np.testing.assert_array_equal(got["ranks"], want["ranks"])


def assert_equal_learning(got: dict[str, Any], want: dict[str, Any]) -> None:
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=4e-7)
    np.testing.assert_allclose(got["aux"].per_position, want["aux"].per_position, rtol=2e-6)
    for name in ("tp", "fp", "fn", "tn"):
        np.testing.assert_array_equal(
            getattr(got["aux"].counts, name), getattr(want["aux"].counts, name)
        )
    for name, gradient in want["gradients"].items():
        # By a weight it is the difference of two nearly equal losses.
        bound = 3e-5 if name == "weights" else 1e-6
        assert relative_l2(got["gradients"][name], gradient) <= bound, name
