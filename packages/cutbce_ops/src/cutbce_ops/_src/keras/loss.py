"""`CutBinaryCrossentropy`: Keras' binary cross-entropy over a catalog, without its logits."""

from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import Array

from cutbce_ops import (
    cut_binary_cross_entropy,
    cut_binary_cross_entropy_per_position,
    cut_binary_cross_entropy_with_aux,
)
from cutbce_ops._src import checks
from cutbce_ops._src.binary_cross_entropy.config import (
    GRADIENT_MODES,
    PRECISIONS,
    GradientMode,
    Precision,
)
from cutbce_ops._src.keras.rescue import give_back_variables
from cutbce_ops._src.keras.scoring import Scoring, known_tables, scoring_of

# In larger catalogs no list of rows is as long as the catalog: such targets are multi-hot.
_MOST_ITEMS_TO_LIST = 64


@keras.saving.register_keras_serializable(package="cutbce_ops")
class CutBinaryCrossentropy(keras.losses.Loss):
    """Binary cross-entropy over the whole catalog, for a model that ends in `CutDense`.

    Equals `keras.losses.BinaryCrossentropy(from_logits=True)` on `Dense` logits and multi-hot
    targets, sample weights, masks and reduction included, but neither logits nor multi-hot targets
    ever exist. `y_true` is `[..., L]` integer table rows for `y_pred` `[..., D]`; rows outside
    `[0, V)` (so also -1) are padding, and a repeated row counts once. `sample_weight` is `[...]`.

    Wrong targets fail before a step has run, and the model keeps its values.

    Args:
      label_smoothing: in [0, 1], as in Keras.
      pos_weight: positive factor on the loss of targets, as in PyTorch; None for 1.
      focal_gamma: at least 0, the `gamma` of `keras.losses.BinaryFocalCrossentropy`.
      gradient_mode: "auto", "fused" or "recompute", see `cut_binary_cross_entropy`.
      precision: "default", "bfloat16" or "highest", see `cut_binary_cross_entropy`. "default" is
        "bfloat16" where the layer's dtype policy computes in bfloat16.
      reduction: as in Keras. With None or "none" the logits are computed twice, since the gradient
        has to wait for the caller's reduction.
      name: of the loss.
      dtype: of the result, None for Keras' default.

    Raises:
      ValueError: an option is outside its range; or, when called, `y_pred` is not the output of a
        `CutDense` layer itself, or `y_true` does not have the positions of `y_pred` or is multi-hot
        (as long as a catalog of more than 64 rows).
      TypeError: `y_true` does not hold integers.

    Example:
      >>> import numpy as np, keras, cutbce_ops.keras
      >>> model = keras.Sequential([keras.Input((4,)), cutbce_ops.keras.CutDense(1000)])
      >>> model.compile("sgd", loss=cutbce_ops.keras.CutBinaryCrossentropy())
      >>> targets = np.array([[3, 7], [9, -1]], "int32")
      >>> loss = model.evaluate(np.zeros((2, 4)), targets, verbose=0)
      >>> round(loss, 4)  # every probability is 1/2: log 2
      0.6931
    """

    def __init__(
        self,
        *,
        label_smoothing: float = 0.0,
        pos_weight: float | None = None,
        focal_gamma: float = 0.0,
        gradient_mode: GradientMode = "auto",
        precision: Precision = "default",
        reduction: Any = "sum_over_batch_size",
        name: str = "cut_binary_crossentropy",
        dtype: Any = None,
    ):
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        checks.require_number("label_smoothing", label_smoothing, 0.0, 1.0)
        if pos_weight is not None:
            checks.require_number("pos_weight", pos_weight, 0.0, float("inf"), low_is_allowed=False)
        checks.require_number("focal_gamma", focal_gamma, 0.0, float("inf"))
        checks.require_choice("gradient_mode", gradient_mode, GRADIENT_MODES)
        checks.require_choice("precision", precision, PRECISIONS)
        self.label_smoothing = label_smoothing
        self.pos_weight = pos_weight
        self.focal_gamma = focal_gamma
        self.gradient_mode = gradient_mode
        self.precision = precision

    def __call__(self, y_true: Array, y_pred: Array, sample_weight: Any = None) -> Array:
        """Returns the reduced loss; see the class for the arguments."""
        # Not Keras' own __call__: it would cast the rows to float32, which is exact to 2^24 only.
        try:
            return self._reduced(y_true, y_pred, sample_weight)
        except Exception:
            give_back_variables()
            raise

    def _reduced(self, y_true: Array, y_pred: Array, sample_weight: Any) -> Array:
        scoring = scoring_of(y_pred)
        if scoring is None:
            return self._without_table(y_true, y_pred, sample_weight)
        _check_rows(y_true, y_pred)
        _check_not_multi_hot(y_true, scoring.embeddings.shape[0])

        def reduce(per_position: Array) -> Array:
            return _reduce(per_position, y_pred, sample_weight, self.reduction, self.dtype)

        if self.reduction in (None, "none"):
            if scoring.metrics:
                raise ValueError(
                    "CutDense(track_confusion=True) needs a loss with a reduction, since the "
                    f"sweep that reduces counts, too; got reduction={self.reduction!r}."
                )
            return reduce(self.call(y_true, y_pred))
        # Every reduction is linear in the losses, so its derivative is the weight of each. Keras
        # itself thus says what masks and sample weights mean.
        position_weights = jax.grad(reduce)(jnp.zeros(y_pred.shape[:-1], self.dtype))
        return self._fused(y_true, y_pred, scoring, position_weights)

    def call(self, y_true: Array, y_pred: Array) -> Array:
        """Returns the loss of every position, `[...]` float32, the mean over the catalog."""
        scoring = scoring_of(y_pred)
        if scoring is None:
            raise _not_from_head()
        _check_rows(y_true, y_pred)
        _check_not_multi_hot(y_true, scoring.embeddings.shape[0])
        return cut_binary_cross_entropy_per_position(
            y_pred, scoring.embeddings, y_true, bias=scoring.bias, **self._options(y_pred)
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal loss."""
        return {
            **super().get_config(),
            "label_smoothing": self.label_smoothing,
            "pos_weight": self.pos_weight,
            "focal_gamma": self.focal_gamma,
            "gradient_mode": self.gradient_mode,
            "precision": self.precision,
            "dtype": self.dtype,
        }

    def _fused(self, y_true: Array, y_pred: Array, scoring: Scoring, weights: Array) -> Array:
        arguments = (y_pred, scoring.embeddings, y_true)
        options = {
            **self._options(y_pred),
            "bias": scoring.bias,
            "position_weights": weights,
            "gradient_mode": self.gradient_mode,
        }
        if scoring.metrics:
            mean, output = cut_binary_cross_entropy_with_aux(*arguments, **options)
            for metric in scoring.metrics:
                metric.update_state(output.counts)
        else:
            mean = cut_binary_cross_entropy(*arguments, **options)
        # The operator divides by the total weight, which Keras does not.
        return (mean * jnp.sum(weights).astype(mean.dtype)).astype(self.dtype)

    def _options(self, activations: Array) -> dict[str, Any]:
        is_bfloat16 = self.precision == "default" and activations.dtype == jnp.bfloat16
        return {
            "label_smoothing": self.label_smoothing,
            "pos_weight": self.pos_weight,
            "focal_gamma": self.focal_gamma,
            "precision": "bfloat16" if is_bfloat16 else self.precision,
        }

    def _without_table(self, y_true: Array, y_pred: Array, sample_weight: Any) -> Array:
        # Before the first step Keras calls a loss on stand-ins for the model's output, only to see
        # the shape of the result. Wrong targets fail here already, which is the clearest place.
        with keras.SymbolicScope() as scope:
            is_symbolic = scope.original_scope is not None
        if not is_symbolic:
            raise _not_from_head()
        _check_rows(y_true, y_pred)
        for num_items in known_tables(y_pred.shape[-1]):
            _check_not_multi_hot(y_true, num_items)
        per_position = jnp.zeros(y_pred.shape[:-1], self.dtype)
        return _reduce(per_position, y_pred, sample_weight, self.reduction, self.dtype)


def _check_rows(y_true: Array, y_pred: Array) -> None:
    checks.require_integer("y_true", y_true)
    leading = y_pred.shape[:-1]
    # Keras' stand-ins have dimensions that are not known yet, which are no integers.
    differ = any(
        isinstance(got, int) and isinstance(want, int) and got != want
        for got, want in zip(y_true.shape, leading, strict=False)
    )
    if len(y_true.shape) != len(y_pred.shape) or differ:
        raise ValueError(
            f"`y_true` must have shape {checks.list_shape(leading)}, a list of table rows for each "
            f"position of `y_pred` {y_pred.shape}; got {y_true.shape}."
        )


def _check_not_multi_hot(y_true: Array, num_items: int) -> None:
    if y_true.shape[-1] == num_items > _MOST_ITEMS_TO_LIST:
        raise ValueError(
            f"`y_true` must list the table rows of the targets, `[..., L]`, padded with -1, not "
            f"mark them in a multi-hot vector; got shape {y_true.shape} for a table of "
            f"{num_items} rows."
        )


def _not_from_head() -> ValueError:
    return ValueError(
        "`y_pred` of CutBinaryCrossentropy must be the output of a CutDense layer itself, since "
        "the loss finds the table through it. Make CutDense the last layer, apply nothing to its "
        "output, and call model and loss in the same (traced) function."
    )


class _Reduction(keras.losses.Loss):
    """Keras' own reduction, with its rules for sample weights and masks, of given losses."""

    def __init__(self, per_position: Array, **kwargs: Any):
        super().__init__(**kwargs)
        self.per_position = per_position

    def call(self, y_true: Array, y_pred: Array) -> Array:
        return self.per_position


def _reduce(per_position: Array, y_pred: Array, sample_weight: Any, reduction: Any, dtype: Any):
    # Keras looks up the mask by `y_pred`; the values of both are not used.
    reduction = _Reduction(per_position, reduction=reduction, dtype=dtype)
    return reduction(y_pred, y_pred, sample_weight)
