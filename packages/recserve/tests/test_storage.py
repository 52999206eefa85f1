"""Folders appear complete or not at all."""

import os
import threading

import pytest

from recserve._src import storage
from recserve._src.errors import UserError


def anything(_folder):
    """Lets any folder be replaced."""
    return True


def nothing(_folder):
    """Lets no folder be replaced."""
    return False


def write(target, text, *, overwrite=False, is_replaceable=anything):
    """Writes a folder with two files of the same text."""
    with storage.new_folder(target, overwrite=overwrite, is_replaceable=is_replaceable) as folder:
        (folder / "a").write_text(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "b").write_text(text)


def read(target):
    """Returns the texts of a folder written by `write`."""
    return (target / "a").read_text(), (target / "sub" / "b").read_text()


def test_folder_appears_with_its_parents(tmp_path):
    write(tmp_path / "x" / "y", "new")
    assert read(tmp_path / "x" / "y") == ("new", "new")
    assert os.listdir(tmp_path / "x") == ["y"]


def test_failure_leaves_nothing(tmp_path):
    with (
        pytest.raises(FileNotFoundError),
        storage.new_folder(tmp_path / "y", overwrite=False, is_replaceable=anything) as folder,
    ):
        (folder / "missing" / "a").write_text("half")
    assert os.listdir(tmp_path) == []


def test_failed_replacement_keeps_the_old_folder(tmp_path):
    write(tmp_path / "y", "old")
    with (
        pytest.raises(RuntimeError),
        storage.new_folder(tmp_path / "y", overwrite=True, is_replaceable=anything),
    ):
        raise RuntimeError
    assert read(tmp_path / "y") == ("old", "old")
    assert os.listdir(tmp_path) == ["y"]


def test_old_folder_returns_when_the_new_name_is_refused(tmp_path, monkeypatch):
    write(tmp_path / "y", "old")
    rename = os.rename

    def failing(source, target):
        if ".tmp-" in str(source) and not os.path.exists(target):
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "y", "new", overwrite=True)
    assert read(tmp_path / "y") == ("old", "old")
    assert os.listdir(tmp_path) == ["y"]


def test_existing_folder_is_refused_then_replaced(tmp_path):
    write(tmp_path / "y", "old")
    with pytest.raises(UserError, match="exists already; choose another name or pass --overwrite"):
        write(tmp_path / "y", "new")
    write(tmp_path / "y", "new", overwrite=True)
    assert read(tmp_path / "y") == ("new", "new")
    assert os.listdir(tmp_path) == ["y"]


def test_symbolic_link_keeps_pointing_at_the_replaced_folder(tmp_path):
    write(tmp_path / "v1", "old")
    (tmp_path / "current").symlink_to("v1")
    write(tmp_path / "current", "new", overwrite=True)
    assert (tmp_path / "current").is_symlink()
    assert read(tmp_path / "v1") == ("new", "new")


def test_foreign_folder_or_file_is_never_replaced(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder"):
        with pytest.raises(UserError, match="is not an index folder, so it is not overwritten"):
            write(tmp_path / name, "new", overwrite=True, is_replaceable=nothing)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
def test_simultaneous_writers_never_mix(tmp_path, monkeypatch, overwrite):
    barrier = threading.Barrier(4)
    rename = storage._rename
    monkeypatch.setattr(storage, "_rename", lambda *a: (barrier.wait(), rename(*a)))
    refused = []

    def work(text):
        try:
            write(tmp_path / "y", text, overwrite=overwrite)
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=work, args=(f"text {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = read(tmp_path / "y")
    assert first == second
    assert first.startswith("text ")
    assert os.listdir(tmp_path) == ["y"]
    assert len(refused) == (0 if overwrite else 3)
    assert all("was written by another process meanwhile" in message for message in refused)
