"""From raw events to sequences: check, filter, number, sort, in bounded memory.

The events go through three passes. Reading numbers users and items as they appear and writes
each piece of the file to disk as 16 bytes an event. Then the users are known, and the events
are divided into parts of consecutive users. Each part is sorted in memory, which finds the
repetitions; the core filter then goes over the parts until nothing changes. At last the parts
are written to the store one after another.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import polars as pl

from recmodels._src.data.event_files import EVENT, EventFiles
from recmodels._src.data.filters import Filters, repetitions, usable_events
from recmodels._src.data.ids import Place, normalise_ids, normalise_times
from recmodels._src.data.numbering import IdNumbering
from recmodels._src.data.raw import RawEvents
from recmodels._src.data.store_writer import SequenceParts
from recmodels._src.errors import UserError

MAX_ITEMS = 2**31 - 1
"""Rows are int32 and row 0 is padding."""

PART_EVENTS = 1 << 20
"""Events of a part, unless one user has more: about 60 MB while it is sorted."""

Report = Callable[[str], None]
"""Takes words for what is going on."""


@dataclasses.dataclass(frozen=True)
class _Read:
    # What the first pass leaves.
    files: EventFiles  # pieces of the file, in its order
    users: IdNumbering
    items: IdNumbering
    user_counts: np.ndarray  # [len(users)] int64 events
    has_time: bool


@dataclasses.dataclass
class _Sorted:
    # What the second pass leaves; users are positions among `user_ids`, items still numbers.
    files: EventFiles
    user_counts: np.ndarray  # [num_users] int64, 0 for those left out
    item_counts: np.ndarray  # [num_items] int64, likewise


def build_sequences(
    events: RawEvents,
    file: str,
    folder: Path,
    *,
    filters: Filters,
    known_items: pl.Series | None = None,
    report: Report = lambda what: None,
) -> tuple[SequenceParts, dict[str, int]]:
    """Turns raw events into sequences.

    Users and items are numbered in ascending order of their raw ids (integers by value,
    strings by code point), so the same file always gives the same rows. Events are sorted by
    user and time; events with equal times keep the order of the file.

    Args:
      events: what a reader returned.
      file: name of the file, for messages.
      folder: where to keep events meanwhile: an empty folder, 16 bytes an event.
      filters: what is left out.
      known_items: distinct ids, int64 or string, that get the rows 1, 2, ... in this order
        whether they occur or not; other items come after them.
      report: is told which step is running.

    Returns:
      The sequences, to be read once while `folder` is there, and the number of events left out
      by reason (reasons that did not occur are absent).

    Raises:
      UserError: a value is no id or no timestamp, or nothing is left.
    """
    skipped: Counter[str] = Counter()
    read = _read(events, file, folder / "read", filters, known_items, skipped, report)
    user_order = read.users.ids.arg_sort().to_numpy()
    result = _sort(read, user_order, folder / "sorted", filters, skipped, report)
    _keep_core(result, filters, skipped, report)
    left_out = {reason: count for reason, count in skipped.items() if count}
    if not result.user_counts.any():
        reasons = ", ".join(f"{count} x {reason}" for reason, count in left_out.items())
        raise UserError(
            f"{file} has no interactions left ({reasons}); check the columns and filters"
        )
    num_known = 0 if known_items is None else len(known_items)
    return _numbered(read, result, user_order, num_known, file), left_out


def _read(
    events: RawEvents,
    file: str,
    folder: Path,
    filters: Filters,
    known_items: pl.Series | None,
    skipped: Counter[str],
    report: Report,
) -> _Read:
    files, users, items = EventFiles(folder), IdNumbering(), IdNumbering(known_items)
    user_counts = np.zeros(0, dtype=np.int64)
    has_time, num_read = False, 0
    for frame in events.frames:
        report(f"1/3 reading, {num_read + frame.height:,} {events.unit}s")
        place = Place(file, events.unit, start=num_read)
        usable, drops = usable_events(_normalised(frame, events, place), filters.min_played_pct)
        skipped.update(drops)
        num_read += frame.height
        has_time = "time" in usable.columns
        piece = np.zeros(usable.height, EVENT)
        piece["user"], piece["item"] = users.number(usable["user"]), items.number(usable["item"])
        if has_time:
            piece["time"] = usable["time"].to_numpy()
        files.append(len(files), piece)
        user_counts = _added(user_counts, piece["user"], len(users))
    return _Read(files, users, items, user_counts, has_time)


def _normalised(frame: pl.DataFrame, events: RawEvents, place: Place) -> pl.DataFrame:
    for name in ("user", "item"):
        ids = normalise_ids(frame[name], name, place, numeric=events.numeric)
        frame = frame.with_columns(ids.alias(name))
    if "time" in frame.columns:
        frame = frame.with_columns(normalise_times(frame["time"], place).alias("time"))
    return frame


def _added(counts: np.ndarray, numbers: np.ndarray, size: int) -> np.ndarray:
    total = np.bincount(numbers, minlength=size)
    total[: len(counts)] += counts
    return total


def _sort(
    read: _Read,
    user_order: np.ndarray,
    folder: Path,
    filters: Filters,
    skipped: Counter[str],
    report: Report,
) -> _Sorted:
    report("2/3 numbering and sorting")
    files = _divided(read, user_order, folder)
    user_counts = np.zeros(len(user_order), dtype=np.int64)
    item_counts = np.zeros(len(read.items), dtype=np.int64)
    for part in range(len(files)):
        report(f"2/3 numbering and sorting, part {part + 1} of {len(files)}")
        events = files.read(part)
        order = _stable_order(events)
        if order is not None:
            events = events[order]
        repeats = repetitions(events, filters.deduplicate)
        if repeats.any():
            skipped[_REPETITIONS[filters.deduplicate]] += int(repeats.sum())
            events = events[~repeats]
        if order is not None or repeats.any():
            files.replace(part, events)
        user_counts = _added(user_counts, events["user"], len(user_counts))
        item_counts = _added(item_counts, events["item"], len(item_counts))
    return _Sorted(files, user_counts, item_counts)


_REPETITIONS = {
    "exact": "exact duplicate of an earlier event",
    "consecutive": "repetition of the event before it",
}


def _divided(read: _Read, user_order: np.ndarray, folder: Path) -> EventFiles:
    # Users get their place among all users, and each part is a range of them.
    files, num_users = EventFiles(folder), len(user_order)
    place = np.empty(num_users, dtype=np.uint32)
    place[user_order] = np.arange(num_users, dtype=np.uint32)
    counts = read.user_counts[user_order]
    part_of_place = (np.cumsum(counts) - counts) // PART_EVENTS
    # Consecutive numbers: a user with very many events leaves gaps. In the narrowest type,
    # because NumPy sorts 16 bits by counting.
    part_of_place = np.cumsum(np.diff(part_of_place, prepend=part_of_place[:1]) > 0)
    part_of_place = part_of_place.astype(np.min_scalar_type(num_users and part_of_place[-1]))
    for events in read.files.drain():
        events["user"] = place[events["user"]]
        part = part_of_place[events["user"]]
        order = np.argsort(part, kind="stable")
        bounds = np.cumsum(np.bincount(part))
        for number, piece in enumerate(np.split(events[order], bounds[:-1])):
            if len(piece):
                files.append(number, piece)
    return files


def _stable_order(events: np.ndarray) -> np.ndarray | None:
    # None when the events are in order already, which the published files are: sorting 46
    # million events would take longer than all the rest.
    users, times = events["user"], events["time"]
    same_user = users[1:] == users[:-1]
    in_order = (users[1:] > users[:-1]) | (same_user & (times[1:] >= times[:-1]))
    if in_order.all():
        return None
    user, user_span = _from_zero(users)
    time, time_span = _from_zero(times)
    position_bits = len(events).bit_length()
    if user_span * time_span << position_bits <= 2**64:
        # One number holds user, time and position: a plain sort of those is ten times as fast
        # as a stable sort by two columns, and as stable. Ten years of seconds fit.
        key = (user * np.uint64(time_span) + time) << np.uint64(position_bits)
        key |= np.arange(len(key), dtype=np.uint64)
        key.sort()
        return (key & np.uint64((1 << position_bits) - 1)).astype(np.int64)
    return np.lexsort((times, users))


def _from_zero(values: np.ndarray) -> tuple[np.ndarray, int]:
    # Distances from the smallest value, and the number of values that they may take. Unsigned
    # arithmetic wraps around, so that distances beyond int64 are right as well.
    smallest, largest = int(values.min()), int(values.max())
    return values.astype(np.uint64) - np.uint64(smallest % 2**64), largest - smallest + 1


def _keep_core(result: _Sorted, filters: Filters, skipped: Counter[str], report: Report) -> None:
    # Leaving out a user takes events from items and the other way round, so this goes on until
    # a pass changes nothing.
    few_user_events = f"user with fewer than {filters.min_user_events} events"
    few_item_events = f"item with fewer than {filters.k_core} events"
    rounds = 0
    while True:
        user_stays = result.user_counts >= filters.min_user_events
        item_stays = result.item_counts >= filters.k_core
        if user_stays[result.user_counts > 0].all() and item_stays[result.item_counts > 0].all():
            return
        rounds += 1
        report(f"2/3 filtering, round {rounds}")
        result.user_counts = np.zeros_like(result.user_counts)
        result.item_counts = np.zeros_like(result.item_counts)
        for part in range(len(result.files)):
            events = result.files.read(part)
            by_user, by_item = user_stays[events["user"]], item_stays[events["item"]]
            kept = by_user & by_item
            skipped[few_user_events] += int((~by_user).sum())
            skipped[few_item_events] += int((by_user & ~by_item).sum())
            if not kept.all():
                events = events[kept]
                result.files.replace(part, events)
            result.user_counts += np.bincount(events["user"], minlength=len(result.user_counts))
            result.item_counts += np.bincount(events["item"], minlength=len(result.item_counts))


def _numbered(
    read: _Read, result: _Sorted, user_order: np.ndarray, num_known: int, file: str
) -> SequenceParts:
    users_stay = result.user_counts > 0
    item_ids, row_of_item = _rows(read.items.ids, result.item_counts, num_known)
    if len(item_ids) > MAX_ITEMS:
        raise UserError(
            f"{file} has {len(item_ids)} items; a catalog holds at most {MAX_ITEMS}, so filter "
            "rare items first"
        )
    counts = np.zeros(len(item_ids), dtype=np.int64)
    occurs = row_of_item > 0
    counts[row_of_item[occurs] - 1] = result.item_counts[occurs]
    lengths = result.user_counts[users_stay]
    return SequenceParts(
        parts=_parts(result.files, row_of_item, has_time=read.has_time),
        lengths=lengths,
        item_counts=counts,
        timestamps_kind="seconds" if read.has_time else "order",
        user_ids=read.users.ids.gather(user_order[users_stay]),
        item_ids=item_ids,
    )


def _rows(ids: pl.Series, counts: np.ndarray, num_known: int) -> tuple[pl.Series, np.ndarray]:
    # The ids of the catalog by row, and the row of every item number (0: not in the catalog).
    new = np.flatnonzero(counts[num_known:]) + num_known
    new = new[ids.gather(new).arg_sort().to_numpy()]
    numbers = np.concatenate([np.arange(num_known), new])
    row_of_item = np.zeros(len(ids), dtype=np.int64)
    row_of_item[numbers] = np.arange(1, len(numbers) + 1)
    return ids.gather(numbers), row_of_item


def _parts(
    files: EventFiles, row_of_item: np.ndarray, *, has_time: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for events in files.drain():
        if has_time:
            times = events["time"]
        else:
            # A part holds whole users, back to back.
            lengths = np.bincount(events["user"])
            start = np.cumsum(lengths) - lengths
            times = np.arange(len(events)) - start[events["user"]]
        yield row_of_item[events["item"]].astype(np.int32), times.astype(np.int64)
