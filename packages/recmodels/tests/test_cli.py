import dataclasses
import json
import os
import subprocess
import sys

import pytest
from train_cases import chain_store, finished_run

from recmodels import RECIPES, Recipe
from recmodels._src.cli import main

_TINY = [
    *("--max-length", "8", "--hidden-dim", "8", "--num-layers", "1", "--num-heads", "2"),
    *("--batch-size", "8", "--num-steps", "2", "--log-every", "1", "--checkpoint-every", "2"),
]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "error: the following arguments are required: COMMAND"),
        ("bogus", "invalid choice: 'bogus'"),
        ("train --recipe sasrec-demo --data x", "required: --out"),
        ("train --recipe nope --data x --out y", "error: no recipe 'nope'; choose one of"),
        ("train --recipe sasrec-demo --data x --out y --droput 0.1", "unrecognized arguments"),
        ("train --recipe sasrec-demo --data x --out y --dropout 2", "`dropout` must be at least 0"),
        ("train --recipe sasrec-demo --data x --out y --dropout z", "invalid float value: 'z'"),
        ("train --recipe sasrec-demo --data x --out y --hide-seen no", "must be true or false"),
        ("train --recipe sasrec-demo --data nowhere --out y", "nowhere is not a sequence store"),
        ("evaluate nowhere", "nowhere is not a training run"),
        ("evaluate nowhere --baselines some", "invalid choice: 'some'"),
        ("compare nowhere", "the following arguments are required: RUN_B"),
        ("compare nowhere here", "nowhere is not a training run"),
        ("report nowhere", "nowhere is not a training run"),
        ("evaluate nowhere -k 8,x", "must be integers separated by commas; got '8,x'"),
        ("recipes nope", "no recipe 'nope'"),
        ("plan sasrec-demo --topology v6e:2x4 --num-items 0", "`num_items` must be at least 1"),
    ],
)
def test_mistakes_give_one_line_and_status_2(capsys, arguments, message):
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize(
    "command", ["prepare", "describe", "recipes", "train", "evaluate", "compare", "report", "plan"]
)
def test_help_has_examples(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"examples:\n  recmodels {command}" in capsys.readouterr().out


def test_every_field_of_a_recipe_is_an_option(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(Recipe):
        if field.name != "name":
            assert f"--{field.name.replace('_', '-')} " in text


def test_recipes_are_listed_and_printed(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == list(RECIPES)
    assert main(["recipes", "sasrec-demo"]) == 0
    assert Recipe(**json.loads(capsys.readouterr().out)) == RECIPES["sasrec-demo"]


def test_train_then_train_again(tmp_path, capsys):
    store = chain_store(tmp_path / "store")
    command = ["train", "--recipe", "sasrec-demo", "--data", str(store.path)]
    command += ["--out", str(tmp_path / "run"), *_TINY]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert "test of next-8, step 2: 54 users" in first
    assert f"bundle: {tmp_path / 'run' / 'bundle'}" in first
    assert main(command) == 0
    again = capsys.readouterr().out
    assert "is finished already (2 steps)" in again
    assert again.endswith(first)
    assert main([*command, "--seed", "5"]) == 2
    assert "holds a run with other settings (seed 0 -> 5)" in capsys.readouterr().err


def test_evaluate_prints_the_chosen_protocol(capsys):
    _, result = finished_run()
    command = ["evaluate", str(result.run_dir), "--part", "dev", "--hide-seen", "true", "-k", "3,5"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "dev of next-8" in printed
    assert "seen items hidden" in printed
    assert "hit@3" in printed
    assert "hit@8" not in printed


def test_baselines_are_chosen(capsys):
    _, result = finished_run()
    for choice, names in (
        ("none", "model"),
        ("popularity", "model popularity"),
        ("all", "model popularity markov item-knn random"),
    ):
        assert main(["evaluate", str(result.run_dir), "--baselines", choice]) == 0
        header = capsys.readouterr().out.splitlines()[2]
        assert header.split() == names.split()


def test_compare_prints_both_runs(capsys):
    _, result = finished_run()
    run = str(result.run_dir)
    assert main(["compare", run, run, "--part", "dev", "-k", "3"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"A: {run}\nB: {run}\ndev of next-8: 54 users")
    assert "\nhit@3 " in printed
    assert "+0.0000    [+0.0000, +0.0000]   1.000" in printed


def test_divergence_is_status_1(tmp_path, capsys):
    store = chain_store(tmp_path / "store")
    command = ["train", "--recipe", "sasrec-demo", "--data", str(store.path), *_TINY]
    command += ["--out", str(tmp_path / "run"), "--learning-rate", "1e30", "--warmup-steps", "0"]
    assert main(command) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: step 2: the loss is nan")


def test_divergence_in_the_last_update_is_status_1(tmp_path, capsys):
    store = chain_store(tmp_path / "store")
    command = ["train", "--recipe", "sasrec-demo", "--data", str(store.path), *_TINY]
    command += ["--out", str(tmp_path / "run"), "--learning-rate", "1e30", "--warmup-steps", "0"]
    assert main([*command, "--num-steps", "1"]) == 1
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].startswith("error: step 1: the parameters are not finite")
    assert not printed.out
    assert not (tmp_path / "run" / "bundle").exists()


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("recmodels 0.")


def test_a_closed_pipe_is_silent():
    command = [
        sys.executable,
        "-c",
        "from recmodels._src.cli import main; raise SystemExit(main())",
    ]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*command, "recipes"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_full_disk_is_one_line_and_status_1(tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise ValueError("UNKNOWN: writing d/1: No space left on device [tensorstore]")

    store = chain_store(tmp_path / "store")
    command = ["train", "--recipe", "sasrec-demo", "--data", str(store.path), *_TINY]
    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.save", full)
    assert main([*command, "--out", str(tmp_path / "run")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    checkpoint = tmp_path / "run" / "checkpoints" / "2"
    assert last == f"error: cannot write {checkpoint}: No space left on device"
