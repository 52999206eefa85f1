"""Losses a recipe can train with: exact ones over the whole catalog, and the sampled ones.

A loss takes `(params, activations [T, D], targets [T, L], weights [T], key)` and returns a `[]`
float32: its mean over the positions, by their weights. `params` are the arrays of the model,
`targets` rows of the table, -1 on padding.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import Array

import cutbce_ops
from recmodels._src.data.splits import PAD_TARGET
from recmodels._src.errors import UserError
from recmodels._src.models.base import output_table
from recmodels._src.recipe import Recipe

Loss = Callable[[dict, Array, Array, Array, Array], Array]


def make_loss(
    recipe: Recipe, *, vocab_size: int, sharding: cutbce_ops.LossSharding | None = None
) -> Loss:
    """The loss that the recipe names.

    Args:
        recipe: names the loss and its settings.
        vocab_size: table rows in use, the padding row included.
        sharding: how positions and table are spread over a mesh; None on one device.

    Raises:
        UserError: the loss needs the whole table on every device and the table is sharded.
    """
    if recipe.loss == "cut-bce":
        return _cut_binary_cross_entropy(recipe, vocab_size, sharding)
    if recipe.loss == "cut-softmax":
        return _cut_softmax_cross_entropy(recipe, vocab_size, sharding)
    if sharding is not None and sharding.vocabulary_axes is not None:
        raise UserError(
            f"`loss` {recipe.loss} needs the whole table on every device; set `table` to "
            '"replicated" or `loss` to "cut-bce" or "cut-softmax".'
        )
    if recipe.loss == "dense-bce":
        return functools.partial(_dense_binary_cross_entropy, recipe, vocab_size)
    return functools.partial(_sampled_binary_cross_entropy, recipe, vocab_size)


def gradient_scale(recipe: Recipe, vocab_size: int) -> int:
    """Factor of the gradients before the optimizer.

    A mean over the catalog makes gradients shrink with its size, below Adam's epsilon for large
    ones. The sum over the catalog has the same minimum and no such scale.
    """
    return vocab_size if recipe.loss in ("cut-bce", "dense-bce") else 1


def _cut_binary_cross_entropy(
    recipe: Recipe, vocab_size: int, sharding: cutbce_ops.LossSharding | None
) -> Loss:
    def loss(params: dict, activations: Array, targets: Array, weights: Array, _: Array) -> Array:
        return cutbce_ops.cut_binary_cross_entropy(
            activations,
            output_table(params),
            targets,
            position_weights=weights,
            bias=params.get("output_bias"),
            vocab_size=vocab_size,
            label_smoothing=recipe.label_smoothing,
            gradient_mode=recipe.gradient_mode,
            precision=recipe.precision,
            sharding=sharding,
        )

    return loss


def _cut_softmax_cross_entropy(
    recipe: Recipe, vocab_size: int, sharding: cutbce_ops.LossSharding | None
) -> Loss:
    def loss(params: dict, activations: Array, targets: Array, weights: Array, _: Array) -> Array:
        return cutbce_ops.cut_softmax_cross_entropy(
            activations,
            output_table(params),
            targets[:, 0],
            position_weights=weights,
            bias=params.get("output_bias"),
            vocab_size=vocab_size,
            precision=recipe.precision,
            sharding=sharding,
        )

    return loss


def _dense_binary_cross_entropy(
    recipe: Recipe,
    vocab_size: int,
    params: dict,
    activations: Array,
    targets: Array,
    weights: Array,
    _: Array,
) -> Array:
    """What `cut_binary_cross_entropy` computes, with all `[T, V]` logits and labels in memory."""
    table = output_table(params)[:vocab_size]
    logits = jnp.einsum("td,vd->tv", activations, table, preferred_element_type=jnp.float32)
    if "output_bias" in params:
        logits = logits + params["output_bias"][:vocab_size]
    position = jnp.arange(targets.shape[0])[:, None]
    row = jnp.where(targets == PAD_TARGET, vocab_size, targets)
    labels = jnp.zeros_like(logits).at[position, row].set(1.0, mode="drop")
    labels = labels * (1 - recipe.label_smoothing) + 0.5 * recipe.label_smoothing
    losses = optax.sigmoid_binary_cross_entropy(logits, labels).mean(axis=1)
    return _weighted_mean(losses, weights)


def _sampled_binary_cross_entropy(
    recipe: Recipe,
    vocab_size: int,
    params: dict,
    activations: Array,
    targets: Array,
    weights: Array,
    key: Array,
) -> Array:
    """Binary cross-entropy of the targets and of uniformly drawn negatives, as SASRec has it.

    With gBCE (Petrov and Macdonald, arXiv 2308.07192) the targets' part is multiplied by

        beta = a (t (1 - 1/a) + 1/a),   a = num_negatives / (num_items - 1)

    which makes up for the share a of the catalog that is sampled; t = 0 gives beta = 1.
    """
    num_items = vocab_size - 1
    shape = (len(targets), recipe.num_negatives)
    negatives = jax.random.randint(key, shape, 1, vocab_size)  # row 0 is padding
    is_target = (negatives[:, :, None] == targets[:, None, :]).any(-1)
    has_target = targets != PAD_TARGET
    rows = jnp.concatenate([jnp.maximum(targets, 0), negatives], axis=1)
    scores = row_scores(activations.astype(jnp.float32), output_table(params), rows)
    if "output_bias" in params:
        scores = scores + params["output_bias"][rows]
    of_targets, of_negatives = jnp.split(scores, [targets.shape[1]], axis=1)
    beta = 1.0
    if recipe.loss == "gbce":
        sampled = recipe.num_negatives / max(num_items - 1, 1)
        beta = sampled * (recipe.gbce_calibration * (1 - 1 / sampled) + 1 / sampled)
    losses = beta * jnp.where(has_target, jax.nn.softplus(-of_targets), 0).sum(1)
    losses = losses + jnp.where(is_target, 0, jax.nn.softplus(of_negatives)).sum(1)
    num_terms = has_target.sum(1) + (~is_target).sum(1)
    return _weighted_mean(losses / jnp.maximum(num_terms, 1), weights)


@jax.custom_vjp
def row_scores(activations: Array, table: Array, rows: Array) -> Array:
    """Dot products of every position with its own rows of the table, one column at a time.

    Autodiff would keep all `[T, K, D]` rows, and add up a table gradient for each column.

    Args:
        activations: `[T, D]` float32.
        table: `[V, D]` float32.
        rows: `[T, K]` int32.

    Returns:
        `[T, K]` float32.
    """
    return jax.lax.map(lambda row: (activations * table[row]).sum(-1), rows.T).T


def _row_scores_forward(activations: Array, table: Array, rows: Array) -> tuple[Array, tuple]:
    return row_scores(activations, table, rows), (activations, table, rows)


def _row_scores_backward(residuals: tuple, d_scores: Array) -> tuple[Array, Array, None]:
    activations, table, rows = residuals

    def column(state: tuple[Array, Array], both: tuple[Array, Array]) -> tuple:
        (d_activations, d_table), (row, d_score) = state, both
        d_activations = d_activations + d_score[:, None] * table[row]
        return (d_activations, d_table.at[row].add(d_score[:, None] * activations)), None

    zeros = (jnp.zeros_like(activations), jnp.zeros_like(table))
    (d_activations, d_table), _ = jax.lax.scan(column, zeros, (rows.T, d_scores.T))
    return d_activations, d_table, None


row_scores.defvjp(_row_scores_forward, _row_scores_backward)


def _weighted_mean(losses: Array, weights: Array) -> Array:
    return (losses * weights).sum() / jnp.maximum(weights.sum(), 1)
