"""Time gaps of training windows, evaluation inputs and histories, against the definition."""

import itertools

import numpy as np
import pytest
from store_cases import Options, tiny_store

from recmodels import UserError
from recmodels._src.data.pipeline import evaluation_batches, history_batches, train_batches
from recmodels._src.data.splits import Split
from recmodels._src.data.time_gaps import time_gaps

LENGTHS = (1, 2, 5, 9, 30, 41)


def _times(seed=0):
    rng = np.random.default_rng(seed)
    return [np.cumsum(rng.integers(0, 9, n)) - 5 for n in LENGTHS]


def _store(path, times):
    # Every event has an item of its own, which says which event it is.
    bounds = np.concatenate([[0], np.cumsum(LENGTHS)]) + 1
    rows = [range(a, b) for a, b in itertools.pairwise(bounds)]
    return tiny_store(path, rows, times=times)


def _gap_of_row(times):
    gaps = {0: -1, -1: -1}  # padding
    row = 0
    for each in times:
        for n, time in enumerate(each):
            row += 1
            gaps[row] = -1 if n == 0 else int(time - each[n - 1])
    return gaps


def _gaps_by_definition(rows, times):
    return np.vectorize(_gap_of_row(times).get)(rows)


@pytest.mark.parametrize("protocol", ["next-8", "leave-one-out"])
@pytest.mark.parametrize("max_length", [3, 16])
def test_training_gaps(tmp_path, protocol, max_length):
    store = _store(tmp_path / "s", _times())
    options = Options(protocol=protocol, num_targets=4, max_length=max_length, time_gaps=True)
    batches = train_batches(store, options)
    for _ in range(12):
        batch = next(batches)
        read = np.concatenate([batch["history"], batch["targets"][:, -1]], axis=1)
        assert batch["gaps"].dtype == np.int32
        np.testing.assert_array_equal(batch["gaps"], _gaps_by_definition(read, _times()))
    assert "gaps" not in next(train_batches(store, Options(protocol=protocol)))


@pytest.mark.parametrize("max_length", [3, 64])
def test_gaps_of_histories(tmp_path, max_length):
    store = _store(tmp_path / "s", _times())
    split = Split("next-8", num_targets=3)
    for batch in (
        *evaluation_batches(store, split, "dev", max_length, 4),
        *evaluation_batches(store, split, "test", max_length, 4),
        *history_batches(store, max_length, 4),
    ):
        expected = _gaps_by_definition(batch["history"], _times())
        np.testing.assert_array_equal(batch["gaps"], expected)


def test_a_gap_says_nothing_of_later_events(tmp_path):
    times = _times()
    store, event = _store(tmp_path / "s", times), np.arange(sum(LENGTHS))
    first = np.repeat(store.offsets[:-1], LENGTHS)
    gaps = time_gaps(store, event, first)
    for user, place in ((3, 4), (5, 0), (5, 40)):
        later = [each.copy() for each in times]
        later[user][place + 1 :] += 1000
        changed = time_gaps(_store(tmp_path / "later", later), event, first)
        np.testing.assert_array_equal(
            np.flatnonzero(changed != gaps),
            store.offsets[user] + np.arange(place + 1, LENGTHS[user])[:1],
        )


@pytest.mark.parametrize("protocol", ["next-8", "leave-one-out"])
def test_held_out_times_are_in_no_training_batch_and_in_no_input(tmp_path, protocol):
    times, options = _times(), Options(protocol=protocol, num_targets=2, time_gaps=True)
    split = Split(protocol, num_targets=2)
    moved = [each.copy() for each in times]
    for each in moved:
        if split.is_evaluated(len(each)):
            each[split.evaluation(len(each), "dev").target_start :] += 7777
    stores = _store(tmp_path / "s", times), _store(tmp_path / "moved", moved)
    batches = [train_batches(store, options) for store in stores]
    for _ in range(20):
        one, other = map(next, batches)
        np.testing.assert_array_equal(one["gaps"], other["gaps"])
    inputs = [evaluation_batches(store, split, "dev", 64, 4) for store in stores]
    for one, other in zip(*inputs, strict=True):
        np.testing.assert_array_equal(one["gaps"], other["gaps"])


def test_extreme_times(tmp_path):
    store = tiny_store(tmp_path / "s", [[1, 2, 3]], times=[[-(2**62), 2**62 - 1, 2**62 - 1]])
    gaps = time_gaps(store, np.arange(-1, 3), np.array(0))
    assert gaps.tolist() == [-1, -1, 2**31 - 1, 0]
    lonely = tiny_store(tmp_path / "lonely", [[1]], times=[[5]])
    assert time_gaps(lonely, np.arange(1), np.array(0)).tolist() == [-1]


def test_a_store_without_times(tmp_path):
    store = tiny_store(tmp_path / "s", [[1, 2, 3]])
    with pytest.raises(UserError, match=r"`time_gaps` needs times, and .* has none; .* --time$"):
        train_batches(store, Options(time_gaps=True))
