"""What training, evaluation, export and planning ask of a model, whichever it is."""

import abc
import functools
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array

from recmodels._src.models.encoder import HistoryEncoder
from recmodels._src.models.layers import random_table
from recmodels._src.models.side_inputs import side_tables
from recmodels._src.recipe import Recipe

TABLES = frozenset({"item_embeddings", "output_embeddings"})  # arrays with a vector for every row


class TrainingBatch(NamedTuple):
    """What a model reads and predicts in one step."""

    rows: Array  # [B, S] int32 table rows that the encoder reads; 0 where it reads none
    targets: Array  # [B, P, L] int32 rows that each of P positions predicts; -1 on padding
    is_masked: Array | None = None  # [B, S] bool, positions whose item is to be guessed
    positions: Array | None = None  # [B, P] int32 places of the predicting positions in S
    gaps: Array | None = None  # [B, S] int32 seconds since the event before; see `SideInputs`


class SequenceModel(abc.ABC):
    """A model's computations; its arrays are a dict of its own, `params`, made by `build`.

    The arrays by name: `item_embeddings` `[V, D]`, the table that reads histories and, when tied,
    scores items; `output_embeddings` `[V, D]`, the table that scores them otherwise; `output_bias`
    `[V]`, when the recipe has one; `category_embeddings` and `gap_embeddings`, see `side_tables`;
    `encoder`, the arrays of the encoder. Row 0 of the item tables is padding: it never enters an
    activation and is never recommended.

    Args:
        recipe: sizes and options.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @abc.abstractmethod
    def make_encoder(self, rngs: nnx.Rngs) -> HistoryEncoder:
        """A freshly initialised encoder."""

    @abc.abstractmethod
    def training_batch(
        self, history: Array, targets: Array, key: Array, gaps: Array | None = None
    ) -> TrainingBatch:
        """What the model makes of a batch of windows.

        Args:
            history: `[B, N]` int32 rows, right-aligned, 0 on padding.
            targets: `[B, N, L]` int32 rows, the next L items of each position, -1 on padding.
            key: random key of the step.
            gaps: `[B, N + L]` int32 of the history and the targets of its last position, for a
                recipe with `time_gaps`.
        """

    @abc.abstractmethod
    def training_activations(
        self,
        params: dict,
        batch: TrainingBatch,
        vectors: Array,
        dropout_key: Array,
        *,
        recompute: bool,
        capacity: int | None = None,
    ) -> Array:
        """Activations of the predicting positions.

        Args:
            params: arrays of the model.
            batch: what the model reads and predicts.
            vectors: `[B, S, D]` float32 vectors of `batch.rows`, side inputs added.
            dropout_key: random key of dropout.
            recompute: see `HistoryEncoder.__call__`.
            capacity: at least the number of positions with a target, which are those of the windows
                that are no padding; None computes all positions.

        Returns:
            `[B, P, D]` in the recipe's compute type.
        """

    @abc.abstractmethod
    def queries(self, params: dict, history_vectors: Array, history_mask: Array) -> Array:
        """The vector that scores the catalog after each history.

        Args:
            params: arrays of the model; only those of the encoder are read.
            history_vectors: `[b, N, D]` float32, side inputs added, most recent last.
            history_mask: `[b, N]` bool, False on padding. An all-False row gives a finite query.

        Returns:
            `[b, D]` float32.
        """

    @abc.abstractmethod
    def loss_capacity(self, num_positions: int, num_windows: int) -> int:
        """Most positions that predict something in a batch.

        Args:
            num_positions: positions with a target in the batch's windows, together.
            num_windows: B.
        """

    def build(self, vocab_size: int, num_categories: int = 0) -> dict:
        """Fresh arrays of the model, the output bias still zero (see `popularity_bias`).

        Call it under `jax.eval_shape` when only shapes are wanted.

        Args:
            vocab_size: V, rows of the table.
            num_categories: categories of the items, for a recipe with `item_categories`.
        """
        rngs = nnx.Rngs(self.recipe.seed)
        params: dict = {"item_embeddings": random_table(rngs, vocab_size, self.recipe.hidden_dim)}
        params["encoder"] = nnx.to_pure_dict(nnx.state(self.make_encoder(rngs), nnx.Param))
        if not self.recipe.tie_embeddings:
            table = random_table(rngs, vocab_size, self.recipe.hidden_dim)
            params["output_embeddings"] = table
        if self.recipe.output_bias:
            params["output_bias"] = jnp.zeros(vocab_size)
        return params | side_tables(self.recipe, rngs, num_categories)

    def encoder(self, params: dict) -> HistoryEncoder:
        """The encoder with the given arrays."""
        return nnx.merge(self._graph, params["encoder"])

    @functools.cached_property
    def _graph(self) -> "nnx.GraphDef[HistoryEncoder]":
        # Static part of the encoder, made without allocating any array.
        return nnx.split(nnx.eval_shape(lambda: self.make_encoder(nnx.Rngs(0))))[0]


def output_table(params: dict) -> Array:
    """`[V, D]` table that scores items: their own one, or the one that histories are read with."""
    return params.get("output_embeddings", params["item_embeddings"])


def popularity_bias(counts: Array, num_targets: int) -> Array:
    """Output bias with which a fresh model predicts each item's share of the training targets.

        bias_v = log(p_v / (1 - p_v)),   p_v = num_targets * count_v / sum(count)

    Args:
        counts: `[V]` interactions per row in the training part; row 0 is padding.
        num_targets: targets per position, so that p_v is the chance of v being one of them.

    Returns:
        `[V]` float32. A row never seen counts as half an interaction, so that every bias is finite.
    """
    total = jnp.maximum(counts.sum(), 1)
    share = num_targets * jnp.maximum(counts, 0.5) / total
    share = jnp.minimum(share, 0.5)  # in a tiny catalog the estimate can reach 1
    return (jnp.log(share) - jnp.log1p(-share)).astype(jnp.float32)
