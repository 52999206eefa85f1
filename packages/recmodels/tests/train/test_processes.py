"""Two processes of two devices each, joined by `jax.distributed`, train what one process does."""

import io
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from object_stores import object_stores
from train_cases import chain_store, small_recipe

from recmodels import SequenceStore
from recmodels._src.storage import as_path, upload_folder
from recmodels._src.train import processes
from recmodels._src.train.metrics_log import read_metrics
from recmodels._src.train.run_directory import RunDirectory

_SCRIPT = Path(__file__).parent / "process_of_two.py"


def _start(process_id, port, store, run_dir, mesh, num_devices):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
    }
    command = [sys.executable, str(_SCRIPT), str(port), str(process_id)]
    return subprocess.Popen(
        [*command, str(store), str(run_dir), mesh],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(*processes):
    """Lines with results of each; all of them end, also when one of them fails."""
    try:
        ends = [process.communicate(timeout=500) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert not any(process.returncode for process in processes), [errors for _, errors in ends]
    return [[line for line in out.splitlines() if line.startswith("result")] for out, _ in ends]


def _train_together(store, run_dir, mesh):
    with socket.socket() as chosen:
        chosen.bind(("localhost", 0))
        port = chosen.getsockname()[1]
    both = [_start(number, port, store, run_dir, mesh, 2) for number in range(2)]
    lines = _finish(*both)
    assert lines[0] == lines[1] != []
    return lines[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    store = chain_store(folder / "store").path
    _finish(_start(0, 0, store, folder / "alone", "alone", 4))
    _train_together(store, folder / "together", "data=4")
    return folder


def _assert_alike(run_dir, expected):
    got, want = read_metrics(run_dir), read_metrics(expected)
    assert [(line["step"], line["split"]) for line in got] == [
        (line["step"], line["split"]) for line in want
    ]
    for one, other in zip(got, want, strict=True):
        if one["split"] == "train":
            np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-5)
    files = [run / "bundle" / "item_embeddings.npy" for run in (run_dir, expected)]
    vectors = [np.load(io.BytesIO(file.read_bytes())) for file in files]
    np.testing.assert_allclose(*vectors, rtol=2e-3, atol=2e-4)


def test_two_processes_equal_one(runs):
    _assert_alike(runs / "together", runs / "alone")
    assert not [entry for entry in (runs / "together").iterdir() if entry.name.startswith(".")]


def test_processes_along_the_model_axis_resume_from_a_checkpoint(runs):
    run_dir = runs / "resumed"
    shutil.copytree(runs / "together", run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "12")
    (run_dir / "summary.json").unlink()
    with_model_axis = RunDirectory.open(run_dir).recipe.override(mesh="data=1,model=4")
    (run_dir / "config.json").unlink()
    run = RunDirectory(run_dir, with_model_axis, RunDirectory.open(runs / "together").store, 1024)
    run.write_json("config.json", run._config())
    _train_together(runs / "store", run_dir, "data=1,model=4")
    _assert_alike(run_dir, runs / "alone")


def test_processes_write_a_bundle_again(runs):
    run_dir = runs / "without bundle"
    shutil.copytree(runs / "together", run_dir)
    shutil.rmtree(run_dir / "bundle")
    _train_together(runs / "store", run_dir, "data=4")
    _assert_alike(run_dir, runs / "alone")


def test_a_process_that_comes_late_meets_what_the_first_one_makes(tmp_path, monkeypatch):
    """The first process writes config.json as soon as all have looked for it."""
    store, recipe = SequenceStore.open(chain_store(tmp_path / "store").path), small_recipe()
    first = RunDirectory.create_or_resume(tmp_path / "first", recipe, store, num_rows=1024)

    def meet(where):
        if where == "the run was looked for":
            shutil.copytree(first.path, tmp_path / "run")

    monkeypatch.setattr(processes, "wait_for_all", meet)
    monkeypatch.setattr(processes, "is_first", lambda: False)
    run = RunDirectory.create_or_resume(tmp_path / "run", recipe, store, num_rows=1024)
    assert run.recipe == first.recipe


@pytest.mark.slow
def test_two_processes_write_to_an_object_store(runs):
    object_stores().add_bucket("together")
    store, run_dir = as_path("gs://together/store"), as_path("gs://together/run")
    upload_folder(runs / "store", store, "meta.json")
    _train_together(store, run_dir, "data=4")
    _assert_alike(run_dir, runs / "alone")
