"""`CutTopK`: exact full-catalog retrieval as the last layer of a serving model."""

from typing import Any

import keras
from jax import Array

from cutbce_ops._src import checks
from cutbce_ops._src.keras.head import CutDense


@keras.saving.register_keras_serializable(package="cutbce_ops")
class CutTopK(keras.layers.Layer):
    """Best rows of the catalog for activations that a trained `CutDense` returned.

    Args:
      head: the trained layer; its variables are shared, not copied.
      k: number of rows to return.
      **kwargs: `name`, `dtype` (policy).

    Raises:
      ValueError: `k` is not positive, or exceeds the catalog.
      TypeError: an argument has a wrong type.

    Example:
      >>> import keras, cutbce_ops.keras
      >>> head = cutbce_ops.keras.CutDense(1000)
      >>> model = keras.Sequential([keras.Input((4,)), head])
      >>> serving = keras.Model(model.inputs, cutbce_ops.keras.CutTopK(head, 10)(model.outputs[0]))
      >>> scores, rows = serving(keras.ops.ones((2, 4)))
      >>> rows.shape
      (2, 10)
    """

    def __init__(self, head: CutDense, k: int, **kwargs: Any):
        super().__init__(**kwargs)
        if not isinstance(head, CutDense):
            raise TypeError(f"`head` must be a CutDense layer; got {type(head).__name__}.")
        if checks.require_static_int("k", k) < 1:
            raise ValueError(f"`k` must be at least 1; got {k}.")
        self.head = head
        self.k = k
        self.supports_masking = True  # of its input; the mask ends here

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Builds the head where that has not happened."""
        if not self.head.built:
            self.head.build(input_shape)
        self.built = True

    def call(self, activations: Array, exclude: Array | None = None) -> tuple[Array, Array]:
        """Ranks the catalog.

        Args:
          activations: `[..., D]` output of the head.
          exclude: `[..., X]` integer rows that must not be returned, padded with -1.

        Returns:
          Scores `[..., k]` float32, descending, and rows `[..., k]` int32.
        """
        return self.head.top_k(activations, self.k, exclude=exclude)

    def compute_output_spec(self, activations: Any, exclude: Any = None) -> tuple[Any, Any]:
        """Returns the shapes and dtypes of scores and rows."""
        shape = (*activations.shape[:-1], self.k)
        return keras.KerasTensor(shape, "float32"), keras.KerasTensor(shape, "int32")

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Returns None: results for masked positions are results like any other."""

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal layer."""
        head = keras.saving.serialize_keras_object(self.head)
        return {**super().get_config(), "head": head, "k": self.k}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CutTopK":
        """Returns a layer from `get_config()`."""
        return cls(**{**config, "head": keras.saving.deserialize_keras_object(config["head"])})
