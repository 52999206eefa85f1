"""The item-kNN baseline: items that share their users with the most recent ones of a history."""

import numpy as np
from scipy import sparse
from tqdm import tqdm

from recmodels._src.data.splits import Split
from recmodels._src.data.store import SequenceStore
from recmodels._src.evaluation.blocks import RECENT_ITEMS
from recmodels._src.evaluation.popularity_order import Scores
from recmodels._src.evaluation.training_items import TrainingItems

NUM_NEIGHBORS = 100  # similar items kept for each item
MAX_ITEMS = 1_000_000  # their neighbors take 0.8 GB
MAX_INTERACTIONS = 1 << 26  # all counted training items are in memory at the same time, 2 GB
MAX_PAIRS = 1 << 32  # pairs of items of one user, which take the time: minutes
_MAX_COUNTED_ITEMS = 200  # newest training items of a user that count: their pairs are quadratic
_PRODUCTS = 1 << 24  # multiplications in one block of the co-occurrences


def why_not(store: SequenceStore, split: Split) -> str | None:
    """Why this baseline is left out for a store; None if it is not."""
    if store.num_items > MAX_ITEMS:
        return f"more than {MAX_ITEMS:,} items"
    lengths = TrainingItems.of(store, split).newest(_MAX_COUNTED_ITEMS).lengths
    if lengths.sum() > MAX_INTERACTIONS:
        return f"more than {MAX_INTERACTIONS:,} interactions"
    if (lengths**2).sum() > MAX_PAIRS:
        return f"more than {MAX_PAIRS:,} pairs of items that users have in training"
    return None


def make_scores(store: SequenceStore, split: Split, *, progress: bool = False) -> Scores:
    """Sum of the similarities of each item to the user's last `RECENT_ITEMS` ones.

    The similarity of two items is the cosine of their users: the number of users with both over
    the geometric mean of the numbers of users with either, counted on each user's newest training
    items. The j-th last item of a history counts 1/j.

    Args:
        store: the sequences.
        split: decides which items are held out.
        progress: whether to show a progress bar.
    """
    training = TrainingItems.of(store, split).newest(_MAX_COUNTED_ITEMS)
    users = np.repeat(np.arange(store.num_users), training.lengths)
    ones = np.ones(len(users), np.float32)
    has = sparse.csr_matrix(
        (ones, (users, store.items[training.places()])),
        shape=(store.num_users, store.num_items + 1),
    )
    has.data[:] = 1.0  # repeats were added up
    neighbors = cosine_neighbors(has, NUM_NEIGHBORS, progress=progress)
    return lambda block: _recent(block.history, store.num_items + 1) @ neighbors


def _recent(history: np.ndarray, vocab_size: int) -> sparse.csr_matrix:
    last = history[:, -RECENT_ITEMS:]
    weights = np.broadcast_to(1.0 / np.arange(last.shape[1], 0, -1), last.shape)
    user, column = np.nonzero(last)
    entries = (weights[user, column].astype(np.float32), (user, last[user, column]))
    return sparse.csr_matrix(entries, shape=(len(history), vocab_size))


def cosine_neighbors(
    has: sparse.csr_matrix, num_neighbors: int, *, progress: bool = False
) -> sparse.csr_matrix:
    """The most similar items of each item.

    Args:
        has: `[U, V]` 1 where the user has the item.
        num_neighbors: most items to keep for each; equal similarities prefer the lower row.
        progress: whether to show a progress bar.

    Returns:
        `[V, V]` float32 cosines, none of an item with itself.
    """
    num_users = np.maximum(np.asarray(has.sum(0), np.float64).ravel(), 1)
    rows = sparse.csr_matrix(has.T)
    # Multiplications of each row of the product: the items of all users that have the item.
    products = np.cumsum(has.T @ np.asarray(has.sum(1), np.float64).ravel())
    blocks, begin = [], 0
    bar = tqdm(total=len(num_users), desc="neighbors", unit="item", delay=2.0, disable=not progress)
    with bar:
        while begin < len(num_users):
            done = products[begin - 1] if begin else 0
            stop = max(begin + 1, int(np.searchsorted(products, done + _PRODUCTS)))
            together = sparse.csr_matrix(rows[begin:stop] @ has)
            blocks.append(_most_similar(together, num_users, begin, num_neighbors))
            bar.update(stop - begin)
            begin = stop
    return sparse.csr_matrix(sparse.vstack(blocks))


def _most_similar(
    together: sparse.csr_matrix, num_users: np.ndarray, first_row: int, num: int
) -> sparse.csr_matrix:
    """Cosines of the `num` most similar items of each row, without the row's own."""
    row = np.repeat(np.arange(len(together.indptr) - 1), np.diff(together.indptr))
    other = together.indices != row + first_row
    row, column, count = row[other], together.indices[other], together.data[other]
    # A quotient of integers is rounded once: what is equally similar compares as equal.
    square = count.astype(np.float64) ** 2 / num_users[column]
    best_first = np.lexsort((column, -square, row))
    place = np.arange(len(row)) - np.searchsorted(row, row)
    kept = best_first[place < num]
    cosines = np.sqrt(square[kept] / num_users[first_row + row[kept]]).astype(np.float32)
    return sparse.csr_matrix((cosines, (row[kept], column[kept])), shape=together.shape)
