"""Which evaluated step of a run is tested and exported, when to stop, and what is kept for it."""

import os
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


@pytest.fixture
def scripted(monkeypatch):
    """Training whose dev evaluations come from a list."""
    original = loop.evaluate_params
    dev = []

    def evaluate_params(params, recipe, store, *, part, step, **rest):
        found = original(params, recipe, store, part=part, step=step, **rest)
        if part == "dev":
            found.model["ndcg@10"] = dev[step // 2 - 1]
        return found

    monkeypatch.setattr(loop, "evaluate_params", evaluate_params)
    return dev


def _stopping_recipe():
    return small_recipe(
        selection="ndcg@10", patience=3, evaluate_every=2, checkpoint_every=100, num_steps=40
    )


def test_the_best_step_is_tested_exported_and_kept(tmp_path, scripted):
    scripted += [0.1, 0.5, 0.2, 0.3, 0.4, 0.9, 0.9]
    store = chain_store(tmp_path / "store")
    result = train(_stopping_recipe(), store, tmp_path / "run", progress=False)
    assert (result.step, result.test.step) == (10, 4)  # three evaluations after the best
    assert int(RunDirectory.open(tmp_path / "run").restore().step) == 4
    again = evaluate(tmp_path / "run", progress=False)
    assert (again.step, again.model["ndcg@10"]) == (4, result.test.model["ndcg@10"])
    kept = {entry.name for entry in (tmp_path / "run" / "checkpoints").iterdir()}
    assert {"4", "10"} <= kept
    assert train(_stopping_recipe(), store, tmp_path / "run", progress=False).already_finished


def test_a_resumed_run_remembers_what_was_best(tmp_path, scripted, monkeypatch):
    scripted += [0.1, 0.5, 0.2, 0.3, 0.4]
    store = chain_store(tmp_path / "store")

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(loop, "_finish", killed)
        with pytest.raises(KeyboardInterrupt):
            train(_stopping_recipe(), store, tmp_path / "run", progress=False)
    result = train(_stopping_recipe(), store, tmp_path / "run", progress=False)
    assert (result.step, result.test.step) == (10, 4)


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
