"""AdamW with linear warm-up, cosine decay and clipping of the global gradient norm."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from recmodels._src.recipe import Recipe

# Leaves that weight decay must leave alone, by the last name on their path. Decay pulls towards
# zero, which is no neutral value for an offset, a scale or a position.
_NOT_DECAYED = ("bias", "scale", "positions", "output_bias")


def learning_rate(recipe: Recipe, step: ArrayLike) -> Array:
    """Rate of the 0-based `step`: linear up to the peak, then a cosine down to the final share."""
    step = jnp.asarray(step)
    warmup = jnp.minimum(1.0, (step + 1) / max(recipe.warmup_steps, 1))
    decay_steps = max(recipe.num_steps - recipe.warmup_steps, 1)
    progress = jnp.clip((step - recipe.warmup_steps) / decay_steps, 0.0, 1.0)
    final = recipe.final_learning_rate_ratio
    decay = final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return recipe.learning_rate * warmup * decay


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """The optimizer of a recipe; its state is a tree of arrays and holds the schedule's step."""
    return optax.chain(
        optax.clip_by_global_norm(recipe.gradient_clip_norm),
        optax.adamw(
            lambda step: learning_rate(recipe, step),
            b2=0.98,  # usual for recommenders; 0.999 remembers longer than a short run lasts
            weight_decay=recipe.weight_decay,
            mask=decayed,
        ),
    )


def decayed(params: Any) -> Any:
    """Tree of bools: True where weight decay applies (matrices and the item table)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: getattr(path[-1], "key", None) not in _NOT_DECAYED, params
    )
