"""Public functions: exact binary cross-entropy over the whole vocabulary, without stored logits."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from cutbce_ops._src import checks
from cutbce_ops._src.binary_cross_entropy import sharded
from cutbce_ops._src.binary_cross_entropy.arguments import check_arrays, flat_weights
from cutbce_ops._src.binary_cross_entropy.config import (
    GRADIENT_MODES,
    GradientMode,
    Implementation,
    Precision,
    TileConfig,
)
from cutbce_ops._src.binary_cross_entropy.options import Options, as_thresholds
from cutbce_ops._src.binary_cross_entropy.vjp import (
    Forward,
    Static,
    fused_loss,
    mean_weights,
    per_position_loss,
    weighted_sum,
)
from cutbce_ops._src.metrics import ConfusionCounts
from cutbce_ops._src.sharding import LossSharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BinaryCrossEntropyOutput:
    """Loss with its parts; only the first result of the call that returns it is differentiable.

    Attributes:
      loss: `[]` float32, weighted mean over positions.
      per_position: `[...]` float32, mean over the vocabulary for each position, unweighted.
      counts: int32 confusion counts `[...]` for each position; `[..., K]` for K thresholds.
    """

    loss: Array
    per_position: Array
    counts: ConfusionCounts


def cut_binary_cross_entropy(
    activations: Array,
    embeddings: Array,
    targets: Array,
    *,
    position_weights: Array | None = None,
    bias: Array | None = None,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    pos_weight: float | None = None,
    focal_gamma: float = 0.0,
    logit_scale: float | Array | None = None,
    logit_cap: float | None = None,
    sharding: LossSharding | None = None,
    gradient_mode: GradientMode = "auto",
    precision: Precision = "default",
    implementation: Implementation | None = None,
    tiles: TileConfig | None = None,
) -> Array:
    """Exact binary cross-entropy over the whole vocabulary, without storing logits.

    With `z = logit_scale * activations @ embeddings.T + bias` and softplus(x) = log(1 + e^x),

        loss_t = (sum_v softplus(z_tv) - sum_{v in targets(t)} z_tv) / V
        loss   = sum_t w_t loss_t / sum_t w_t

    which equals Keras' `binary_crossentropy(multi_hot, z, from_logits=True)`, averaged with the
    weights. `z`, the multi-hot targets and the derivative by `z` exist one tile at a time. With
    the options for the loss of one logit, labels y = 1 - s/2 or s/2 (smoothing s), positive weight
    w, focal gamma g and cap c, that loss is, for x = c tanh(z / c) and p = sigmoid(x),

        (y (1 - p) + (1 - y) p)^g (w y softplus(-x) + (1 - y) softplus(x))

    Args:
      activations: `[..., D]` float32, bfloat16 or float16.
      embeddings: `[V, D]` item table, float.
      targets: `[..., L]` integer table rows. Rows outside `[0, vocab_size)` (so also -1) are
        padding; a row repeated in one position's list counts once.
      position_weights: `[...]` float or bool, None for ones. A total of zero gives loss 0 and
        zero gradients. Activations of weight 0 must still be finite.
      bias: `[V]` float, added to the logits.
      vocab_size: rows in use; the rest of the table is padding that contributes nothing.
      label_smoothing: in [0, 1]; targets become `1 - s/2` and `s/2`, as in Keras.
      pos_weight: positive factor on the part of the loss that the (soft) target selects, as in
        PyTorch; None for 1.
      focal_gamma: at least 0; items that are already on the right side count less, as in Keras'
        `BinaryFocalCrossentropy`. 0 for none.
      logit_scale: factor of the dot products (not of the bias): a number above 0, or a `[]` float
        array, which receives a gradient. The scaled activations are rounded to their dtype.
      logit_cap: number above 0 that bounds the logits smoothly to (-c, c); None for no bound.
      sharding: layout over a device mesh, see `LossSharding`; None for one device, or inside
        `jax.shard_map` for the loss of this device's positions.
      gradient_mode: "fused" takes loss and gradients from one sweep and keeps the gradients
        (`[T, D]` and `[V, D]` float32) until the backward pass; "recompute" keeps nothing and
        sweeps again. "auto" is "fused".
      precision: of the matrix products, always accumulated in float32. "default" takes the
        operands as they are (a TPU then multiplies float32 in bfloat16), "bfloat16" rounds them
        first, "highest" asks for full float32 products on every backend.
      implementation: None for the best available, or "mosaic_tpu", "xla" or "gpu", which run or
        fail but never fall back.
      tiles: size of the tile of logits, None for the platform's default.

    Returns:
      `[]` float32.

    Raises:
      ValueError: a shape or an option is inconsistent.
      TypeError: a dtype is wrong.
      NotImplementedError: the chosen implementation cannot run this case.

    Memory: O(T D + V D + block_t block_v) beyond the inputs.

    Example:
      >>> import jax, jax.numpy as jnp, cutbce_ops
      >>> table = jnp.zeros((100_000, 16))
      >>> targets = jnp.array([[3, 7], [9, -1]])
      >>> loss = cutbce_ops.cut_binary_cross_entropy(jnp.ones((2, 16)), table, targets)
      >>> round(float(loss), 4)  # every probability is 1/2: log 2
      0.6931
    """
    options = Options(
        vocab_size, label_smoothing, logit_scale, logit_cap, sharding, precision, implementation,
        tiles, pos_weight, focal_gamma,
    )  # fmt: skip
    loss, _ = _loss_and_forward(
        activations, embeddings, targets, position_weights, bias, gradient_mode, options
    )
    return loss


def cut_binary_cross_entropy_with_aux(
    activations: Array,
    embeddings: Array,
    targets: Array,
    *,
    position_weights: Array | None = None,
    bias: Array | None = None,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    pos_weight: float | None = None,
    focal_gamma: float = 0.0,
    logit_scale: float | Array | None = None,
    logit_cap: float | None = None,
    sharding: LossSharding | None = None,
    thresholds: float | tuple[float, ...] = 0.5,
    gradient_mode: GradientMode = "auto",
    precision: Precision = "default",
    implementation: Implementation | None = None,
    tiles: TileConfig | None = None,
) -> tuple[Array, BinaryCrossEntropyOutput]:
    """`cut_binary_cross_entropy` with the loss per position and confusion counts from the sweep.

    Made for `jax.value_and_grad(..., has_aux=True)`. The arguments, errors and memory are those of
    `cut_binary_cross_entropy`, and `thresholds`: the probability in (0, 1) above which an item
    counts as predicted, or a tuple of K strictly increasing ones, all counted in the same sweep.

    Returns:
      The loss, `[]` float32, and a `BinaryCrossEntropyOutput` through which no gradient flows.
    """
    all_thresholds = as_thresholds(thresholds)
    options = Options(
        vocab_size, label_smoothing, logit_scale, logit_cap, sharding, precision, implementation,
        tiles, pos_weight, focal_gamma, all_thresholds,
    )  # fmt: skip
    loss, forward = _loss_and_forward(
        activations, embeddings, targets, position_weights, bias, gradient_mode, options
    )
    shape = activations.shape[:-1]
    counts = forward.counts
    assert counts is not None
    if position_weights is not None:
        is_counted = (jnp.reshape(position_weights, -1) != 0)[:, None]
        counts = jax.tree.map(lambda count: jnp.where(is_counted, count, 0), counts)
    kept = all_thresholds if isinstance(thresholds, tuple) else all_thresholds[0]
    # In two steps: arrays split over explicit axes can only regain the axes they came with.
    counts = jax.tree.map(lambda count: count.reshape(*shape, len(all_thresholds)), counts)
    if not isinstance(kept, tuple):
        counts = jax.tree.map(lambda count: count[..., 0], counts)
    output = BinaryCrossEntropyOutput(
        loss=loss,
        per_position=forward.per_position.reshape(shape),
        counts=dataclasses.replace(counts, thresholds=kept),
    )
    return loss, lax.stop_gradient(output)


def cut_binary_cross_entropy_per_position(
    activations: Array,
    embeddings: Array,
    targets: Array,
    *,
    bias: Array | None = None,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    pos_weight: float | None = None,
    focal_gamma: float = 0.0,
    logit_scale: float | Array | None = None,
    logit_cap: float | None = None,
    sharding: LossSharding | None = None,
    precision: Precision = "default",
    implementation: Implementation | None = None,
    tiles: TileConfig | None = None,
) -> Array:
    """Loss of every position, differentiable, for callers who reduce it in their own way.

    The backward pass recomputes the logits, since it has to wait for the cotangents. The arguments
    and errors are those of `cut_binary_cross_entropy`; weights and gradient mode do not apply.

    Returns:
      `[...]` float32, the leading shape of `activations`; mean over the vocabulary.
    """
    options = Options(
        vocab_size, label_smoothing, logit_scale, logit_cap, sharding, precision, implementation,
        tiles, pos_weight, focal_gamma,
    )  # fmt: skip
    static, primals = _prepare(activations, embeddings, targets, bias, options)
    laid_out, _ = sharded.lay_out(*primals, None, static.sharding)
    forward = sharded.restore(per_position_loss(static, *laid_out), primals[0], static.sharding)
    return forward.per_position.reshape(activations.shape[:-1])


def _loss_and_forward(
    activations: Array,
    embeddings: Array,
    targets: Array,
    position_weights: Array | None,
    bias: Array | None,
    gradient_mode: GradientMode,
    options: Options,
) -> tuple[Array, Forward]:
    checks.require_choice("gradient_mode", gradient_mode, GRADIENT_MODES)
    static, primals = _prepare(activations, embeddings, targets, bias, options)
    weights = flat_weights(position_weights, activations.shape[:-1])
    laid_out, weights = sharded.lay_out(*primals, weights, static.sharding)
    weights = mean_weights(weights, static.sharding)
    if gradient_mode == "recompute":
        forward = per_position_loss(static, *laid_out)
        loss = weighted_sum(static, weights, forward)
    else:
        loss, forward = fused_loss(static, *laid_out, weights)
    return loss, sharded.restore(forward, primals[0], static.sharding)


def _prepare(
    activations: Array, embeddings: Array, targets: Array, bias: Array | None, options: Options
) -> tuple[Static, tuple[Array, Array, Array | None, Array]]:
    """Checks every argument and flattens the leading axes to positions."""
    check_arrays(activations, embeddings, bias)
    checks.require_integer("targets", targets)
    if targets.ndim != activations.ndim or targets.shape[:-1] != activations.shape[:-1]:
        raise ValueError(
            f"`targets` must have shape {checks.list_shape(activations.shape[:-1])} to match "
            f"`activations` {activations.shape}; got {targets.shape}."
        )
    activations, embeddings = jnp.asarray(activations), jnp.asarray(embeddings)
    bias = None if bias is None else jnp.asarray(bias)
    config = options.sweep_config(embeddings)
    flat_activations = options.scaled(activations).reshape(-1, activations.shape[-1])
    flat_targets = checks.rows_or_padding(targets, config.vocab_size)
    if targets.shape[-1] == 0:  # a list of padding, so that no loop below has to know of this
        flat_targets = jnp.full((*activations.shape[:-1], 1), -1, jnp.int32)
    flat_targets = flat_targets.reshape(flat_activations.shape[0], -1)
    static = Static(config, options.sharding, with_counts=options.thresholds is not None)
    return static, (flat_activations, embeddings, bias, flat_targets)
