"""The demo runs on generated and on given data, and says in one line what is wrong."""

# ruff: noqa: D103 - the name of a test says what it shows

import itertools
import tempfile
from pathlib import Path

import demo
import pytest

FAST = ["--num-steps", "4"]


def _write_csv(path: Path, num_users: int, length: int) -> Path:
    # Everybody walks round the same 20 items, so that a model has something to learn.
    names = [f"item-{number}" for number in range(20)]
    lines = ["who,what,when"]
    for user in range(num_users):
        walk = itertools.islice(itertools.cycle(names), user, user + length)
        lines += [f"u{user},{item},{second}" for second, item in enumerate(walk)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _csv_options(path: Path) -> list[str]:
    columns = ["--user", "who", "--item", "what", "--time", "when"]
    return ["--data", str(path), "--format", "csv", *columns, *FAST]


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder in which temporary folders are made, empty at first."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_generated_data_end_to_end(tmp_path, capsys):
    work = tmp_path / "work"
    sizes = ["--num-users", "150", "--num-items", "500", "--seed", "3", *FAST]
    assert demo.main(["--work", str(work), *sizes]) == 0
    shown = capsys.readouterr().out
    assert "generated: 150 users" in shown
    assert "4 steps of" in shown
    assert "any of the 8 held-out items in the top 8 of all" in shown
    assert "recall@8 against exact search 1.0000" in shown
    assert ": the first one with a hit (" in shown
    answer = shown[shown.index("  answer") :].splitlines()[1:9]
    held_out = shown[shown.index("  held out") : shown.index("  answer")].split()
    for line in answer:
        item_id, _, *mark = line.split()
        assert mark == (["*", "held", "out"] if f"{item_id}*" in held_out else [])
    assert any("* held out" in line for line in answer)
    assert sorted(entry.name for entry in work.iterdir()) == ["index", "run", "store"]
    assert (work / "run" / "bundle" / "bundle.json").exists()


def test_given_data_with_few_items_and_names_as_ids(tmp_path, temporary, capsys):
    # 40 items each: the history before the 8 held-out ones holds all 20 names, so that hiding
    # seen items leaves nothing to recommend to anybody. That is an answer too.
    path = _write_csv(tmp_path / "events.csv", num_users=40, length=40)
    assert demo.main(_csv_options(path)) == 0
    shown = capsys.readouterr().out
    assert "events.csv: 40 users, 20 items, 1,600 interactions" in shown
    assert "User u0: without a hit" in shown
    assert "item-11" in shown
    assert not list(temporary.iterdir())  # the demo cleans up behind itself


def test_nobody_is_long_enough(tmp_path, temporary, capsys):
    path = _write_csv(tmp_path / "events.csv", num_users=40, length=26)
    assert demo.main(_csv_options(path)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert "has no user to evaluate: protocol next-8 needs 27 items" in error
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "gru4rec"], "no recipe 'gru4rec'"),
        (["--num-steps", "0"], "`num_steps` must be at least 1"),
        (["--num-steps", "many"], "argument --num-steps: invalid int value: 'many'"),
        (["--num-step", "3"], "unrecognized arguments: --num-step 3"),
        (["--format", "csv"], "--format needs --data"),
        (["--no-header"], "--no-header needs --data"),
        (["--data", "x.csv"], "--data needs --format, one of yambda-flat"),
        (["--data", "x.csv", "--format", "xml"], "`format` must be one of yambda-flat"),
        (["--data", "x.csv", "--format", "csv"], "x.csv does not exist"),
        (["--data", "x.csv", "--num-users", "3"], "--num-users does not go with --data"),
        (["--work", str(Path(__file__).parent)], "is not an empty folder"),
        (["--work", __file__], "is not an empty folder"),
    ],
)
def test_bad_arguments_give_one_line_and_status_2(arguments, message, temporary, capsys):
    assert demo.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("error: ")
    assert message in shown.err
    assert not list(temporary.iterdir())


def test_sparkline():
    assert demo.sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert demo.sparkline([2.0]) == "▁"
    assert demo.sparkline([float(value) for value in range(100, 0, -1)], width=8) == "█▇▆▅▄▃▂▁"
