"""Checksummed files, and folders that appear complete or not at all."""

import contextlib
import dataclasses
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from recserve._src.errors import UserError

_CHUNK_BYTES = 1 << 22
_RENAME_ONTO_EXISTING = {errno.ENOTEMPTY, errno.EEXIST}


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """Size and checksum of one file, as a manifest lists it."""

    num_bytes: int
    """Length of the file."""
    sha256: str
    """Lower-case hexadecimal SHA-256 of its content."""


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Adds `path` to errors that name no file, as a full disk gives them."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def copy_file(source: Path, target: Path) -> FileRecord:
    """Copies `source` to `target`, both read once, and returns what was written."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, naming(target), target.open("xb") as writer:
        while True:
            with naming(source):
                chunk = reader.read(_CHUNK_BYTES)
            if not chunk:
                break
            digest.update(chunk)
            writer.write(chunk)
        num_bytes = writer.tell()
    return FileRecord(num_bytes, digest.hexdigest())


def record_file(path: Path) -> FileRecord:
    """Returns size and checksum of an existing file."""
    with path.open("rb") as reader:
        digest = hashlib.file_digest(reader, "sha256")
        return FileRecord(reader.tell(), digest.hexdigest())


def check_record(path: Path, found: FileRecord, listed: FileRecord, manifest: str) -> None:
    """Raises `UserError` when a file is not the one its manifest lists."""
    if found.num_bytes != listed.num_bytes:
        raise UserError(
            f"{path} has {found.num_bytes:,} bytes but {manifest} lists {listed.num_bytes:,}: "
            "the file is truncated or from another model; write the folder again"
        )
    if found.sha256 != listed.sha256:
        raise UserError(
            f"{path} has SHA-256 {found.sha256[:12]}... but {manifest} lists "
            f"{listed.sha256[:12]}...: the file is corrupted or from another model; "
            "write the folder again"
        )


@contextlib.contextmanager
def new_folder(
    target: Path, *, overwrite: bool, is_replaceable: Callable[[Path], bool]
) -> Iterator[Path]:
    """Yields an empty folder beside `target` that takes its name when the block succeeds.

    Args:
      target: name of the finished folder; its parent is created if needed.
      overwrite: replace an existing folder. The old one is kept until the new one is complete.
      is_replaceable: says whether an existing folder may be replaced at all, so that a mistyped
        path never deletes somebody's files.

    Raises:
      UserError: `target` exists and may not be replaced, also when it appears meanwhile.
    """
    target = target.resolve()
    check_target(target, overwrite=overwrite, is_replaceable=is_replaceable)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _sibling(target, "tmp")
    temporary.mkdir()
    try:
        yield temporary
        _flush(temporary)
        _rename(temporary, target, overwrite)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already when it was renamed


def check_target(target: Path, *, overwrite: bool, is_replaceable: Callable[[Path], bool]) -> None:
    """Raises `UserError` when a folder may not be written at `target`."""
    if not target.exists():
        return
    if not overwrite:
        raise UserError(f"{target} exists already; choose another name or pass --overwrite")
    if not target.is_dir() or not is_replaceable(target):
        raise UserError(f"{target} is not an index folder, so it is not overwritten; move it away")


def _sibling(target: Path, purpose: str) -> Path:
    # The process id tells people whose leftover it is; the random part keeps threads apart.
    return target.parent / f".{target.name}.{purpose}-{os.getpid()}-{secrets.token_hex(4)}"


def _flush(folder: Path) -> None:
    """Forces every file and folder below `folder` to the disk, so a rename never outruns it."""
    for parent, _, names in os.walk(folder):
        for path in [*(os.path.join(parent, name) for name in names), parent]:
            handle = os.open(path, os.O_RDONLY)
            try:
                with naming(path):
                    os.fsync(handle)
            finally:
                os.close(handle)


def _rename(temporary: Path, target: Path, overwrite: bool) -> None:
    """Renames `temporary` to `target`; with `overwrite` a folder in the way is moved aside.

    A folder cannot be renamed onto a full one, so replacing takes two renames. Another build may
    rename in between; the loop then moves that one aside, and the last build wins as a whole.
    """
    aside: list[Path] = []
    try:
        while True:
            try:
                os.rename(temporary, target)
                break
            except OSError as error:
                if error.errno not in _RENAME_ONTO_EXISTING:
                    raise
            if not overwrite:
                raise UserError(
                    f"{target} was written by another process meanwhile; "
                    "choose another name or pass --overwrite"
                )
            with contextlib.suppress(FileNotFoundError):  # another build moved it first
                old = _sibling(target, "old")
                os.rename(target, old)
                aside.append(old)
    except BaseException:
        if aside and not target.exists():
            os.rename(aside.pop(), target)
        raise
    finally:
        for old in aside:
            shutil.rmtree(old, ignore_errors=True)
    handle = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
