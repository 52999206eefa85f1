"""From raw events to sequences: check, filter, number, sort."""

import numpy as np
import polars as pl

from recmodels._src.data.ids import Place, normalise_ids, normalise_times
from recmodels._src.data.raw import RawEvents
from recmodels._src.data.store import SequenceColumns
from recmodels._src.errors import UserError

MAX_ITEMS = 2**31 - 1
"""Rows are int32 and row 0 is padding."""


def build_sequences(
    events: RawEvents, file: str, *, min_interactions: int = 1, min_played_pct: int = 0
) -> tuple[SequenceColumns, dict[str, int]]:
    """Turns raw events into sequences.

    Users and items are numbered in ascending order of their raw ids (integers by value,
    strings by code point), so the same file always gives the same rows. Events are sorted by
    user and time; events with equal times keep the order of the file.

    Args:
      events: what a reader returned.
      file: name of the file, for messages.
      min_interactions: users with fewer events (after the other filters) are left out.
      min_played_pct: listens with a smaller played ratio are left out.

    Returns:
      The sequences, and the number of events left out by reason (reasons that did not occur
      are absent).

    Raises:
      UserError: a value is no id or no timestamp, or nothing is left.
    """
    frame = _normalise(events, Place(file, events.unit))
    frame, skipped = _filter(frame, min_played_pct)
    if min_interactions > 1:
        kept = frame.filter(pl.len().over("user") >= min_interactions)
        skipped[f"user with fewer than {min_interactions} events"] = frame.height - kept.height
        frame = kept
    skipped = {reason: count for reason, count in skipped.items() if count}
    if frame.height == 0:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in skipped.items())
        raise UserError(
            f"{file} has no interactions left ({reasons}); check the columns and filters"
        )
    return _number_and_sort(frame, file), skipped


def _normalise(events: RawEvents, place: Place) -> pl.DataFrame:
    frame = events.frame
    for name in ("user", "item"):
        ids = normalise_ids(frame[name], name, place, numeric=events.numeric)
        frame = frame.with_columns(ids.alias(name))
    if "time" in frame.columns:
        frame = frame.with_columns(normalise_times(frame["time"], place).alias("time"))
    return frame


def _filter(frame: pl.DataFrame, min_played_pct: int) -> tuple[pl.DataFrame, dict[str, int]]:
    no_user, no_item = pl.col("user").is_null(), pl.col("item").is_null()
    drops = {
        "blank line": no_user & no_item,
        "missing user id": no_user,
        "missing item id": no_item,
    }
    if "time" in frame.columns:
        drops["missing time"] = pl.col("time").is_null()
    if "event_type" in frame.columns:
        # A dislike says the opposite of a listen, and a like repeats one.
        is_listen = pl.col("event_type").cast(pl.String) == "listen"
        drops["event that is not a listen"] = ~is_listen.fill_null(False)
    if min_played_pct:
        if "played_pct" not in frame.columns:
            raise UserError(
                "--min-played-pct needs the column played_ratio_pct, which the file lacks; "
                "leave the option out"
            )
        played = pl.col("played_pct").cast(pl.Float64, strict=False)
        drops[f"played less than {min_played_pct} %"] = ~(played >= min_played_pct).fill_null(False)
    skipped = {}
    for reason, drop in drops.items():
        skipped[reason] = frame.select(drop.sum()).item()
        if skipped[reason]:
            frame = frame.filter(~drop)
    columns = [name for name in ("user", "item", "time") if name in frame.columns]
    return frame.select(columns), skipped


def _number_and_sort(frame: pl.DataFrame, file: str) -> SequenceColumns:
    user_ids, users = _number(frame["user"])
    item_ids, items = _number(frame["item"])
    if len(item_ids) > MAX_ITEMS:
        raise UserError(
            f"{file} has {len(item_ids)} items; a catalog holds at most {MAX_ITEMS}, so filter "
            "rare items first"
        )
    times = frame["time"].to_numpy() if "time" in frame.columns else None
    order = _stable_order(users, times)
    if order is not None:
        users, items = users[order], items[order]
        times = times[order] if times is not None else None
    offsets = np.zeros(len(user_ids) + 1, dtype=np.int64)
    np.cumsum(np.bincount(users, minlength=len(user_ids)), out=offsets[1:])
    if times is None:
        timestamps = np.arange(len(items), dtype=np.int64) - offsets[users]
    else:
        timestamps = times.astype(np.int64)
    return SequenceColumns(
        items=(items + 1).astype(np.int32),
        offsets=offsets,
        timestamps=timestamps,
        timestamps_kind="order" if times is None else "seconds",
        user_ids=user_ids,
        item_ids=item_ids,
    )


def _number(ids: pl.Series) -> tuple[pl.Series, np.ndarray]:
    # The distinct ids in ascending order, and each event's position among them.
    distinct = ids.unique().sort()
    numbered = pl.DataFrame({"id": distinct}).with_row_index("number")
    joined = pl.DataFrame({"id": ids}).join(numbered, on="id", how="left", maintain_order="left")
    raw = distinct if distinct.dtype == pl.String else distinct.cast(pl.Int64)
    return raw, joined["number"].to_numpy()


def _stable_order(users: np.ndarray, times: np.ndarray | None) -> np.ndarray | None:
    # None when the events are in order already, which the published files are: sorting 46
    # million events would take longer than all the rest.
    same_user = users[1:] == users[:-1]
    in_order = (users[1:] > users[:-1]) | same_user
    if times is not None:
        in_order &= ~same_user | (times[1:] >= times[:-1])
    if in_order.all():
        return None
    # `lexsort` is stable, which is what keeps ties in file order; polars' stable sort by two
    # columns took twice as long (6 million events).
    return np.lexsort((users,) if times is None else (times, users))
