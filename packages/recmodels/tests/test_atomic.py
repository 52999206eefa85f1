"""Outputs appear complete or not at all."""

import errno
import os
import re
from pathlib import Path

import pytest

from recmodels._src.atomic import atomic_file, atomic_folder, check_output
from recmodels._src.errors import UserError


def _fill(folder: Path, text: str) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "file.txt").write_text(text)


def _write_half_a_folder(out: Path, **options) -> None:
    with atomic_folder(out, **options) as folder:
        _fill(folder, "half")
        raise KeyboardInterrupt


def _write_half_a_file(out: Path) -> None:
    with atomic_file(out) as path:
        path.write_text("half")
        raise KeyboardInterrupt


def test_folder_appears_only_when_complete(tmp_path):
    out = tmp_path / "new" / "out"
    with atomic_folder(out) as folder:
        _fill(folder, "content")
        assert not out.exists()
        assert folder.name == f".out.tmp-{os.getpid()}"
    assert (out / "inner" / "file.txt").read_text() == "content"
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_failure_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        _write_half_a_folder(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        _write_half_a_file(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_existing_output_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    with (
        pytest.raises(UserError, match="exists already; choose another name or pass --overwrite"),
        atomic_folder(tmp_path / "out"),
    ):
        raise AssertionError("must not be reached")


def test_overwrite_replaces_folder_and_keeps_it_on_failure(tmp_path):
    out = tmp_path / "out"
    with atomic_folder(out) as folder:
        _fill(folder, "old")
    with pytest.raises(KeyboardInterrupt):
        _write_half_a_folder(out, overwrite=True)
    assert (out / "inner" / "file.txt").read_text() == "old"
    with atomic_folder(out, overwrite=True) as folder:
        (folder / "only.txt").write_text("new")
    assert [p.name for p in out.iterdir()] == ["only.txt"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_failed_rename_brings_the_old_folder_back(tmp_path, monkeypatch):
    out = tmp_path / "out"
    with atomic_folder(out) as folder:
        _fill(folder, "old")
    replace = os.replace

    def fail_on_new(source, target):
        if ".tmp-" in str(source):
            raise OSError("disk trouble")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_on_new)
    with pytest.raises(OSError, match="disk trouble"), atomic_folder(out, overwrite=True) as folder:
        _fill(folder, "new")
    assert (out / "inner" / "file.txt").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_file_is_replaced_only_on_request(tmp_path):
    path = tmp_path / "a.json"
    with atomic_file(path) as temporary:
        temporary.write_text("1")
    with pytest.raises(UserError, match="exists already"), atomic_file(path):
        raise AssertionError("must not be reached")
    with atomic_file(path, overwrite=True) as temporary:
        temporary.write_text("2")
    assert path.read_text() == "2"


def test_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="is a file, not a folder"),
        atomic_folder(tmp_path / "file" / "out"),
    ):
        raise AssertionError("must not be reached")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError("4096 requested and 512 written"),
        ValueError("UNKNOWN: write failed: No space left on device"),
    ],
)
@pytest.mark.parametrize("kind", [atomic_file, atomic_folder])
def test_a_full_disk_names_the_output(tmp_path, kind, error):
    message = f"^cannot write {re.escape(str(tmp_path / 'out'))}: No space left on device$"
    with pytest.raises(OSError, match=message), kind(tmp_path / "out"):
        raise error
    assert not list(tmp_path.iterdir())


def test_a_folder_without_permission_is_refused_before_the_work(tmp_path, monkeypatch):
    # Asking the system would not do: the tests may run as a user who may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(UserError, match=f"cannot be written: {tmp_path} does not let you write"):
        check_output(tmp_path / "new" / "out", overwrite=True)
