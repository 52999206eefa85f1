"""Models with weights of the size of trained ones, made without compiling anything."""

from typing import Any

import jax
import numpy as np

from recmodels._src.models.registry import make_model
from recmodels._src.recipe import Recipe


def random_params(
    recipe: Recipe,
    vocab_size: int,
    *,
    seed: int = 0,
    scale: float = 0.3,
    num_categories: int = 0,
) -> dict:
    """Arrays of a model in which every part of it shows; at 0.02 a leak would drown in rounding."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: make_model(recipe).build(vocab_size, num_categories))

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        is_scale = getattr(path[-1], "key", None) == "scale"
        return (is_scale + scale * rng.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)
