"""Outputs appear complete or not at all."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
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
        pl.exceptions.ComputeError("No space left on device (os error 28)"),
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


def _killed_writer(tmp_path, kind, out):
    """Starts to write in a process of its own, which is killed with half of it written."""
    program = f"""
import os, pathlib, signal
from recmodels._src.atomic import {kind}
with {kind}(pathlib.Path({str(out)!r}), overwrite=True) as path:
    (path / "half" if {kind == "atomic_folder"} else path).write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("kind", ["atomic_file", "atomic_folder"])
def test_the_next_writer_removes_what_a_killed_one_left(tmp_path, kind):
    out = tmp_path / "out[1]"  # with characters that a pattern would read
    _killed_writer(tmp_path, kind, out)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out[1].tmp-")
    (tmp_path / ".other.tmp-1").write_text("of another output")
    if kind == "atomic_file":
        with atomic_file(out) as path:
            path.write_text("whole")
    else:
        with atomic_folder(out) as folder:
            _fill(folder, "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".other.tmp-1", "out[1]"]


def test_what_another_process_is_writing_stays(tmp_path):
    out = tmp_path / "out"
    program = f"""
import pathlib
from recmodels._src.atomic import atomic_folder
with atomic_folder(pathlib.Path({str(out)!r}), overwrite=True) as folder:
    print(folder, flush=True)
    input()
    (folder / "file").write_text("of the other")
"""
    command = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as other:
        theirs = Path(other.stdout.readline().strip())
        with atomic_folder(out) as folder:
            (folder / "file").write_text("ours")
        assert theirs.is_dir()
        other.communicate("go on\n")
    assert other.returncode == 0
    assert (out / "file").read_text() == "of the other"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_output_that_was_moved_aside_is_kept_while_it_is_all_there_is(tmp_path):
    out, aside = tmp_path / "out", tmp_path / ".out.old-1"
    aside.mkdir()
    with pytest.raises(KeyboardInterrupt):
        _write_half_a_folder(out)
    assert aside.is_dir()
    for _ in range(2):
        with atomic_folder(out, overwrite=True) as folder:
            _fill(folder, "whole")
    assert not aside.exists()


def test_one_kind_of_output_does_not_replace_another(tmp_path):
    folder, file, device = tmp_path / "folder", tmp_path / "file", Path("/dev/null")
    folder.mkdir()
    file.write_text("")
    cases = (
        (folder, False, "folder is a folder, and a file is to be written; choose another name"),
        (file, True, "file is a file, and a folder is to be written; choose another name"),
        (device, False, "/dev/null is a device, and a file is to be written"),
        (device, True, "/dev/null is a device, and a folder is to be written"),
    )
    for path, is_folder, message in cases:
        write = atomic_folder if is_folder else atomic_file
        with pytest.raises(UserError, match=message), write(path, overwrite=True):
            raise AssertionError("must not be reached")
    assert device.is_char_device()


def test_of_a_link_the_target_is_replaced(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.symlink_to(tmp_path / "elsewhere" / "file")
    folder.symlink_to(tmp_path / "elsewhere" / "folder")
    for text in ("first", "second"):
        with atomic_file(file, overwrite=True) as path:
            path.write_text(text)
        with atomic_folder(folder, overwrite=True) as path:
            _fill(path, text)
        assert file.is_symlink()
        assert folder.is_symlink()
        assert file.read_text() == (folder / "inner" / "file.txt").read_text() == text
    assert sorted(p.name for p in (tmp_path / "elsewhere").iterdir()) == ["file", "folder"]
