"""Checkpoints in an object store that Orbax does not write to, by way of a folder of this machine.

Orbax writes to gs:// by itself, from every process; what goes to s3:// is written here and
uploaded, which one process alone can do.
"""

import contextlib
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax

from recmodels._src import storage
from recmodels._src.errors import UserError

_LAST_FILE = "_CHECKPOINT_METADATA"  # which Orbax writes for every checkpoint


def needs_staging(folder: Path) -> bool:
    """Whether the checkpoints in `folder` have to go by way of this machine."""
    return storage.is_remote(folder) and not str(folder).startswith("gs://")


class Staging:
    """The folder in which Orbax works, and its copies in an object store.

    Args:
        remote: folder of the checkpoints in the object store.

    Raises:
        UserError: several processes train together.
    """

    def __init__(self, remote: Path) -> None:
        if jax.process_count() > 1:
            raise UserError(
                f"several processes cannot write checkpoints to {remote}; choose gs:// or a folder "
                "that all of them see."
            )
        self._remote = remote
        self.folder = Path(tempfile.mkdtemp(prefix="recmodels-checkpoints-"))
        self._uploader = ThreadPoolExecutor(1, "upload")
        self._upload: Future[None] | None = None

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are whole in the object store."""
        with storage.reaching("read", self._remote):
            found = list(self._remote.glob(f"*/{_LAST_FILE}"))
        return [int(file.parent.name) for file in found if file.parent.name.isdecimal()]

    def upload(self, step: int) -> None:
        """Starts to copy the checkpoint of a step, which is complete here."""
        here, there = self.folder / str(step), self._remote / str(step)
        self._upload = self._uploader.submit(storage.upload_folder, here, there, _LAST_FILE)

    def wait(self) -> None:
        """Returns once the copy is complete.

        Raises:
            OSError: it cannot be written.
        """
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.result()

    def fetch(self, step: int) -> None:
        """Gets the checkpoint of a step, unless it is here.

        Raises:
            OSError: it cannot be read.
        """
        here = self.folder / str(step)
        if here.exists():
            return
        partial = self.folder / f".{step}.part"
        shutil.rmtree(partial, ignore_errors=True)
        storage.download_folder(self._remote / str(step), partial)
        with contextlib.suppress(FileNotFoundError):  # there is nothing of that step
            partial.rename(here)

    def delete(self, step: int) -> None:
        """Removes the copy of a step.

        Raises:
            OSError: it cannot be removed.
        """
        storage.remove_folder(self._remote / str(step), _LAST_FILE)

    def close(self) -> None:
        """Removes the folder of this machine."""
        self._uploader.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)
