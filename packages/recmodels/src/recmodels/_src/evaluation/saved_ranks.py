"""Ranks of every user's held-out items, kept with the run for comparisons."""

import dataclasses
import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import polars as pl

from recmodels._src.atomic import atomic_file
from recmodels._src.data.store import SequenceStore
from recmodels._src.errors import UserError
from recmodels._src.storage import local_copy
from recmodels._src.train.run_directory import installed_version

_KEY = "recmodels"  # of the file's own metadata
_FOLDER = "ranks"


@dataclasses.dataclass(frozen=True)
class UserRanks:
    """Where a ranking has the held-out items of each user."""

    user: np.ndarray
    """`[U]` int64 number of the user in the store."""
    targets: np.ndarray
    """`[U, L]` int32 distinct held-out rows, -1 on padding."""
    ranks: np.ndarray
    """`[U, L]` int64 0-based rank of each, -1 on padding."""


def ranks_path(run_dir: Path, part: str, hide_seen: bool) -> Path:
    """Parquet file of the ranks in a run directory, one for each way to evaluate it."""
    return run_dir / _FOLDER / f"{part}-{'hidden' if hide_seen else 'shown'}.parquet"


def ranks_identity(params: dict, store: SequenceStore) -> dict[str, Any]:
    """What the ranks of a run depend on, apart from its settings, which never change.

    Args:
        params: arrays of the model.
        store: the sequences.
    """
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        sha.update(np.ascontiguousarray(leaf).data)
    return {
        "params": sha.hexdigest(),
        "store": store.digest,
        "version": installed_version("recmodels"),
    }


def save_ranks(
    path: Path, found: UserRanks, store: SequenceStore, identity: dict[str, Any]
) -> None:
    """Writes ranks with user ids; a folder that cannot be written to gives a warning only.

    Args:
        path: result of `ranks_path`.
        found: the ranks.
        store: gives the ids.
        identity: result of `ranks_identity`.
    """
    table = pl.DataFrame(
        {
            "user": found.user,
            "user_id": store.user_ids()[found.user],
            "targets": found.targets,
            "ranks": found.ranks,
        }
    )
    try:
        with atomic_file(path, overwrite=True) as temporary:
            table.write_parquet(temporary, metadata={_KEY: json.dumps(identity)})
    except (OSError, UserError, pl.exceptions.PolarsError) as error:
        # The run may be somebody else's; what was measured is not lost with the copy of it.
        warnings.warn(f"ranks are not kept: {error}", stacklevel=2)


def read_ranks(
    path: Path, identity: dict[str, Any], users: np.ndarray, num_targets: int, num_items: int
) -> UserRanks | None:
    """Ranks of exactly this model on this store; None if there are none, or only of another.

    None is also what a damaged file gives, after a warning: the ranks can be measured again.

    Args:
        path: result of `ranks_path`.
        identity: result of `ranks_identity`.
        users: `[U]` int64 numbers of the users that are evaluated, ascending.
        num_targets: L, held-out items of each.
        num_items: size of the catalog.
    """
    found = None
    try:
        with local_copy(path) as file:
            if pl.read_parquet_metadata(file).get(_KEY) != json.dumps(identity):
                return None
            table = pl.read_parquet(file)
        found = UserRanks(*(table[name].to_numpy() for name in ("user", "targets", "ranks")))
        reason = _misfit(found, users, (len(users), num_targets), num_items)
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = str(error).splitlines()[0]
    if found is not None and reason is None:
        return found
    warnings.warn(f"{path} is damaged ({reason}); it is measured again.", stacklevel=4)
    return None


def _misfit(
    found: UserRanks, users: np.ndarray, shape: tuple[int, int], num_items: int
) -> str | None:
    if not np.array_equal(np.sort(found.user), users):
        return f"it is not of the {len(users)} users that are evaluated"
    for name, values in {"targets": found.targets, "ranks": found.ranks}.items():
        if values.shape != shape or not np.issubdtype(values.dtype, np.integer):
            return f"{name} are {values.dtype}{list(values.shape)}, not integers {list(shape)}"
        if values.size and not (values.min() >= -1 and values.max() <= num_items):
            return f"{name} are not all between -1 and {num_items}"
    if not np.array_equal(found.targets < 0, found.ranks < 0):
        return "not every target has a rank"
    return None
