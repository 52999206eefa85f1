"""Optimizers with linear warm-up, cosine decay and clipping of the global gradient norm."""

from collections.abc import Hashable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from recmodels._src.recipe import Recipe

# Leaves that weight decay must leave alone, by the last name on their path. Decay pulls towards
# zero, which is no neutral value for an offset, a scale or a position.
_NOT_DECAYED = ("bias", "scale", "positions", "mask_vector", "output_bias", "gap_embeddings")
_TABLES = ("item_embeddings", "output_embeddings")
_SECOND_MOMENT_DECAY = 0.98  # usual for recommenders; 0.999 remembers longer than a short run lasts


def learning_rate(recipe: Recipe, step: ArrayLike) -> Array:
    """Rate of the 0-based `step`: linear up to the peak, then a cosine down to the final share."""
    step = jnp.asarray(step)
    warmup = jnp.minimum(1.0, (step + 1) / max(recipe.warmup_steps, 1))
    decay_steps = max(recipe.num_steps - recipe.warmup_steps, 1)
    progress = jnp.clip((step - recipe.warmup_steps) / decay_steps, 0.0, 1.0)
    final = recipe.final_learning_rate_ratio
    decay = final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return recipe.learning_rate * warmup * decay


def make_optimizer(recipe: Recipe, vocab_size: int | None = None) -> optax.GradientTransformation:
    """The optimizer of a recipe; its state is a tree of arrays and holds the schedule's step.

    Args:
        recipe: rates and kinds.
        vocab_size: table rows in use, all by default; the gradients of the others are zero.
    """
    clip = optax.clip_by_global_norm(recipe.gradient_clip_norm)
    if recipe.table_optimizer == "adamw":
        return optax.chain(clip, _adamw(recipe))
    parts: dict[Hashable, optax.GradientTransformation]
    parts = {"table": _table_optimizer(recipe, vocab_size), "rest": _adamw(recipe)}
    return optax.chain(clip, optax.partition(parts, _tables_and_rest))


def _adamw(recipe: Recipe) -> optax.GradientTransformation:
    return optax.adamw(
        lambda step: learning_rate(recipe, step),
        b2=_SECOND_MOMENT_DECAY,
        weight_decay=recipe.weight_decay,
        mask=decayed,
    )


def _table_optimizer(recipe: Recipe, vocab_size: int | None) -> optax.GradientTransformation:
    if recipe.table_optimizer == "adafactor":
        # Its moments are a column and a row for each table; no momentum, steps of about one.
        scale = optax.chain(
            optax.scale_by_factored_rms(min_dim_size_to_factor=1), _clip_by_rms(vocab_size)
        )
    else:
        scale = scale_by_rowwise_adagrad()
    return optax.chain(
        scale,
        optax.add_decayed_weights(recipe.weight_decay),
        optax.scale_by_learning_rate(lambda step: learning_rate(recipe, step)),
    )


def _clip_by_rms(vocab_size: int | None) -> optax.GradientTransformation:
    """Adafactor's clipping: divides a table's update by its root mean square where that exceeds 1.

    Optax would count the unused rows too, and so the steps would depend on how many there are.
    """

    def clipped(update: Array) -> Array:
        num_rows = update.shape[0] if vocab_size is None else vocab_size
        mean = jnp.sum(jnp.square(update)) / (num_rows * update.shape[1])
        return update / jnp.maximum(1, jnp.sqrt(mean))

    return optax.stateless(lambda updates, _: jax.tree.map(clipped, updates))


class RowwiseAdagradState(NamedTuple):
    """Sums of squared gradients."""

    sums: Any  # for each leaf `[V, D]`: `[V, 1]`, sum over the steps of the mean over the columns


def scale_by_rowwise_adagrad(epsilon: float = 1e-10) -> optax.GradientTransformation:
    """Divides each row of the gradient by the root of its summed mean squares: one float a row.

    Args:
        epsilon: added to the sums, so that a row without any gradient stays where it is.
    """

    def init(params: Any) -> RowwiseAdagradState:
        return RowwiseAdagradState(jax.tree.map(lambda leaf: jnp.zeros_like(leaf[:, :1]), params))

    def update(updates: Any, state: optax.OptState, params: Any = None) -> tuple[Any, Any]:
        del params
        gradients, state = updates, cast(RowwiseAdagradState, state)
        sums = jax.tree.map(
            lambda total, leaf: total + jnp.square(leaf).mean(axis=1, keepdims=True),
            state.sums,
            gradients,
        )
        scaled = jax.tree.map(
            lambda leaf, total: leaf * jax.lax.rsqrt(total + epsilon), gradients, sums
        )
        return scaled, RowwiseAdagradState(sums)

    return optax.GradientTransformation(init, update)


def decayed(params: Any) -> Any:
    """Tree of bools: True where weight decay applies (matrices and the item table)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: getattr(path[-1], "key", None) not in _NOT_DECAYED, params
    )


def _tables_and_rest(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "table" if getattr(path[-1], "key", None) in _TABLES else "rest", params
    )
