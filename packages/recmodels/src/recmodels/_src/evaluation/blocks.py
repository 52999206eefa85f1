"""Blocks of evaluated users, and what every ranker answers for one."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from recmodels._src import metrics
from recmodels._src.data.pipeline import evaluation_batches
from recmodels._src.data.splits import Part, Split
from recmodels._src.data.store import SequenceStore

RECENT_ITEMS = 20  # what a baseline may read of a history, whatever the model reads


@dataclasses.dataclass(frozen=True)
class UserBlock:
    """Users of one block, with what is known of them and what is asked."""

    user: np.ndarray
    """`[b]` int64 number of the user in the store, -1 on filling."""
    history: np.ndarray
    """`[b, N]` int32 most recent rows of the input, right-aligned, 0 on padding."""
    targets: np.ndarray
    """`[b, L]` int32 distinct held-out rows, -1 on padding."""
    hidden: np.ndarray
    """`[b, X]` int32 distinct rows that cannot be recommended to the user, -1 on padding."""

    gaps: np.ndarray | None = None
    """`[b, N]` int32 seconds since the event before each of the history, see `time_gaps`; None
    where no model reads them."""

    @property
    def is_user(self) -> np.ndarray:
        """`[b]` bool, False on filling."""
        return self.user >= 0


class Ranked(NamedTuple):
    """A ranker's answer for a block."""

    ranks: np.ndarray
    """`[b, L]` int64 0-based rank of each target among the rows that are not hidden; -1 on padding,
    any number for a target that is hidden itself."""
    rows: np.ndarray
    """`[b, list_length]` int32 best rows that are not hidden; -1 where none is left."""


class Ranker(Protocol):
    """Orders the whole catalog for every user."""

    def rank(self, block: UserBlock, list_length: int) -> Ranked:
        """Ranks of the targets and the first `list_length` rows, none if that is 0."""
        ...


def user_blocks(
    store: SequenceStore,
    split: Split,
    part: Part,
    *,
    max_length: int,
    hide_seen: bool,
    size: int,
    users: np.ndarray | None = None,
) -> Iterator[UserBlock]:
    """All evaluated users in blocks of one size.

    Args:
        store: the sequences.
        split: decides who is evaluated on what.
        part: held-out part.
        max_length: N, most recent items in `history`.
        hide_seen: whether the items of the whole input are hidden; else none is.
        size: users in a block.
        users: `[U]` int64 numbers of long enough users, to take no others.

    Raises:
        UserError: no user is long enough.
    """
    for batch in evaluation_batches(store, split, part, max_length, size, users=users):
        seen = batch["seen"] if hide_seen else np.empty((size, 0), np.int32)
        yield UserBlock(
            user=batch["user"],
            history=batch["history"],
            targets=metrics.distinct(batch["targets"]),
            hidden=metrics.distinct(seen),
            gaps=batch["gaps"],
        )
