"""One training step as a pure function: forward, loss over the whole catalog, gradients, update."""

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array

import cutbce_ops
from recmodels._src.data.splits import PAD_TARGET
from recmodels._src.models.base import TABLES, popularity_bias
from recmodels._src.models.registry import make_model
from recmodels._src.models.side_inputs import SideInputs, with_side_inputs
from recmodels._src.recipe import Recipe
from recmodels._src.train.losses import gradient_scale, make_loss
from recmodels._src.train.optimizer import make_optimizer
from recmodels._src.train.sharded import add_rows, take_categories, take_rows


class TrainState(NamedTuple):
    """Everything a step changes."""

    step: Array  # steps done; also seeds the dropout of the next one
    params: dict  # arrays of the model, see `SequenceModel`
    optimizer: optax.OptState  # moments and schedule step
    average: dict | None = None  # running average of the parameters; None without `ema_decay`

    @property
    def result(self) -> dict:
        """The parameters to evaluate and export: the average where there is one."""
        return self.params if self.average is None else self.average


class StepMetrics(NamedTuple):
    """What a step reports, as device scalars."""

    loss: Array  # mean over positions; of binary cross-entropy over the catalog too
    gradient_norm: Array  # global norm before clipping


_NO_SIDE_INPUTS = SideInputs()
TrainStep = Callable[..., tuple[TrainState, StepMetrics]]

# From this many rows on the loss takes so much longer than the encoder that a second pass through
# the encoder costs next to nothing, and the memory it frees is worth having.
RECOMPUTE_FROM_ROWS = 100_000


@jax.jit(static_argnames=("recipe", "num_rows", "num_categories"))
def initial_state(
    recipe: Recipe,
    item_counts: Array,
    *,
    num_rows: int | None = None,
    num_categories: int = 0,
) -> TrainState:
    """State before the first step; the output bias starts at the popularity of the items.

    Args:
        recipe: sizes, seed and optimizer.
        item_counts: `[V]` training interactions per row; V is the number of table rows in use.
        num_rows: table rows in memory, V by default. Further ones are zero and stay zero, and the
            others do not depend on how many there are.
        num_categories: categories of the items, for a recipe with `item_categories`.
    """
    vocab_size = item_counts.shape[0]
    num_unused = 0 if num_rows is None else num_rows - vocab_size
    params = make_model(recipe).build(vocab_size + num_unused, num_categories)
    if num_unused:
        is_used = jnp.arange(vocab_size + num_unused) < vocab_size
        for name in sorted(TABLES & params.keys()):
            params[name] = jnp.where(is_used[:, None], params[name], 0)
    if recipe.output_bias:
        bias = popularity_bias(item_counts, recipe.num_targets)
        params["output_bias"] = jnp.pad(bias, (0, num_unused))
    # A copy: the step is given both to reuse, and one buffer cannot be given twice.
    average = jax.tree.map(jnp.copy, params) if recipe.ema_decay else None
    optimizer = make_optimizer(recipe).init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer, average)


@jax.jit
def is_usable(params: dict) -> Array:
    """`[]` bool: False once the squared norm overflows float32 or is NaN, so no model is left."""
    return jnp.isfinite(optax.tree.norm(params))


def make_train_step(
    recipe: Recipe,
    *,
    vocab_size: int | None = None,
    sharding: cutbce_ops.LossSharding | None = None,
) -> TrainStep:
    """The step of a recipe: `step(state, history, targets, capacity, side) -> (state, metrics)`.

    The returned function is pure and not compiled: the trainer and the planner compile it, with
    the state donated. Its arguments:

    - state: `TrainState`.
    - history: `[B, S]` int32 rows, right-aligned, 0 on padding.
    - targets: `[B, S, L]` int32 rows, -1 on padding.
    - capacity: int, at least the number of positions with a target in the batch (or in each part
      of it, see `accumulate_steps`), or None for all positions. Every position that is no padding
      must have a target. Only so many positions are computed; the random numbers of dropout depend
      on it, and nothing else.
    - side: `SideInputs` of the recipe, `gaps` those of the batch, `[B, S + L]`: of the history and
      of the targets of its last position.

    Args:
        recipe: model, loss and optimizer.
        vocab_size: table rows in use, all by default.
        sharding: how positions and table are spread over a mesh; None on one device. With a mesh
            `capacity` must be None, since compaction would move positions between devices.
    """
    model = make_model(recipe)
    optimizer = make_optimizer(recipe, vocab_size)

    def rows_in_use(params):
        return params["item_embeddings"].shape[0] if vocab_size is None else vocab_size

    def objective(params, vectors, batch, categories, capacity, key):
        vectors = with_side_inputs(params, vectors, categories, batch.gaps)
        recompute = rows_in_use(params) >= RECOMPUTE_FROM_ROWS
        activations = model.training_activations(
            params, batch, vectors, key, recompute=recompute, capacity=capacity
        )
        if capacity is not None:
            capacity = model.loss_capacity(capacity, len(vectors))
        activations, targets, weights = _positions_with_targets(
            activations, batch.targets, capacity
        )
        loss = make_loss(recipe, vocab_size=rows_in_use(params), sharding=sharding)
        loss_key = jax.random.fold_in(key, 1)
        return loss(params, activations, targets, weights, loss_key), weights.sum()

    def gradients_of(params, history, targets, side, capacity, key):
        batch = model.training_batch(history, targets, jax.random.fold_in(key, 2), side.gaps)
        categories = take_categories(side.item_categories, batch.rows, sharding)
        vectors = take_rows(params["item_embeddings"], batch.rows, sharding)
        (loss, weight), (gradients, d_vectors) = jax.value_and_grad(
            objective, argnums=(0, 1), has_aux=True
        )(params, vectors, batch, categories, capacity, key)
        # Adding the rows read by the histories to the finished table gradient keeps one [V, D]
        # buffer; differentiating through the gather would make a second one.
        gradients["item_embeddings"] = add_rows(
            gradients["item_embeddings"], batch.rows, d_vectors, sharding
        )
        return loss, weight, gradients

    def accumulated(params, history, targets, side, capacity, key):
        """The same over the parts of the batch, one after another, each by its weight."""

        def one_part(total, part):
            history, targets, gaps, key = part
            loss, weight, gradients = gradients_of(
                params, history, targets, side._replace(gaps=gaps), capacity, key
            )
            weighted = jax.tree.map(lambda leaf: leaf * weight, (loss, 1.0, gradients))
            return jax.tree.map(jnp.add, total, weighted), None

        num_parts = recipe.accumulate_steps
        zeros = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        parts = jax.tree.map(lambda each: _split(each, num_parts), (history, targets, side.gaps))
        keys = jax.random.split(key, num_parts)
        (loss, weight, gradients), _ = jax.lax.scan(one_part, zeros, (*parts, keys))
        share = 1 / jnp.maximum(weight, 1)
        return loss * share, weight, jax.tree.map(lambda leaf: leaf * share, gradients)

    def step(state, history, targets, capacity=None, side=_NO_SIDE_INPUTS):
        key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
        compute = gradients_of if recipe.accumulate_steps == 1 else accumulated
        loss, _, gradients = compute(state.params, history, targets, side, capacity, key)
        # Scaling here, not in the objective, becomes part of the update and takes no second
        # [V, D] buffer.
        scale = gradient_scale(recipe, rows_in_use(state.params))
        gradients = jax.tree.map(lambda leaf: leaf * scale, gradients)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params = cast(dict, optax.apply_updates(state.params, updates))
        average = _averaged(state.average, params, state.step, recipe.ema_decay)
        metrics = StepMetrics(loss, optax.tree.norm(gradients))
        return TrainState(state.step + 1, params, optimizer_state, average), metrics

    return step


def _averaged(average: dict | None, params: dict, step: Array, decay: float) -> dict | None:
    if average is None:
        return None
    # Young averages forget faster, or they would remember the random start for 1/(1-decay) steps.
    decay_now = jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda old, new: new + decay_now * (old - new), average, params)


def _split(batch: Array, num_parts: int) -> Array:
    """`[num_parts, B / num_parts, ...]`: every device of a mesh keeps its share of every part."""
    return jnp.moveaxis(batch.reshape(-1, num_parts, *batch.shape[1:]), 1, 0)


def _positions_with_targets(
    activations: Array, targets: Array, capacity: int | None
) -> tuple[Array, Array, Array]:
    """Positions flattened to T = B*P, or compacted to the `capacity` first ones with a target."""
    activations = activations.reshape(-1, activations.shape[-1])
    targets = targets.reshape(-1, targets.shape[-1])
    has_target = (targets != PAD_TARGET).any(-1)
    if capacity is None or capacity >= has_target.size:
        return activations, targets, has_target.astype(jnp.float32)
    chosen = jnp.nonzero(has_target, size=capacity, fill_value=has_target.size)[0]
    return (
        activations.at[chosen].get(mode="fill", fill_value=0),
        targets.at[chosen].get(mode="fill", fill_value=PAD_TARGET),
        (chosen < has_target.size).astype(jnp.float32),
    )
