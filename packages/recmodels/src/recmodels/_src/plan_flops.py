"""How much arithmetic a training step has to do, whatever the implementation does besides."""

import math
from typing import Any

import jax
import numpy as np

from recmodels._src.models.registry import make_model
from recmodels._src.recipe import Recipe

# A product costs its forward pass once and the gradients of both factors.
_PASSES = 3
_EXACT_LOSSES = ("cut-bce", "cut-softmax", "dense-bce")


def model_flops(recipe: Recipe, params: dict[str, Any], vocab_size: int) -> float:
    """Floating-point operations of one step, forward and backward, over all devices.

        6 (T (encoder matrices + 2 layers S D) + P D rows)

    T positions are read, in sequences of S, and P of them predict something: all of SASRec's, the
    masked ones of BERT4Rec. The encoder's matrices are 12 D^2 for each layer (4 D^2 of attention,
    8 D^2 of the MLP). Attention is counted for all S positions, also those that a mask hides.
    `rows` are those that the loss scores: the whole catalog, or the targets and negatives of a
    sampled loss. Recomputation, norms, softmax, lookups and the optimizer are not counted.

    Args:
        recipe: model, sizes and loss.
        params: arrays of the model, or their shapes; the encoder's matrices are named `kernel`.
        vocab_size: table rows in use.
    """
    windows = jax.ShapeDtypeStruct((recipe.batch_size, recipe.max_length), np.int32)
    targets = jax.ShapeDtypeStruct((*windows.shape, recipe.num_targets), np.int32)
    batch = jax.eval_shape(make_model(recipe).training_batch, windows, targets, jax.random.key(0))
    num_read, num_predicting = batch.rows.size, math.prod(batch.targets.shape[:2])
    leaves = jax.tree_util.tree_leaves_with_path(params["encoder"])
    matrices = sum(leaf.size for path, leaf in leaves if getattr(path[-1], "key", "") == "kernel")
    attention = 2 * recipe.num_layers * batch.rows.shape[1] * recipe.hidden_dim
    is_exact = recipe.loss in _EXACT_LOSSES
    num_scored = vocab_size if is_exact else recipe.num_targets + recipe.num_negatives
    products = num_read * (matrices + attention) + num_predicting * recipe.hidden_dim * num_scored
    return _PASSES * 2.0 * products
