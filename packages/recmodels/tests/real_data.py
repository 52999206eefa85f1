"""Where the real data sets are, for tests that skip without them."""

import os
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).resolve().parents[3]


def real_data(name: str) -> Path:
    """Path of a file of the real data sets, such as `ml-1m/ml-1m.txt.gz`.

    The folder is `$CUTBCE_DATA`, or `../shared/data` beside the repository. The calling test
    is skipped when the file is not there.
    """
    folder = Path(os.environ.get("CUTBCE_DATA", _REPOSITORY.parent / "shared" / "data"))
    path = folder / name
    if not path.is_file():
        pytest.skip(f"data set {name} is not in {folder}; set CUTBCE_DATA to its folder")
    return path
