"""The recserve command: output, messages on one line, exit statuses."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import recserve
from recserve._src import cli


@pytest.fixture
def run(capsys):
    """Runs the command and returns status, stdout and stderr."""

    def call(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def index(bundle, tmp_path):
    """Index folder of the small bundle."""
    return recserve.build(bundle.path, tmp_path / "index").path


def test_build(run, bundle, tmp_path):
    status, out, err = run("build", bundle.path, "--out", tmp_path / "index")
    assert (status, err) == (0, "")
    first, second = out.splitlines()
    assert first.startswith(f"wrote {tmp_path}/index: 20 items, 5 dimensions, 0.0 MB in ")
    assert second == "searcher: exact (20 items are fewer than 20,000)"


def test_build_refuses_then_overwrites(run, bundle, index):
    status, out, err = run("build", bundle.path, "--out", index)
    assert (status, out) == (2, "")
    assert err == f"error: {index} exists already; choose another name or pass --overwrite\n"
    assert run("build", bundle.path, "--out", index, "--overwrite")[0] == 0


def test_every_size_is_an_option(run, bundle, tmp_path):
    sizes = ("--num-leaves", 4, "--leaves-to-search", 3, "--reorder", 15)
    training = ("--training-sample-size", 19, "--dimensions-per-block", 1)
    rest = ("--anisotropic-threshold", 0.4, "--searcher", "scann")
    status, out, err = run("build", bundle.path, "--out", tmp_path / "i", *sizes, *training, *rest)
    assert status == 0, err
    assert "searcher: scann (4 leaves, 3 searched, 15 candidates scored exactly)" in out
    manifest = json.loads((tmp_path / "i" / "manifest.json").read_text())
    assert list(manifest["searcher"]["scann"].values()) == [4, 3, 15, 19, 1, 0.4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--searcher", "faiss"], "`searcher` must be one of auto, scann, exact; got 'faiss'"),
        (["--num-leaves", "many"], "argument --num-leaves: invalid int value: 'many'"),
        (["--reorder", "5"], "`reorder` applies to ScaNN only, but exact search would be built"),
        (["--leaves", "5"], "unrecognized arguments: --leaves 5"),
    ],
)
def test_bad_build_options(run, bundle, tmp_path, options, message):
    status, out, err = run("build", bundle.path, "--out", tmp_path / "i", *options)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert not (tmp_path / "i").exists()


def test_auto_without_scann_builds_exact_with_one_line(
    run, large_bundle, tmp_path, without_scann, caplog
):
    status, out, _ = run("build", large_bundle.path, "--out", tmp_path / "i")
    assert status == 0
    assert out.splitlines()[1].startswith("searcher: exact (ScaNN is not installed; pip install")
    assert [record.getMessage() for record in caplog.records] == [
        "exact search instead of ScaNN: ScaNN is not installed; pip install scann to use it"
    ]


def test_explicit_scann_without_scann(run, bundle, tmp_path, without_scann):
    status, _, err = run("build", bundle.path, "--out", tmp_path / "i", "--searcher", "scann")
    assert status == 2
    assert err == "error: ScaNN is not installed; pip install scann to use it\n"


def test_query_table(run, index, bundle):
    status, out, err = run("query", index, "--history", "100,107", "-k", 3)
    found = recserve.Recommender.open(index).recommend([100, 107], 3)
    header, *lines = out.splitlines()
    assert (status, err, header.split()) == (0, "", ["rank", "item_id", "score"])
    for rank, line in enumerate(lines, 1):
        columns = line.split()
        assert columns[:2] == [str(rank), str(found.item_ids[rank - 1])]
        assert columns[2] == f"{found.scores[rank - 1]:.4f}"
    assert len(lines) == 3


def test_query_json(run, index):
    status, out, _ = run("query", index, "--user", 12, "--json")
    found = recserve.Recommender.open(index).recommend_user(12)
    assert status == 0
    assert json.loads(out) == {
        "item_ids": list(found.item_ids),
        "scores": list(found.scores),
        "num_unknown": 0,
    }


def test_query_seen_switches(run, index):
    shown = {}
    for switch in ("--exclude-seen", "--include-seen"):
        _, out, _ = run("query", index, "--history", "100,107", "-k", 18, switch, "--json")
        shown[switch] = set(json.loads(out)["item_ids"])
    assert not shown["--exclude-seen"] & {100, 107}
    assert len(shown["--exclude-seen"]) == 18
    assert run("query", index, "--history", "100", "-k", 20, "--include-seen")[0] == 0


def test_query_vector(run, index, tmp_path):
    vector = np.arange(5, dtype=np.float32)
    np.save(tmp_path / "one.npy", vector)
    np.save(tmp_path / "two.npy", vector[None])
    (found,) = recserve.Recommender.open(index).search(vector[None])
    for name in ("one.npy", "two.npy"):
        status, out, _ = run("query", index, "--vector", tmp_path / name, "--json")
        assert status == 0
        assert json.loads(out)["item_ids"] == list(found.item_ids)


def test_query_unknown_items_are_stated(run, index):
    status, out, err = run("query", index, "--history", "1,100,2", "--json")
    assert status == 0
    assert err == "note: 2 of 3 history items are not in the catalog and were skipped\n"
    assert json.loads(out)["num_unknown"] == 2


@pytest.mark.parametrize("history", ["", " ", "1,2,3"])
def test_query_without_any_known_item(run, index, history):
    status, out, _ = run("query", index, "--history", history, "--json")
    answer = recserve.Recommender.open(index).recommend([])
    assert status == 0
    assert json.loads(out)["item_ids"] == list(answer.item_ids)


def test_query_negative_ids_and_strings(run, toys, tmp_path):
    source = toys.write(tmp_path / "n", item_ids=range(-10, 10), user_ids=["a b", "b", "c"])
    index = recserve.build(source.path, tmp_path / "i").path
    assert run("query", index, "--history=-10,5", "-k", 1)[0] == 0
    assert run("query", index, "--user", "a b", "-k", 1)[0] == 0


def test_query_ignores_spaces_around_ids(run, toys, tmp_path):
    item_ids = [f"item {i}" for i in range(20)]
    source = toys.write(tmp_path / "s", item_ids=item_ids)
    index = recserve.build(source.path, tmp_path / "i").path
    spaced = run("query", index, "--history", " item 3, item 5 ", "--json")
    assert spaced == run("query", index, "--history", "item 3,item 5", "--json")
    assert json.loads(spaced[1])["num_unknown"] == 0


def test_query_help_says_how_to_ask_for_ids_with_commas(capsys):
    with pytest.raises(SystemExit):
        cli.main(["query", "--help"])
    assert "Ids that contain a comma can be asked through Python" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "one of the arguments --history --user --vector is required"),
        (["--history", "1", "--user", "2"], "argument --user: not allowed with argument --history"),
        (["--history", "1,x"], "item ids of this model are whole numbers; got 'x'"),
        (["--history", "1,,2"], "item ids of this model are whole numbers; got ''"),
        (["--history", str(2**63)], "item ids of this model have 64 bits; got 9223372036854775808"),
        (["--user", "x"], "user ids of this model are whole numbers; got 'x'"),
        (["--user", "99"], "user 99 is not among the 3 users of this model; pass the user's"),
        (["--user", "11", "-k", "0"], "`k` must be a whole number, at least 1; got 0"),
        (["--user", "11", "-k", "21"], "`k` is 21 but the catalog has 20 items; ask for fewer"),
        (["--user", "11", "-k", "x"], "argument -k: invalid int value: 'x'"),
        (["--vector", "nowhere.npy"], "nowhere.npy does not exist"),
        (["--vector", "text.npy"], "text.npy is not a NumPy array file (.npy): "),
        (["--vector", "many.npz"], "many.npz is not a NumPy array file (.npy): "),
        (["--vector", "folder"], "folder cannot be read: Is a directory"),
        (["--vector", "objects.npy"], "objects.npy is not a NumPy array file"),
        (["--vector", "short.npy"], "query vectors must have shape [Q, 5] for this model"),
        (["--vector", "double.npy"], "query vectors must be a float32 array; got float64"),
        (["--vector", "nan.npy"], "query vectors must be finite"),
        (["--vector", "three.npy"], "three.npy must hold one query vector; got shape (3, 5)"),
        (["--vector", "scalar.npy"], "scalar.npy must hold one query vector; got shape ()"),
        (["--vector", "short.npy", "--include-seen"], "--exclude-seen and --include-seen need a"),
        (["--vector", "short.npy", "--exclude-seen"], "--exclude-seen and --include-seen need a"),
    ],
)
def test_bad_queries(run, index, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.npy").write_text("text")
    np.savez("many.npz", vector=np.ones(5, np.float32))
    (tmp_path / "folder").mkdir()
    np.save("objects.npy", np.array([{}], dtype=object))
    np.save("short.npy", np.ones(4, np.float32))
    np.save("double.npy", np.ones(5))
    np.save("nan.npy", np.full(5, np.nan, np.float32))
    np.save("three.npy", np.ones((3, 5), np.float32))
    np.save("scalar.npy", np.float32(1))
    status, out, err = run("query", index, *options)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["query", "recall"])
def test_missing_index(run, tmp_path, command):
    options = ["--user", "1"] if command == "query" else []
    status, _, err = run(command, tmp_path / "no", *options)
    assert status == 2
    assert err.startswith(f"error: {tmp_path}/no is no index folder: it has no manifest.json;")


def test_recall(run, index):
    status, out, err = run("recall", index, "-k", 5)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == (
        "ANN recall@5 of exact search: 1.0000 (2 queries from user histories, seen items hidden)"
    )
    assert [line.split()[0] for line in lines[1:]] == ["latency", "exact"]


def test_recall_of_scann_shows_both_latencies(run, large_index):
    status, out, _ = run("recall", large_index, "--num-queries", 5)
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["ANN", "latency", "scann", "exact"]


def test_recall_json(run, index):
    status, out, _ = run("recall", index, "--num-queries", 1, "--seed", 3, "--json")
    assert status == 0
    report = json.loads(out)
    assert (report["ann_recall_at_k"], report["num_queries"], report["k"]) == (1.0, 1, 8)
    assert run("recall", index, "--num-queries", 0)[0] == 2


@pytest.mark.parametrize("arguments", [[], ["serve"], ["build"], ["query"], ["--nothing"]])
def test_wrong_usage_is_one_line(run, arguments):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["build", "query", "recall"])
def test_help_has_examples(run, capsys, command):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"examples:\n  recserve {command} " in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"recserve {recserve.__version__}\n"


def test_failure_of_the_system_is_status_1(run, bundle, tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr("recserve._src.build.copy_file", full)
    status, _, err = run("build", bundle.path, "--out", tmp_path / "i")
    assert status == 1
    assert err.startswith("error: [Errno 28] No space left on device")
    assert os.listdir(tmp_path) == ["bundle"]


LIMITED = """
import resource, sys
from recserve._src import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
sys.exit(cli.main(sys.argv[1:]))
"""


def test_full_disk_names_the_file_that_is_written(bundle, tmp_path, child_environment):
    # A limit on file sizes fails like a full disk: in the write itself, which knows no name.
    process = subprocess.run(
        [sys.executable, "-c", LIMITED, "build", bundle.path, "--out", tmp_path / "i"],
        env=child_environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert process.stderr.startswith(f"error: [Errno 27] File too large: '{tmp_path}/.i.tmp-")
    assert process.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["bundle"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_pipe_is_silent(index, tmp_path, child_environment, unbuffered):
    np.save(tmp_path / "vector.npy", np.ones(5, np.float32))
    code = "import sys; from recserve._src import cli; sys.exit(cli.main(sys.argv[1:]))"
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-c", code, "query", index, "--vector", tmp_path / "vector.npy"],
        env=child_environment | {"PYTHONUNBUFFERED": unbuffered},
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (1, b"")


def test_interrupt_is_status_130(run, bundle, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("recserve._src.build.load_catalog", interrupt)
    status, _, err = run("build", bundle.path, "--out", tmp_path / "i")
    assert (status, err) == (130, "error: interrupted; no partial output was left\n")
    assert os.listdir(tmp_path) == ["bundle"]


def test_as_a_process(bundle, tmp_path, child_environment):
    code = "import sys; from recserve._src.cli import main; sys.exit(main())"
    arguments = [sys.executable, "-W", "error", "-c", code, "build", bundle.path, "--out", "index"]
    process = subprocess.run(
        arguments, env=child_environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("wrote index: 20 items")
    assert process.stderr == ""
