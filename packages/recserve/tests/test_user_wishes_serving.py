"""What users of recommenders trip over when they serve one; the points have stable numbers.

1 ids that are not 1..N, 2 padding, 5 seen items, 11 a model that stands alone, 12 new users in
real time, 13 unknown items, 14 ScaNN cannot be installed, 15 swapping an index folder.
"""

import shutil
import threading

import numpy as np
import pytest

import recserve


@pytest.fixture
def open_toy(toys, tmp_path):
    """Builds an index folder of a toy bundle and opens it."""

    def call(**arguments):
        source = toys.write(tmp_path / "b", **arguments)
        return recserve.Recommender.open(recserve.build(source.path, tmp_path / "i").path)

    return call


@pytest.mark.parametrize(
    "item_ids",
    [
        [-(2**63), *range(-9, 9), 2**63 - 1],
        [10**15 + i * i for i in range(20)],
        [f"B00{i:03}/ä ö,{i}" for i in range(20)],
        [0, *range(7, 26)],
    ],
)
def test_point_01_ids_that_are_not_1_to_n(open_toy, item_ids):
    recommender = open_toy(item_ids=item_ids)
    found = recommender.recommend(item_ids[:3], 17)
    assert set(found.item_ids) == set(item_ids[3:])
    assert found.num_unknown == 0


@pytest.mark.parametrize("exclude_seen", [True, False])
def test_point_02_padding_is_never_recommended(open_toy, toys, exclude_seen):
    vectors = -np.abs(toys.vectors(20, 5))  # the padding row would score highest
    recommender = open_toy(vectors=vectors)
    vectors_found = recommender.search(np.ones((1, 5), np.float32), 20)
    found = recommender.recommend([100], 20, exclude_seen=exclude_seen)
    for each in (*vectors_found, found):
        assert set(each.item_ids) <= {100 + 7 * i for i in range(20)}
        assert len(set(each.item_ids)) == len(each.item_ids)
    assert len(found.item_ids) == (19 if exclude_seen else 20)


def test_point_02_padding_is_never_recommended_by_scann(large_index):
    recommender = recserve.Recommender.open(large_index)
    query = np.zeros((1, 33), np.float32)
    query[0, -1] = -1e-6
    (found,) = recommender.search(query, 3000)
    assert len(set(found.item_ids)) == 3000
    assert set(found.item_ids) <= {100 + 7 * i for i in range(30_000)}


@pytest.mark.parametrize("num_seen", [0, 1, 12, 18])
def test_point_05_seen_items_are_hidden_and_replaced(open_toy, bundle, num_seen):
    recommender = open_toy()
    history = bundle.item_ids[:num_seen]
    everything = recommender.recommend(history, 20, exclude_seen=False)
    shown = [item_id for item_id in everything.item_ids if item_id not in history]
    hidden = recommender.recommend(history, 8, exclude_seen=True)
    assert list(hidden.item_ids) == shown[:8]


def test_point_05_the_whole_history_is_hidden_not_only_what_the_model_reads(open_toy, bundle):
    recommender = open_toy()  # the encoder reads four items
    found = recommender.recommend(bundle.item_ids[:10], 10, exclude_seen=True)
    assert set(found.item_ids) == set(bundle.item_ids[10:])


def test_point_05_scann_returns_k_although_the_best_are_hidden(large_index, large_bundle):
    recommender = recserve.Recommender.open(large_index)
    history = recommender.recommend(large_bundle.item_ids[:4], 400, exclude_seen=False).item_ids
    found = recommender.recommend(history, 8, exclude_seen=True)
    assert len(found.item_ids) == 8
    assert not set(found.item_ids) & set(history)


def test_point_11_the_index_folder_stands_alone(bundle, tmp_path):
    report = recserve.build(bundle.path, tmp_path / "index")
    wanted = recserve.Recommender.open(report.path).recommend_user(11)
    shutil.rmtree(bundle.path)
    moved = shutil.move(report.path, tmp_path / "other machine")
    recommender = recserve.Recommender.open(moved)
    assert recommender.recommend_user(11) == wanted
    assert recommender.header.model["name"] == "toy"


@pytest.mark.parametrize(
    "name", ["items.parquet", "item_embeddings.npy", "query_encoder.stablehlo"]
)
def test_point_11_a_part_of_another_model_is_refused(bundle, tmp_path, toys, name):
    vectors = toys.vectors(20, 6, seed=9)
    other = toys.write(tmp_path / "other", vectors=vectors, item_ids=range(20))
    first = recserve.build(bundle.path, tmp_path / "a").path
    second = recserve.build(other.path, tmp_path / "b").path
    shutil.copy(second / name, first / name)
    with pytest.raises(recserve.UserError, match=name.replace(".", r"\.")):
        recserve.Recommender.open(first)


def test_point_12_new_user_one_request_or_many(open_toy, bundle):
    recommender = open_toy()
    one = recommender.recommend(bundle.item_ids[2:5])
    many = recommender.recommend_batch([bundle.item_ids[2:5], [], bundle.item_ids[:1]])
    assert len(one.item_ids) == len(one.scores) == 8
    assert [len(each.item_ids) for each in many] == [8, 8, 8]
    assert many[0].item_ids == one.item_ids


def test_point_13_unknown_items_are_skipped_and_counted(open_toy, bundle):
    recommender = open_toy()
    known = bundle.item_ids[:2]
    found = recommender.recommend([1, known[0], 2, known[1], 3])
    plain = recommender.recommend(known)
    assert (found.item_ids, found.scores) == (plain.item_ids, plain.scores)
    assert (found.num_unknown, plain.num_unknown) == (3, 0)


def test_point_13_nothing_known_has_a_defined_answer(open_toy):
    recommender = open_toy()
    found, empty = recommender.recommend([1, 2, 3]), recommender.recommend([])
    assert (found.item_ids, found.scores) == (empty.item_ids, empty.scores)
    assert (found.num_unknown, empty.num_unknown) == (3, 0)
    assert np.isfinite(empty.scores).all()


def test_point_14_without_scann_exact_search_answers(large_index, without_scann, tmp_path, caplog):
    # The folder was built with the explicit searcher "scann", so it insists.
    with pytest.raises(recserve.UserError, match="was built for ScaNN explicitly, but ScaNN is no"):
        recserve.Recommender.open(large_index)
    shutil.copytree(large_index, tmp_path / "auto")
    manifest = (tmp_path / "auto" / "manifest.json").read_text()
    manifest = manifest.replace('"requested": "scann"', '"requested": "auto"')
    (tmp_path / "auto" / "manifest.json").write_text(manifest)
    recommender = recserve.Recommender.open(tmp_path / "auto")
    assert recommender.searcher_kind == "exact"
    assert len(recommender.recommend([100]).item_ids) == 8
    (record,) = caplog.records
    assert record.getMessage().startswith("exact search instead of ScaNN: ScaNN is not installed")


def test_point_15_swapping_beside_readers(bundle, toys, tmp_path):
    other = toys.write(tmp_path / "other", item_ids=range(900, 920))
    target = recserve.build(bundle.path, tmp_path / "index").path
    running = recserve.Recommender.open(target)
    wanted = running.recommend([100])
    done, answers = threading.Event(), set()

    def read():
        while not done.is_set():
            try:
                found = recserve.Recommender.open(target).search(np.ones((1, 5), np.float32), 20)
                answers.add(min(found[0].item_ids))
            except (recserve.UserError, OSError):
                answers.add("refused")  # caught between the two models: an error, never a mixture

    reader = threading.Thread(target=read)
    reader.start()
    for source in (other, bundle, other):
        recserve.build(source.path, target, overwrite=True)
    done.set()
    reader.join()
    assert answers <= {100, 900, "refused"}
    assert running.recommend([100]) == wanted
    assert min(recserve.Recommender.open(target).recommend([], 20).item_ids) == 900
