"""One training step as a pure function: forward, loss over the whole catalog, gradients, update."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

import cutbce_ops
from recmodels._src.data.splits import PAD_TARGET
from recmodels._src.models import sasrec
from recmodels._src.recipe import Recipe
from recmodels._src.train.optimizer import make_optimizer


class TrainState(NamedTuple):
    """Everything a step changes."""

    step: Array  # steps done; also seeds the dropout of the next one
    params: dict  # arrays of the model, see `sasrec.build`
    optimizer: optax.OptState  # moments and schedule step


class StepMetrics(NamedTuple):
    """What a step reports, as device scalars."""

    loss: Array  # binary cross-entropy, mean over positions and catalog
    gradient_norm: Array  # global norm before clipping


TrainStep = Callable[..., tuple[TrainState, StepMetrics]]


@jax.jit(static_argnames="recipe")
def initial_state(recipe: Recipe, item_counts: Array) -> TrainState:
    """State before the first step; the output bias starts at the popularity of the items.

    Args:
        recipe: sizes, seed and optimizer.
        item_counts: `[V]` training interactions per row; V is the number of table rows.
    """
    _, params = sasrec.build(recipe, item_counts.shape[0])
    if recipe.output_bias:
        params["output_bias"] = sasrec.popularity_bias(item_counts, recipe.num_targets)
    return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(recipe).init(params))


@jax.jit
def is_usable(params: dict) -> Array:
    """`[]` bool: False once the squared norm overflows float32 or is NaN, so no model is left."""
    return jnp.isfinite(optax.tree.norm(params))


def encoder_graph(recipe: Recipe) -> "nnx.GraphDef[sasrec.HistoryEncoder]":
    """Static part of the recipe's encoder, made without allocating any array."""
    model = nnx.eval_shape(lambda: sasrec.HistoryEncoder(recipe, nnx.Rngs(0)))
    return nnx.split(model)[0]


def make_train_step(
    recipe: Recipe, *, sharding: cutbce_ops.LossSharding | None = None
) -> TrainStep:
    """The step function of a recipe: `step(state, history, targets, capacity) -> (state, metrics)`.

    The returned function is pure and not compiled: the trainer and the planner compile it, with
    the state donated. Its arguments:

    - state: `TrainState`.
    - history: `[B, S]` int32 rows, right-aligned, 0 on padding.
    - targets: `[B, S, L]` int32 rows, -1 on padding.
    - capacity: int, at least the number of positions with a target, or None for all positions. The
      loss is computed for that many positions only; the result does not depend on it.

    Args:
        recipe: model, loss and optimizer.
        sharding: how positions and table are spread over a mesh; None on one device. With a mesh
            `capacity` must be None, since compaction would move positions between devices.
    """
    encoder = encoder_graph(recipe)
    optimizer = make_optimizer(recipe)

    def objective(params, history_vectors, history, targets, capacity, dropout_key):
        activations = sasrec.encode(encoder, params, history_vectors, history > 0, dropout_key)
        activations, targets, weights = _positions_with_targets(activations, targets, capacity)
        loss = cutbce_ops.cut_binary_cross_entropy(
            activations,
            params["item_embeddings"],
            targets,
            position_weights=weights,
            bias=params.get("output_bias"),
            label_smoothing=recipe.label_smoothing,
            gradient_mode=recipe.gradient_mode,
            precision=recipe.precision,
            sharding=sharding,
        )
        # The mean over the catalog makes gradients shrink with its size, below Adam's epsilon for
        # large ones. The sum over the catalog has the same minimum and no such scale.
        return loss * params["item_embeddings"].shape[0], loss

    def step(state, history, targets, capacity=None):
        dropout_key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
        vectors = state.params["item_embeddings"][history]
        gradient_of = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
        (_, loss), (gradients, d_vectors) = gradient_of(
            state.params, vectors, history, targets, capacity, dropout_key
        )
        # Adding the rows read by the histories to the finished table gradient keeps one [V, D]
        # buffer; differentiating through the gather would make a second one. On a mesh every device
        # adds all rows: gathering them is [T, D], adding up the devices' tables would be [V, D].
        rows, d_rows = _replicated((history, d_vectors), sharding)
        gradients["item_embeddings"] = gradients["item_embeddings"].at[rows].add(d_rows)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params = cast(dict, optax.apply_updates(state.params, updates))
        metrics = StepMetrics(loss, optax.tree.norm(gradients))
        return TrainState(state.step + 1, params, optimizer_state), metrics

    return step


def _replicated(arrays: Any, sharding: cutbce_ops.LossSharding | None) -> Any:
    if sharding is None:
        return arrays
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.lax.with_sharding_constraint(arrays, everywhere)


def _positions_with_targets(
    activations: Array, targets: Array, capacity: int | None
) -> tuple[Array, Array, Array]:
    """Positions flattened to T = B*S, or compacted to the `capacity` first ones with a target."""
    activations = activations.reshape(-1, activations.shape[-1])
    targets = targets.reshape(-1, targets.shape[-1])
    has_target = (targets != PAD_TARGET).any(-1)
    if capacity is None:
        return activations, targets, has_target.astype(jnp.float32)
    chosen = jnp.nonzero(has_target, size=capacity, fill_value=has_target.size)[0]
    return (
        activations.at[chosen].get(mode="fill", fill_value=0),
        targets.at[chosen].get(mode="fill", fill_value=PAD_TARGET),
        (chosen < has_target.size).astype(jnp.float32),
    )
