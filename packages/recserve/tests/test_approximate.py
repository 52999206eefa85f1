"""ScaNN: recall, exact scores, hidden items, and how it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import recserve
from recserve._src import approximate
from recserve._src.approximate import ScannSearcher

pytest.importorskip("scann.scann_ops.py.scann_ops_pybind", reason="ScaNN is not installed")

NOTHING = np.empty(0, np.int32)


@pytest.fixture(scope="module")
def recommender(large_index):
    """A recommender that searches with ScaNN."""
    recommender = recserve.Recommender.open(large_index)
    assert isinstance(recommender.searcher, ScannSearcher)
    return recommender


@pytest.fixture(scope="module")
def queries(large_bundle):
    """`[200, 33]` queries near cluster members; the last column reads the bias."""
    rng = np.random.default_rng(8)
    near = large_bundle.vectors[rng.integers(1, 30_001, 200), :-1] * 1.5
    noise = 0.3 * rng.normal(size=near.shape)
    return np.concatenate([near + noise, np.ones((200, 1))], axis=1).astype(np.float32)


def recall(found, wanted):
    """Returns the share of wanted rows that were found."""
    pairs = zip(found, wanted, strict=True)
    return np.mean([np.isin(w.rows, f.rows).mean() for f, w in pairs])


@pytest.mark.parametrize("k", [1, 8, 100, 1000])
def test_ann_recall_at_k(recommender, queries, k):
    hidden = [NOTHING] * len(queries)
    found = recommender.searcher.search(queries, k, hidden)
    wanted = recommender.exact_searcher.search(queries, k, hidden)
    assert all(len(each.rows) == k for each in found)
    assert recall(found, wanted) >= 0.95


def test_scores_are_those_of_exact_search(recommender, queries):
    hidden = [NOTHING] * len(queries)
    found = recommender.searcher.search(queries, 8, hidden)
    wanted = recommender.exact_searcher.search(queries, 8, hidden)
    shared = 0
    for some, all_ in zip(found, wanted, strict=True):
        scores = dict(zip(all_.rows.tolist(), all_.scores.tolist(), strict=True))
        for row, score in zip(some.rows.tolist(), some.scores.tolist(), strict=True):
            if row in scores:
                assert scores[row] == score
                shared += 1
        assert some.scores.tolist() == sorted(some.scores.tolist(), reverse=True)
    assert shared > 1000


@pytest.mark.parametrize("num_hidden", [8, 700, 14_000, 29_995])
def test_hidden_items_are_replaced_by_the_next_best(recommender, queries, num_hidden):
    # The best items are hidden: the hardest case for an approximate searcher.
    best = recommender.exact_searcher.search(queries[:20], num_hidden, [NOTHING] * 20)
    hidden = [np.sort(each.rows) for each in best]
    found = recommender.searcher.search(queries[:20], 8, hidden)
    wanted = recommender.exact_searcher.search(queries[:20], 8, hidden)
    for each, rows, exact in zip(found, hidden, wanted, strict=True):
        assert len(each.rows) == len(exact.rows) == min(8, 30_000 - num_hidden)
        assert not np.isin(each.rows, rows).any()
        assert len(set(each.rows.tolist())) == len(each.rows)
    assert recall(found, wanted) >= 0.9


def test_answer_depends_neither_on_batch_nor_on_load(recommender, queries, large_index):
    again = recserve.Recommender.open(large_index)
    together = recommender.search(queries)
    assert again.search(queries) == together
    assert [recommender.search(query[None])[0] for query in queries] == together


def test_every_row_can_be_found_but_the_padding_row(recommender):
    query = np.zeros((1, 33), np.float32)
    query[0, -1] = -1.0  # prefers the lowest bias; padding has score 0, every item more
    for k in (8, 30_000):
        (found,) = recommender.searcher.search(query, k, [NOTHING])
        assert len(found.rows) == k
        assert found.rows.min() >= 1


@pytest.mark.parametrize(
    ("num_items", "k", "num_hidden", "asks_scann"),
    [
        (2_000, 8, 0, True),
        (2_000, 8, 54, True),  # 62 answers deep: 8 candidates for each are the 500 of the index
        (2_000, 8, 55, False),
        (2_000, 100, 0, False),
        (256, 8, 0, True),
        (250, 8, 0, False),
    ],
)
def test_small_index_asks_scann_unless_the_answer_is_deep(
    toys, tmp_path, monkeypatch, num_items, k, num_hidden, asks_scann
):
    source = toys.write(tmp_path / "bundle", vectors=toys.vectors(num_items, 9))
    config = recserve.SearcherConfig(searcher="scann")
    recommender = recserve.Recommender.open(
        recserve.build(source.path, tmp_path / "index", config=config).path
    )
    searcher = recommender.searcher
    assert isinstance(searcher, ScannSearcher)
    propose = searcher._candidates
    asked = []

    def counted(query, num_candidates):
        asked.append(num_candidates)
        return propose(query, num_candidates)

    monkeypatch.setattr(searcher, "_candidates", counted)
    query = np.ones((1, 9), np.float32)
    hidden = [np.arange(1, 1 + num_hidden, dtype=np.int32)]
    found = searcher.search(query, k, hidden)
    assert asked == ([num_items // 4] if asks_scann else [])
    assert recall(found, recommender.exact_searcher.search(query, k, hidden)) >= 0.75


def test_training_is_silent_but_hides_nothing_of_others(toys, tmp_path, capfd):
    sizes = recserve.derive_scann_sizes(2_000, 9)
    vectors = toys.vectors(2_000, 9)
    approximate.train_scann(vectors, sizes, tmp_path / "a")
    assert capfd.readouterr().err == ""
    with approximate._without_scann_log():
        os.write(2, b"I0000 00:00:1796 1 partitioner.cc:58] Size\nline of a thread\n")
    assert capfd.readouterr().err == "line of a thread\n"


def test_log_is_shown_when_training_fails(capfd):
    def fail():
        os.write(2, b"W0000 00:00:1796 1 gmm_utils.cc:1026] the reason\n")
        raise KeyError

    with pytest.raises(KeyError):
        approximate._without_scann_log()(fail)()
    assert capfd.readouterr().err == "W0000 00:00:1796 1 gmm_utils.cc:1026] the reason\n"
    os.write(2, b"as before\n")
    assert capfd.readouterr().err == "as before\n"


def test_training_without_stderr(toys, tmp_path, child_environment):
    source = toys.write(tmp_path / "bundle", vectors=toys.vectors(100, 5))
    code = "import os, sys; os.close(2); from recserve._src import cli; sys.exit(cli.main())"
    options = ["build", source.path, "--out", tmp_path / "i", "--searcher", "scann"]
    command = [sys.executable, "-c", code, *options]
    subprocess.run(command, env=child_environment, check=True, stdout=subprocess.DEVNULL)


def test_folder_that_cannot_be_written_is_named(toys, tmp_path, monkeypatch):
    monkeypatch.setattr(
        Path, "mkdir", lambda path: None
    )  # so ScaNN itself fails, as on a full disk
    sizes = recserve.derive_scann_sizes(100, 5)
    with pytest.raises(OSError, match=f"ScaNN cannot write to {tmp_path}/scann: "):
        approximate.train_scann(toys.vectors(100, 5), sizes, tmp_path / "scann")


def test_pickle_beside_scann_files_is_refused(recommender, large_index, tmp_path):
    import shutil

    shutil.copytree(large_index, tmp_path / "index")
    (tmp_path / "index" / "scann" / "scann_docids.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(recserve.UserError, match="is a pickle file, which recserve never writes"):
        recserve.Recommender.open(tmp_path / "index")


IMPORT = """
import sys
from recserve._src import approximate
assert approximate.scann_problem() is None, approximate.scann_problem()
assert "tensorflow" not in sys.modules
assert "scann" not in sys.modules
"""


def test_import_runs_no_tensorflow(tmp_path, child_environment):
    # A TensorFlow that ScaNN was not built for fails like this one.
    (tmp_path / "tensorflow.py").write_text("raise RuntimeError('undefined symbol')")
    path = f"{tmp_path}:{child_environment['PYTHONPATH']}"
    environment = child_environment | {"PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", IMPORT], env=environment, check=True)


def test_broken_package_is_reported_with_its_reason(monkeypatch):
    def broken():
        raise ImportError("libscann.so: undefined symbol: foo")

    monkeypatch.setattr(approximate, "_import_scann", broken)
    problem = approximate.scann_problem()
    assert problem is not None
    assert problem.startswith("ScaNN cannot be imported (libscann.so: undefined symbol: foo)")


def test_missing_package_names_the_install_command(monkeypatch):
    approximate._import_scann.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in [name for name in sys.modules if name == "scann"]:
        monkeypatch.delitem(sys.modules, name)
    problem = approximate.scann_problem()
    assert problem == "ScaNN is not installed; pip install scann to use it"
