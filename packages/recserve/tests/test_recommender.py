"""Recommendations in the caller's ids."""

import json
import shutil
import threading

import numpy as np
import pytest

import recserve

STRING_IDS = sorted(f"track:{name}" for name in "abcdefghijklmnopqrst")


@pytest.fixture
def index(bundle, tmp_path):
    """Index folder of the small bundle."""
    return recserve.build(bundle.path, tmp_path / "index").path


@pytest.fixture
def recommender(index):
    """Recommender of the small bundle."""
    return recserve.Recommender.open(index)


@pytest.fixture
def strings(toys, tmp_path):
    """Recommender with item and user ids that are strings."""
    source = toys.write(tmp_path / "s", item_ids=STRING_IDS, user_ids=["ann", "bob", "Ünal"])
    return recserve.Recommender.open(recserve.build(source.path, tmp_path / "s-index").path)


def expected(toys, bundle, rows, k, hidden):
    """Returns ids and scores by sorting everything."""
    query = toys.encode(bundle.vectors, rows).astype(np.float64)
    scores = bundle.vectors.astype(np.float64) @ query
    kept = [row for row in range(1, len(scores)) if row not in hidden]
    best = sorted(kept, key=lambda row: (-scores[row], row))[:k]
    return tuple(bundle.item_ids[row - 1] for row in best), scores[best]


@pytest.mark.parametrize("exclude_seen", [None, True, False])
def test_history(recommender, bundle, toys, exclude_seen):
    history = [bundle.item_ids[row - 1] for row in (2, 4, 6, 8, 10)]
    found = recommender.recommend(history, 5, exclude_seen=exclude_seen)
    hidden = () if exclude_seen is False else (2, 4, 6, 8, 10)
    item_ids, scores = expected(toys, bundle, [2, 4, 6, 8, 10], 5, hidden)
    assert found.item_ids == item_ids
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5)
    assert found.num_unknown == 0
    assert {type(item_id) for item_id in found.item_ids} == {int}
    assert {type(score) for score in found.scores} == {float}


def test_default_of_exclude_seen_is_the_models(toys, tmp_path):
    source = toys.write(tmp_path / "open", hide_seen=False)
    recommender = recserve.Recommender.open(recserve.build(source.path, tmp_path / "i").path)
    history = source.item_ids[:3]
    default = recommender.recommend(history, 20)
    assert default == recommender.recommend(history, 20, exclude_seen=False)
    assert default != recommender.recommend(history, 20, exclude_seen=True)


def test_user_is_the_stored_history(recommender, bundle):
    history = [bundle.item_ids[row - 1] for row in bundle.histories[1]]
    assert recommender.recommend_user(12) == recommender.recommend(history)
    assert recommender.recommend_user(13) == recommender.recommend([])


def test_strings(strings):
    found = strings.recommend([STRING_IDS[0], "track:nowhere"], 3)
    assert set(found.item_ids) <= set(STRING_IDS) - {STRING_IDS[0]}
    assert found.num_unknown == 1
    assert strings.recommend_user("Ünal") == strings.recommend([])


def test_batch_equals_single_calls(recommender, bundle):
    rng = np.random.default_rng(4)
    histories = [rng.choice(bundle.item_ids, rng.integers(0, 9)).tolist() for _ in range(70)]
    together = recommender.recommend_batch(histories, 6)
    for history, found in zip(histories, together, strict=True):
        alone = recommender.recommend(history, 6)
        assert alone.item_ids == found.item_ids
        np.testing.assert_allclose(alone.scores, found.scores, rtol=1e-5)
    assert recommender.recommend_batch([]) == []


def test_repeated_items_are_hidden_once(recommender, bundle):
    found = recommender.recommend([bundle.item_ids[0]] * 30, 20)
    assert len(found.item_ids) == 19


def test_fewer_results_only_when_hiding_leaves_fewer(recommender, bundle):
    found = recommender.recommend(bundle.item_ids[:15], 8)
    assert len(found.item_ids) == 5
    assert set(found.item_ids) == set(bundle.item_ids[15:])
    assert recommender.recommend(bundle.item_ids, 8).item_ids == ()


def test_search_takes_vectors_and_ids_to_exclude(recommender, bundle):
    vectors = np.eye(5, dtype=np.float32)[:2]
    first, second = recommender.search(vectors, 20, exclude=[[bundle.item_ids[3], 1], []])
    assert set(first.item_ids) == set(bundle.item_ids) - {bundle.item_ids[3]}
    assert set(second.item_ids) == set(bundle.item_ids)
    assert recommender.search(vectors, 20)[1] == second


@pytest.mark.parametrize(
    ("k", "message"),
    [
        (0, "`k` must be a whole number, at least 1; got 0"),
        (-3, "`k` must be a whole number, at least 1; got -3"),
        (2.0, "`k` must be a whole number, at least 1; got 2.0"),
        (True, "`k` must be a whole number, at least 1; got True"),
        (21, "`k` is 21 but the catalog has 20 items; ask for fewer"),
    ],
)
def test_bad_k(recommender, k, message):
    for ask in (
        lambda: recommender.recommend([], k),
        lambda: recommender.recommend_user(11, k),
        lambda: recommender.search(np.ones((1, 5), np.float32), k),
    ):
        with pytest.raises(recserve.UserError) as error:
            ask()
        assert str(error.value) == message


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (np.ones((1, 4), np.float32), "must have shape [Q, 5] for this model; got (1, 4)"),
        (np.ones(5, np.float32), "must have shape [Q, 5] for this model; got (5,)"),
        (np.ones((1, 5)), "must be a float32 array; got float64"),
        ([[1.0] * 5], "must be a float32 array; got list"),
        (np.full((1, 5), np.nan, np.float32), "must be finite; got NaN or infinity"),
        (np.full((1, 5), np.inf, np.float32), "must be finite; got NaN or infinity"),
    ],
)
def test_bad_vectors(recommender, vectors, message):
    with pytest.raises(recserve.UserError) as error:
        recommender.search(vectors)
    assert message in str(error.value)


def test_exclude_needs_one_entry_per_query(recommender):
    with pytest.raises(recserve.UserError, match="one sequence per query, 2; got 1"):
        recommender.search(np.ones((2, 5), np.float32), exclude=[[]])


@pytest.mark.parametrize("user_id", [14, -1, 0])
def test_unknown_user(recommender, user_id):
    with pytest.raises(recserve.UserError, match=f"user {user_id} is not among the 3 users of"):
        recommender.recommend_user(user_id)


def test_model_without_users(toys, tmp_path):
    source = toys.write(tmp_path / "none", histories=(), user_ids=())
    recommender = recserve.Recommender.open(recserve.build(source.path, tmp_path / "i").path)
    assert len(recommender.recommend([100]).item_ids) == 8
    with pytest.raises(recserve.UserError, match="is not among the 0 users"):
        recommender.recommend_user(11)


def test_header_names_the_model(recommender):
    assert recommender.header.model == {"name": "toy", "kind": "sasrec", "step": 7}
    assert recommender.searcher_kind == "exact"


def test_threads_share_one_recommender(recommender, bundle):
    histories = [bundle.item_ids[i : i + 5] for i in range(12)]
    wanted = [recommender.recommend(history) for history in histories]
    recommender = recserve.Recommender.open  # the threads also race for the first compilation
    fresh = recommender(bundle.path.parent / "index")
    barrier, failures = threading.Barrier(6), []

    def work():
        barrier.wait()
        for _ in range(20):
            found = [fresh.recommend(history) for history in histories]
            if found != wanted:
                failures.append(found)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_threads_share_one_scann_searcher(large_index):
    recommender = recserve.Recommender.open(large_index)
    queries = np.random.default_rng(6).normal(size=(100, 33)).astype(np.float32)
    wanted = recommender.search(queries)
    results: dict[int, object] = {}

    def work(i):
        results[i] = recommender.search(queries)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(4)] == [wanted] * 4


# Index folders that cannot be opened.


def refuse(index, message):
    """Opens a folder and expects a `UserError`."""
    with pytest.raises(recserve.UserError) as error:
        recserve.Recommender.open(index)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def edit(index, **fields):
    """Changes fields of the manifest."""
    content = json.loads((index / "manifest.json").read_text()) | fields
    (index / "manifest.json").write_text(json.dumps(content))


def test_missing_index(tmp_path):
    refuse(tmp_path / "no", "no is no index folder: it has no manifest.json; write one with `recs")


def test_bundle_taken_for_an_index(bundle):
    refuse(bundle.path, "is no index folder: it has no manifest.json")


@pytest.mark.parametrize("version", [0, 2, "1"])
def test_other_version(index, version):
    edit(index, version=version)
    refuse(index, f"has version {version!r} but this recserve reads 1; write one with `recserve b")


@pytest.mark.parametrize(
    "searcher",
    [
        None,
        {},
        {"kind": "exact"},
        {"requested": "auto", "kind": "scann", "reason": "", "scann": None},
    ],
)
def test_damaged_searcher(index, searcher):
    edit(index, searcher=searcher)
    refuse(index, "field 'searcher'")


def test_missing_index_file(index):
    (index / "users.parquet").unlink()
    refuse(index, "users.parquet is missing but")


def test_truncated_index_file(index):
    content = (index / "item_embeddings.npy").read_bytes()
    (index / "item_embeddings.npy").write_bytes(content[:100])
    refuse(index, f"item_embeddings.npy has 100 bytes but {index}/manifest.json lists")


def test_changed_index_file(index, bundle):
    changed = bundle.vectors.copy()
    changed[7, 2] += 1
    np.save(index / "item_embeddings.npy", changed)
    refuse(index, "item_embeddings.npy has SHA-256")


def test_changed_scann_file(large_index, tmp_path):
    shutil.copytree(large_index, tmp_path / "index")
    path = tmp_path / "index" / "scann" / "hashed_dataset.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    refuse(tmp_path / "index", "hashed_dataset.npy has SHA-256")


def test_index_and_bundle_can_be_moved(index, bundle, tmp_path):
    wanted = recserve.Recommender.open(index).recommend([100])
    (tmp_path / "elsewhere").mkdir()
    moved = index.rename(tmp_path / "elsewhere" / "index")
    assert recserve.Recommender.open(moved).recommend([100]) == wanted


def test_scann_index_can_be_moved(large_index, tmp_path):
    queries = np.random.default_rng(6).normal(size=(10, 33)).astype(np.float32)
    wanted = recserve.Recommender.open(large_index).search(queries)
    shutil.copytree(large_index, tmp_path / "moved")
    assert recserve.Recommender.open(tmp_path / "moved").search(queries) == wanted


def test_index_replaced_while_it_is_opened(index, bundle, toys, tmp_path, monkeypatch):
    from recserve._src.catalog import load_catalog

    other = toys.write(tmp_path / "other", item_ids=range(900, 920))

    def swap(folder, header):
        recserve.build(other.path, index, overwrite=True)
        return load_catalog(folder, header)

    monkeypatch.setattr("recserve._src.recommender.load_catalog", swap)
    refuse(index, "was replaced while it was being opened; open it again")


def test_index_replaced_after_it_was_opened(index, recommender, bundle, toys, tmp_path):
    wanted = recserve.Recommender.open(index).recommend([100, 107])
    other = toys.write(tmp_path / "other", vectors=toys.vectors(20, 6))
    recserve.build(other.path, index, overwrite=True)
    assert recommender.recommend([100, 107]) == wanted  # nothing was encoded before
