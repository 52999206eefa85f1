"""The link from a head's output to the table that scores it.

Keras gives a loss `y_true` and `y_pred`, nothing else. Reading the head's variables inside the loss
would do within `fit`, yet silently lose their gradient in a hand-written step that calls the loss
outside Keras' stateless scope. So the head notes, for the very tensor it returns, the values it had
when it was called, and the loss looks them up. Keras carries its masks along in the same way.
"""

import dataclasses
import weakref
from typing import Any

from jax import Array


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How to score activations against the catalog.

    Attributes:
      embeddings: `[V, D]` table, as the head's call saw it (under `fit`, a traced value).
      bias: `[V]` or None.
      metrics: the head's confusion metrics, fed by the loss.
    """

    embeddings: Array
    bias: Array | None
    metrics: tuple[Any, ...]


# Keyed by identity, since traced values take no attributes and concrete ones no hash.
_scorings: dict[int, tuple[weakref.ref, Scoring]] = {}


# Tables of the heads that live, by head: all that is known of them before the first step.
_tables: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()


def note_table(head: Any, num_items: int, size: int) -> None:
    """Notes that `head` scores activations of `size` features against `num_items` rows."""
    _tables[head] = (num_items, size)


def known_tables(size: int) -> set[int]:
    """Returns the numbers of rows of all heads for activations of `size` features."""
    return {num_items for num_items, features in _tables.values() if features == size}


def attach(activations: Array, scoring: Scoring) -> None:
    """Notes that `activations` are to be scored by `scoring`, for as long as they live."""
    key = id(activations)
    _scorings[key] = (weakref.ref(activations, lambda _: _scorings.pop(key, None)), scoring)


def scoring_of(activations: Array) -> Scoring | None:
    """Returns what was attached to this very tensor, None if nothing was."""
    reference, scoring = _scorings.get(id(activations), (None, None))
    return scoring if reference is not None and reference() is activations else None
