"""Measuring approximate against exact search."""

import math

import numpy as np
import pytest

import recserve


def test_scann_on_user_histories(large_index):
    report = recserve.measure_recall(large_index, num_queries=150)
    assert (report.searcher, report.query_source) == ("scann", "user histories")
    assert (report.num_queries, report.k, report.seen_hidden) == (150, 8, True)
    assert 0.9 <= report.ann_recall_at_k <= 1
    assert 0 < report.p50_ms <= report.p99_ms
    assert 0 < report.exact_p50_ms <= report.exact_p99_ms


def test_the_seed_decides_which_queries_are_drawn(large_index, monkeypatch):
    from recserve._src import recall

    draw = recall._draw
    drawn = []

    def recorded(*arguments):
        result = draw(*arguments)
        drawn.append(result[1])
        return result

    monkeypatch.setattr(recall, "_draw", recorded)
    for seed in (1, 1, 2):
        recserve.measure_recall(large_index, num_queries=20, seed=seed)
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


def test_exact_search_finds_everything(bundle, tmp_path):
    index = recserve.build(bundle.path, tmp_path / "index").path
    report = recserve.measure_recall(index)
    # Two of the three users have a history; hiding leaves 14 and 17 of 20 items.
    assert (report.searcher, report.num_queries, report.ann_recall_at_k) == ("exact", 2, 1.0)
    assert recserve.measure_recall(index, k=20).ann_recall_at_k == 1.0


def test_item_vectors_stand_in_for_missing_histories(toys, tmp_path):
    source = toys.write(tmp_path / "none", histories=(), user_ids=())
    index = recserve.build(source.path, tmp_path / "index").path
    report = recserve.measure_recall(index, num_queries=1000)
    assert (report.query_source, report.num_queries) == ("random item vectors", 20)
    assert not report.seen_hidden


def test_missed_results_lower_the_recall(bundle, tmp_path, monkeypatch):
    from recserve._src import recall
    from recserve._src.exact import Neighbors

    timed = recall._timed
    seen = []

    def worse(searcher, queries, k, hidden, show_progress):
        results, times = timed(searcher, queries, k, hidden, show_progress)
        seen.append(len(results))
        halves = [Neighbors(each.rows[: k // 2], each.scores[: k // 2]) for each in results]
        return halves, times

    monkeypatch.setattr(recall, "_timed", worse)
    index = recserve.build(bundle.path, tmp_path / "index").path
    assert math.isclose(recserve.measure_recall(index).ann_recall_at_k, 0.5)
    assert seen == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_queries": 0}, "`num_queries` must be at least 1; got 0"),
        ({"k": 21}, "`k` is 21 but the catalog has 20 items"),
        ({"seed": -1}, "`seed` must be at least 0; got -1"),
    ],
)
def test_bad_arguments(bundle, tmp_path, arguments, message):
    index = recserve.build(bundle.path, tmp_path / "index").path
    with pytest.raises(recserve.UserError) as error:
        recserve.measure_recall(index, **arguments)
    assert message in str(error.value)
