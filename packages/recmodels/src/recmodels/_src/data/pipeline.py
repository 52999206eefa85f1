"""Batches for training and evaluation."""

from collections.abc import Iterator
from typing import Protocol

import grain
import numpy as np

from recmodels._src.data import splits
from recmodels._src.data.splits import PAD_ROW, PAD_TARGET, Split
from recmodels._src.data.store import SequenceStore
from recmodels._src.data.time_gaps import NO_GAP, time_gaps
from recmodels._src.data.windows import WindowTable, cut_gaps, cut_windows, windows
from recmodels._src.errors import UserError

# Width of the narrowest `seen` array. Wider ones are powers of two, so that a jitted
# evaluation step is compiled for a handful of shapes only.
_MIN_SEEN_WIDTH = 64


class BatchOptions(Protocol):
    """The fields of a recipe that decide the training batches."""

    @property
    def protocol(self) -> splits.Protocol:
        """Which positions are trained on."""
        ...

    @property
    def num_targets(self) -> int:
        """L, targets of each position."""
        ...

    @property
    def max_length(self) -> int:
        """N, positions in a window."""
        ...

    @property
    def batch_size(self) -> int:
        """B, windows in a batch."""
        ...

    @property
    def seed(self) -> int:
        """Decides the order of the windows."""
        ...

    @property
    def time_gaps(self) -> bool:
        """Whether batches hold `gaps`."""
        ...


def training_window_lengths(store: SequenceStore, options: BatchOptions) -> np.ndarray:
    """Positions with a target in each window of an epoch, `[num_windows]` int64."""
    split = Split(options.protocol, options.num_targets)
    table = windows(store, split, options.max_length)
    return table.stop - table.start


def train_batches(
    store: SequenceStore,
    options: BatchOptions,
    *,
    start_step: int = 0,
    rank: int = 0,
    num_ranks: int = 1,
) -> grain.DatasetIterator:
    """Endless training batches; every window once an epoch, in a new order each epoch.

    Batch k is a pure function of the store, the options and k. The iterator's state is
    therefore the number of the next batch and nothing else, and a run that resumes with
    `start_step=k` (or `set_state`) sees exactly what the unbroken run would have seen.
    Keep it so: no transformation here may hold a random generator or a buffer.

    Epochs run into one another inside a batch, so no window is lost to a remainder.

    Of several processes each reads its own rows only: the k-th batches of ranks 0, 1, ... put
    together in this order are batch k of a single process. The state says nothing of ranks, so
    that a run may go on with another number of processes.

    Args:
      store: the sequences.
      options: usually a recipe; see `BatchOptions`.
      start_step: number of batches to pass over; costs nothing.
      rank: which share of every batch to yield, 0..num_ranks-1.
      num_ranks: R, into how many shares each batch is divided; divides `options.batch_size`.

    Returns:
      Iterator with `get_state` and `set_state`, yielding
      `{"history": int32 [B/R, N], "targets": int32 [B/R, N, L]}`: history right-aligned with 0
      on padding, targets with -1 on padding. With `time_gaps` also `"gaps"`, int32 [B/R, N+L], of
      the history and of the targets of its last position; see `data.time_gaps`.

    Raises:
      UserError: no user is long enough to be trained on, the batch cannot be divided, or there are
        no times for the gaps.
      ValueError: there is no such rank.
    """
    own = _share(options.batch_size, rank, num_ranks)
    if options.time_gaps:
        store.check_has_times()
    split = Split(options.protocol, options.num_targets)
    max_length = options.max_length
    table = windows(store, split, max_length)
    if len(table) == 0:
        raise UserError(
            f"{store.location} has nothing to train on: no user has two items before the "
            f"held-out ones of protocol {options.protocol}"
        )
    dataset = (
        grain.MapDataset.range(len(table))
        .shuffle(seed=options.seed)
        .repeat(reseed_each_epoch=True)
        # Batch the window numbers first and cut a whole batch at once: a few NumPy calls a
        # step instead of a few a window.
        .batch(options.batch_size)
        .map(lambda selected: _training_batch(store, options, split, table, selected[own]))
    )
    # In-process, without read-ahead: a batch takes about a millisecond, a step far longer.
    read_options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    iterator = iter(dataset.to_iter_dataset(read_options))
    if start_step:
        iterator.set_state(iterator.get_state() | {"next_index": start_step})
    return iterator


def _training_batch(
    store: SequenceStore,
    options: BatchOptions,
    split: Split,
    table: WindowTable,
    selected: np.ndarray,
) -> dict[str, np.ndarray]:
    batch = cut_windows(store, split, table, selected, options.max_length)
    if options.time_gaps:
        batch["gaps"] = cut_gaps(store, split, table, selected, options.max_length)
    return batch


def _share(batch_size: int, rank: int, num_ranks: int) -> slice:
    if not 0 <= rank < num_ranks:
        raise ValueError(f"`rank` must be in [0, {num_ranks}); got {rank}.")
    if batch_size % num_ranks:
        raise UserError(
            f"`batch_size` {batch_size} cannot be divided among {num_ranks} processes; choose a "
            f"multiple of {num_ranks}"
        )
    size = batch_size // num_ranks
    return slice(rank * size, (rank + 1) * size)


def evaluation_batches(
    store: SequenceStore,
    split: Split,
    part: splits.Part,
    max_length: int,
    batch_size: int,
    *,
    users: np.ndarray | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """All evaluated users, shortest first, in batches of one size.

    Args:
      store: the sequences.
      split: decides who is evaluated on what.
      part: `"dev"` or `"test"`.
      max_length: N, the most recent input items that the model reads.
      batch_size: b; the last batch is filled up with user -1.
      users: `[U]` int64 numbers of long enough users, to take no others.

    Yields:
      `user` int64 [b], -1 on filling; `history` int32 [b, N], right-aligned, 0 on padding; `gaps`
      int32 [b, N], see `data.time_gaps`, of no meaning in a store without times;
      `targets` int32 [b, num_evaluation_targets], -1 on filling; `seen` int32 [b, X]: the
      whole input, not only its last N items, -1 on padding. X takes few distinct values.

    Raises:
      UserError: `part` is unknown, or no user is long enough.
    """
    splits.check_part(part)
    if users is None:
        users = np.flatnonzero(split.is_evaluated(store.lengths))
    if len(users) == 0:
        raise UserError(
            f"{store.location} has no user to evaluate: protocol {split.protocol} needs "
            f"{split.min_length} items, the longest user has {store.lengths.max()}"
        )
    # Similar lengths together keep `seen` narrow.
    users = users[np.argsort(store.lengths[users], kind="stable")]
    return _evaluation_batches(store, split, part, max_length, batch_size, users)


def _evaluation_batches(
    store: SequenceStore,
    split: Split,
    part: splits.Part,
    max_length: int,
    batch_size: int,
    users: np.ndarray,
) -> Iterator[dict[str, np.ndarray]]:
    for begin in range(0, len(users), batch_size):
        user = users[begin : begin + batch_size]
        bounds = split.evaluation(store.lengths[user], part)
        first = store.offsets[user]
        batch = _inputs(store, user, bounds.input_stop, max_length)
        batch["targets"] = _gather(
            store,
            first + bounds.target_start,
            first + bounds.target_stop,
            split.num_evaluation_targets,
            PAD_TARGET,
            align="left",
        )
        yield {name: _fill_up(name, array, batch_size) for name, array in batch.items()}


def history_batches(
    store: SequenceStore, max_length: int, batch_size: int
) -> Iterator[dict[str, np.ndarray]]:
    """All users with all they have, shortest first, in batches of one size.

    Args:
      store: the sequences.
      max_length: N, the most recent items that the model reads.
      batch_size: b; the last batch is filled up with user -1.

    Yields:
      `user`, `history`, `gaps` and `seen` as `evaluation_batches` does; nothing is held out.
    """
    users = np.argsort(store.lengths, kind="stable")
    for begin in range(0, len(users), batch_size):
        user = users[begin : begin + batch_size]
        batch = _inputs(store, user, store.lengths[user], max_length)
        yield {name: _fill_up(name, array, batch_size) for name, array in batch.items()}


def _inputs(
    store: SequenceStore, user: np.ndarray, input_stop: np.ndarray, max_length: int
) -> dict[str, np.ndarray]:
    first = store.offsets[user]
    stop = first + input_stop
    start = np.maximum(first, stop - max_length)
    return {
        "user": user,
        "history": _gather(store, start, stop, max_length, PAD_ROW, align="right"),
        "gaps": _gaps(store, first, start, stop, max_length),
        "seen": _gather(store, first, stop, _seen_width(input_stop), PAD_TARGET, align="left"),
    }


def _gaps(
    store: SequenceStore, first: np.ndarray, start: np.ndarray, stop: np.ndarray, width: int
) -> np.ndarray:
    event = stop[:, None] - width + np.arange(width)
    return time_gaps(store, np.where(event >= start[:, None], event, -1), first[:, None])


def _seen_width(input_stop: np.ndarray) -> int:
    return max(_MIN_SEEN_WIDTH, 1 << int(input_stop.max() - 1).bit_length())


def _gather(
    store: SequenceStore,
    start: np.ndarray,
    stop: np.ndarray,
    width: int,
    padding: int,
    *,
    align: str,
) -> np.ndarray:
    # `[b, width]` int32 of store.items[start:stop] for each of b users.
    shift = stop - width if align == "right" else start
    position = shift[:, None] + np.arange(width)
    valid = (position >= start[:, None]) & (position < stop[:, None])
    return np.where(valid, store.items[np.where(valid, position, 0)], np.int32(padding))


def _fill_up(name: str, array: np.ndarray, batch_size: int) -> np.ndarray:
    missing = batch_size - len(array)
    if missing == 0:
        return array
    padding = {"history": PAD_ROW, "gaps": NO_GAP}.get(name, PAD_TARGET)
    return np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1), constant_values=padding)
