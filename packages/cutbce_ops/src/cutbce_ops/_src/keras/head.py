"""`CutDense`: the output table of a recommender as a Keras layer that never makes logits."""

from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import Array

from cutbce_ops import cut_top_k
from cutbce_ops._src import checks
from cutbce_ops._src.keras.confusion import confusion_metrics
from cutbce_ops._src.keras.scoring import Scoring, attach, note_table


@keras.saving.register_keras_serializable(package="cutbce_ops")
class CutDense(keras.layers.Layer):
    """Output table for a whole catalog, in place of `Dense(num_items)` before a binary loss.

    The layer returns its input, so that no `[..., V]` logits exist in training; the loss
    `CutBinaryCrossentropy` finds the table through the layer's output, which must therefore be the
    model's output itself. `predict` gives activations too: rank them with `CutTopK` or `top_k`.

    Metrics of `compile(metrics=...)` would see activations; use `track_confusion` instead.

    Args:
      num_items: rows V of a table of the layer's own; None with `embedding`.
      embedding: a `keras.layers.Embedding` whose table is used (tied weights); None with
        `num_items`. `model.save` keeps them tied; `clone_model` and a model's `from_config` copy
        layers one by one and so untie them.
      use_bias: adds a bias `[V]` to the logits, as `Dense` does.
      embeddings_initializer, embeddings_regularizer, embeddings_constraint: of the table `[V, D]`
        (the transpose of a `Dense` kernel). None is "glorot_uniform", the default of `Dense`.
      bias_initializer, bias_regularizer, bias_constraint: of the bias. None is "zeros".
      track_confusion: adds "binary_accuracy", "precision" and "recall" of every logit at
        probability 0.5 to the results of `fit` and `evaluate`, counted in the loss's own sweep.
        Positions of weight zero are left out; others count once, whatever their weight. Text
        is put before the names ("films" gives "films_precision"), which a model with two such heads
        needs: Keras shows one of two metrics of the same name.
      **kwargs: `name`, `dtype` (policy), `trainable`. With a bfloat16 policy the products of the
        loss take bfloat16 operands; the table stays float32.

    Attributes:
      embeddings: `[V, D]` variable.
      bias: `[V]` variable or None.

    Raises:
      ValueError: not exactly one of `num_items` and `embedding` is given, or an option is given
        that has no effect.
      TypeError: an argument has a wrong type.

    Example:
      >>> import keras, cutbce_ops.keras
      >>> head = cutbce_ops.keras.CutDense(100_000)
      >>> model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(16), head])
      >>> model.compile("adam", loss=cutbce_ops.keras.CutBinaryCrossentropy())
      >>> head.embeddings.shape
      (100000, 16)
    """

    def __init__(
        self,
        num_items: int | None = None,
        *,
        embedding: keras.layers.Embedding | None = None,
        use_bias: bool = True,
        embeddings_initializer: Any = None,
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        bias_initializer: Any = None,
        bias_regularizer: Any = None,
        bias_constraint: Any = None,
        track_confusion: bool | str = False,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        _check_table(num_items, embedding)
        if not isinstance(track_confusion, bool | str):
            raise TypeError(
                "`track_confusion` must be True, False or text to put before the names; "
                f"got {track_confusion!r}."
            )
        _check_unused("embedding", embedding is None, "embeddings", embeddings_initializer,
                      embeddings_regularizer, embeddings_constraint)  # fmt: skip
        _check_unused("use_bias=False", use_bias, "bias", bias_initializer, bias_regularizer,
                      bias_constraint)  # fmt: skip
        self.num_items = num_items
        self.embedding = embedding
        self.use_bias = use_bias
        self.track_confusion = track_confusion
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)
        self.embeddings_constraint = keras.constraints.get(embeddings_constraint)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.supports_masking = True
        self.bias = None
        self._table = None
        prefix = track_confusion if isinstance(track_confusion, str) else ""
        self.confusion_metrics = confusion_metrics(prefix) if track_confusion else []

    @property
    def embeddings(self) -> Any:
        """Table `[V, D]`: a variable of this layer, or of the embedding layer it shares."""
        if not self.built:
            raise AttributeError(f"Layer {self.name!r} has no `embeddings` before it is built.")
        return self._table if self.embedding is None else self.embedding.embeddings

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Creates the variables for activations `[..., D]`."""
        size: Any = input_shape[-1]
        num_items: Any = self.num_items if self.embedding is None else self.embedding.input_dim
        if self.embedding is None:
            self._table = self.add_weight(
                name="embeddings",
                shape=(num_items, size),
                initializer=self.embeddings_initializer or "glorot_uniform",
                regularizer=self.embeddings_regularizer,
                constraint=self.embeddings_constraint,
                autocast=False,  # the loss rounds; a cast here would round the gradient, too
            )
        else:
            if not self.embedding.built:
                self.embedding.build(None)
            if size != self.embedding.output_dim:
                raise ValueError(
                    f"Activations of {self.name!r} must have as many features as the rows of "
                    f"`embedding` {self.embedding.name!r} ({self.embedding.output_dim}); "
                    f"got shape {tuple(input_shape)}."
                )
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(num_items,),
                initializer=self.bias_initializer or "zeros",
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
                autocast=False,
            )
        note_table(self, num_items, size)
        self.built = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer and links its output to the table as it is now."""
        outputs = super().__call__(*args, **kwargs)
        if isinstance(outputs, jax.Array):  # not for symbolic tensors of a functional model
            attach(outputs, Scoring(*self._values(), tuple(self.confusion_metrics)))
        return outputs

    def call(self, activations: Array) -> Array:
        """Returns `activations` `[..., D]` as a tensor of its own, which carries the link."""
        return jnp.copy(activations)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Returns `input_shape`."""
        return input_shape

    def _values(self) -> tuple[Array, Array | None]:
        value: Any = keras.ops.convert_to_tensor  # of a variable, inside Keras' stateless scope too
        return value(self.embeddings), None if self.bias is None else value(self.bias)

    def logits(self, activations: Array) -> Array:
        """Scores of the whole catalog, for inspection and small catalogs.

        Args:
          activations: `[..., D]` float, an output of the layer.

        Returns:
          `[..., V]` in the compute dtype, as `Dense` would give.
        """
        embeddings, bias = self._values()
        logits = jnp.asarray(activations, self.compute_dtype) @ embeddings.T.astype(
            self.compute_dtype
        )
        return logits if bias is None else logits + bias.astype(logits.dtype)

    def top_k(
        self, activations: Array, k: int, *, exclude: Array | None = None
    ) -> tuple[Array, Array]:
        """Best `k` rows of the catalog for each position, exactly, without its logits.

        Args:
          activations: `[..., D]` float, an output of the layer.
          k: number of rows, static.
          exclude: `[..., X]` integer rows that must not be returned, padded with -1.

        Returns:
          Scores `[..., k]` float32, descending, and rows `[..., k]` int32; see `cut_top_k`.
        """
        embeddings, bias = self._values()
        leading = activations.shape[:-1]
        queries = jnp.reshape(activations, (-1, activations.shape[-1]))
        if exclude is not None:
            exclude = jnp.reshape(exclude, (-1, exclude.shape[-1]))
        scores, rows = cut_top_k(queries, embeddings, k, bias=bias, exclude=exclude)
        return scores.reshape(*leading, k), rows.reshape(*leading, k)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal layer."""
        serialize = keras.saving.serialize_keras_object
        objects = (
            "embedding", "embeddings_initializer", "embeddings_regularizer",
            "embeddings_constraint", "bias_initializer", "bias_regularizer", "bias_constraint",
        )  # fmt: skip
        return {
            **super().get_config(),
            "num_items": self.num_items,
            "use_bias": self.use_bias,
            "track_confusion": self.track_confusion,
            **{name: serialize(getattr(self, name)) for name in objects},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CutDense":
        """Returns a layer from `get_config()`."""
        embedding = keras.saving.deserialize_keras_object(config["embedding"])
        return cls(**{**config, "embedding": embedding})


def _check_table(num_items: Any, embedding: Any) -> None:
    if (num_items is None) == (embedding is None):
        raise ValueError(
            "Give exactly one of `num_items` (a table of the layer's own) and `embedding` (a "
            f"shared one); got num_items={num_items!r} and embedding={embedding!r}."
        )
    if num_items is not None and checks.require_static_int("num_items", num_items) < 1:
        raise ValueError(f"`num_items` must be at least 1; got {num_items}.")
    if embedding is not None and not isinstance(embedding, keras.layers.Embedding):
        raise TypeError(
            f"`embedding` must be a keras.layers.Embedding; got {type(embedding).__name__}."
        )


def _check_unused(reason: str, is_used: bool, what: str, *options: Any) -> None:
    if not is_used and any(option is not None for option in options):
        raise ValueError(
            f"With {reason} the options `{what}_initializer`, `{what}_regularizer` and "
            f"`{what}_constraint` have no effect; leave them out."
        )
