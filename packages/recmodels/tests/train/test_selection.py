"""Which evaluated step of a run is tested and exported, when to stop, and what is kept for it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from train_cases import chain_store, small_recipe

from recmodels import TrainingInterruptedError, UserError, evaluate, train
from recmodels._src.cli import main
from recmodels._src.train import loop
from recmodels._src.train.metrics_log import read_metrics
from recmodels._src.train.run_directory import RunDirectory
from recmodels._src.train.selection import DevSelection


def _records(values):
    return [{"step": 10 * (n + 1), "split": "dev", "ndcg@10": x} for n, x in enumerate(values)]


def test_best_and_patience():
    recipe = small_recipe(selection="ndcg@10", patience=2)
    selection = DevSelection(recipe)
    seen = []
    for record in _records([0.1, 0.3, 0.2, 0.3]):
        is_best = selection.add(record["step"], record)
        seen.append((is_best, selection.best_step, selection.is_out_of_patience))
    assert seen == [(True, 10, False), (True, 20, False), (False, 20, False), (False, 20, True)]
    again = DevSelection(recipe, _records([0.1, 0.3, 0.2, 0.3]))
    assert (again.best_step, again.is_out_of_patience) == (20, True)


def test_the_last_step_counts_by_default():
    selection = DevSelection(small_recipe(), _records([0.3, 0.1, 0.0]))
    assert selection.best_step is None
    assert not selection.is_out_of_patience


@contextlib.contextmanager
def _scripted(values):
    """Training whose dev evaluations come from a list."""
    original = loop.evaluate_params

    def evaluate_params(params, recipe, store, *, part, step, **rest):
        found = original(params, recipe, store, part=part, step=step, **rest)
        if part == "dev":
            found.model["ndcg@10"] = values[step // 2 - 1]
        return found

    with pytest.MonkeyPatch.context() as context:
        context.setattr(loop, "evaluate_params", evaluate_params)
        yield


@pytest.fixture(scope="module")
def best_at_4(tmp_path_factory):
    """A store, and a run on it whose step 4 is the best and step 10 the last."""
    folder = tmp_path_factory.mktemp("selected")
    store = chain_store(folder / "store")
    with _scripted([0.1, 0.5, 0.2, 0.3, 0.4]):
        return store, train(_stopping_recipe(), store, folder / "run", progress=False)


@pytest.fixture
def run_dir(best_at_4, tmp_path):
    """A copy of that run."""
    shutil.copytree(best_at_4[1].run_dir, tmp_path / "run")
    return tmp_path / "run"


def _stopping_recipe():
    return small_recipe(
        selection="ndcg@10", patience=3, evaluate_every=2, checkpoint_every=100, num_steps=40
    )


def test_the_best_step_is_tested_exported_and_kept(best_at_4, run_dir):
    store, result = best_at_4
    assert (result.step, result.test.step) == (10, 4)  # three evaluations after the best
    assert int(RunDirectory.open(run_dir).restore().step) == 4
    again = evaluate(run_dir, progress=False)
    assert (again.step, again.model["ndcg@10"]) == (4, result.test.model["ndcg@10"])
    assert {"4", "10"} <= {entry.name for entry in (run_dir / "checkpoints").iterdir()}
    assert train(_stopping_recipe(), store, run_dir, progress=False).already_finished


def test_a_resumed_run_remembers_what_was_best(best_at_4, run_dir):
    (run_dir / "summary.json").unlink()  # as if it had been killed at the end
    shutil.rmtree(run_dir / "bundle")
    with _scripted([]):
        result = train(_stopping_recipe(), best_at_4[0], run_dir, progress=False)
    assert (result.step, result.test.step) == (10, 4)


def _cut(run_dir, *steps):
    """Takes the evaluations of some steps out of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    records = [r for r in read_metrics(run_dir) if r["split"] != "dev" or r["step"] not in steps]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_finished_run_without_metrics_keeps_its_step(run_dir):
    (run_dir / "metrics.jsonl").unlink()
    assert evaluate(run_dir, baselines="none", progress=False).step == 4
    shutil.rmtree(run_dir / "checkpoints" / "4")
    with pytest.warns(UserWarning, match=r"no checkpoint of step 4, .*ndcg@10 on dev.* step 10"):
        assert evaluate(run_dir, baselines="none", progress=False).step == 10


def test_an_unfinished_run_without_its_evaluations_says_what_is_taken(run_dir):
    (run_dir / "summary.json").unlink()
    _cut(run_dir, 6)
    with pytest.warns(UserWarning, match=r"lacks the evaluation of step 6, .*step 4, the best rec"):
        assert evaluate(run_dir, baselines="none", progress=False).step == 4
    (run_dir / "metrics.jsonl").unlink()
    with pytest.warns(UserWarning, match=r"lacks the evaluation of step 2, .*step 10, the newest"):
        assert evaluate(run_dir, baselines="none", progress=False).step == 10


def test_a_resumed_run_says_what_its_selection_lacks(best_at_4, run_dir):
    again = _stopping_recipe(), best_at_4[0], run_dir
    (run_dir / "summary.json").unlink()
    _cut(run_dir, 6)
    lacking = "lacks the evaluation of step 6, .*; the best step is one of the others"
    with _scripted([0] * 5 + [0.35]), pytest.warns(UserWarning, match=lacking):
        result = train(*again, progress=False)
    assert (result.step, result.test.step) == (12, 4)  # one evaluation less to be patient with


def test_a_resumed_run_whose_best_checkpoint_is_gone_says_so(best_at_4, run_dir):
    (run_dir / "summary.json").unlink()
    shutil.rmtree(run_dir / "checkpoints" / "4")
    gone = r"checkpoint of step 4, which ndcg@10 on dev chose, is gone; step 10 is tested"
    with pytest.warns(UserWarning, match=gone):
        result = train(_stopping_recipe(), best_at_4[0], run_dir, progress=False)
    assert result.test.step == 10


def test_a_damaged_best_checkpoint_is_not_replaced_in_silence(run_dir):
    (run_dir / "checkpoints" / "4" / "window" / "metadata").write_text("{")
    with pytest.raises(UserError, match=r"4 is damaged .* that `selection` chose; remove it to ta"):
        evaluate(run_dir, progress=False)


def test_newest_checkpoints_are_kept(tmp_path):
    recipe = small_recipe(checkpoint_every=2, keep_checkpoints=3)
    train(recipe, chain_store(tmp_path / "store"), tmp_path / "run", progress=False)
    kept = sorted(int(entry.name) for entry in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [8, 10, 12]


def test_selection_needs_a_catalog_that_large(tmp_path):
    from store_cases import tiny_store

    store = tiny_store(tmp_path / "store", [[1, 2, 3, 4, 5]] * 20)
    recipe = small_recipe(protocol="leave-one-out", num_targets=1, selection="hit@10")
    with pytest.raises(UserError, match=r"`selection` hit@10 needs more items than the 5"):
        train(recipe, store, tmp_path / "run", progress=False)


def test_sigterm_saves_and_says_so(tmp_path, monkeypatch, capsys):
    store = chain_store(tmp_path / "store")
    unbroken = train(small_recipe(), store, tmp_path / "unbroken", progress=False)
    add = loop.LossWindow.add

    def add_and_terminate(window, step, step_metrics):
        add(window, step, step_metrics)
        if step == 5:  # neither a record nor a checkpoint is due
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as context:
        context.setattr(loop.LossWindow, "add", add_and_terminate)
        with pytest.raises(TrainingInterruptedError, match="SIGTERM after step 5, which is saved"):
            train(small_recipe(), store, tmp_path / "run", progress=False)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert int(RunDirectory.open(tmp_path / "run").restore().step) == 5
    result = train(small_recipe(), store, tmp_path / "run", progress=False)
    assert result.loss_curve == unbroken.loss_curve
    assert read_metrics(tmp_path / "run") == read_metrics(tmp_path / "unbroken")


def test_sigterm_exit_status(tmp_path):
    store = chain_store(tmp_path / "store")
    options = (
        "--recipe sasrec-demo --num-steps 100000 --max-length 8 --hidden-dim 8 --num-layers 1 "
        "--log-every 1 --checkpoint-every 1000 --evaluate-every 100000 --hide-seen false"
    )
    main_call = "from recmodels._src.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", main_call, "train", "--data", str(store.path)]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "run"), *options.split()],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    ) as process:
        records = Path(tmp_path / "run" / "metrics.jsonl")
        while not records.exists():  # opened when everything else is ready
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 75, errors
    assert "error: stopped by SIGTERM after step" in errors
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_main_turns_it_into_the_exit_status(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise TrainingInterruptedError("stopped by SIGTERM after step 3, which is saved")

    monkeypatch.setattr("recmodels._src.cli.train", interrupted)
    assert main(["train", "--recipe", "sasrec-demo", "--data", "x", "--out", "y"]) == 75
    assert "error: stopped by SIGTERM after step 3" in capsys.readouterr().err
