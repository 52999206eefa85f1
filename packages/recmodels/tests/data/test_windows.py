"""Windows cover every training position once and carry the right targets."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_cases import distinct_store, slow_training_pairs

from recmodels._src.data.splits import Split
from recmodels._src.data.windows import cut_windows, windows


def _pairs(batch) -> list[tuple[int, list[int]]]:
    """(input item, targets) of every non-padded position."""
    rows, columns = np.nonzero(batch["history"])
    return [
        (int(batch["history"][b, j]), [int(t) for t in batch["targets"][b, j] if t != -1])
        for b, j in zip(rows, columns, strict=True)
    ]


@pytest.mark.parametrize("protocol", ["next-8", "leave-one-out"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6), max_length=st.integers(1, 40))
def test_an_epoch_holds_every_training_pair_once(tmp_path, protocol, lengths, max_length):
    store = distinct_store(tmp_path / "s", lengths)
    split = Split(protocol)
    table = windows(store, split, max_length)
    batch = cut_windows(store, split, table, np.arange(len(table)), max_length)
    expected = []
    for user in range(store.num_users):
        expected += slow_training_pairs(store.sequence(user).tolist(), protocol)
    assert sorted(_pairs(batch)) == expected
    assert batch["history"].shape == (len(table), max_length)
    assert batch["targets"].shape == (len(table), max_length, 8)
    assert batch["history"].dtype == batch["targets"].dtype == np.int32


def test_windows_are_cut_from_the_end_and_right_aligned(tmp_path):
    store = distinct_store(tmp_path / "s", [34])  # 8 training inputs
    split = Split("next-8")
    table = windows(store, split, 5)
    assert (table.start.tolist(), table.stop.tolist()) == ([0, 3], [3, 8])
    batch = cut_windows(store, split, table, np.array([0, 1]), 5)
    assert batch["history"].tolist() == [[0, 0, 1, 2, 3], [4, 5, 6, 7, 8]]
    # Targets reach beyond the window, padding has none.
    assert batch["targets"][0, 4].tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert batch["targets"][1, 4].tolist() == [9, 10, 11, 12, 13, 14, 15, 16]
    assert (batch["targets"][0, :2] == -1).all()


def test_targets_of_short_users_end_in_padding(tmp_path):
    store = distinct_store(tmp_path / "s", [4])
    split = Split("next-8", num_targets=3)
    batch = cut_windows(store, split, windows(store, split, 4), np.array([0]), 4)
    assert batch["history"].tolist() == [[0, 1, 2, 3]]
    assert batch["targets"].tolist() == [[[-1, -1, -1], [2, 3, 4], [3, 4, -1], [4, -1, -1]]]
