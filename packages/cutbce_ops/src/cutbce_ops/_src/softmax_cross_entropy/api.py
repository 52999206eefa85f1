"""Public functions: exact softmax cross-entropy over the whole vocabulary, no logits stored."""

import jax.numpy as jnp
from jax import Array

from cutbce_ops._src import checks
from cutbce_ops._src.binary_cross_entropy.arguments import check_arrays, flat_weights
from cutbce_ops._src.binary_cross_entropy.config import Implementation, Precision, TileConfig
from cutbce_ops._src.binary_cross_entropy.options import Options
from cutbce_ops._src.binary_cross_entropy.sharded import lay_out, restore, sum_of_positions
from cutbce_ops._src.binary_cross_entropy.vjp import Static, mean_weights
from cutbce_ops._src.sharding import LossSharding
from cutbce_ops._src.softmax_cross_entropy.vjp import per_position_loss


def cut_softmax_cross_entropy(
    activations: Array,
    embeddings: Array,
    targets: Array,
    *,
    position_weights: Array | None = None,
    bias: Array | None = None,
    vocab_size: int | None = None,
    logit_scale: float | Array | None = None,
    logit_cap: float | None = None,
    sharding: LossSharding | None = None,
    precision: Precision = "default",
    implementation: Implementation | None = None,
    tiles: TileConfig | None = None,
) -> Array:
    """Exact softmax cross-entropy over the whole vocabulary, without storing logits.

    With `z = logit_scale * activations @ embeddings.T + bias` (bounded by `logit_cap`),

        loss_t = log(sum_v exp(z_tv)) - z_t,target(t)
        loss   = sum_t w_t loss_t / sum_t w_t

    over the positions that have a target. One sweep over the table computes the log-sum-exp as a
    running largest logit and a running sum; the backward pass recomputes the probabilities and
    forms both gradients in a second sweep.

    Args:
      activations: `[..., D]` float32, bfloat16 or float16.
      embeddings: `[V, D]` item table, float.
      targets: `[...]` integer table rows. A position whose target lies outside `[0, vocab_size)`
        (so also -1) has none and weighs nothing.
      position_weights: `[...]` float or bool, None for ones. A total of zero gives loss 0 and
        zero gradients. Activations of weight 0 must still be finite.
      bias: `[V]` float, added to the logits.
      vocab_size: rows in use; the rest of the table is padding that contributes nothing.
      logit_scale: factor of the dot products (not of the bias): a number above 0, or a `[]` float
        array, which receives a gradient. The scaled activations are rounded to their dtype.
      logit_cap: number c above 0 that bounds the logits to c tanh(z / c); None for no bound.
      sharding: layout over a device mesh, see `LossSharding`.
      precision: of the matrix products, as in `cut_binary_cross_entropy`.
      implementation: None or "xla", which is the only one there is.
      tiles: size of the tile of logits, None for the platform's default.

    Returns:
      `[]` float32.

    Raises:
      ValueError: a shape or an option is inconsistent.
      TypeError: a dtype is wrong.
      NotImplementedError: `implementation` names one that this loss does not have.

    Memory: O(T D + V D + block_t block_v) beyond the inputs.

    Example:
      >>> import jax.numpy as jnp, cutbce_ops
      >>> table = jnp.zeros((100_000, 16))
      >>> loss = cutbce_ops.cut_softmax_cross_entropy(jnp.ones((2, 16)), table, jnp.array([3, -1]))
      >>> round(float(loss), 4)  # every item is as likely: log 100,000
      11.5129
    """
    options = Options(
        vocab_size, 0.0, logit_scale, logit_cap, sharding, precision, implementation, tiles
    )
    static, primals = _prepare(activations, embeddings, targets, bias, options)
    weights = flat_weights(position_weights, activations.shape[:-1])
    weights = jnp.where(primals[-1][:, 0] >= 0, weights, 0)
    laid_out, weights = lay_out(*primals, weights, sharding)
    weights = mean_weights(weights, sharding)
    return sum_of_positions(weights * per_position_loss(static, *laid_out), sharding)


def cut_softmax_cross_entropy_per_position(
    activations: Array,
    embeddings: Array,
    targets: Array,
    *,
    bias: Array | None = None,
    vocab_size: int | None = None,
    logit_scale: float | Array | None = None,
    logit_cap: float | None = None,
    sharding: LossSharding | None = None,
    precision: Precision = "default",
    implementation: Implementation | None = None,
    tiles: TileConfig | None = None,
) -> Array:
    """Softmax cross-entropy of every position, differentiable.

    The arguments and errors are those of `cut_softmax_cross_entropy`; weights do not apply.

    Returns:
      `[...]` float32, the leading shape of `activations`; 0 at positions without a target.
    """
    options = Options(
        vocab_size, 0.0, logit_scale, logit_cap, sharding, precision, implementation, tiles
    )
    static, primals = _prepare(activations, embeddings, targets, bias, options)
    laid_out, _ = lay_out(*primals, None, sharding)
    losses = restore(per_position_loss(static, *laid_out), primals[0], sharding)
    return jnp.where(primals[-1][:, 0] >= 0, losses, 0).reshape(activations.shape[:-1])


def _prepare(
    activations: Array, embeddings: Array, targets: Array, bias: Array | None, options: Options
) -> tuple[Static, tuple[Array, Array, Array | None, Array]]:
    """Checks every argument and flattens the leading axes to positions."""
    check_arrays(activations, embeddings, bias)
    checks.require_integer("targets", targets)
    checks.require_shape("targets", targets, activations.shape[:-1], "`activations`")
    activations, embeddings = jnp.asarray(activations), jnp.asarray(embeddings)
    bias = None if bias is None else jnp.asarray(bias)
    config = options.sweep_config(embeddings)
    if config.implementation not in (None, "xla"):
        raise NotImplementedError(
            f"`implementation` {config.implementation!r} does not exist for softmax cross-entropy; "
            "use None or 'xla'."
        )
    flat_activations = options.scaled(activations).reshape(-1, activations.shape[-1])
    flat_targets = checks.rows_or_padding(targets, config.vocab_size).reshape(-1, 1)
    static = Static(config, options.sharding, with_counts=False)
    return static, (flat_activations, embeddings, bias, flat_targets)
