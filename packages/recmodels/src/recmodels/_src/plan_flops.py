"""How much arithmetic a training step has to do, whatever the implementation does besides."""

from typing import Any

import jax

from recmodels._src.recipe import Recipe

# A product costs its forward pass once and the gradients of both factors.
_PASSES = 3
_EXACT_LOSSES = ("cut-bce", "cut-softmax", "dense-bce")


def model_flops(recipe: Recipe, params: dict[str, Any], vocab_size: int) -> float:
    """Floating-point operations of one step, forward and backward, over all devices.

        6 T (encoder matrices + 2 layers S D + D rows),   T = batch_size S,   S = max_length

    The encoder's matrices are 12 D^2 for each layer of SASRec (4 D^2 of attention, 8 D^2 of the
    MLP). Attention is counted for all S positions, also those that a mask hides. `rows` are those
    that the loss scores: the whole catalog, or the targets and negatives of a sampled loss.
    Recomputation, norms, softmax, lookups and the optimizer are not counted.

    Args:
        recipe: sizes and loss.
        params: arrays of the model, or their shapes; the encoder's matrices are named `kernel`.
        vocab_size: table rows in use.
    """
    num_positions = recipe.batch_size * recipe.max_length
    leaves = jax.tree_util.tree_leaves_with_path(params["encoder"])
    matrices = sum(leaf.size for path, leaf in leaves if getattr(path[-1], "key", "") == "kernel")
    attention = 2 * recipe.num_layers * recipe.max_length * recipe.hidden_dim
    is_exact = recipe.loss in _EXACT_LOSSES
    num_scored = vocab_size if is_exact else recipe.num_targets + recipe.num_negatives
    return _PASSES * 2.0 * num_positions * (matrices + attention + recipe.hidden_dim * num_scored)
