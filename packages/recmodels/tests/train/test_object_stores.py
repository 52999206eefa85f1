"""Runs in object stores equal runs on a disk, also when a kill left them at any object's making."""

import json

import jax
import numpy as np
import pytest
from object_stores import object_stores
from train_cases import chain_store, small_recipe

from recmodels import UserError, compare, evaluate, recommend, train, write_report
from recmodels._src.bundle import is_whole
from recmodels._src.cli import main
from recmodels._src.storage import as_path, upload_folder
from recmodels._src.train.run_directory import RunDirectory
from recmodels._src.train.staging import Staging

# Names of objects; a process killed right before one is made leaves what was there until then.
_KILLS = {
    "gs": (
        "run/checkpoints/8/state/_METADATA",  # inside the second checkpoint
        "run/bundle/bundle.json",  # everything but what makes the bundle one
    ),
    "s3": ("run/checkpoints/8/_CHECKPOINT_METADATA",),  # all of the second one but the last object
}


# Names of files by time or chance, and what other tests ask of the runs.
_NAMED_OTHERWISE = ("checkpoints", "tensorboard", "ranks", "recommendations.csv")


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A store and an unbroken run on the disk."""
    folder = tmp_path_factory.mktemp("local")
    store = chain_store(folder / "store")
    return store, train(small_recipe(), store, folder / "run", progress=False).run_dir


@pytest.fixture(scope="module", params=["gs", "s3"])
def remote(request, local):
    """The same in an object store: its place, its objects, and what was there before some."""
    server, before = object_stores(), {}
    root, objects = (
        f"{request.param}://{request.param}-runs",
        server.add_bucket(f"{request.param}-runs"),
    )
    upload_folder(local[0].path, as_path(f"{root}/store"), "meta.json")

    def remember(name):
        if name in _KILLS[request.param] and name not in before:
            before[name] = dict(objects)

    server.on_write = remember
    train(small_recipe(), f"{root}/store", f"{root}/run", progress=False)
    server.on_write = lambda name: None
    return root, objects, before


def _assert_equals(run_dir, objects, local_dir):
    assert objects["run/metrics.jsonl"][1] == (local_dir / "metrics.jsonl").read_bytes()
    vectors = (local_dir / "bundle" / "item_embeddings.npy").read_bytes()
    assert objects["run/bundle/item_embeddings.npy"][1] == vectors
    states = [RunDirectory.open(path).restore() for path in (run_dir, local_dir)]
    for leaf, expected in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected))


def test_a_run_there_equals_one_on_the_disk(remote, local):
    root, objects, _ = remote
    _assert_equals(f"{root}/run", objects, local[1])
    names = {name.removeprefix("run/") for name in objects if name.startswith("run/")}
    of_disk = {str(file.relative_to(local[1])) for file in local[1].rglob("*") if file.is_file()}
    by_place = [
        {name for name in each if name.split("/")[0] not in _NAMED_OTHERWISE}
        for each in (names, of_disk)
    ]
    assert by_place[0] == by_place[1]
    steps = {name.split("/")[1] for name in names if name.startswith("checkpoints/")}
    assert steps == {file.name for file in (local[1] / "checkpoints").iterdir()}
    assert any(name.startswith("tensorboard/events.") for name in names)
    assert json.loads(objects["run/config.json"][1])["store"]["path"] == f"{root}/store"


def test_a_killed_run_continues_from_there(remote, local):
    root, objects, before = remote
    kills = _KILLS[root.split(":")[0]]
    assert list(before) == list(kills)
    whole = dict(objects)
    try:
        for left in before.values():
            objects.clear()
            objects.update(left)
            assert "run/summary.json" not in objects
            result = train(small_recipe(), f"{root}/store", f"{root}/run", progress=False)
            assert not result.already_finished
            _assert_equals(f"{root}/run", objects, local[1])
    finally:
        objects.clear()
        objects.update(whole)


def test_a_finished_run_is_used_there(remote, local, capsys):
    root, objects, _ = remote
    again = train(small_recipe(), f"{root}/store", f"{root}/run", progress=False)
    assert again.already_finished
    assert str(again.bundle) == f"{root}/run/bundle"
    assert evaluate(f"{root}/run", progress=False) == evaluate(local[1], progress=False)
    assert "run/ranks/test-shown.parquet" in objects
    found = compare(f"{root}/run", local[1], progress=False)
    assert all(each.difference == 0 for each in found.metrics.values())
    for run_dir in (f"{root}/run", local[1]):
        recommend(run_dir, k=3, progress=False)
    listed = (local[1] / "recommendations.csv").read_bytes()
    assert objects["run/recommendations.csv"][1] == listed
    del objects["run/report.html"]
    assert main(["report", f"{root}/run"]) == 0
    assert capsys.readouterr().out == f"page: {root}/run/report.html\n"
    assert b"</html>" in objects["run/report.html"][1]
    write_report(f"{root}/run", f"{root}/page.html", progress=False)
    assert "page.html" in objects


# Orbax stops at the first array that cannot be read; TensorStore's answers for the others then meet
# the event loop of a read that is over.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_checkpoint_gives_way_to_the_one_before(remote):
    root, objects, _ = remote
    run, whole = RunDirectory.open(f"{root}/run"), dict(objects)
    try:
        for name in [each for each in objects if each.startswith("run/checkpoints/12/state/")]:
            if "/d/" in name:
                del objects[name]
        with pytest.warns(UserWarning, match=f"{root}/run/checkpoints/12 is damaged .* of step 8"):
            assert int(run.restore().step) == 8
    finally:
        objects.update(whole)
    assert int(run.restore().step) == 12


@pytest.mark.slow
@pytest.mark.parametrize("remote", ["gs"], indirect=True)
def test_training_starts_from_a_run_there(remote, local):
    root, objects, _ = remote
    recipe = small_recipe(num_steps=1, learning_rate=1e-12)
    train(recipe, local[0], f"{root}/next", start_from=f"{root}/run", progress=False)
    assert json.loads(objects["next/config.json"][1])["start_from"] == f"{root}/run"
    got, was = (RunDirectory.open(f"{root}/{name}").restore().params for name in ("next", "run"))
    vectors = (np.asarray(params["item_embeddings"])[1:] for params in (got, was))
    np.testing.assert_allclose(*vectors, atol=1e-6)


# Orbax leaves what it had begun, and TensorStore reports that to event loops that are gone.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("scheme", ["gs", pytest.param("s3", marks=pytest.mark.slow)])
def test_losing_the_right_to_write_is_one_line(local, capsys, scheme):
    server, bucket = object_stores(), f"{scheme}-lost"
    server.add_bucket(bucket)
    server.on_write = lambda name: server.read_only.add(bucket) if "checkpoints/" in name else None
    options = ["--num-steps", "4", "--batch-size", "8", "--max-length", "8", "--hidden-dim", "8"]
    options += ["--checkpoint-every", "2", "--log-every", "2"]
    command = ["train", "--recipe", "sasrec-demo", "--data", str(local[0].path), *options]
    status = main([*command, "--out", f"{scheme}://{bucket}/run"])
    server.on_write = lambda name: None
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert status == 1
    assert len(errors) == 1
    assert errors[0].startswith(f"error: cannot write {scheme}://{bucket}/run/")


def test_several_processes_need_another_place_than_s3(monkeypatch):
    object_stores().add_bucket("pair")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match=r"several processes cannot write checkpoints to s3://pair"):
        Staging(as_path("s3://pair/run/checkpoints"))


def test_a_bundle_that_lacks_an_object_is_written_again(remote):
    root, objects, _ = remote
    assert is_whole(f"{root}/run/bundle")
    content = objects.pop("run/bundle/item_embeddings.npy")
    assert not is_whole(f"{root}/run/bundle")
    assert train(small_recipe(), f"{root}/store", f"{root}/run", progress=False).already_finished
    assert objects["run/bundle/item_embeddings.npy"][1] == content[1]
    assert is_whole(f"{root}/run/bundle")
