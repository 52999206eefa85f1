"""The sequence store: every user's items in time order, memory-mapped.

A folder with `items.npy` (int32, users back to back), `offsets.npy` (int64),
`timestamps.npy` (int64), `users.parquet`, `items.parquet` and `meta.json`. Rows run
from 1 to `num_items`; row 0 is padding. With item categories `items.parquet` has a column
`categories`, a list of names for every item.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recmodels._src import storage
from recmodels._src.atomic import check_output
from recmodels._src.data.categories import COLUMN, COUNTS, ItemCategories, numbered
from recmodels._src.errors import UserError

FORMAT = "cutbce-sequence-store"
VERSION = 1

LAST_FILE = "meta.json"
"""File that makes a folder a store; it changes with all others, as it holds their digest."""
_FILES = ("items.npy", "offsets.npy", "timestamps.npy", "users.parquet", "items.parquet")


# Name and allowed types of every column.
_USER_COLUMNS = {
    "user": (pl.Int64,),
    "user_id": (pl.Int64, pl.String),
    "num_interactions": (pl.Int64,),
}
_ITEM_COLUMNS = {"row": (pl.Int32,), "item_id": (pl.Int64, pl.String), "count": (pl.Int64,)}
_CHECK_BLOCK = 1 << 24  # events checked at a time: 64 MiB


def check_store_output(path: Path, *, overwrite: bool) -> None:
    """Refuses an output that exists, unless it is a store that may be overwritten.

    Args:
      path: where the store will be.
      overwrite: whether an existing store may be replaced.

    Raises:
      UserError: `path` exists and is not to be replaced, or is not a store.
    """
    check_output(path, overwrite=overwrite, is_folder=True)
    if path.exists() and any(path.iterdir()):
        try:
            _read_meta(path)
        except UserError as error:
            # Replacing removes what is there: a slip in --out must not cost somebody's folder.
            raise UserError(
                f"{path} exists and is not a whole sequence store; --overwrite replaces nothing "
                "else, so choose another name or remove it"
            ) from error


@dataclasses.dataclass(frozen=True)
class SequenceStore:
    """A sequence store opened for reading; the arrays are read-only memory maps.

    Example: `SequenceStore.open("store").sequence(0)` is the first user's history.
    """

    path: Path
    """The folder, of this machine."""
    location: Path
    """Where it was opened: the same folder, or that in an object store which it is a copy of."""
    meta: dict[str, Any]
    """Content of `meta.json`."""
    items: np.ndarray
    """`[num_interactions]` int32 rows 1..num_items, users back to back, oldest first."""
    offsets: np.ndarray
    """`[num_users + 1]` int64: where each user starts."""
    timestamps: np.ndarray
    """`[num_interactions]` int64; see `meta["timestamps"]`: "seconds" or "order"."""

    @classmethod
    def open(cls, path: str | Path) -> "SequenceStore":
        """Opens a store and checks it, in one pass over its events.

        Args:
          path: folder written by `recmodels prepare`; one in an object store is copied to this
            machine first, see `storage.cached_folder`.

        Raises:
          UserError: there is no store, it is of another version, or it is damaged.
        """
        location = storage.as_path(path)
        path = _on_this_machine(location)
        with storage.naming(location, path):
            meta = _read_meta(path)
            arrays = {}
            for name in ("items", "offsets", "timestamps"):
                try:
                    arrays[name] = np.load(path / f"{name}.npy", mmap_mode="r")
                except (OSError, ValueError, EOFError) as error:
                    raise _damaged(path, f"{name}.npy cannot be read ({error})") from error
            store = cls(path=path, location=location, meta=meta, **arrays)
            store._check()
        return store

    def _check(self) -> None:
        num_users, num_interactions = self.num_users, self.num_interactions
        expected = {
            "items": (self.items, (num_interactions,), np.int32),
            "offsets": (self.offsets, (num_users + 1,), np.int64),
            "timestamps": (self.timestamps, (num_interactions,), np.int64),
        }
        for name, (array, shape, dtype) in expected.items():
            if not isinstance(array, np.ndarray):
                raise _damaged(self.path, f"{name}.npy is not one array")
            if array.shape != shape or array.dtype != dtype:
                got = f"{array.dtype.name}{list(array.shape)}"
                want = f"{np.dtype(dtype).name}{list(shape)}"
                raise _damaged(self.path, f"{name}.npy is {got}, meta.json says {want}")
        if self.offsets[0] != 0 or self.offsets[-1] != num_interactions:
            raise _damaged(self.path, "offsets.npy does not span the interactions")
        if (self.lengths < 0).any():
            raise _damaged(self.path, "offsets.npy has a user that ends before it starts")
        for start in range(0, num_interactions, _CHECK_BLOCK):
            block = self.items[start : start + _CHECK_BLOCK]
            if block.min() < 1 or block.max() > self.num_items:
                raise _damaged(self.path, f"items.npy has rows outside 1..{self.num_items}")
        _check_table(self.path, "users.parquet", _USER_COLUMNS, num_users)
        columns: dict[str, tuple[Any, ...]] = dict(_ITEM_COLUMNS)
        if self.num_categories:
            columns[COLUMN] = (pl.List(pl.String),)
        _check_table(self.path, "items.parquet", columns, self.num_items)

    @property
    def num_users(self) -> int:
        """Number of users."""
        return self.meta["num_users"]

    @property
    def num_items(self) -> int:
        """Number of items in the catalog; the item table has one row more."""
        return self.meta["num_items"]

    @property
    def num_interactions(self) -> int:
        """Number of events."""
        return self.meta["num_interactions"]

    @property
    def digest(self) -> str:
        """Hex digest of sequences, times, ids and categories; equal ones mean equal stores."""
        return self.meta["digest"]

    @property
    def num_categories(self) -> int:
        """Number of item categories; 0 when the store has none."""
        found = self.meta.get("item_categories")
        return 0 if found is None else found["num_categories"]

    @functools.cached_property
    def item_categories(self) -> ItemCategories:
        """The categories of every item.

        Raises:
          UserError: the store has none, or they are damaged.
        """
        if not self.num_categories:
            raise UserError(
                f"`item_categories` needs categories, and {self.location} has none; prepare it "
                "with --item-categories"
            )
        found = numbered(pl.read_parquet(self.path / "items.parquet", columns=[COLUMN])[COLUMN])
        if len(found.names) != self.num_categories:
            what = f"items.parquet has {len(found.names)} categories"
            raise _damaged(self.location, f"{what}, meta.json says {self.num_categories}")
        return found

    def check_has_times(self) -> None:
        """Refuses a store that knows the order of the events only.

        Raises:
          UserError: it was prepared without a time column.
        """
        if self.meta["timestamps"] != "seconds":
            raise UserError(
                f"`time_gaps` needs times, and {self.location} has none; prepare it with --time"
            )

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """`[num_users]` int64 number of events of each user."""
        return np.diff(self.offsets)

    def sequence(self, user: int) -> np.ndarray:
        """One user's rows, oldest first.

        Args:
          user: 0..num_users-1.

        Returns:
          `[n]` int32 view into the memory map.

        Raises:
          IndexError: there is no such user.
        """
        if not 0 <= user < self.num_users:
            raise IndexError(f"`user` must be in [0, {self.num_users}); got {user}.")
        return self.items[self.offsets[user] : self.offsets[user + 1]]

    def item_ids(self) -> np.ndarray:
        """Raw item ids: `[num_items]` int64 or `str` objects; row r is at r - 1."""
        return pl.read_parquet(self.path / "items.parquet")["item_id"].to_numpy()

    def user_ids(self) -> np.ndarray:
        """Raw user ids: `[num_users]` int64 or `str` objects."""
        return pl.read_parquet(self.path / "users.parquet")["user_id"].to_numpy()


def _on_this_machine(location: Path) -> Path:
    if not storage.is_remote(location):
        return location
    _check_is_store(location)
    return storage.cached_folder(location, LAST_FILE)


def _check_is_store(path: Path) -> None:
    if not (path / LAST_FILE).is_file():
        raise UserError(f"{path} is not a sequence store; write one with `recmodels prepare`")


def _read_meta(path: Path) -> dict[str, Any]:
    _check_is_store(path)
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, f"meta.json is not JSON ({error})") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UserError(f"{path} is not a sequence store; write one with `recmodels prepare`")
    if meta.get("version") != VERSION:
        raise UserError(
            f"{path} has store version {meta.get('version')}, this program reads {VERSION}; "
            "write it again with `recmodels prepare`"
        )
    for name in ("num_users", "num_items", "num_interactions"):
        if type(meta.get(name)) is not int or meta[name] < 0:
            raise _damaged(path, f"meta.json has no valid {name}")
    for name in ("digest", "timestamps"):
        if not isinstance(meta.get(name), str):
            raise _damaged(path, f"meta.json has no valid {name}")
    for name in ("source", "filters", "skipped"):  # for the card; older stores may lack them
        if not isinstance(meta.get(name, {}), dict):
            raise _damaged(path, f"meta.json has no valid {name}")
    if not all(type(count) is int for count in meta.get("skipped", {}).values()):
        raise _damaged(path, "meta.json has no valid skipped")
    if not _are_category_counts(meta.get("item_categories")):
        raise _damaged(path, "meta.json has no valid item_categories")
    missing = [name for name in _FILES if not (path / name).is_file()]
    if missing:
        raise _damaged(path, f"{missing[0]} is missing")
    return meta


def _are_category_counts(found: Any) -> bool:
    if found is None:
        return True
    return isinstance(found, dict) and all(type(found.get(name)) is int for name in COUNTS)


def _check_table(path: Path, name: str, columns: dict[str, tuple[Any, ...]], num_rows: int) -> None:
    try:
        schema = pl.read_parquet_schema(path / name)
        height = pl.scan_parquet(path / name).select(pl.len()).collect().item()
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = str(error).splitlines()[0]
        raise _damaged(path, f"{name} cannot be read ({reason})") from error
    for column, types in columns.items():
        if schema.get(column) not in types:
            raise _damaged(path, f"{name} has no valid column {column}")
    if height != num_rows:
        raise _damaged(path, f"{name} has {height} rows, meta.json says {num_rows}")


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path} is damaged: {what}; write it again with `recmodels prepare`")
