"""Ids, order, skips and filters on the way from events to sequences."""

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recmodels._src.data import sequences
from recmodels._src.data.filters import Filters
from recmodels._src.data.raw import RawEvents
from recmodels._src.data.sequences import build_sequences


@dataclasses.dataclass(frozen=True)
class Built:
    """The result of `build_sequences`, its pieces put together."""

    items: np.ndarray
    timestamps: np.ndarray
    lengths: np.ndarray
    item_counts: np.ndarray
    user_ids: pl.Series
    item_ids: pl.Series
    skipped: dict[str, int]

    def histories(self) -> dict:
        """Items of each user in raw ids."""
        raw = self.item_ids.gather(self.items - 1).to_list()
        bounds = np.cumsum(self.lengths)
        pieces = [raw[b - n : b] for b, n in zip(bounds, self.lengths, strict=True)]
        return dict(zip(self.user_ids.to_list(), pieces, strict=True))


def _build(frame: pl.DataFrame, *, chunk: int = 1000, known_items=None, **filters) -> Built:
    pieces = iter([frame[k : k + chunk] for k in range(0, frame.height, chunk)])
    events = RawEvents(frames=pieces, unit="row", numeric=False, columns={})
    with tempfile.TemporaryDirectory() as folder:
        parts, skipped = build_sequences(
            events, "file", Path(folder), filters=Filters(**filters), known_items=known_items
        )
        items, times = (np.concatenate(arrays) for arrays in zip(*parts.parts, strict=True))
    return Built(
        items, times, parts.lengths, parts.item_counts, parts.user_ids, parts.item_ids, skipped
    )


def _events(**columns) -> pl.DataFrame:
    return pl.DataFrame(columns)


ROWS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 2**62), st.integers(-3, 3)),
    min_size=1,
    max_size=60,
)
# Few items and times, so that ids repeat.
FEW = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=60
)


def _frame(rows) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=["user", "item", "time"], orient="row")


@given(ROWS)
def test_order_is_that_of_a_stable_sort(rows):
    built = _build(_frame(rows))
    expected = sorted(rows, key=lambda row: (row[0], row[2]))
    item_ids, user_ids = built.item_ids.to_list(), built.user_ids.to_list()
    assert user_ids == sorted({row[0] for row in rows})
    assert item_ids == sorted({row[1] for row in rows})
    assert [item_ids[row - 1] for row in built.items] == [row[1] for row in expected]
    assert built.timestamps.tolist() == [row[2] for row in expected]
    assert np.repeat(user_ids, built.lengths).tolist() == [row[0] for row in expected]
    assert built.item_counts.tolist() == [[r[1] for r in rows].count(i) for i in item_ids]
    assert built.skipped == {}


@pytest.mark.parametrize(
    "times", [[2**63 - 1, -(2**63), 0, -(2**63), 5], [2**40, 3, -9, 3, 2**40]], ids=["all", "wide"]
)
def test_times_however_far_apart(times):
    built = _build(_events(user=[4, 4, 4, 4, 1], item=[0, 1, 2, 3, 4], time=times))
    order = sorted(range(4), key=lambda k: times[k])
    assert built.histories() == {1: [4], 4: order}
    assert built.timestamps.tolist() == [times[4], *sorted(times[:4])]


@settings(max_examples=50)
@given(rows=FEW, chunk=st.integers(1, 20), part=st.integers(1, 20), with_time=st.booleans())
def test_pieces_and_parts_of_any_size_give_the_same(rows, chunk, part, with_time):
    frame = _frame(rows) if with_time else _frame(rows).drop("time")
    filters = {"deduplicate": "consecutive", "k_core": 2}
    try:
        whole = _build(frame, **filters)
    except ValueError:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "PART_EVENTS", part)
        pieces = _build(frame, chunk=chunk, **filters)
    for field in dataclasses.fields(Built):
        first, second = getattr(whole, field.name), getattr(pieces, field.name)
        assert list(first) == list(second), field.name
    assert whole.skipped == pieces.skipped


def test_types_of_the_columns():
    built = _build(_events(user=[1, 1], item=["b", "a"], time=[2, 1]))
    assert built.items.dtype == np.int32
    assert built.items.tolist() == [1, 2]
    assert built.lengths.dtype == built.timestamps.dtype == np.int64
    assert built.user_ids.dtype == pl.Int64
    assert built.item_ids.dtype == pl.String


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (["10", "9"], [9, 10]),  # integers, by value
        (["10", "9", "x"], ["10", "9", "x"]),  # one word makes all of them words
        (["10", "09"], ["09", "10"]),  # leading zeros must survive
        (["+1", "1"], ["+1", "1"]),
        (["9223372036854775807"], [2**63 - 1]),
        (["9223372036854775808", "1"], ["1", "9223372036854775808"]),  # not an int64
        (["B000123", "é", "z"], ["B000123", "z", "é"]),  # by code point
    ],
)
def test_text_ids_are_integers_only_if_all_are(raw, expected):
    for chunk in (1, 100):  # the word may come in a later piece
        built = _build(_events(user=["1"] * len(raw), item=raw), chunk=chunk)
        assert built.item_ids.to_list() == expected
        assert built.item_ids.gather(built.items - 1).cast(pl.String).to_list() == raw


def test_unsigned_hashes_beyond_int64_become_text():
    item = pl.Series([5, 2**63 + 1], dtype=pl.UInt64)
    built = _build(_events(user=[1, 1], item=item), chunk=1)
    assert built.item_ids.to_list() == ["5", "9223372036854775809"]


def test_nulls_are_skipped_and_counted_once():
    events = _events(
        user=["a", None, "a", "", None, "a"],
        item=["x", "x", None, "x", None, "y"],
        time=["1", "2", "3", "4", None, ""],
    )
    for chunk in (1, 2, 100):
        built = _build(events, chunk=chunk)
        assert built.skipped == {
            "blank line": 1,
            "missing user id": 2,
            "missing item id": 1,
            "missing time": 1,
        }
        assert built.items.tolist() == [1]


def test_min_interactions_counts_events_left_out_and_renumbers():
    events = _events(user=[1, 1, 2, 3, 3], item=[10, 20, 30, 20, 40])
    built = _build(events, min_interactions=2)
    assert built.skipped == {"user with fewer than 2 events": 1}
    assert built.histories() == {1: [10, 20], 3: [20, 40]}
    assert built.item_ids.to_list() == [10, 20, 40]
    assert built.items.tolist() == [1, 2, 2, 3]
    assert built.timestamps.tolist() == [0, 1, 0, 1]


def _slow_core(rows: list[tuple], min_user: int, min_item: int) -> list[tuple]:
    # The definition: all at once, until nothing changes.
    while True:
        users, items = [row[0] for row in rows], [row[1] for row in rows]
        kept = [
            (user, item, time)
            for user, item, time in rows
            if users.count(user) >= min_user and items.count(item) >= min_item
        ]
        if len(kept) == len(rows):
            return rows
        rows = kept


@given(rows=FEW, k_core=st.integers(0, 5), min_interactions=st.integers(0, 6))
def test_core_is_the_largest_in_which_all_have_enough(rows, k_core, min_interactions):
    expected = _slow_core(rows, max(k_core, min_interactions), k_core)
    options = {"k_core": k_core, "min_interactions": min_interactions}
    if not expected:
        with pytest.raises(ValueError, match="has no interactions left"):
            _build(_frame(rows), **options)
        return
    built = _build(_frame(rows), **options)
    histories: dict = {}
    for user, item, _ in sorted(expected, key=lambda row: (row[0], row[2])):
        histories.setdefault(user, []).append(item)
    assert built.histories() == histories
    assert sum(built.skipped.values()) == len(rows) - len(expected)


def test_core_cascades_and_says_why():
    # User 3 alone holds up item 30, which alone holds up user 2.
    events = _events(user=[1, 1, 2, 2, 3, 4, 4], item=[10, 20, 10, 30, 30, 10, 20])
    built = _build(events, k_core=2)
    assert built.histories() == {1: [10, 20], 4: [10, 20]}
    assert built.skipped == {
        "user with fewer than 2 events": 2,
        "item with fewer than 2 events": 1,
    }


def _slow_deduplicate(rows: list[tuple], mode: str) -> list[tuple]:
    # Rows in order of user and time.
    kept = []
    for k, row in enumerate(rows):
        before = rows[k - 1] if k else None
        if mode == "exact" and row in rows[:k]:
            continue
        if mode == "consecutive" and before and before[:2] == row[:2]:
            continue
        kept.append(row)
    return kept


@pytest.mark.parametrize("mode", ["none", "exact", "consecutive"])
@given(rows=FEW)
def test_deduplication_equals_its_definition(mode, rows):
    rows = sorted(rows, key=lambda row: (row[0], row[2]))
    expected = _slow_deduplicate(rows, mode)
    built = _build(_frame(rows), deduplicate=mode, chunk=7)
    got = zip(
        np.repeat(built.user_ids.to_list(), built.lengths).tolist(),
        built.item_ids.gather(built.items - 1).to_list(),
        built.timestamps.tolist(),
        strict=True,
    )
    assert list(got) == expected
    assert sum(built.skipped.values()) == len(rows) - len(expected)


def test_repetitions_go_before_events_are_counted():
    events = _events(user=[1, 1, 1, 2, 2], item=[5, 5, 5, 5, 6], time=[1, 1, 2, 1, 2])
    built = _build(events, deduplicate="exact", min_interactions=2)
    assert built.skipped == {"exact duplicate of an earlier event": 1}
    built = _build(events, deduplicate="consecutive", min_interactions=2)
    assert built.histories() == {2: [5, 6]}
    assert built.skipped == {
        "repetition of the event before it": 2,
        "user with fewer than 2 events": 1,
    }


def test_known_items_keep_their_rows():
    known = pl.Series([30, 10, 99])
    built = _build(_events(user=[1, 1, 1, 1], item=[20, 10, 5, 30]), known_items=known)
    assert built.item_ids.to_list() == [30, 10, 99, 5, 20]
    assert built.items.tolist() == [5, 2, 4, 1]
    assert built.item_counts.tolist() == [1, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("known", "new"), [([7, 8], ["x", "8"]), (["x", "8"], [8, 9])], ids=["words", "integers"]
)
def test_known_items_of_the_other_type(known, new):
    built = _build(_events(user=[1, 1], item=new), known_items=pl.Series(known))
    expected = [str(item) for item in known]
    assert built.item_ids.to_list()[:2] == expected
    assert built.histories() == {1: [str(item) for item in new]}
    assert built.item_ids.n_unique() == len(built.item_ids) == 3


def test_a_known_item_that_the_core_leaves_out_keeps_its_row():
    events = _events(user=[1, 1, 2, 2], item=[10, 20, 10, 30])
    known = pl.Series([30, 20])
    built = _build(events, known_items=known, k_core=0, min_interactions=2)
    assert built.item_ids.to_list() == [30, 20, 10]
    events = _events(user=[1, 1, 2, 2, 2], item=[10, 20, 10, 20, 30])
    built = _build(events, known_items=known, k_core=2)
    assert built.item_ids.to_list() == [30, 20, 10]
    assert built.item_counts.tolist() == [0, 2, 2]
