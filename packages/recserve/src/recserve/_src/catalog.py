"""Items, users and their histories as arrays, read from a bundle or an index folder."""

import dataclasses
import numbers
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recserve._src.errors import UserError
from recserve._src.header import (
    HISTORY_ITEMS,
    HISTORY_OFFSETS,
    HISTORY_TIMES,
    ITEM_EMBEDDINGS,
    ITEMS,
    USERS,
    Header,
    IdType,
)

_BLOCK_ROWS = 1 << 16


class IdMap:
    """Translates between a caller's ids and consecutive positions 0, 1, 2, ..."""

    def __init__(self, ids: NDArray[Any], id_type: IdType, noun: str) -> None:
        """Keeps `ids`, the id of every position.

        Args:
          ids: `[n]` int64, or object holding `str`; distinct.
          id_type: which of the two.
          noun: what messages call one of them, such as "item id".
        """
        self._ids = ids
        self._id_type = id_type
        self._noun = noun
        ascending = len(ids) < 2 or bool(np.all(ids[1:] > ids[:-1]))
        # Dense ids follow raw ids, so the map is usually sorted and needs no second copy.
        self._order = None if ascending else np.argsort(ids, kind="stable")
        self._sorted = ids if self._order is None else ids[self._order]

    def __len__(self) -> int:
        """Number of ids."""
        return len(self._ids)

    def positions(self, raw_ids: Sequence[Any] | NDArray[Any]) -> NDArray[np.int64]:
        """Returns `[n]` positions, -1 for an id that is not in the map.

        Raises:
          UserError: an id is not of the map's type, or the ids are not a sequence.
        """
        if isinstance(raw_ids, str | bytes):
            raise UserError(f"{self._noun}s must be a sequence of ids; got the text {raw_ids!r}")
        if not isinstance(raw_ids, Sequence | np.ndarray):
            raise UserError(f"{self._noun}s must be a sequence of ids; got {raw_ids!r}")
        wanted = self._as_array(raw_ids)
        found = np.minimum(np.searchsorted(self._sorted, wanted), len(self._ids) - 1)
        known = self._sorted[found] == wanted if len(self._ids) else np.zeros(len(wanted), bool)
        positions = found if self._order is None else self._order[found]
        return np.where(known.astype(bool), positions, -1).astype(np.int64)

    def parse(self, text: str) -> int | str:
        """Reads one id from the command line.

        Raises:
          UserError: the ids are numbers and `text` is none.
        """
        if self._id_type == "string":
            return text
        try:
            return int(text)
        except ValueError:
            raise UserError(
                f"{self._noun}s of this model are whole numbers; got {text!r}"
            ) from None

    def ids(self, positions: NDArray[np.integer[Any]]) -> tuple[int, ...] | tuple[str, ...]:
        """Returns the ids at `positions` as Python numbers or strings."""
        return tuple(self._ids[positions].tolist())

    def find_duplicate(self) -> int | str | None:
        """Returns an id that occurs twice, if there is one."""
        twice = np.flatnonzero(self._sorted[1:] == self._sorted[:-1])
        return self._sorted[twice].tolist()[0] if len(twice) else None

    def _as_array(self, raw_ids: Sequence[Any] | NDArray[Any]) -> NDArray[Any]:
        if self._id_type == "string":
            for raw_id in raw_ids:
                if not isinstance(raw_id, str):
                    raise UserError(f"{self._noun}s of this model are strings; got {raw_id!r}")
            wanted = np.empty(len(raw_ids), dtype=object)
            wanted[:] = [str(raw_id) for raw_id in raw_ids]
            return wanted
        for raw_id in raw_ids:
            if not isinstance(raw_id, numbers.Integral) or isinstance(raw_id, bool):
                raise UserError(f"{self._noun}s of this model are whole numbers; got {raw_id!r}")
            if not -(2**63) <= raw_id < 2**63:
                raise UserError(f"{self._noun}s of this model have 64 bits; got {raw_id}")
        return np.array([int(raw_id) for raw_id in raw_ids], dtype=np.int64)


@dataclasses.dataclass(frozen=True)
class Catalog:
    """The data of a model, memory-mapped where it is large."""

    header: Header
    """Sizes and types, checked against the arrays."""
    item_vectors: NDArray[np.float32]
    """`[num_items + 1, Dq]`; row 0 is padding and zero."""
    items: IdMap
    """Item ids; the item at position p has row p + 1."""
    users: IdMap
    """User ids."""
    history_items: NDArray[np.int32]
    """`[num_interactions]` rows, users back to back, oldest first."""
    history_offsets: NDArray[np.int64]
    """`[num_users + 1]` bounds of each user's part of `history_items`."""
    history_times: NDArray[np.int64] | None = None
    """`[num_interactions]` seconds of the same; None for an encoder that reads no times."""

    def history(self, user: int) -> NDArray[np.int32]:
        """Returns the rows that the user at position `user` has interacted with, oldest first."""
        start, stop = self.history_offsets[user : user + 2]
        return self.history_items[start:stop]

    def times(self, users: Iterable[int]) -> list[NDArray[np.int64]] | None:
        """Returns the seconds of the histories of users, or None for an encoder without times."""
        if self.history_times is None:
            return None
        return [self.history_times[slice(*self.history_offsets[u : u + 2])] for u in users]


def load_catalog(folder: Path, header: Header) -> Catalog:
    """Opens the arrays and id maps in `folder` and checks that they fit the header and each other.

    Raises:
      UserError: a file cannot be read, or its shape, type or length contradicts another one.
    """
    vectors = _load_array(folder / ITEM_EMBEDDINGS, np.float32, 2)
    _check_equal(
        folder / ITEM_EMBEDDINGS, "shape", vectors.shape, (header.vocab_size, header.vector_dim)
    )
    item_ids = _load_ids(folder / ITEMS, "row", "item_id", header.item_id_type, first=1)
    _check_equal(folder / ITEMS, "number of items", len(item_ids), header.num_items)
    user_ids = _load_ids(folder / USERS, "user", "user_id", header.user_id_type, first=0)
    offsets = _load_array(folder / HISTORY_OFFSETS, np.int64, 1)
    _check_equal(folder / HISTORY_OFFSETS, "length", len(offsets), len(user_ids) + 1)
    history = _load_array(folder / HISTORY_ITEMS, np.int32, 1)
    _check_equal(folder / HISTORY_ITEMS, "length", len(history), int(offsets[-1]))
    times = None
    if header.reads_times:
        times = _load_array(folder / HISTORY_TIMES, np.int64, 1)
        _check_equal(folder / HISTORY_TIMES, "length", len(times), len(history))
    return Catalog(
        header=header,
        item_vectors=vectors,
        items=IdMap(item_ids, header.item_id_type, "item id"),
        users=IdMap(user_ids, header.user_id_type, "user id"),
        history_items=history,
        history_offsets=offsets,
        history_times=times,
    )


def check_contents(catalog: Catalog, folder: Path) -> None:
    """Reads every value once and checks it; the slow part, done when an index folder is built.

    Raises:
      UserError: a vector is not finite, the padding row is not zero, an id occurs twice, offsets or
        times decrease, or a history holds a row that the catalog does not have.
    """
    vectors = catalog.item_vectors
    for start in range(0, len(vectors), _BLOCK_ROWS):
        bad = np.flatnonzero(~np.isfinite(vectors[start : start + _BLOCK_ROWS]).all(axis=1))
        if len(bad):
            raise UserError(
                f"{folder / ITEM_EMBEDDINGS} row {start + bad[0]} is not finite; "
                "export a model whose training did not diverge"
            )
    if np.any(vectors[0]):
        raise UserError(f"{folder / ITEM_EMBEDDINGS} row 0 is padding and must be zero")
    for name, ids in ((ITEMS, catalog.items), (USERS, catalog.users)):
        twice = ids.find_duplicate()
        if twice is not None:
            raise UserError(f"{folder / name} has the id {twice!r} twice; ids must be distinct")
    offsets = catalog.history_offsets
    if offsets[0] != 0 or np.any(offsets[1:] < offsets[:-1]):
        raise UserError(f"{folder / HISTORY_OFFSETS} must start at 0 and never decrease")
    history = catalog.history_items
    if len(history) and not (history.min() >= 1 and history.max() <= catalog.header.num_items):
        raise UserError(
            f"{folder / HISTORY_ITEMS} must hold rows 1 to {catalog.header.num_items:,}; "
            f"got {history.min()} to {history.max()}"
        )
    if catalog.history_times is not None:
        earlier = np.flatnonzero(catalog.history_times[1:] < catalog.history_times[:-1]) + 1
        if not np.isin(earlier, offsets).all():  # only where a user ends
            raise UserError(f"{folder / HISTORY_TIMES} must never decrease within a user's history")


def _load_array(path: Path, dtype: type[np.generic], ndim: int) -> NDArray[Any]:
    try:
        # A plain view of the mapped file: slicing the memmap class costs more than a search.
        array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} cannot be read as a NumPy array: {error}") from error
    _check_equal(path, "dtype", str(array.dtype), np.dtype(dtype).name)
    _check_equal(path, "number of axes", array.ndim, ndim)
    return array


def _load_ids(path: Path, position: str, column: str, id_type: IdType, first: int) -> NDArray[Any]:
    import polars as pl  # here, because it is slow to import

    try:
        table = pl.read_parquet(path, columns=[position, column])
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read as a parquet table: {reason}") from error
    wanted = pl.Int64 if id_type == "int64" else pl.String
    _check_equal(path, f"type of column {column!r}", str(table[column].dtype), str(wanted()))
    _check_equal(path, f"number of nulls in column {column!r}", table[column].null_count(), 0)
    numbers_expected = np.arange(first, first + len(table))
    if not np.array_equal(table[position].to_numpy(), numbers_expected):
        raise UserError(f"{path} column {position!r} must count up from {first} without gaps")
    if id_type == "int64":
        return table[column].to_numpy()
    ids = np.empty(len(table), dtype=object)
    ids[:] = table[column].to_list()
    return ids


def _check_equal(path: Path, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise UserError(
            f"{path} has {what} {found} but the rest of the folder needs {wanted}: "
            "the files are of different models; write the folder again"
        )
