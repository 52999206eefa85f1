"""SASRec: a causal transformer over a user's history; every position predicts what follows it."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from recmodels._src.models.base import SequenceModel, TrainingBatch
from recmodels._src.models.encoder import HistoryEncoder


class SASRec(SequenceModel):
    """Predicts the next items of every position from the items up to it."""

    def make_encoder(self, rngs: nnx.Rngs) -> HistoryEncoder:
        """See `SequenceModel`."""
        length = self.recipe.max_length
        return HistoryEncoder(self.recipe, rngs, num_positions=length, is_causal=True)

    def training_batch(
        self, history: Array, targets: Array, key: Array, gaps: Array | None = None
    ) -> TrainingBatch:
        """The window as it is; see `SequenceModel`."""
        del key
        gaps = None if gaps is None else gaps[:, : history.shape[1]]
        return TrainingBatch(history, targets, gaps=gaps)

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
        """Those of every position; see `SequenceModel`."""
        encoder = self.encoder(params)
        mask = batch.rows > 0
        return encoder(vectors, mask, dropout_key, recompute=recompute, capacity=capacity)

    def queries(self, params: dict, history_vectors: Array, history_mask: Array) -> Array:
        """The activation of the last position; see `SequenceModel`."""
        activations = self.encoder(params)(history_vectors, history_mask)
        return activations[:, -1].astype(jnp.float32)

    def loss_capacity(self, num_positions: int, num_windows: int) -> int:
        """Every position with a target; see `SequenceModel`."""
        del num_windows
        return num_positions
