"""A run killed anywhere and started again equals one that was never interrupted, bit for bit."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from train_cases import chain_store, small_recipe

from recmodels._src.errors import UserError
from recmodels._src.train.loop import train
from recmodels._src.train.metrics_log import read_metrics
from recmodels._src.train.run_directory import RunDirectory

_SCRIPT = Path(__file__).parent / "killable_run.py"

# In the order in which a run passes them: each process continues what the one before left.
_KILLS = (
    r"os.rename .*\.config\.json",  # before there is a run at all
    r"open .*/metrics\.jsonl",  # started, no step done
    r"open .*/checkpoints/4\.\S*/_METADATA",  # inside the first checkpoint
    r"os.rename .*/checkpoints/8\.orbax-checkpoint-tmp$",  # second one complete but unnamed
    r"open .*/checkpoints/12\.\S*/window\.\S*/metadata",  # last one, open loss window unsaved
    r"shutil.rmtree .*/checkpoints/4",  # while the oldest checkpoint is removed
    r"open .*/\.bundle\.tmp-\d+/history_items\.npy",  # inside the bundle
    r"os.rename .*/\.bundle\.tmp",  # bundle complete but unnamed
    r"os.rename .*/\.summary\.json",  # everything done but the mark that says so
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    # Every process compiles the same few functions: share them, or the test takes minutes.
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return chain_store(tmp_path_factory.mktemp("data") / "store").path


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, environment, store):
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    assert _run(environment, store, run_dir) == 0
    return run_dir


def _run(environment, store, run_dir, *pattern):
    command = [sys.executable, str(_SCRIPT), str(store), str(run_dir), *pattern]
    return subprocess.run(command, env=environment, check=False).returncode


def _assert_same(run_dir, unbroken):
    assert (run_dir / "metrics.jsonl").read_bytes() == (unbroken / "metrics.jsonl").read_bytes()
    states = [RunDirectory.open(path).restore() for path in (run_dir, unbroken)]
    for leaf, expected in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected))
    files = [json.loads((path / "bundle/bundle.json").read_text()) for path in (run_dir, unbroken)]
    assert files[0]["files"]["item_embeddings.npy"] == files[1]["files"]["item_embeddings.npy"]
    assert not [entry.name for entry in run_dir.iterdir() if entry.name.startswith(".")]


def test_killed_at_file_operations(tmp_path, environment, store, unbroken):
    run_dir = tmp_path / "run"
    for pattern in _KILLS:
        assert _run(environment, store, run_dir, pattern) == -signal.SIGKILL, pattern
    assert _run(environment, store, run_dir) == 0
    _assert_same(run_dir, unbroken)


_FULL_AT = (
    r"open .*/checkpoints/4\.\S*/_METADATA",  # in the thread that writes a checkpoint
    r"os.mkdir .*/checkpoints/8\.",
    r"open .*/\.bundle\.tmp-\d+/bundle\.json",
    r"os.rename .*/\.summary\.json",
)


def test_a_full_disk_loses_nothing(tmp_path, environment, store, unbroken):
    run_dir = tmp_path / "run"
    for pattern in _FULL_AT:
        command = [sys.executable, str(_SCRIPT), str(store), str(run_dir), f"full {pattern}"]
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        assert done.returncode == 1, (pattern, done.stderr)
        assert "No space left on device" in done.stderr.strip().splitlines()[-1], pattern
    assert _run(environment, store, run_dir) == 0
    _assert_same(run_dir, unbroken)


@pytest.mark.slow
def test_killed_twenty_times_at_random(tmp_path, environment, store, unbroken):
    rng = random.Random(0)
    num_kills, run_dir = 0, tmp_path / "run0"
    while num_kills < 20:
        operation = f"#{rng.randrange(1, 120)}"  # a whole run has several hundred
        status = _run(environment, store, run_dir, operation)
        num_kills += status == -signal.SIGKILL
        if status == 0:
            _assert_same(run_dir, unbroken)
            run_dir = tmp_path / f"run{num_kills}"
    assert _run(environment, store, run_dir) == 0
    _assert_same(run_dir, unbroken)


def test_killed_between_checkpoints(tmp_path, environment, store, unbroken):
    run_dir = tmp_path / "run"
    command = [sys.executable, str(_SCRIPT), str(store), str(run_dir)]
    process = subprocess.Popen(command, env=environment)
    while not (run_dir / "checkpoints" / "4").exists():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    # A record past the checkpoint and half a line, as an unlucky kill leaves them.
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "split": "train", "loss": 99.0}\n{"step": 8, "spl')
    assert _run(environment, store, run_dir) == 0
    _assert_same(run_dir, unbroken)
    steps = [(line["step"], line["split"]) for line in read_metrics(run_dir)]
    assert len(set(steps)) == len(steps)
    assert [step for step, split in steps if split == "train"] == [2, 4, 6, 8, 10, 12]


def test_a_second_process_is_refused(tmp_path, store):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    holder = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another process is training in .*run"):
            train(small_recipe(), store, run_dir, progress=False)
    finally:
        os.close(holder)
