"""Outputs that appear complete or not at all.

Everything is written under a temporary sibling name, flushed to the disk and then
renamed. A reader therefore never meets half a file, whatever kills the writer. In an
object store one object appears whole or not at all: what is to be there is written on
this machine, in the folder for temporary files, and then uploaded.
"""

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from recmodels._src import storage
from recmodels._src.errors import UserError


def check_output(path: Path, *, overwrite: bool, is_folder: bool = False) -> None:
    """Refuses an output that exists, unless it may be overwritten.

    Call it before long work, so that the refusal comes at once.

    Args:
      path: where the output will be.
      overwrite: whether an existing output may be replaced.
      is_folder: whether the output is a folder; one kind never replaces the other.

    Raises:
      UserError: `path` exists and `overwrite` is false, or `path` cannot be written.
    """
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists already; choose another name or pass --overwrite")
    if storage.is_remote(path):
        return
    if path.exists() and not (path.is_dir() if is_folder else path.is_file()):
        found = "a folder" if path.is_dir() else "a file" if path.is_file() else "a device"
        wanted = "folder" if is_folder else "file"
        raise UserError(f"{path} is {found}, and a {wanted} is to be written; choose another name")
    blocker = next((p for p in path.absolute().parents if p.exists()), None)
    if blocker is not None and not blocker.is_dir():
        raise UserError(f"{path} cannot be written: {blocker} is a file, not a folder")
    if blocker is not None and not os.access(blocker, os.W_OK | os.X_OK):
        raise UserError(f"{path} cannot be written: {blocker} does not let you write into it")


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_TEXTS = tuple(os.strerror(number) for number in _FULL)


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
    text = str(error)
    if isinstance(error, OSError) and "requested and" in text and "written" in text:
        return os.strerror(errno.ENOSPC)
    return next((reason for reason in _FULL_TEXTS if reason in text), None)


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
    path = path.resolve()  # of a link the target is replaced, not the link
    temporary = _sibling(path, "tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path), _owned(temporary, is_folder=False):
        _remove_what_was_left(path)
        try:
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
    check_output(path, overwrite=overwrite, is_folder=True)
    if storage.is_remote(path):
        with tempfile.TemporaryDirectory() as folder:
            with writing(path):
                yield Path(folder)
            storage.upload_folder(Path(folder), path, last)
        return
    path = path.resolve()
    temporary = _sibling(path, "tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path), _owned(temporary, is_folder=True):
        _remove_what_was_left(path)
        try:
            yield temporary
            for entry in sorted(temporary.rglob("*")):
                _sync(entry)
            _sync(temporary)
            _swap_in(temporary, path)
            _sync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _owned(temporary: Path, *, is_folder: bool) -> Iterator[None]:
    """Makes a file or folder and keeps a lock on it, which ends with the process that holds it."""
    descriptor = -1
    while descriptor == -1:
        _remove(temporary)
        if is_folder:
            temporary.mkdir()
        else:
            temporary.touch()
        # Others may take it for left behind, and remove it, until it is locked.
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(temporary, os.O_RDONLY)
            with contextlib.suppress(OSError):  # a file system without locks: nobody removes it
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        if descriptor != -1 and not temporary.exists():
            os.close(descriptor)
            descriptor = -1
    try:
        yield
    finally:
        os.close(descriptor)


def _remove_what_was_left(path: Path) -> None:
    """Removes what killed writers of the same output left beside it, which may be large."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.tmp-*"):
        with contextlib.suppress(OSError):  # somebody else's, in use, or gone in the meantime
            descriptor = os.open(temporary, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(temporary)
            finally:
                os.close(descriptor)
    replaced = list(path.parent.glob(f".{glob.escape(path.name)}.old-*"))
    if path.exists():  # else one of them is all there is of the output
        for old in replaced:
            with contextlib.suppress(OSError):
                _remove(old)


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
    with contextlib.suppress(FileNotFoundError):  # the next writer may be faster
        _remove(old)


def _sibling(path: Path, kind: str) -> Path:
    return path.parent / f".{path.name}.{kind}-{os.getpid()}"


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
