"""Counts for the popularity baseline."""

import numpy as np
import pytest
from store_cases import distinct_store, tiny_store

from recmodels._src.data.popularity import popularity_counts
from recmodels._src.data.splits import Split


@pytest.mark.parametrize(
    ("protocol", "include", "counted"),
    [
        ("next-8", False, [0, 13, 0]),  # 30 - 17
        ("next-8", True, [26, 13, 2]),
        ("leave-one-out", False, [24, 28, 0]),
        ("leave-one-out", True, [24, 28, 2]),
    ],
)
def test_counts_the_items_before_the_dev_targets(tmp_path, protocol, include, counted):
    lengths = [26, 30, 2]
    store = distinct_store(tmp_path / "s", lengths)
    counts = popularity_counts(store, Split(protocol), include_short_users=include)
    expected = np.concatenate(
        [[0], *(np.arange(n) < k for n, k in zip(lengths, counted, strict=True))]
    )
    np.testing.assert_array_equal(counts, expected)
    assert counts.dtype == np.int64


def test_repeats_add_up_and_every_row_has_a_count(tmp_path):
    store = tiny_store(tmp_path / "s", [[2, 2, 2, 1, 4], [2, 1, 4]])
    assert popularity_counts(store, Split("leave-one-out")).tolist() == [0, 0, 4, 0, 0]
