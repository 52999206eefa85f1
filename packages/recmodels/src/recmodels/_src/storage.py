"""Paths in an object store, gs:// and s3://, beside those of this machine.

A path of this machine is a `pathlib.Path`, any other an `etils.epath.Path`, which answers to the
same methods as far as this package calls them. Memory maps, appending and renaming need files of
this machine, so what they are for is written or read in a local copy. In an object store one
object appears whole or not at all; of several that belong together, the one that readers look for
is written last.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from etils import epath
from fsspec.callbacks import Callback, TqdmCallback

from recmodels._src.errors import UserError

_CLIENTS = {"gs": "gcsfs", "s3": "s3fs"}  # module by scheme
_EXTRAS = {"gs": "gcs", "s3": "s3"}
# What these packages raise, beside `OSError`, is about the store and not about our code.
_CLIENT_PACKAGES = {"aiohttp", "botocore", "fsspec", "gcsfs", "google", "requests", "s3fs"}
# TensorStore, which writes the arrays of checkpoints, raises `ValueError` with one of these first.
_STATUS = re.compile(
    r"(ABORTED|DEADLINE_EXCEEDED|INTERNAL|NOT_FOUND|PERMISSION_DENIED|RESOURCE_EXHAUSTED"
    r"|UNAUTHENTICATED|UNAVAILABLE): "
)
_BAR_DELAY_S = 2
_SILENCE_S = 5  # before a line says what is waited for


def as_path(path: str | os.PathLike[str]) -> Path:
    """The path that a user named, here or in an object store.

    Args:
        path: local, or `gs://bucket/...` or `s3://bucket/...`.

    Returns:
        A `pathlib.Path` or, typed as one, an `etils.epath.Path`.

    Raises:
        UserError: the scheme is another, its client is not installed, or the bucket cannot be
            reached.
    """
    text = os.fspath(path)
    scheme, _, name = text.partition("://")
    if not name or "/" in scheme:
        if re.match(r"(gs|s3):/", text):
            raise UserError(f"{text} has lost a slash; pass it as a text, not as a pathlib.Path")
        return Path(path)
    if scheme not in _CLIENTS:
        raise UserError(f"{text} is neither a local path nor one of gs:// and s3://")
    if importlib.util.find_spec(_CLIENTS[scheme]) is None:
        raise UserError(
            f"{text} needs {_CLIENTS[scheme]}; install it with "
            f'`pip install "recmodels[{_EXTRAS[scheme]}]"`'
        )
    _set_up_client(scheme)
    remote = cast(Path, epath.Path(text))
    _check_reachable(remote)
    return remote


def is_remote(path: Path) -> bool:
    """Whether a path is in an object store."""
    return "://" in os.fspath(path)


def absolute(path: Path) -> Path:
    """The path from the root of its file system."""
    return path if is_remote(path) else path.absolute()


def size(path: Path) -> int:
    """Bytes of a file or an object.

    Raises:
        FileNotFoundError: there is none.
    """
    found: Any = path.stat()
    return found.length if is_remote(path) else found.st_size


def is_failure(error: Exception) -> bool:
    """Whether an exception says that a file or an object could not be read or written."""
    return (
        isinstance(error, OSError)
        or type(error).__module__.split(".")[0] in _CLIENT_PACKAGES
        or (isinstance(error, ValueError) and _STATUS.match(str(error)) is not None)
    )


def is_absence(error: Exception) -> bool:
    """Whether an exception says that there is no such file, object or bucket."""
    return isinstance(error, FileNotFoundError) or str(error).startswith("NOT_FOUND: ")


def failure_text(error: Exception) -> str:
    """An exception as part of a one-line message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if is_absence(error):
        return f"no such bucket or object: {lines[0]}"
    text = " ".join(lines)
    # What TensorStore adds in brackets is long, and only of use to its authors.
    return text.partition(" [")[0] if _STATUS.match(text) else text[:300]


def upload(local: Path, path: Path) -> None:
    """Writes a file to an object, which appears whole or not at all.

    Args:
        local: file of this machine.
        path: object to make or replace.

    Raises:
        OSError: the object cannot be written.
    """
    with reaching("write", path), _bar("upload", path) as callback:
        _client(path).put_file(str(local), str(path), callback=callback)


def upload_folder(local: Path, path: Path, last: str | None) -> None:
    """Writes a folder's files to objects; those that were there before and are in it no more go.

    Args:
        local: folder of this machine.
        path: prefix of the objects.
        last: file that readers look for first: the old one goes before anything else, the new
            one is written after all others; None if there is none.

    Raises:
        OSError: an object cannot be written.
    """
    names = sorted(str(file.relative_to(local)) for file in local.rglob("*") if not file.is_dir())
    names.sort(key=lambda name: name == last)
    with reaching("write", path):
        _remove(path, [last] if last else [])
        _remove(path, sorted(_sizes_in(path).keys() - set(names)))
    for name in names:
        upload(local / name, path / name)


def download_folder(path: Path, local: Path) -> None:
    """Copies all objects below a prefix into a folder.

    Args:
        path: prefix of the objects.
        local: folder of this machine, made when absent.

    Raises:
        OSError: an object cannot be read, or the disk is full.
    """
    with reaching("read", path):
        names = list(_sizes_in(path))
    for name in names:
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        _download(path / name, local / name)


def remove_folder(path: Path, first: str) -> None:
    """Removes all objects below a prefix.

    Args:
        path: prefix of the objects.
        first: the one that readers look for.

    Raises:
        OSError: an object cannot be removed.
    """
    with reaching("remove", path):
        _remove(path, [first])
        _remove(path, list(_sizes_in(path)))


@contextlib.contextmanager
def local_copy(path: Path) -> Iterator[Path]:
    """Yields a file of this machine with the content of `path`: itself, or a copy for the block.

    Messages of a `UserError` from the block name `path`.

    Args:
        path: file to read; one that does not exist is left to the block to find out.
    """
    if not is_remote(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / path.name
        if path.is_file():
            _download(path, local)
        with naming(path, local):
            yield local


def cached_folder(path: Path, key_file: str) -> Path:
    """A folder of this machine with the objects of the folder `path`, fetched when they change.

    Copies are kept in `RECMODELS_CACHE`, by default `recmodels` in the user's cache folder, and
    shared by all processes: one fetches, the others wait for it. Nothing removes old ones.

    Args:
        path: folder in an object store.
        key_file: file whose content changes whenever another file does without changing its size.

    Raises:
        OSError: the objects cannot be read, or the disk is full.
    """
    with reaching("read", path):
        content = (path / key_file).read_bytes()
        sizes = _sizes_in(path)
    key = hashlib.sha256(f"{path}\0{sizes}\0".encode() + content).hexdigest()[:32]
    folder = _cache() / f"{path.name}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a killed process leaves none behind
        if not folder.exists():
            partial = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(partial, ignore_errors=True)
            download_folder(path, partial)
            partial.rename(folder)
    return folder


@contextlib.contextmanager
def reaching(what: str, path: Path) -> Iterator[None]:
    """Gives whatever an object store refuses one form: an `OSError` that names `path`.

    Args:
        what: "read", "write" or the like.
        path: object or folder that the block is about; a local one changes nothing.

    Raises:
        OSError: the object store refuses; `FileNotFoundError` where something is not there.
    """
    try:
        yield
    except Exception as error:
        if not is_remote(path) or not is_failure(error) or str(path) in str(error):
            raise
        kind = FileNotFoundError if is_absence(error) else OSError
        raise kind(f"cannot {what} {path}: {failure_text(error)}") from error


@contextlib.contextmanager
def naming(path: Path, local: Path) -> Iterator[None]:
    """Lets the messages of a `UserError` name `path` where they name its copy `local`."""
    try:
        yield
    except UserError as error:
        if str(local) not in str(error):
            raise
        raise UserError(str(error).replace(str(local), str(path))) from error


def _cache() -> Path:
    named = os.environ.get("RECMODELS_CACHE")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "recmodels"


@functools.cache
def _set_up_client(scheme: str) -> None:
    # The clients remember listings for ever, and TensorStore and other processes write past them.
    from fsspec.config import conf

    conf.setdefault(scheme, {}).setdefault("use_listings_cache", False)
    # What they log of a failure, tracebacks of every attempt, comes beside the exception.
    logger = logging.getLogger(_CLIENTS[scheme])
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)


@contextlib.contextmanager
def _telling_of_the_wait(path: Path) -> Iterator[None]:
    # Without a network the clients try again for a minute before they give up.
    timer = threading.Timer(
        _SILENCE_S, print, (f"waiting for an answer about {path} ...",), {"file": sys.stderr}
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check_reachable(path: Path) -> None:
    bucket = str(path).split("/")[2]
    try:
        with _telling_of_the_wait(path):
            if path.exists():
                return
    except Exception as error:  # whatever the client, and what it asks for credentials, raises
        reason = failure_text(error)
        raise UserError(f"{path} cannot be read ({reason}); check bucket and access") from error
    try:
        _client(path).info(bucket)
    except FileNotFoundError:
        raise UserError(f"{path} cannot be used: there is no bucket {bucket}") from None
    except Exception as error:
        if not is_failure(error):
            raise
        # To look at objects but not at their bucket may be all that one is allowed.


def _client(path: Path) -> Any:
    from fsspec.core import url_to_fs

    return url_to_fs(str(path))[0]


def _sizes_in(path: Path) -> dict[str, int]:
    # By name, relative to `path`; consoles make folders as objects whose names end with a slash.
    root = str(path).split("://")[1].rstrip("/") + "/"
    found = _client(path).find(str(path), detail=True).items()
    sizes = {name.removeprefix(root): entry["size"] for name, entry in found}
    return {name: sizes[name] for name in sorted(sizes) if name and not name.endswith("/")}


def _remove(path: Path, names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            _client(path).rm_file(str(path / name))


def _download(path: Path, local: Path) -> None:
    with reaching("read", path), _bar("download", path) as callback:
        _client(path).get_file(str(path), str(local), callback=callback)


def _bar(what: str, path: Path) -> Callback:
    # Nobody asked for a bar here, so it is for terminals alone.
    options = {"unit": "B", "unit_scale": True, "delay": _BAR_DELAY_S, "disable": None}
    return TqdmCallback(tqdm_kwargs={"desc": f"{what} {path.name}", "leave": False, **options})
