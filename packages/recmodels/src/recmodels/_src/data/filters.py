"""Which events are left out, and for which reason."""

import dataclasses
from typing import Literal, get_args

import numpy as np
import polars as pl

from recmodels._src.errors import UserError

Deduplicate = Literal["none", "exact", "consecutive"]
"""Which repetitions are left out.

`"exact"`: events with the user, the item and the time of an earlier event of the file.
`"consecutive"`: events with the item of the user's event right before them, in time order.
"""


@dataclasses.dataclass(frozen=True)
class Filters:
    """What `prepare` leaves out. Applied in this order, each to what the ones before it left."""

    min_played_pct: int = 0
    """Listens played less than this many percent; 0 keeps all."""
    deduplicate: Deduplicate = "none"
    """Repetitions; see `Deduplicate`."""
    min_interactions: int = 1
    """Users with fewer events."""
    k_core: int = 0
    """Users and items with fewer events, again and again until all have as many; 0 keeps all."""

    def __post_init__(self) -> None:
        """Checks the fields."""
        for name in ("min_interactions", "min_played_pct", "k_core"):
            if getattr(self, name) < 0:
                raise UserError(f"`{name}` must not be negative; got {getattr(self, name)}")
        if self.deduplicate not in get_args(Deduplicate):
            allowed = ", ".join(get_args(Deduplicate))
            raise UserError(f"`deduplicate` must be one of {allowed}; got {self.deduplicate!r}")

    @property
    def min_user_events(self) -> int:
        """Fewest events of a user that stays."""
        return max(self.min_interactions, self.k_core)


def usable_events(frame: pl.DataFrame, min_played_pct: int) -> tuple[pl.DataFrame, dict[str, int]]:
    """Drops the rows that are no event, or not one that counts.

    Args:
      frame: columns `user` and `item`, and `time`, `event_type` and `played_pct` if there are.
      min_played_pct: listens with a smaller played ratio are left out.

    Returns:
      Columns `user`, `item` and perhaps `time`, without nulls; the number of rows left out by
      reason, 0 included.

    Raises:
      UserError: there is no played ratio to filter by.
    """
    skipped = {}
    for reason, drop in _drops(frame, min_played_pct).items():
        skipped[reason] = frame.select(drop.sum()).item()
        if skipped[reason]:
            frame = frame.filter(~drop)
    columns = [name for name in ("user", "item", "time") if name in frame.columns]
    return frame.select(columns), skipped


def _drops(frame: pl.DataFrame, min_played_pct: int) -> dict[str, pl.Expr]:
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
    return drops


def repetitions(events: np.ndarray, mode: Deduplicate) -> np.ndarray:
    """Marks the events that `deduplicate` leaves out.

    Args:
      events: `[n]` of type `EVENT`, in order: by user, by time, ties as in the file.
      mode: what counts as a repetition.

    Returns:
      `[n]` bool.
    """
    repeats = np.zeros(len(events), dtype=bool)
    if mode == "consecutive":
        repeats[1:] = _equal_neighbors(events, ("user", "item"))
    elif mode == "exact":
        # The sort is stable, so the first of equal events is the first of the file.
        order = np.lexsort((events["item"], events["time"], events["user"]))
        repeats[order[1:]] = _equal_neighbors(events[order], ("user", "item", "time"))
    return repeats


def _equal_neighbors(events: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    return np.all([events[name][1:] == events[name][:-1] for name in names], axis=0)
