"""`describe`: what is in a sequence store, in numbers."""

import dataclasses
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import polars as pl
from tqdm import tqdm

from recmodels._src.data.card_html import write_card_html
from recmodels._src.data.filters import Filters
from recmodels._src.data.splits import Protocol, Split
from recmodels._src.data.store import SequenceStore
from recmodels._src.storage import as_path

_BLOCK_EVENTS = 1 << 22
_BAR_DELAY_S = 2.0  # no bar for what is over before one can read it
_CURVE_POINTS = 60  # of the popularity curve, evenly spaced in the logarithm of the rank
_TOP_SHARES = (0.01, 0.1)
_SECONDS_PER_DAY = 86_400
_FIRST_YEAR = 1980


class LengthBin(NamedTuple):
    """Users whose number of events is in a range."""

    low: int
    """Fewest events."""
    high: int
    """Most events."""
    num_users: int
    """Users in the range."""


class PopularityPoint(NamedTuple):
    """An item of the catalog, ranked by its number of events."""

    rank: int
    """1 for the most frequent item."""
    num_events: int
    """Its events."""


@dataclasses.dataclass(frozen=True)
class EvaluationShare:
    """What a protocol (with its 8 training targets) makes of the users."""

    num_users: int
    """Users to evaluate; the others are too short."""
    min_length: int
    """Fewest events of such a user."""
    unseen_targets_share: float
    """Share of the test targets that are in no training window; 0 without users."""


@dataclasses.dataclass(frozen=True)
class DatasetCard:
    """What is in a store; `str()` of it is what the command line prints."""

    name: str
    """Name of the file or generator that the store was made from."""
    digest: str
    """Of sequences and ids, as in `SequenceStore`."""
    num_users: int
    """Users."""
    num_items: int
    """Items of the catalog."""
    num_interactions: int
    """Events."""
    density: float
    """Distinct pairs of user and item, as a share of all possible pairs."""
    lengths: dict[str, float]
    """`min`, `median`, `mean`, `p90` and `max` number of events of a user."""
    item_counts: dict[str, float]
    """The same of the events of an item."""
    top_items_share: dict[str, float]
    """Share of the events that the most frequent 1 % and 10 % of the items have."""
    repeats_share: float
    """Share of the events whose item the user had before."""
    ties_share: float | None
    """Share of the events at the same time as the user's event before; None without times."""
    first_timestamp: int | None
    """Seconds, as in the source; None without times."""
    last_timestamp: int | None
    """Likewise."""
    evaluation: dict[Protocol, EvaluationShare]
    """By protocol."""
    filters: dict[str, Any]
    """Filters that `prepare` applied."""
    skipped: dict[str, int]
    """Events that it left out, by reason."""
    length_bins: list[LengthBin]
    """Users by number of events; each range doubles the one before it."""
    popularity_curve: list[PopularityPoint]
    """Items from the most frequent to the rarest, thinned out evenly in the logarithm."""
    item_categories: dict[str, Any] | None = None
    """What `prepare --item-categories` found, as in `meta.json`; None without."""

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """The card as text of a few lines."""
        return "\n".join(f"{label:<19}{text}" for label, text in self.lines())

    def lines(self) -> list[tuple[str, str]]:
        """Label and text of every line of the card."""
        lines = [
            ("source", self.name),
            ("users", f"{self.num_users:,}"),
            ("items", f"{self.num_items:,}"),
            ("interactions", f"{self.num_interactions:,}"),
            ("density", f"{self.density:.3%} of all pairs of user and item"),
            ("events of a user", _five(self.lengths)),
            ("events of an item", _five(self.item_counts)),
            ("top items", ", ".join(f"{k}: {v:.1%}" for k, v in self.top_items_share.items())),
            (
                "repeats",
                f"{self.repeats_share:.1%} of the events, the user had the item before",
            ),
            ("time", self._time()),
        ]
        if self.item_categories is not None:
            lines.append(("categories", _categories(self.item_categories, self.num_items)))
        for protocol, share in self.evaluation.items():
            short = self.num_users - share.num_users
            text = f"{share.num_users:,} users to evaluate, {short:,} shorter than "
            text += f"{share.min_length}"
            if share.num_users:
                text += f"; {share.unseen_targets_share:.1%} of the test targets are "
                text += "never seen in training"
            lines.append((protocol, text))
        unused = dataclasses.asdict(Filters())
        used = [f"{name} {v}" for name, v in self.filters.items() if v != unused.get(name)]
        lines.append(("filters", ", ".join(used) or "none"))
        return lines + [("left out", f"{n:,} x {reason}") for reason, n in self.skipped.items()]

    def _time(self) -> str:
        if self.first_timestamp is None or self.last_timestamp is None:
            return "none: the order of the source"
        days = (self.last_timestamp - self.first_timestamp) / _SECONDS_PER_DAY
        span = f"{_date(self.first_timestamp)} to {_date(self.last_timestamp)}, {days:,.1f} days"
        return f"{span}; {self.ties_share:.1%} of the events at the time of the one before"

    def write_html(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Writes the card as a page with plots of the lengths and of the popularity.

        Args:
          path: file to write; it appears complete or not at all.
          overwrite: whether an existing file may be replaced.

        Raises:
          UserError: `path` exists, or matplotlib is not installed.
        """
        write_card_html(
            as_path(path),
            title=self.name,
            lines=self.lines(),
            length_bins=self.length_bins,
            popularity_curve=self.popularity_curve,
            overwrite=overwrite,
        )


def describe(store: str | Path | SequenceStore, *, progress: bool = False) -> DatasetCard:
    """Looks through a store, a few million events at a time.

    Args:
      store: sequence store written by `prepare`.
      progress: show a bar on stderr when it takes long.

    Returns:
      The card.

    Raises:
      UserError: there is no store, or it is damaged.
    """
    store = store if isinstance(store, SequenceStore) else SequenceStore.open(store)
    counts = pl.read_parquet(store.path / "items.parquet", columns=["count"])["count"].to_numpy()
    counts = np.sort(counts)[::-1]
    trained = {protocol: np.zeros(store.num_items + 1, bool) for protocol in get_args(Protocol)}
    num_pairs = num_ties = 0
    with _bar(store, progress) as bar:
        for block in _blocks(store):
            num_pairs += block.num_pairs()
            num_ties += block.num_ties()
            for protocol, seen in trained.items():
                train = Split(protocol).train_range(block.lengths)
                # A lone item before the held-out ones is in no training window.
                stop = np.where(train.num_inputs > 0, train.target_stop, 0)
                seen[block.items[block.position < np.repeat(stop, block.lengths)]] = True
            bar.update(len(block.items))
    has_time = store.meta["timestamps"] == "seconds"
    return DatasetCard(
        name=str(store.meta.get("source", {}).get("name", store.location.name)),
        digest=store.digest,
        num_users=store.num_users,
        num_items=store.num_items,
        num_interactions=store.num_interactions,
        density=num_pairs / (store.num_users * store.num_items),
        lengths=_summary(store.lengths),
        item_counts=_summary(counts),
        top_items_share={f"{s:.0%}": _top_share(counts, s) for s in _TOP_SHARES},
        repeats_share=1 - num_pairs / store.num_interactions,
        ties_share=num_ties / store.num_interactions if has_time else None,
        first_timestamp=int(store.timestamps.min()) if has_time else None,
        last_timestamp=int(store.timestamps.max()) if has_time else None,
        evaluation={name: _evaluation(store, Split(name), seen) for name, seen in trained.items()},
        filters=dict(store.meta.get("filters", {})),
        skipped=dict(store.meta.get("skipped", {})),
        length_bins=_length_bins(store.lengths),
        popularity_curve=_popularity_curve(counts),
        item_categories=store.meta.get("item_categories"),
    )


class _Block(NamedTuple):
    # The events of some consecutive users.
    items: np.ndarray
    timestamps: np.ndarray
    lengths: np.ndarray  # of the users
    position: np.ndarray  # of each event within its user

    def num_pairs(self) -> int:
        # Distinct pairs of user and item; rows fit 31 bits.
        user = np.repeat(np.arange(len(self.lengths), dtype=np.uint64), self.lengths)
        pairs = np.sort((user << np.uint64(32)) | self.items.astype(np.uint64))
        return int((pairs[1:] != pairs[:-1]).sum()) + 1

    def num_ties(self) -> int:
        ties = self.timestamps[1:] == self.timestamps[:-1]
        return int((ties & (self.position[1:] > 0)).sum())


def _categories(found: dict[str, Any], num_items: int) -> str:
    share = 1 - found["num_items_without"] / num_items
    return f"{found['num_categories']:,}; {share:.1%} of the items have one or more"


def _blocks(store: SequenceStore) -> Iterator[_Block]:
    start = 0
    while start < store.num_users:
        bound = store.offsets[start] + _BLOCK_EVENTS
        stop = max(int(np.searchsorted(store.offsets, bound, side="right")) - 1, start + 1)
        offsets = store.offsets[start : stop + 1]
        lengths = np.diff(offsets)
        events = slice(offsets[0], offsets[-1])
        yield _Block(
            items=np.asarray(store.items[events]),
            timestamps=np.asarray(store.timestamps[events]),
            lengths=lengths,
            position=np.arange(offsets[0], offsets[-1]) - np.repeat(offsets[:-1], lengths),
        )
        start = stop


def _bar(store: SequenceStore, progress: bool) -> tqdm:
    return tqdm(
        total=store.num_interactions,
        desc="describe",
        unit="event",
        unit_scale=True,
        delay=_BAR_DELAY_S,
        disable=not progress,
        leave=False,
    )


def _evaluation(store: SequenceStore, split: Split, trained: np.ndarray) -> EvaluationShare:
    users = np.flatnonzero(split.is_evaluated(store.lengths))
    share = 0.0
    if len(users):
        first = split.evaluation(store.lengths[users], "test").target_start
        first = (store.offsets[users] + first)[:, None]
        targets = store.items[first + np.arange(split.num_evaluation_targets)]
        share = 1 - float(trained[targets].mean())
    return EvaluationShare(len(users), split.min_length, share)


def _summary(counts: np.ndarray) -> dict[str, float]:
    ordered, n = np.sort(counts), len(counts)
    return {
        "min": int(ordered[0]),
        "median": int(ordered[n // 2]),
        "mean": float(ordered.mean()),
        "p90": int(ordered[int(n * 0.9)]),
        "max": int(ordered[-1]),
    }


def _top_share(counts: np.ndarray, share: float) -> float:
    return float(counts[: max(round(len(counts) * share), 1)].sum() / counts.sum())


def _length_bins(lengths: np.ndarray) -> list[LengthBin]:
    power = np.floor(np.log2(lengths)).astype(np.int64)
    users = np.bincount(power)
    return [
        LengthBin(1 << k, (2 << k) - 1, int(users[k])) for k in range(int(power.min()), len(users))
    ]


def _popularity_curve(counts: np.ndarray) -> list[PopularityPoint]:
    ranks = np.unique(np.geomspace(1, len(counts), _CURVE_POINTS).round().astype(np.int64))
    return [PopularityPoint(int(rank), int(counts[rank - 1])) for rank in ranks]


def _five(summary: dict[str, float]) -> str:
    values = " / ".join(f"{v:,.1f}" if k == "mean" else f"{v:,}" for k, v in summary.items())
    return f"{values}  ({' / '.join(summary)})"


def _date(timestamp: int) -> str:
    # Published sets count seconds from a start of their own: a date in 1970 would mislead.
    try:
        date = datetime.datetime.fromtimestamp(timestamp, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return f"{timestamp:,} s"
    return f"{date:%Y-%m-%d}" if date.year >= _FIRST_YEAR else f"{timestamp:,} s"
