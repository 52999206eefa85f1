"""BERT4Rec: a transformer that reads a history both ways and guesses what is masked in it.

A row has S = N + L positions for windows of N positions with L targets: a window and the last of
its targets in training; a history and, at its end, L masked positions in evaluation and serving.

Masks come in spans of L positions, and every position of a span predicts the set of all items of
the span. No masked item is visible from anywhere, so nothing leaks. With L = 1 this is the cloze
task of the paper (arXiv 1904.06690).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from recmodels._src.data.splits import PAD_ROW, PAD_TARGET
from recmodels._src.data.time_gaps import NO_GAP
from recmodels._src.models.base import SequenceModel, TrainingBatch
from recmodels._src.models.encoder import HistoryEncoder
from recmodels._src.models.layers import random_table
from recmodels._src.recipe import Recipe


class ClozeEncoder(HistoryEncoder):
    """A bidirectional encoder that reads one learned vector instead of every masked item."""

    def __init__(self, recipe: Recipe, rngs: nnx.Rngs, *, num_positions: int) -> None:
        super().__init__(recipe, rngs, num_positions=num_positions, is_causal=False)
        self.mask_vector = nnx.Param(random_table(rngs, recipe.hidden_dim))

    def fill_in(self, vectors: Array, mask: Array, is_masked: Array) -> tuple[Array, Array]:
        """Vectors and mask to encode: masked positions are visible and hold the mask's vector.

        Args:
            vectors: `[B, S, D]` float32 item vectors; those of masked positions are not read.
            mask: `[B, S]` bool, False on padding and on masked positions.
            is_masked: `[B or 1, S]` bool, True on masked positions.
        """
        return jnp.where(is_masked[..., None], self.mask_vector[...], vectors), mask | is_masked


class BERT4Rec(SequenceModel):
    """Predicts the items of masked spans from the items on both sides of them.

    Masking, from the random key of the step: a window of n items has k spans masked, with

        k = ceil(mask_share (n - 1) / L), at least 1 and at most floor((n - 1) / L)

    chosen at random among the places that remain when a random offset below L is left free at the
    end. In a share `mask_end_share` of the windows the last span alone is masked, which is what the
    model answers in evaluation. The oldest item of a window is never masked; in a window of at most
    L items all others are, as one shorter span.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.span = recipe.num_targets
        self.num_positions = recipe.max_length + self.span
        self.num_places = max(1, (self.num_positions - 1) // self.span)
        # Spans of a window by its number of items. A table, so that host and device agree.
        lengths = np.arange(self.num_positions + 1)
        wanted = np.ceil(recipe.mask_share * (lengths - 1) / self.span - 1e-9)
        self.num_spans = np.clip(wanted, 1, self.num_places).astype(np.int32)

    def make_encoder(self, rngs: nnx.Rngs) -> HistoryEncoder:
        """See `SequenceModel`."""
        return ClozeEncoder(self.recipe, rngs, num_positions=self.num_positions)

    def training_batch(
        self, history: Array, targets: Array, key: Array, gaps: Array | None = None
    ) -> TrainingBatch:
        """Window and last targets with masked spans; see `SequenceModel`.

        The gap of a masked position is not read, since its vector is not: at the end of a history
        nobody knows when the next event will be.
        """
        last = targets[:, -1]
        num_missing = (last == PAD_TARGET).sum(1, keepdims=True)
        rows = jnp.concatenate([history, jnp.maximum(last, PAD_ROW)], axis=1)
        rows = _right_aligned(rows, num_missing, PAD_ROW)
        num_items = (rows != PAD_ROW).sum(1)
        positions = self._draw_spans(num_items, key)
        oldest = self.num_positions - num_items[:, None, None]
        is_predicted = positions > oldest  # the first part of a short window's span is left out
        items = jnp.take_along_axis(rows[:, None], jnp.maximum(positions, 0), axis=2)
        items = jnp.where(is_predicted, items, PAD_TARGET)  # [B, M, L], the set of each span
        shared = jnp.where(is_predicted[..., None], items[:, :, None], PAD_TARGET)
        # Positions that predict nothing have -1, which is no position.
        positions = jnp.where(is_predicted, positions, -1).reshape(len(history), -1)
        is_masked = (positions[..., None] == jnp.arange(self.num_positions)).any(1)
        return TrainingBatch(
            rows=jnp.where(is_masked, PAD_ROW, rows),
            targets=shared.reshape(*positions.shape, self.span),
            is_masked=is_masked,
            positions=jnp.maximum(positions, 0),
            gaps=None if gaps is None else _right_aligned(gaps, num_missing, NO_GAP),
        )

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
        """Those of the masked positions; see `SequenceModel`."""
        assert batch.is_masked is not None
        assert batch.positions is not None
        encoder = self._cloze_encoder(params)
        filled = encoder.fill_in(vectors, batch.rows != PAD_ROW, batch.is_masked)
        if capacity is not None:  # a row also holds the last targets of its window
            capacity += len(vectors) * self.span
        activations = encoder(*filled, dropout_key, recompute=recompute, capacity=capacity)
        return jnp.take_along_axis(activations, batch.positions[..., None], axis=1)

    def queries(self, params: dict, history_vectors: Array, history_mask: Array) -> Array:
        """Mean activation of a masked span after the history; see `SequenceModel`.

        All positions of a span are trained on the same targets, so their mean is a better answer
        than any of them.
        """
        encoder = self._cloze_encoder(params)
        after = (0, self.span)
        vectors = jnp.pad(history_vectors, ((0, 0), after, (0, 0)))
        mask = jnp.pad(history_mask, ((0, 0), after))
        is_masked = (jnp.arange(self.num_positions) >= self.recipe.max_length)[None]
        activations = encoder(*encoder.fill_in(vectors, mask, is_masked))
        return activations[:, -self.span :].astype(jnp.float32).mean(1)

    def loss_capacity(self, num_positions: int, num_windows: int) -> int:
        """Every masked position; see `SequenceModel`.

        A window of c positions with a target has at most c + L items, hence at most
        mask_share (c + L - 1) / L + 1 spans of L positions.
        """
        shared = num_positions + num_windows * (self.span - 1)
        return math.ceil(self.recipe.mask_share * shared) + num_windows * self.span

    def _cloze_encoder(self, params: dict) -> ClozeEncoder:
        encoder = self.encoder(params)
        assert isinstance(encoder, ClozeEncoder)
        return encoder

    def _draw_spans(self, num_items: Array, key: Array) -> Array:
        """`[B, M, L]` positions of the masked spans, negative where a window has fewer than M."""
        # One draw: the generator takes longer to compile than everything else here.
        draws = jax.random.uniform(key, (num_items.shape[0], 2 + self.num_places))
        is_end = draws[:, 0] < self.recipe.mask_end_share
        most = jnp.clip(num_items - 1 - self.span, 0, self.span - 1)
        offset = jnp.minimum((draws[:, 1] * self.span).astype(jnp.int32), most)
        offset = jnp.where(is_end, 0, offset)
        num_places = jnp.maximum((num_items - 1 - offset) // self.span, 1)
        num_places = jnp.where(is_end, 1, num_places)
        num_spans = jnp.minimum(jnp.asarray(self.num_spans)[num_items], num_places)
        # The first of a random order of the places there are; places count from the end.
        is_place = jnp.arange(self.num_places) < num_places[:, None]
        most_spans = int(self.num_spans.max())
        place = jnp.argsort(jnp.where(is_place, draws[:, 2:], 2.0), axis=1)[:, :most_spans]
        start = self.num_positions - offset[:, None] - (place + 1) * self.span
        start = jnp.where(jnp.arange(most_spans) < num_spans[:, None], start, -self.num_positions)
        return start[..., None] + jnp.arange(self.span)


def _right_aligned(values: Array, num_missing: Array, padding: int) -> Array:
    """`[B, S]` with the last `num_missing` `[B, 1]` of each row moved to its front, as padding."""
    source = jnp.arange(values.shape[1]) - num_missing
    shifted = jnp.take_along_axis(values, jnp.maximum(source, 0), axis=1)
    return jnp.where(source >= 0, shifted, padding)
