"""Paths in object stores: what is read and written there, in which order, and what may go wrong."""

import importlib.util
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from object_stores import object_stores

from recmodels import SequenceStore, UserError, describe, prepare, prepare_synthetic
from recmodels._src import storage
from recmodels._src.atomic import atomic_file, atomic_folder
from recmodels._src.cli import main
from recmodels._src.storage import as_path

_CSV = b"user,item\n1,a\n1,b\n2,a\n2,c\n2,b\n"
_SIZES = {"num_users": 30, "num_items": 100}


@pytest.fixture
def stores(request):
    """The object stores with an empty bucket of the name of the test."""
    server = object_stores()
    server.add_bucket("empty").clear()
    yield server
    server.on_write = lambda name: None


@pytest.fixture(params=["gs", "s3"])
def root(request, stores):
    return f"{request.param}://empty"


def _content(stores, name):
    return stores.buckets["empty"][name][1]


def test_local_paths_stay_what_they_were(tmp_path):
    for path in (tmp_path / "a", "a/b", "a b:c", Path("~")):
        assert as_path(path) == Path(path)
        assert type(as_path(path)) is type(Path())
        assert not storage.is_remote(as_path(path))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hdfs://host/store", "hdfs://host/store is neither a local path nor one of gs:// and s3"),
        (Path("gs://bucket/run"), "gs:/bucket/run has lost a slash; pass it as a text"),
        ("gs://nothing/run", "gs://nothing/run cannot be used: there is no bucket nothing"),
        ("s3://nothing/run", "s3://nothing/run cannot be used: there is no bucket nothing"),
        ("gs://locked/run", r"gs://locked/run cannot be read \(.*orbidden.*\); check bucket and"),
        ("s3://locked/run", r"s3://locked/run cannot be read \(.*orbidden.*\); check bucket and"),
    ],
)
def test_a_path_that_cannot_be_used(stores, path, message):
    stores.add_bucket("locked")
    stores.forbidden.add("locked")
    with pytest.raises(UserError, match=f"^{message}"):
        as_path(path)


def test_a_store_that_does_not_answer_is_named_while_one_waits(stores, monkeypatch, capsys):
    stores.add_bucket("slow")
    monkeypatch.setattr(storage, "_SILENCE_S", 0.01)
    monkeypatch.setattr(type(epath.Path("gs://slow")), "exists", lambda path: time.sleep(0.5))
    as_path("gs://slow/run")
    assert capsys.readouterr().err == "waiting for an answer about gs://slow/run ...\n"


@pytest.mark.parametrize(
    ("scheme", "extra", "client"), [("gs", "gcs", "gcsfs"), ("s3",) * 2 + ("s3fs",)]
)
def test_a_missing_extra_is_named(monkeypatch, capsys, scheme, extra, client):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == client else found(name)
    )
    assert main(["describe", f"{scheme}://bucket/store"]) == 2
    assert capsys.readouterr().err == (
        f"error: {scheme}://bucket/store needs {client}; install it with "
        f'`pip install "recmodels[{extra}]"`\n'
    )


def test_a_store_is_prepared_there_and_read_from_a_copy(stores, root, tmp_path):
    written = []
    stores.on_write = written.append
    report = prepare_synthetic(f"{root}/data/store", **_SIZES)
    local = prepare_synthetic(tmp_path / "store", **_SIZES)
    assert str(report).replace(f"{root}/data/", "") == str(local).replace(f"{tmp_path}/", "")
    assert written[-1] == "data/store/meta.json"
    files = sorted(file.name for file in (tmp_path / "store").iterdir())
    assert sorted(name.removeprefix("data/store/") for name in written) == files
    for name in files:
        assert _content(stores, f"data/store/{name}") == (tmp_path / "store" / name).read_bytes()
    store = SequenceStore.open(f"{root}/data/store")
    assert isinstance(store.items, np.memmap)
    assert str(store.location) == f"{root}/data/store"
    assert str(describe(store)) == str(describe(tmp_path / "store"))


def test_a_store_is_fetched_once_and_again_when_it_changes(stores, root, monkeypatch, tmp_path):
    monkeypatch.setenv("RECMODELS_CACHE", str(tmp_path))
    fetched = []
    download = storage._download
    monkeypatch.setattr(
        storage, "_download", lambda path, local: (fetched.append(path.name), download(path, local))
    )
    prepare_synthetic(f"{root}/store", **_SIZES)
    assert fetched == []  # the report needs no copy
    opening = [
        threading.Thread(target=SequenceStore.open, args=[f"{root}/store"]) for _ in range(3)
    ]
    for thread in opening:
        thread.start()
    for thread in opening:
        thread.join()
    assert sorted(fetched) == sorted(set(fetched))
    assert len(fetched) == 6
    with pytest.raises(UserError, match=r"store exists already; choose another name or pass --ov"):
        prepare_synthetic(f"{root}/store", **_SIZES)
    prepare_synthetic(f"{root}/store", **_SIZES | {"seed": 1}, overwrite=True)
    digest = SequenceStore.open(f"{root}/store").digest
    assert len(fetched) == 12
    prepare_synthetic(tmp_path / "local", **_SIZES | {"seed": 1})
    assert digest == SequenceStore.open(tmp_path / "local").digest


def test_a_copy_that_was_not_finished_is_made_again(stores, monkeypatch, tmp_path):
    monkeypatch.setenv("RECMODELS_CACHE", str(tmp_path))
    prepare_synthetic("gs://empty/store", **_SIZES)
    download = storage._download

    def fail(path, local):
        if path.name == "offsets.npy":
            raise OSError("no network")
        download(path, local)

    monkeypatch.setattr(storage, "_download", fail)
    with pytest.raises(OSError, match="no network"):
        SequenceStore.open("gs://empty/store")
    monkeypatch.setattr(storage, "_download", download)
    assert SequenceStore.open("gs://empty/store").num_users == _SIZES["num_users"]


def test_interactions_are_read_from_there(stores, root):
    stores.make(stores.buckets["empty"], "events.csv", _CSV)
    columns = {"format": "csv", "user": "user", "item": "item"}
    report = prepare(f"{root}/events.csv", f"{root}/store", **columns)
    assert (report.num_users, report.num_items, report.num_interactions) == (2, 3, 5)
    assert SequenceStore.open(f"{root}/store").meta["source"]["name"] == "events.csv"
    # Messages name what the user named, not the copy.
    with pytest.raises(UserError, match=f"^{root}/events.csv is not a readable parquet file"):
        prepare(f"{root}/events.csv", f"{root}/other", **columns | {"format": "parquet"})
    with pytest.raises(UserError, match=f"^{root}/none.csv does not exist"):
        prepare(f"{root}/none.csv", f"{root}/other", **columns)
    with pytest.raises(UserError, match=f"^{root}/other is not a sequence store"):
        SequenceStore.open(f"{root}/other")


def test_a_damaged_store_is_named_by_its_place(stores):
    prepare_synthetic("gs://empty/store", **_SIZES)
    stores.make(stores.buckets["empty"], "store/items.npy", b"nothing")
    with pytest.raises(UserError, match=r"^gs://empty/store is damaged: items.npy cannot be read"):
        SequenceStore.open("gs://empty/store")


def test_a_file_appears_whole_or_not_at_all(stores, root):
    path = as_path(f"{root}/folder/file.txt")
    with atomic_file(path) as temporary:
        temporary.write_bytes(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    with pytest.raises(UserError, match="exists already"), atomic_file(path):
        raise AssertionError("must not be reached")
    with pytest.raises(KeyboardInterrupt):
        _write_half(path)
    assert path.read_bytes() == b"one"


def _write_half(path):
    with atomic_file(path, overwrite=True) as temporary:
        temporary.write_bytes(b"half")
        raise KeyboardInterrupt


def test_of_a_folder_the_last_file_says_that_it_is_whole(stores, root):
    path, seen = as_path(f"{root}/folder"), []
    stores.on_write = lambda name: seen.append((name, sorted(stores.buckets["empty"])))
    for names in (["a", "last", "z"], ["b", "last", "in/ner"]):
        with atomic_folder(path, overwrite=True, last="last") as folder:
            for name in names:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(name)
    whole = [name for name, there in seen if "folder/last" in there]
    assert whole == []  # neither the old one nor the new one, while any file is written
    assert sorted(stores.buckets["empty"]) == ["folder/b", "folder/in/ner", "folder/last"]


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # gcsfs does
def test_large_objects_go_there_and_back(stores, root, tmp_path):
    content = np.random.default_rng(0).bytes(6 << 20)  # gcsfs has another way for them
    (tmp_path / "large").write_bytes(content)
    storage.upload(tmp_path / "large", as_path(f"{root}/large"))
    assert _content(stores, "large") == content
    with storage.local_copy(as_path(f"{root}/large")) as copy:
        assert copy.read_bytes() == content


def test_who_may_not_write_is_told_in_one_line(stores, root, capsys):
    stores.add_bucket("readable")
    stores.read_only.add("readable")
    out = root.replace("empty", "readable") + "/store"
    assert main(["prepare", "--synthetic", "--num-users", "5", "--out", out]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"error: cannot write {out}")
    assert "orbidden" in message or "AccessDenied" in message
    assert message.count("\n") == 1
