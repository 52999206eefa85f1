"""A few users of the test part: what they did, what was held out and what the model recommends."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import polars as pl

import cutbce_ops
from recmodels._src.data.splits import PAD_ROW, Split
from recmodels._src.data.store import SequenceStore
from recmodels._src.evaluation.blocks import RECENT_ITEMS, user_blocks
from recmodels._src.evaluation.measure import block_size, checked_ks
from recmodels._src.evaluation.model import ModelRanker
from recmodels._src.recipe import Recipe

NUM_EXAMPLES = 5
NUM_ITEMS = 8  # recommended, and shown of a history
_TITLE = "title"  # column of items.parquet that is shown where there is one


class Example(NamedTuple):
    """One user; items are raw ids, with their titles where the store has any."""

    user_id: str
    """Raw id."""
    history: list[str]
    """Newest items of the input, oldest first."""
    held_out: list[str]
    """What the user did next."""
    recommended: list[tuple[str, bool]]
    """Best items, best first, and whether each is a held-out one."""


def find_examples(
    params: dict,
    recipe: Recipe,
    store: SequenceStore,
    *,
    step: int,
    sharding: cutbce_ops.LossSharding | None = None,
) -> list[Example]:
    """Recommendations for users of all lengths; all processes of a training must call it.

    Args:
        params: arrays of the model.
        recipe: how they were trained.
        store: the sequences.
        step: training steps of the parameters, for messages.
        sharding: how the parameters are laid out over a mesh; None on one device.

    Raises:
        TrainingDivergedError: parameters or scores of the model are not finite.
    """
    split = Split(recipe.protocol, recipe.num_targets)
    # In the shapes of an evaluation, whose compiled programs are then at hand.
    blocks = user_blocks(
        store,
        split,
        "test",
        max_length=max(recipe.max_length, RECENT_ITEMS),
        hide_seen=recipe.hide_seen,
        size=block_size(sharding),
        users=_users(store, split),
    )
    block = next(blocks)
    ranker = ModelRanker.of_store(params, recipe, store, step, sharding)
    best = ranker.rank(block, max(checked_ks(None, store.num_items))).rows[:, :NUM_ITEMS]
    users = block.user[block.is_user]
    shown = np.concatenate([block.history, block.targets, best], axis=1)[: len(users)]
    item, user_id = _item_labels(store, shown), _user_labels(store, users)
    examples = []
    for user, history, rows in zip(users, block.history, best, strict=False):
        tail, held_out = history[history != PAD_ROW][-NUM_ITEMS:], _held_out(store, split, user)
        examples.append(
            Example(
                user_id[user],
                [item[row] for row in tail],
                [item[row] for row in held_out],
                [(item[row], bool(row in held_out)) for row in rows if row > 0],
            )
        )
    return examples


def _users(store: SequenceStore, split: Split) -> np.ndarray:
    # Evenly over the evaluated users by length, neither the shortest nor the longest.
    users = np.flatnonzero(split.is_evaluated(store.lengths))
    users = users[np.argsort(store.lengths[users], kind="stable")]
    number = min(NUM_EXAMPLES, len(users))
    return users[((np.arange(number) + 0.5) / number * len(users)).astype(np.int64)]


def _held_out(store: SequenceStore, split: Split, user: int) -> np.ndarray:
    # In the order of the user, which the block does not keep.
    bounds = split.evaluation(store.lengths[user], "test")
    return store.sequence(user)[bounds.target_start : bounds.target_stop]


def _item_labels(store: SequenceStore, rows: np.ndarray) -> dict[int, str]:
    columns = ["row", "item_id"]
    path = store.path / "items.parquet"
    if pl.read_parquet_schema(path).get(_TITLE) == pl.String:
        columns.append(_TITLE)
    wanted = np.unique(rows[rows > 0])
    found = pl.scan_parquet(path).select(columns).filter(pl.col("row").is_in(wanted)).collect()
    return {row: _label(*texts) for row, *texts in found.iter_rows()}


def _label(item_id: object, title: str | None = None) -> str:
    return f"{title} ({item_id})" if title else str(item_id)


def _user_labels(store: SequenceStore, users: Iterable[int]) -> dict[int, str]:
    path = store.path / "users.parquet"
    table = pl.scan_parquet(path).select("user", "user_id")
    found = table.filter(pl.col("user").is_in(list(map(int, users)))).collect()
    return {user: str(user_id) for user, user_id in found.iter_rows()}
