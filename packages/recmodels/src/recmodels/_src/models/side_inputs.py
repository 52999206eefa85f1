"""Side inputs: what a history holds beside its items, added to the vectors that the encoder reads.

An event enters the encoder with the vector

    item_embeddings[item] + mean over its categories of category_embeddings[category]
                          + gap_embeddings[bucket of the time since the user's event before]

of which a recipe may leave out the second and the third part. Items are scored without them: the
losses sweep an item table, and one made of several would have to be built and differentiated anew
in every step.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from recmodels._src.models.layers import random_table
from recmodels._src.recipe import Recipe

NUM_GAP_BUCKETS = 33  # none; 0 seconds; [2^k, 2^(k+1)) seconds for k = 0..30


class SideInputs(NamedTuple):
    """What is read beside histories: arrays, or what stands for them; None if nobody asks."""

    item_categories: Any = None  # [V, K] int32 categories of each row, 0 for none
    gaps: Any = None  # [B, ...] int32 seconds since the event before, -1 for none


def side_tables(recipe: Recipe, rngs: nnx.Rngs, num_categories: int) -> dict[str, Array]:
    """Fresh tables of the side inputs that a recipe asks for.

    Args:
        recipe: names them.
        rngs: where they are drawn from.
        num_categories: C.

    Returns:
        `category_embeddings` `[C + 1, D]`, row 0 unused; `gap_embeddings` `[33, D]`.
    """
    tables = {}
    if recipe.item_categories:
        tables["category_embeddings"] = random_table(rngs, num_categories + 1, recipe.hidden_dim)
    if recipe.time_gaps:
        tables["gap_embeddings"] = random_table(rngs, NUM_GAP_BUCKETS, recipe.hidden_dim)
    return tables


def with_side_inputs(
    params: dict, vectors: Array, categories: Array | None, gaps: Array | None
) -> Array:
    """Item vectors with everything added that the model has a table for.

    Args:
        params: arrays of the model.
        vectors: `[..., D]` float32.
        categories: `[..., K]` int32 of each position, 0 for none.
        gaps: `[...]` int32 seconds since the event before, negative for none.
    """
    if "category_embeddings" in params:
        assert categories is not None
        vectors = vectors + mean_of_categories(params["category_embeddings"], categories)
    return with_gaps(params, vectors, gaps)


def with_gaps(params: dict, vectors: Array, gaps: Array | None) -> Array:
    """The part of `with_side_inputs` that is no property of an item."""
    if "gap_embeddings" not in params:
        return vectors
    assert gaps is not None
    return vectors + jnp.asarray(params["gap_embeddings"])[gap_buckets(gaps)]


def mean_of_categories(table: Array | np.ndarray, categories: Array | np.ndarray) -> Array:
    """`[..., D]` mean of the rows of `table` `[C + 1, D]`, zero for an item without categories.

    Args:
        table: a vector for each category; row 0 is not read.
        categories: `[..., K]` int32, 0 for none.
    """
    is_category = categories > 0
    total = jnp.where(is_category[..., None], jnp.asarray(table)[categories], 0).sum(-2)
    return total / jnp.maximum(is_category.sum(-1, keepdims=True), 1)


def gap_buckets(gaps: Array) -> Array:
    """`[...]` int32: 0 for a negative gap, 1 for none at all, k + 2 for 2^k to 2^(k+1) - 1 s."""
    # Counting zero bits is exact where a logarithm in floating point is not.
    return jnp.where(gaps < 0, 0, NUM_GAP_BUCKETS - lax.clz(jnp.maximum(gaps, 0)))
