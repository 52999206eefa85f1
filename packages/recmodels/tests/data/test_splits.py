"""The split formulas against their written definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_cases import slow_evaluation, slow_training_pairs

from recmodels._src.data.splits import Split
from recmodels._src.errors import UserError

PROTOCOLS = ["next-8", "leave-one-out"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(n=st.integers(1, 300))
def test_ranges_equal_the_definition(protocol, n):
    split, x = Split(protocol), list(range(n))
    num_inputs, target_stop = split.train_range(n)
    pairs = [(j, x[j + 1 : min(j + 9, target_stop)]) for j in range(num_inputs)]
    assert pairs == slow_training_pairs(x, protocol)
    if split.is_evaluated(n):
        for part in ("dev", "test"):
            bounds = split.evaluation(n, part)
            got = (x[: bounds.input_stop], x[bounds.target_start : bounds.target_stop])
            assert got == slow_evaluation(x, protocol, part)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(
    num_targets=st.integers(1, 40), lengths=st.lists(st.integers(1, 400), min_size=1, max_size=20)
)
def test_nothing_leaks_for_any_number_of_targets(protocol, num_targets, lengths):
    split, n = Split(protocol, num_targets), np.array(lengths)
    train = split.train_range(n)
    evaluated = split.is_evaluated(n)
    assert np.all(train.target_stop <= n)
    assert np.all(train.num_inputs < np.maximum(train.target_stop, 1))
    if not evaluated.any():
        return
    dev = split.evaluation(n[evaluated], "dev")
    test = split.evaluation(n[evaluated], "test")
    for bounds in (dev, test):
        assert np.all(bounds.input_stop >= 1)
        assert np.all(bounds.input_stop == bounds.target_start)
        assert np.all(bounds.target_stop - bounds.target_start == split.num_evaluation_targets)
    assert np.all(train.target_stop[evaluated] <= dev.target_start)
    assert np.all(dev.target_stop <= test.target_start)
    assert np.all(test.target_stop == n[evaluated])


@given(num_targets=st.integers(1, 40))
def test_next_8_minimum_is_the_smallest_that_trains(num_targets):
    split = Split("next-8", num_targets)
    train = split.train_range(split.min_length)
    # One input with all its targets: one user shorter could not be trained and evaluated.
    assert (train.num_inputs, train.target_stop) == (1, num_targets + 1)


def test_published_numbers():
    split = Split("next-8")
    assert split.min_length == 27
    assert split.train_range(100) == (74, 82)
    assert split.evaluation(100, "dev") == (83, 83, 91)
    assert split.evaluation(100, "test") == (92, 92, 100)
    assert split.train_range(26) == (25, 26)
    split = Split("leave-one-out")
    assert split.min_length == 3
    assert split.train_range(100) == (97, 98)
    assert split.evaluation(100, "dev") == (98, 98, 99)
    assert split.evaluation(100, "test") == (99, 99, 100)
    assert [split.train_range(n).num_inputs for n in (1, 2, 3, 4)] == [0, 1, 0, 1]


def test_errors():
    with pytest.raises(
        UserError, match="`protocol` must be one of next-8, leave-one-out; got 'loo'"
    ):
        Split("loo")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="`num_targets` must be at least 1; got 0"):
        Split("next-8", 0)
    with pytest.raises(UserError, match="`part` must be one of dev, test; got 'valid'"):
        Split("next-8").evaluation(100, "valid")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="`lengths` must be at least 27; got 26"):
        Split("next-8").evaluation(np.array([30, 26]), "dev")
