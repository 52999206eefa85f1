"""Outputs that appear complete or not at all.

Everything is written under a temporary sibling name, flushed to the disk and then
renamed. A reader therefore never meets half a file, whatever kills the writer. In an
object store one object appears whole or not at all: what is to be there is written on
this machine, in the folder for temporary files, and then uploaded.
"""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from recmodels._src import storage
from recmodels._src.errors import UserError


def check_output(path: Path, *, overwrite: bool) -> None:
    """Refuses an output that exists, unless it may be overwritten.

    Call it before long work, so that the refusal comes at once.

    Args:
      path: where the output will be.
      overwrite: whether an existing output may be replaced.

    Raises:
      UserError: `path` exists and `overwrite` is false, or `path` cannot be written.
    """
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists already; choose another name or pass --overwrite")
    if storage.is_remote(path):
        return
    blocker = next((p for p in path.absolute().parents if p.exists()), None)
    if blocker is not None and not blocker.is_dir():
        raise UserError(f"{path} cannot be written: {blocker} is a file, not a folder")
    if blocker is not None and not os.access(blocker, os.W_OK | os.X_OK):
        raise UserError(f"{path} cannot be written: {blocker} does not let you write into it")


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Gives a full disk one form, whichever library meets it: an `OSError` that names `path`.

    So it does for whatever an object store refuses.

    Args:
      path: the output that is written in the block.

    Raises:
      OSError: the disk is full, or the object store does not take it.
    """
    try:
        yield
    except Exception as error:
        reason = _reason_if_full(error)
        if reason is None and storage.is_remote(path) and storage.is_failure(error):
            reason = storage.failure_text(error)
        if reason is None:
            raise
        raise OSError(f"cannot write {path}: {reason}") from error


def _reason_if_full(error: Exception) -> str | None:
    if isinstance(error, OSError) and error.errno in _FULL:
        return error.strerror
    # Orbax and Polars put the system's words into errors of their own; NumPy counts items instead.
    no_space, text = os.strerror(errno.ENOSPC), str(error)
    by_numpy = isinstance(error, OSError) and "requested and" in text and "written" in text
    return no_space if by_numpy or no_space in text else None


@contextlib.contextmanager
def atomic_file(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary path that becomes the file `path` when the block succeeds.

    Args:
      path: final name; missing parent folders are made.
      overwrite: whether an existing file may be replaced.

    Yields:
      The sibling path to write to.

    Raises:
      UserError: `path` exists and `overwrite` is false.
      OSError: the disk is full or cannot be written.
    """
    check_output(path, overwrite=overwrite)
    if storage.is_remote(path):
        with tempfile.TemporaryDirectory() as folder:
            with writing(path):
                yield Path(folder) / path.name
            storage.upload(Path(folder) / path.name, path)
        return
    temporary = _sibling(path, "tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with writing(path):
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(
    path: Path, *, overwrite: bool = False, last: str | None = None
) -> Iterator[Path]:
    """Yields a temporary folder that becomes the folder `path` when the block succeeds.

    An existing folder is kept until the new one is complete and comes back if the last
    rename fails. In an object store its file `last` goes first, and then the others are
    replaced one after another, so that a reader finds no folder rather than a mixture.

    Args:
      path: final name; missing parent folders are made.
      overwrite: whether an existing output may be replaced.
      last: file without which readers take the folder for incomplete; an object store gets
        it after all others.

    Yields:
      The empty sibling folder to write into.

    Raises:
      UserError: `path` exists and `overwrite` is false.
      OSError: the disk is full or cannot be written.
    """
    check_output(path, overwrite=overwrite)
    if storage.is_remote(path):
        with tempfile.TemporaryDirectory() as folder:
            with writing(path):
                yield Path(folder)
            storage.upload_folder(Path(folder), path, last)
        return
    temporary = _sibling(path, "tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with writing(path):
            yield temporary
            for entry in sorted(temporary.rglob("*")):
                _sync(entry)
            _sync(temporary)
            _swap_in(temporary, path)
            _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _swap_in(new: Path, path: Path) -> None:
    # A folder cannot be renamed onto a non-empty one, so the old one steps aside first.
    old = _sibling(path, "old")
    _remove(old)
    had_old = path.exists()
    if had_old:
        os.replace(path, old)
    try:
        os.replace(new, path)
    except OSError:
        if had_old:
            os.replace(old, path)
        raise
    _remove(old)


def _sibling(path: Path, kind: str) -> Path:
    return path.absolute().parent / f".{path.absolute().name}.{kind}-{os.getpid()}"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
