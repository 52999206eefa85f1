"""What a sweep over the table returns and what it can be asked for; shared by every backend."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sweep:
    """Result of a sweep; a field that was not asked for is None.

    Also the shape in which specs of such results are written, hence `Any`.

    Attributes:
      loss: `[T]` float32, sum over the vocabulary of the loss (not yet divided by V).
      num_predicted: `[T, K]` int32, items with a logit above each of K `config.logit_thresholds`.
      d_activations: `[T, D]` float32.
      d_embeddings: `[V, D]` float32.
      d_bias: `[V]` float32.
    """

    loss: Any = None
    num_predicted: Any = None
    d_activations: Any = None
    d_embeddings: Any = None
    d_bias: Any = None


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which results a sweep computes (static)."""

    loss: bool = False
    counts: bool = False
    gradients: bool = False
