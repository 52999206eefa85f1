"""The page of a run: what is on it, what is not, and when it is refused."""

import json
import re
import shutil

import jax
import numpy as np
import polars as pl
import pytest
from train_cases import finished_run, small_recipe

from recmodels import UserError, write_report
from recmodels._src import page
from recmodels._src.cli import main
from recmodels._src.data.store import SequenceStore
from recmodels._src.evaluation.model import make_query_function
from recmodels._src.models.base import output_table
from recmodels._src.report.examples import find_examples
from recmodels._src.report.write import write_training_report
from recmodels._src.train import resources
from recmodels._src.train.placement import Placement
from recmodels._src.train.resources import Timing, state_bytes
from recmodels._src.train.run_directory import RunDirectory

_SECTIONS = (
    "Curves", "Test", "Example recommendations", "Memory", "Slowest parts", "Recipe", "Versions",
)  # fmt: skip


@pytest.fixture
def run_copy(tmp_path):
    """A run directory that a test may change."""
    _, result = finished_run()
    return shutil.copytree(result.run_dir, tmp_path / "run")


def _cells(text: str) -> list[str]:
    return re.findall(r"<t[dh]>(.*?)</t[dh]>", text)


def test_training_leaves_a_page_with_everything_on_it():
    pytest.importorskip("matplotlib")
    _, result = finished_run()
    text = (result.run_dir / "report.html").read_text(encoding="utf-8")
    assert tuple(re.findall("<h2>(.*?)</h2>", text)) == _SECTIONS
    assert "<h1>small on tiny</h1>" in text
    assert "test of next-8, step 60: 54 users, 8 held-out item(s) each, ranked among all" in text
    assert text.count("<svg") == text.count("</svg>") == 2
    assert "Training loss" in text
    assert "tested step 60" in text
    cells = _cells(text)
    cells = cells[cells.index("metric") :]
    for name, value in result.test.model.items():
        place = cells.index(name)
        low, high = result.test.intervals.get(name, (None, None))
        interval = "" if low is None else f"{low:.4f} to {high:.4f}"
        assert cells[place + 1 : place + 3] == [f"{value:.4f}", interval]
    assert {"popularity", "markov", "item-knn", "random"} <= set(cells)
    assert {"item table", "optimizer", "highest use of the process"} <= set(cells)
    assert {"training steps", "evaluations on dev", "checkpoints", "bundle"} <= set(cells)
    assert {"learning_rate", "0.01", "jax", jax.__version__} <= set(cells)


def test_page_needs_no_other_file_and_names_no_folder():
    store, result = finished_run()
    text = (result.run_dir / "report.html").read_text(encoding="utf-8")
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert all(link.startswith("#") for link in links)
    assert str(result.run_dir.parent) not in text
    assert str(store.path) not in text


def test_the_command_writes_the_same_page(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    _, result = finished_run()
    out = tmp_path / "page.html"
    command = ["report", str(result.run_dir), "--out", str(out)]
    assert main(command) == 0
    assert capsys.readouterr().out == f"page: {out}\n"
    assert out.read_bytes() == (result.run_dir / "report.html").read_bytes()
    assert main(command) == 2
    assert "page.html exists already" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_examples_are_what_the_model_ranks_first():
    store, result = finished_run()
    run = RunDirectory.open(result.run_dir)
    params = run.restore().result
    queries, table = make_query_function(run.recipe), np.asarray(output_table(params))
    examples = find_examples(params, run.recipe, store, step=60)
    assert len({example.user_id for example in examples}) == 5
    for example in examples:
        rows = store.sequence(int(example.user_id) - 100)  # as `tiny_store` numbers them
        ids = [str((row - 1) * 10) for row in rows]
        assert (example.history, example.held_out) == (ids[-16:-8], ids[-8:])
        query = queries(params, np.asarray(rows[-16:-8])[None].astype(np.int32))
        scores = np.asarray(query)[0] @ table.T + np.asarray(params["output_bias"])
        best = [str((row - 1) * 10) for row in np.argsort(-scores[1:])[:8] + 1]
        assert example.recommended == [(item, item in ids[-8:]) for item in best]


def _with_strange_ids(store: SequenceStore, path, *, title: bool) -> SequenceStore:
    shutil.copytree(store.path, path)
    users = pl.read_parquet(path / "users.parquet")
    users = users.with_columns(pl.format("<u>&{}", "user_id").alias("user_id"))
    users.write_parquet(path / "users.parquet")
    items = pl.read_parquet(path / "items.parquet")
    items = items.with_columns(pl.format("<i>&{}", "item_id").alias("item_id"))
    if title:
        items = items.with_columns(pl.format("<Title> {}", "row").alias("title"))
    items.write_parquet(path / "items.parquet")
    return SequenceStore.open(path)


@pytest.mark.parametrize("title", [False, True])
def test_ids_and_titles_are_escaped(tmp_path, title):
    pytest.importorskip("matplotlib")
    store, result = finished_run()
    strange = _with_strange_ids(store, tmp_path / "s", title=title)
    text = write_report(result.run_dir, tmp_path / "page.html", store=strange).read_text()
    assert re.search(r"<th>&lt;u&gt;&amp;\d+</th>", text)
    assert "&lt;i&gt;&amp;10" in text
    assert ("&lt;Title&gt; 2 (&lt;i&gt;&amp;10)" in text) == title
    assert not re.search("<[iu]>|<Title>", text)


def test_without_a_plot_library(run_copy, monkeypatch):
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'page of a run needs matplotlib; .*"recmodels\[report\]"'):
        write_report(run_copy)
    # Training must not fail for it.
    store, _ = finished_run()
    run = RunDirectory.open(run_copy)
    assert run.summary is not None
    write_training_report(run, store, run.restore(), run.summary, None)
    text = (run_copy / "report.html").read_text(encoding="utf-8")
    assert tuple(re.findall("<h2>(.*?)</h2>", text)) == _SECTIONS
    assert "<svg" not in text
    assert "matplotlib is not installed. Get them with `pip install" in text
    assert '<tr class="chosen"><th>60</th>' in text


def test_a_run_that_is_not_finished_is_evaluated(run_copy):
    pytest.importorskip("matplotlib")
    _, result = finished_run()
    (run_copy / "summary.json").unlink()
    text = write_report(run_copy, progress=False).read_text(encoding="utf-8")
    assert "not finished; shown is the checkpoint of step 60 of 60" in text
    low, high = result.test.intervals["mrr"]
    assert f"<th>mrr</th><td>{result.test.model['mrr']:.4f}</td><td>{low:.4f} to {high:.4f}" in text
    assert text.count("this run has no such record") == 2


def test_a_run_that_stopped_early_says_so(run_copy):
    pytest.importorskip("matplotlib")
    summary = json.loads((run_copy / "summary.json").read_text())
    (run_copy / "summary.json").write_text(json.dumps(summary | {"step": 30}))
    text = write_report(run_copy).read_text(encoding="utf-8")
    assert "finished after 30 of 60 steps, out of patience" in text


def test_damaged_summary_is_named(run_copy):
    pytest.importorskip("matplotlib")
    summary = json.loads((run_copy / "summary.json").read_text())
    (run_copy / "summary.json").write_text(json.dumps(summary | {"test": {}}))
    with pytest.raises(UserError, match=r"summary\.json is damaged"):
        write_report(run_copy)


def test_overwrite_alone_says_what_it_needs(capsys):
    assert main(["report", "nowhere", "--overwrite"]) == 2
    assert "--overwrite needs --out" in capsys.readouterr().err


def test_timing_counts_nested_calls_once(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 4.0, 9.0, 10.0])  # outer, first, first, second, second, outer
    monkeypatch.setattr(resources.time, "perf_counter", lambda: next(now))
    timing = Timing()

    def outer() -> None:
        timing.of("inner", lambda: None)
        with pytest.raises(ZeroDivisionError):
            timing.of("inner", lambda: 1 / 0)

    timing.of("outer", outer)
    assert timing.to_dict() == {
        "inner": {"seconds": 7.0, "calls": 2},
        "outer": {"seconds": 3.0, "calls": 1},
    }


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_state_bytes_add_up(ema_decay):
    state = Placement(41, 41).state(small_recipe(ema_decay=ema_decay))
    found = state_bytes(state)
    params = 4 * sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert found["item table"] == 4 * (41 * 8 + 41)  # vectors and bias
    assert found["item table"] + found["encoder"] == params
    assert found["average"] == (params if ema_decay else 0)
    assert 2 * params <= found["optimizer"] <= 2 * params + 16  # two moments and counters
