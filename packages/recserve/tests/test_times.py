"""Models that read the times between the events of a history."""

import numpy as np
import pytest

import recserve
from recserve._src.cli import main

HISTORIES = ((1, 2, 3), (4, 5, 6, 7, 8, 9), ())
TIMES = ((10, 10, 25), (0, 100, 150, 151, 160, 260), ())


@pytest.fixture
def source(tmp_path, toys):
    return toys.write(tmp_path / "timed", histories=HISTORIES, times=TIMES)


@pytest.fixture
def recommender(tmp_path, source):
    return recserve.Recommender.open(recserve.build(source.path, tmp_path / "index").path)


def _scores(toys, source, rows, times, k=20):
    query = toys.encode(source.vectors, rows, times).astype(np.float64)
    return np.sort(source.vectors[1:] @ query)[::-1][:k]


@pytest.mark.parametrize("user", [0, 1, 2])
def test_a_stored_history_is_read_with_its_times(toys, source, recommender, user):
    found = recommender.recommend_user(source.user_ids[user], 20, exclude_seen=False)
    expected = _scores(toys, source, HISTORIES[user], TIMES[user])
    np.testing.assert_allclose(found.scores, expected, rtol=1e-5)


def test_a_history_given_with_times_equals_the_stored_one(source, recommender):
    for user, user_id in enumerate(source.user_ids):
        history = [source.item_ids[row - 1] for row in HISTORIES[user]]
        given = recommender.recommend(history, 5, times=TIMES[user])
        assert given == recommender.recommend_user(user_id, 5)
    histories = [[source.item_ids[row - 1] for row in each] for each in HISTORIES]
    batch = recommender.recommend_batch(histories, 5, times=TIMES)
    for found, user_id in zip(batch, source.user_ids, strict=True):
        expected = recommender.recommend_user(user_id, 5)
        np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5)


def test_unknown_items_leave_with_their_times(toys, source, recommender):
    ids = source.item_ids
    found = recommender.recommend([ids[0], -5, ids[2]], 20, times=[0, 3, 50], exclude_seen=False)
    assert found.num_unknown == 1
    expected = _scores(toys, source, [1, 3], [0, 50])
    np.testing.assert_allclose(found.scores, expected, rtol=1e-5)


def test_nobody_needs_no_times(recommender):
    assert recommender.recommend([], 3).scores == recommender.recommend([], 3, times=[]).scores


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (None, r"also reads the times between the events of a history; pass `times` \(--times\)"),
        ([1], "`times` must be one for each item of a history, 2; got 1"),
        ([2, 1], "`times` must never decrease"),
        ([1.5, 2.5], "`times` must be whole seconds"),
        ("now", "`times` must be whole seconds"),
        ([1, 2**64], "`times` must be whole seconds"),
    ],
)
def test_bad_times(source, recommender, times, message):
    with pytest.raises(recserve.UserError, match=message):
        recommender.recommend(source.item_ids[:2], 3, times=times)


def test_as_many_times_as_histories(source, recommender):
    with pytest.raises(recserve.UserError, match="one sequence per history, 1; got 2"):
        recommender.recommend_batch([source.item_ids[:1]], 3, times=[[1], [2]])


def test_a_model_without_times_refuses_them(tmp_path, bundle):
    recommender = recserve.Recommender.open(recserve.build(bundle.path, tmp_path / "plain").path)
    with pytest.raises(recserve.UserError, match="this model reads no times; leave `times`"):
        recommender.recommend(bundle.item_ids[:1], 3, times=[1])


def test_command(tmp_path, source, capsys):
    index = str(recserve.build(source.path, tmp_path / "index").path)
    ids = ",".join(str(source.item_ids[row - 1]) for row in HISTORIES[0])
    assert main(["query", index, "--history", ids, "--times", "10,10,25", "--json"]) == 0
    given = capsys.readouterr().out
    assert main(["query", index, "--user", "11", "--json"]) == 0
    assert capsys.readouterr().out == given
    assert main(["query", index, "--history", ids]) == 2
    assert capsys.readouterr().err.startswith("error: this model also reads the times between")
    assert main(["query", index, "--history", ids, "--times", "a"]) == 2
    assert "--times must be whole seconds separated by commas; got 'a'" in capsys.readouterr().err
    assert main(["query", index, "--user", "11", "--times", "1"]) == 2
    assert capsys.readouterr().err == "error: --times goes with --history; leave it out\n"
    assert main(["recall", index, "-k", "3"]) == 0


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([1, 2], r"history_times.npy has length 2 but the rest of the folder needs 9"),
        ([3, 2, 1, 4, 5, 6, 7, 8, 9], r"history_times.npy must never decrease within a user"),
    ],
)
def test_damaged_times(tmp_path, source, times, message):
    np.save(source.path / "history_times.npy", np.array(times))
    source.seal()
    with pytest.raises(recserve.UserError, match=message):
        recserve.build(source.path, tmp_path / "index")


def test_missing_times(tmp_path, source):
    (source.path / "history_times.npy").unlink()
    source.seal()
    with pytest.raises(recserve.UserError, match=r"lists no history_times.npy"):
        recserve.build(source.path, tmp_path / "index")


def test_an_encoder_of_another_model(tmp_path, source, bundle):
    encoder = "query_encoder.stablehlo"
    (source.path / encoder).write_bytes((bundle.path / encoder).read_bytes())
    source.seal()
    with pytest.raises(recserve.UserError, match=r"the encoder is of another model"):
        recserve.build(source.path, tmp_path / "index")
