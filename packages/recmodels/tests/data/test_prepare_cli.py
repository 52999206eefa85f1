"""The `prepare` command: report, options, progress."""

import argparse

import pytest

from recmodels._src.data import prepare as prepare_module
from recmodels._src.data.cli import add_prepare_parser
from recmodels._src.data.prepare import prepare, report
from recmodels._src.data.store import SequenceStore
from recmodels._src.errors import UserError


def _run(*arguments) -> int:
    parser = argparse.ArgumentParser()
    add_prepare_parser(parser.add_subparsers())
    args = parser.parse_args(["prepare", *map(str, arguments)])
    return args.run(args)


def _lengths_file(path, lengths):
    lines = [f"u{user:03} {' '.join(['7'] * n)}" for user, n in enumerate(lengths)]
    path.write_text("\n".join([*lines, "lonely", ""]))
    return path


def test_report(tmp_path, capsys):
    path = _lengths_file(tmp_path / "data", [1, 1, 2, 3, 5, 8, 13, 26, 27, 2000])
    assert _run(path, "--format", "user-lines", "--out", tmp_path / "s") == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        f"sequence store  {tmp_path / 's'}",
        "users           10",
        "items           1",
        "interactions    2,086",
        "length          1 / 8 / 2,000 / 2,000  (min / median / p90 / max)",
        "one event only  2 users, kept",
        "next-8          2 users to evaluate, 8 shorter than 27",
        "leave-one-out   7 users to evaluate, 3 shorter than 3",
        "skipped         1 x missing item id",
    ]
    assert captured.err == ""  # no progress bar on small files
    assert str(report(SequenceStore.open(tmp_path / "s"))) + "\n" == captured.out


def test_progress_bar_for_large_files_names_the_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prepare_module, "_BAR_FROM_BYTES", 1)
    path = _lengths_file(tmp_path / "data", [3])
    _run(path, "--format", "user-lines", "--out", tmp_path / "s")
    captured = capsys.readouterr()
    for step in ("1/3 reading", "2/3 numbering and sorting", "3/3 writing"):
        assert step in captured.err
        assert step not in captured.out


def test_every_option_reaches_the_store(tmp_path):
    (tmp_path / "a.csv").write_text("1,x,5\n1,y,4\n2,x,1\n")
    columns = ["--no-header", "--user", 1, "--item", 2, "--time", 3, "--min-interactions", 2]
    out = tmp_path / "s"
    for overwrite in ([], ["--overwrite"]):
        _run(tmp_path / "a.csv", "--format", "csv", *columns, "--out", out, *overwrite)
    store = SequenceStore.open(out)
    assert store.item_ids()[store.items - 1].tolist() == ["y", "x"]
    assert store.meta["filters"]["min_interactions"] == 2


def test_filters_reach_the_store_and_the_report(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("1,x,5\n1,x,5\n1,y,4\n2,y,1\n2,x,1\n3,z,1\n")
    options = ["--no-header", "--user", 1, "--item", 2, "--time", 3, "--format", "csv"]
    filters = ["--k-core", 2, "--deduplicate", "exact"]
    _run(tmp_path / "a.csv", *options, *filters, "--out", tmp_path / "s")
    store = SequenceStore.open(tmp_path / "s")
    histories = [store.item_ids()[store.sequence(user) - 1].tolist() for user in range(2)]
    assert histories == [["y", "x"], ["y", "x"]]
    assert store.meta["filters"] == {
        "min_played_pct": 0, "deduplicate": "exact", "min_interactions": 1, "k_core": 2,
    }  # fmt: skip
    skipped = {"exact duplicate of an earlier event": 1, "user with fewer than 2 events": 1}
    assert store.meta["skipped"] == skipped
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"skipped         {count} x {reason}" for reason, count in skipped.items()
    ]


def test_rows_of_another_store(tmp_path):
    (tmp_path / "a").write_text("1 20\n")
    (tmp_path / "b").write_text("1 10\n1 20\n")
    _run(tmp_path / "a", "--format", "pairs", "--out", tmp_path / "s1")
    _run(tmp_path / "b", "--format", "pairs", "--out", tmp_path / "s2", "--ids-from",
         tmp_path / "s1")  # fmt: skip
    assert SequenceStore.open(tmp_path / "s2").item_ids().tolist() == [20, 10]


def test_synthetic(tmp_path, capsys):
    sizes = ["--num-users", 40, "--num-items", 200, "--seed", 3, "--min-played-pct", 50]
    assert _run("--synthetic", *sizes, "--out", tmp_path / "s") == 0
    store = SequenceStore.open(tmp_path / "s")
    assert store.meta["source"] == {
        "name": "synthetic",
        "format": "yambda-flat",
        "num_users": 40,
        "num_items": 200,
        "seed": 3,
        "columns": {
            "user": "uid",
            "item": "item_id",
            "time": "timestamp",
            "played_pct": "played_ratio_pct",
        },
    }
    assert store.num_users == 40
    assert store.meta["timestamps"] == "seconds"
    assert "played less than 50 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--synthetic"], "PATH does not go with --synthetic; leave one of them out"),
        (["--synthetic", "--format", "csv"], "--format does not go with --synthetic"),
        (["--synthetic", "--user", "u"], "--user does not go with --synthetic"),
        (["--synthetic", "--no-header"], "--no-header does not go with --synthetic"),
        (["x", "--format", "pairs", "--seed", 1], "--seed needs --synthetic"),
        (["x", "--format", "pairs", "--num-users", 9], "--num-users needs --synthetic"),
        (["--format", "pairs"], "PATH is missing; give PATH and --format"),
        (["x"], "--format is missing; give PATH and --format .one of yambda-flat, "),
        (["x", "--format", "pairs", "--k-core", -1], "`k_core` must not be negative; got -1"),
        (["x", "--format", "pairs", "--ids-from", "nowhere"], "nowhere is not a sequence store"),
        (["--synthetic", "--num-items", 5], "`num_items` must be between 100 and"),
    ],
)
def test_wrong_options(tmp_path, arguments, message):
    with pytest.raises(UserError, match=message):
        _run(*arguments, "--out", tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_exact_duplicates_need_times(tmp_path):
    (tmp_path / "a").write_text("1 2\n1 2\n")
    message = "--deduplicate exact compares times, and a is read without"
    with pytest.raises(UserError, match=message):
        _run(tmp_path / "a", "--format", "pairs", "--deduplicate", "exact", "--out", tmp_path / "s")
    with pytest.raises(UserError, match="must be one of none, exact, consecutive; got 'all'"):
        prepare(tmp_path / "a", tmp_path / "s", format="pairs", deduplicate="all")  # pyright: ignore
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        _run("--help")
    text = capsys.readouterr().out
    assert "examples:" in text
    assert "recmodels prepare --synthetic --out store" in text


def test_python_and_command_line_agree(tmp_path):
    path = _lengths_file(tmp_path / "data", [3, 4])
    prepare(path, tmp_path / "a", format="user-lines")
    _run(path, "--format", "user-lines", "--out", tmp_path / "b")
    assert SequenceStore.open(tmp_path / "a").meta == SequenceStore.open(tmp_path / "b").meta
