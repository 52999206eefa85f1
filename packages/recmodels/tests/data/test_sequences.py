"""Ids, order, skips and filters on the way from events to sequences."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recmodels._src.data.raw import RawEvents
from recmodels._src.data.sequences import build_sequences


def _events(numeric: bool = False, **columns) -> RawEvents:
    return RawEvents(frame=pl.DataFrame(columns), unit="row", numeric=numeric, columns={})


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 2**62), st.integers(-3, 3)),
        min_size=1,
        max_size=60,
    )
)
def test_order_is_that_of_a_stable_sort(rows):
    user, item, time = (list(column) for column in zip(*rows, strict=True))
    columns, skipped = build_sequences(_events(user=user, item=item, time=time), "file")
    expected = sorted(rows, key=lambda row: (row[0], row[2]))
    item_ids, user_ids = columns.item_ids.to_list(), columns.user_ids.to_list()
    assert user_ids == sorted(set(user))
    assert item_ids == sorted(set(item))
    assert [item_ids[row - 1] for row in columns.items] == [row[1] for row in expected]
    assert columns.timestamps.tolist() == [row[2] for row in expected]
    of_user = np.repeat(user_ids, np.diff(columns.offsets))
    assert of_user.tolist() == [row[0] for row in expected]
    assert skipped == {}


def test_types_of_the_columns():
    columns, _ = build_sequences(_events(user=[1, 1], item=["b", "a"], time=[2, 1]), "file")
    assert columns.items.dtype == np.int32
    assert columns.items.tolist() == [1, 2]
    assert columns.offsets.dtype == columns.timestamps.dtype == np.int64
    assert columns.user_ids.dtype == pl.Int64
    assert columns.item_ids.dtype == pl.String


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
    columns, _ = build_sequences(_events(user=["1"] * len(raw), item=raw), "file")
    assert columns.item_ids.to_list() == expected


def test_unsigned_hashes_beyond_int64_become_text():
    item = pl.Series([2**63 + 1, 5], dtype=pl.UInt64)
    columns, _ = build_sequences(_events(user=[1, 1], item=item), "file")
    assert columns.item_ids.to_list() == ["5", "9223372036854775809"]


def test_nulls_are_skipped_and_counted_once():
    columns, skipped = build_sequences(
        _events(
            user=["a", None, "a", "", None, "a"],
            item=["x", "x", None, "x", None, "y"],
            time=["1", "2", "3", "4", None, ""],
        ),
        "file",
    )
    assert skipped == {
        "blank line": 1,
        "missing user id": 2,
        "missing item id": 1,
        "missing time": 1,
    }
    assert columns.items.tolist() == [1]


def test_min_interactions_counts_events_left_out_and_renumbers():
    events = _events(user=[1, 1, 2, 3, 3], item=[10, 20, 30, 20, 40])
    columns, skipped = build_sequences(events, "file", min_interactions=2)
    assert skipped == {"user with fewer than 2 events": 1}
    assert columns.user_ids.to_list() == [1, 3]
    assert columns.item_ids.to_list() == [10, 20, 40]
    assert columns.items.tolist() == [1, 2, 2, 3]
    assert columns.offsets.tolist() == [0, 2, 4]
