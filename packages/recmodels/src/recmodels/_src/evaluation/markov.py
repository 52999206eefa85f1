"""The last-item Markov baseline: what followed the user's last item in training."""

import dataclasses

import numpy as np
from scipy import sparse

from recmodels._src.data.splits import Split
from recmodels._src.data.store import SequenceStore
from recmodels._src.evaluation.popularity_order import Scores
from recmodels._src.evaluation.training_items import TrainingItems

MAX_INTERACTIONS = 1 << 26  # all pairs of neighbors are in memory at the same time, 3 GB of them


def why_not(store: SequenceStore) -> str | None:
    """Why this baseline is left out for a store; None if it is not."""
    if store.num_interactions > MAX_INTERACTIONS:
        return f"more than {MAX_INTERACTIONS:,} interactions"
    return None


def make_scores(store: SequenceStore, split: Split) -> Scores:
    """How often each item followed the user's last one in training.

    Args:
        store: the sequences.
        split: decides which items are held out.
    """
    training = TrainingItems.of(store, split)
    # All items but each user's last have a successor.
    places = dataclasses.replace(training, stop=np.maximum(training.stop - 1, training.first))
    before = places.places()
    shape = (store.num_items + 1, store.num_items + 1)
    ones = np.ones(len(before), np.float32)
    pairs = (store.items[before], store.items[before + 1])
    transitions = sparse.csr_matrix((ones, pairs), shape=shape)
    return lambda block: transitions[block.history[:, -1]]
