"""Metrics of every logit, from the confusion counts of the loss's own sweep."""

from collections.abc import Callable
from typing import Any

import keras
from jax import Array

from cutbce_ops import ConfusionCounts, binary_accuracy, precision, recall


class ConfusionMetric(keras.metrics.Metric):
    """A ratio of confusion counts, summed over the steps since the last reset.

    Args:
      function: metric of `ConfusionCounts`.
      **kwargs: of `keras.metrics.Metric`.
    """

    def __init__(self, function: Callable[[ConfusionCounts], Array], **kwargs: Any):
        super().__init__(**kwargs)
        self._function = function
        # float32: a step of 10^4 positions at V = 10^7 is beyond int32.
        self._totals = self.add_variable((4,), initializer="zeros", name="totals")

    def update_state(self, counts: ConfusionCounts) -> None:
        """Adds counts of any shape."""
        parts = (counts.tp, counts.fp, counts.fn, counts.tn)
        totals = [keras.ops.sum(keras.ops.cast(part, "float32")) for part in parts]
        self._totals.assign_add(keras.ops.stack(totals))

    def result(self) -> Array:
        """Returns the metric of all counts so far, `[]` float32."""
        totals: Any = keras.ops.convert_to_tensor(self._totals)
        return self._function(ConfusionCounts(*totals))


def confusion_metrics(prefix: str = "") -> list[ConfusionMetric]:
    """Returns fresh metrics under Keras' usual names, after `prefix` and an underscore if given."""
    functions = (binary_accuracy, precision, recall)
    names = [f"{prefix}_{function.__name__}".lstrip("_") for function in functions]
    return [
        ConfusionMetric(function, name=name)
        for function, name in zip(functions, names, strict=True)
    ]
