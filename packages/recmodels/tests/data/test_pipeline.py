"""Batches: order, resume, evaluation users."""

import numpy as np
import pytest
from store_cases import Options, distinct_store, slow_evaluation

from recmodels._src.data.pipeline import evaluation_batches, train_batches, training_window_lengths
from recmodels._src.data.splits import Split
from recmodels._src.errors import UserError


def _take(iterator, count):
    return [next(iterator) for _ in range(count)]


def _assert_equal(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


@pytest.fixture
def store(tmp_path):
    """23 users of different lengths; each event has an item of its own."""
    return distinct_store(tmp_path / "store", [5 + 7 * k % 61 for k in range(23)])


def test_shapes(store):
    batch = next(train_batches(store, Options(max_length=16, batch_size=4)))
    assert batch["history"].shape == (4, 16)
    assert batch["history"].dtype == np.int32
    assert batch["targets"].shape == (4, 16, 8)
    assert batch["targets"].dtype == np.int32


GOLDEN = [
    [[67, 68, 69], [145, 146, 147], [101, 102, 103], [407, 408, 409]],
    [[98, 99, 100], [27, 28, 29], [453, 454, 455], [416, 417, 418]],
]


def test_golden_order(store):
    # Runs in the world depend on this order: when this test fails, resumed runs no longer
    # equal unbroken ones across versions. Change it only with a note in the changelog.
    batches = _take(train_batches(store, Options(max_length=3, batch_size=4, seed=7)), 2)
    assert [batch["history"].tolist() for batch in batches] == GOLDEN


def test_every_window_once_an_epoch_in_a_new_order(store):
    options = Options(max_length=4, batch_size=5)
    num_windows = len(training_window_lengths(store, options))
    assert num_windows % 5 != 0  # epochs meet inside a batch
    rows = np.concatenate([b["history"] for b in _take(train_batches(store, options), num_windows)])
    newest = rows[:, -1].reshape(5, num_windows)  # of 5 epochs; names the window
    for epoch in newest[1:]:
        assert sorted(epoch) == sorted(newest[0])
        assert list(epoch) != list(newest[0])
    assert len(set(newest[0])) == num_windows


def test_seed_decides_the_order(store):
    first, second, other = (
        _take(train_batches(store, Options(seed=seed)), 6) for seed in (3, 3, 4)
    )
    _assert_equal(first, second)
    assert any((a["history"] != b["history"]).any() for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("step", [0, 1, 7, 40])
def test_resume_equals_unbroken_run(store, step):
    unbroken = _take(train_batches(store, Options()), step + 5)[step:]
    _assert_equal(unbroken, _take(train_batches(store, Options(), start_step=step), 5))
    iterator = train_batches(store, Options())
    _take(iterator, step)
    state = iterator.get_state()
    _assert_equal(unbroken, _take(iterator, 5))
    fresh = train_batches(store, Options())
    fresh.set_state(state)
    _assert_equal(unbroken, _take(fresh, 5))


def _together(shares):
    # One batch from the shares of all ranks, in the order of the ranks.
    return {name: np.concatenate([share[name] for share in shares]) for name in shares[0]}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_shares_of_the_ranks_are_the_batches_of_one_process(store, num_ranks):
    # 6 does not divide the windows of an epoch: epochs meet inside batches and shares.
    options = Options(max_length=4, batch_size=6)
    assert len(training_window_lengths(store, options)) % 6
    single = _take(train_batches(store, options), 40)
    ranks = [train_batches(store, options, rank=r, num_ranks=num_ranks) for r in range(num_ranks)]
    together = [_together([next(iterator) for iterator in ranks]) for _ in range(40)]
    _assert_equal(single, together)


def test_an_epoch_divides_the_windows_among_the_ranks(tmp_path):
    # 24 windows in 4 batches: every event has an item of its own, which names the window.
    store = distinct_store(tmp_path / "s", [29] * 24)
    options = Options(max_length=3, batch_size=6)
    found = []
    for rank in range(3):
        batches = _take(train_batches(store, options, rank=rank, num_ranks=3), 4)
        found += [batch["history"][:, -1] for batch in batches]
    assert {len(rows) for rows in found} == {2}
    rows = np.concatenate(found)
    assert len(rows) == len(set(rows.tolist())) == 24


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_a_run_goes_on_with_another_number_of_ranks(store, before, after):
    options = Options(batch_size=6)
    unbroken = _take(train_batches(store, options), 12)[7:]
    iterator = train_batches(store, options, rank=before - 1, num_ranks=before)
    _take(iterator, 7)
    state = iterator.get_state()
    ranks = []
    for rank in range(after):
        ranks.append(train_batches(store, options, rank=rank, num_ranks=after))
        ranks[-1].set_state(state)
    _assert_equal(unbroken, [_together([next(rank) for rank in ranks]) for _ in range(5)])
    started = train_batches(store, options, start_step=7, rank=after - 1, num_ranks=after)
    share = 6 // after
    _assert_equal(
        [{name: array[-share:] for name, array in batch.items()} for batch in unbroken],
        _take(started, 5),
    )


def test_ranks_that_cannot_be(store):
    with pytest.raises(UserError, match="`batch_size` 4 cannot be divided among 3 processes"):
        train_batches(store, Options(batch_size=4), rank=0, num_ranks=3)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=rf"`rank` must be in \[0, 2\); got {rank}"):
            train_batches(store, Options(batch_size=4), rank=rank, num_ranks=2)


def test_nothing_to_train_on(tmp_path):
    store = distinct_store(tmp_path / "s", [1, 1])
    with pytest.raises(UserError, match="nothing to train on: no user has two items before"):
        train_batches(store, Options())


@pytest.mark.parametrize("batch_size", [1, 4, 100])
@pytest.mark.parametrize("part", ["dev", "test"])
@pytest.mark.parametrize("protocol", ["next-8", "leave-one-out"])
def test_evaluation_batches_equal_the_definition(store, protocol, part, batch_size):
    split, found = Split(protocol), []
    for batch in evaluation_batches(store, split, part, 10, batch_size):
        assert {array.shape[0] for array in batch.values()} == {batch_size}
        for user, history, targets, seen in zip(
            *(batch[name] for name in ("user", "history", "targets", "seen")), strict=True
        ):
            if user == -1:
                assert not history.any()
                assert (targets == -1).all()
                assert (seen == -1).all()
                continue
            found.append(user)
            inputs, expected = slow_evaluation(store.sequence(user).tolist(), protocol, part)
            assert history.tolist() == [0] * (10 - len(inputs)) + inputs[-10:]
            assert targets.tolist() == expected
            assert seen[: len(inputs)].tolist() == inputs
            assert (seen[len(inputs) :] == -1).all()
    assert sorted(found) == np.flatnonzero(store.lengths >= split.min_length).tolist()


def test_evaluation_shapes_are_few(tmp_path):
    store = distinct_store(tmp_path / "s", list(range(27, 400)))
    batches = list(evaluation_batches(store, Split("next-8"), "test", 10, 8))
    assert len(batches) == 47
    assert [batch["seen"].shape[1] for batch in batches[::12]] == [64, 128, 256, 512]
    assert {batch["seen"].shape[1] for batch in batches} == {64, 128, 256, 512}
    assert {name: batches[0][name].dtype.name for name in batches[0]} == {
        "user": "int64", "history": "int32", "targets": "int32", "seen": "int32", "gaps": "int32",
    }  # fmt: skip


def test_evaluation_without_users(tmp_path):
    store = distinct_store(tmp_path / "s", [26, 3])
    message = "has no user to evaluate: protocol next-8 needs 27 items, the longest user has 26"
    with pytest.raises(UserError, match=message):
        evaluation_batches(store, Split("next-8"), "test", 10, 8)
    with pytest.raises(UserError, match="`part` must be one of dev, test; got 'train'"):
        evaluation_batches(store, Split("next-8"), "train", 10, 8)  # pyright: ignore
