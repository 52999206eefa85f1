"""Building: what is written, when nothing is, and whose folder is never touched."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest

import recserve
from recserve._src import build as build_module
from recserve._src.storage import record_file


def test_report_and_folder(bundle, tmp_path):
    report = recserve.build(bundle.path, tmp_path / "index")
    assert report.path == tmp_path / "index"
    assert (report.num_items, report.vector_dim, report.plan.kind) == (20, 5, "exact")
    files = {path for path in report.path.rglob("*") if path.is_file()}
    assert report.num_bytes == sum(path.stat().st_size for path in files)
    manifest = json.loads((report.path / "manifest.json").read_text())
    listed = {report.path / name for name in manifest["files"]}
    assert files == listed | {report.path / "manifest.json"}
    for path in listed:
        record = record_file(path)
        entry = manifest["files"][path.name]
        assert (record.num_bytes, record.sha256) == (entry["bytes"], entry["sha256"])
    assert manifest["model"] == {"name": "toy", "kind": "sasrec", "step": 7}
    assert manifest["bundle_sha256"] == record_file(bundle.path / "bundle.json").sha256
    assert os.listdir(tmp_path) == ["bundle", "index"] or os.listdir(tmp_path) == [
        "index",
        "bundle",
    ]


def test_same_bundle_gives_the_same_folder(bundle, tmp_path):
    for name in ("a", "b"):
        recserve.build(bundle.path, tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_scann_files_hold_no_path_and_no_pickle(large_index):
    assets = (large_index / "scann" / "scann_assets.pbtxt").read_text()
    paths = [line.split('"')[1] for line in assets.splitlines() if "asset_path" in line]
    assert paths
    assert all("/" not in path for path in paths)
    assert not list(large_index.rglob("*.pkl"))


def test_bundle_may_be_deleted_afterwards(bundle, tmp_path):
    recserve.build(bundle.path, tmp_path / "index")
    shutil.rmtree(bundle.path)
    recommender = recserve.Recommender.open(tmp_path / "index")
    assert len(recommender.recommend([100, 107]).item_ids) == 8


def test_existing_target_is_refused_before_the_bundle_is_read(tmp_path):
    (tmp_path / "index").mkdir()
    with pytest.raises(recserve.UserError, match="exists already"):
        recserve.build(tmp_path / "no bundle", tmp_path / "index")


def test_overwrite_replaces_an_index_folder_of_any_version(bundle, tmp_path):
    recserve.build(bundle.path, tmp_path / "index")
    manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
    (tmp_path / "index" / "manifest.json").write_text(json.dumps(manifest | {"version": 0}))
    recserve.build(bundle.path, tmp_path / "index", overwrite=True)
    recserve.Recommender.open(tmp_path / "index")


def test_overwrite_into_an_empty_folder(bundle, tmp_path):
    (tmp_path / "index").mkdir()
    recserve.build(bundle.path, tmp_path / "index", overwrite=True)
    recserve.Recommender.open(tmp_path / "index")


@pytest.mark.parametrize("content", [None, "no JSON", "[]", '{"format": "other"}'])
def test_overwrite_spares_folders_of_others(bundle, tmp_path, content):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    if content is not None:
        (tmp_path / "home" / "manifest.json").write_text(content)
    with pytest.raises(recserve.UserError, match="is not an index folder, so it is not overwr"):
        recserve.build(bundle.path, tmp_path / "home", overwrite=True)
    assert (tmp_path / "home" / "letter").read_text() == "dear"


def test_configuration_is_checked_before_anything_is_written(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "copy_file", None)  # would fail if it were called
    config = recserve.SearcherConfig(searcher="scann", num_leaves=21)
    with pytest.raises(recserve.UserError, match="`num_leaves` must be at most the 20"):
        recserve.build(bundle.path, tmp_path / "new" / "index", config=config)
    assert not (tmp_path / "new").exists()


def test_tiny_scann_catalog(bundle, tmp_path):
    config = recserve.SearcherConfig(searcher="scann", num_leaves=2)
    report = recserve.build(bundle.path, tmp_path / "index", config=config)
    recommender = recserve.Recommender.open(report.path)
    assert recommender.searcher_kind == "scann"
    assert len(recommender.recommend([100], 20, exclude_seen=False).item_ids) == 20


def test_missing_jax_is_noted_but_does_not_stop_the_build(bundle, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = recserve.SearcherConfig(searcher="exact")
    recserve.build(bundle.path, tmp_path / "index", config=config)
    assert "the query encoder was not checked: encoding a history needs jax" in caplog.text


CRASH = """
import os, signal, sys
import recserve
from recserve._src import build, storage

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

module, name = sys.argv[3].split(".")
setattr({"build": build, "storage": storage}[module], name, die)
recserve.build(sys.argv[1], sys.argv[2], overwrite=True)
"""


@pytest.mark.parametrize(
    ("moment", "existing"),
    [
        ("build.load_catalog", True),
        ("build._write_manifest", False),
        ("storage._flush", True),
        ("storage._rename", False),
        ("storage._rename", True),
    ],
)
def test_kill_at_any_moment(bundle, tmp_path, toys, child_environment, moment, existing):
    target = tmp_path / "out" / "index"
    if existing:
        recserve.build(bundle.path, target)
    other = toys.write(tmp_path / "other", item_ids=range(900, 920))
    arguments = [sys.executable, "-c", CRASH, other.path, target, moment]
    process = subprocess.run(arguments, env=child_environment, check=False)
    assert process.returncode == -signal.SIGKILL
    if existing:
        assert min(recserve.Recommender.open(target).recommend([], 20).item_ids) == 100
    else:
        assert not target.exists()
    recserve.build(other.path, target, overwrite=existing)
    assert min(recserve.Recommender.open(target).recommend([], 20).item_ids) == 900


def test_simultaneous_builds_never_mix(bundle, tmp_path, toys, monkeypatch):
    other = toys.write(tmp_path / "other", item_ids=range(900, 920))
    barrier = threading.Barrier(2)
    write_manifest = build_module._write_manifest

    def together(*arguments):
        barrier.wait()
        write_manifest(*arguments)

    monkeypatch.setattr(build_module, "_write_manifest", together)
    outcomes = []

    def work(source):
        try:
            recserve.build(source, tmp_path / "out" / "index")
            outcomes.append("built")
        except recserve.UserError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=work, args=(each.path,)) for each in (bundle, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("built") == 1
    assert sum("was written by another process meanwhile" in each for each in outcomes) == 1
    item_ids = recserve.Recommender.open(tmp_path / "out" / "index").recommend([], 20).item_ids
    assert sorted(item_ids) in (sorted(bundle.item_ids), list(range(900, 920)))
    assert os.listdir(tmp_path / "out") == ["index"]


def test_report_is_frozen(bundle, tmp_path):
    report = recserve.build(bundle.path, tmp_path / "index")
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.num_items = 5  # type: ignore[misc]
