"""Writes the files of a sequence store, one piece after another."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import polars as pl

from recmodels._src.data.categories import COLUMN, numbered
from recmodels._src.data.store import FORMAT, VERSION

_IDS_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True)
class SequenceParts:
    """Everything that goes into a store; the events come in pieces.

    Invariants:
      - the pieces in turn are the histories of users 0..U-1 back to back, oldest event first;
      - rows are 1..num_items.
    """

    parts: Iterable[tuple[np.ndarray, np.ndarray]]
    """Pieces of any size: `[n]` int32 rows, and `[n]` int64 seconds or positions within the
    user."""
    lengths: np.ndarray
    """`[num_users]` int64 events of each user."""
    item_counts: np.ndarray
    """`[num_items]` int64 events of each item; row r is at r - 1."""
    timestamps_kind: Literal["seconds", "order"]
    """Which of the two the pieces hold."""
    user_ids: pl.Series
    """`[num_users]` raw ids, int64 or string."""
    item_ids: pl.Series
    """`[num_items]` raw ids, int64 or string; row r is at r - 1."""


def write_store(
    folder: Path,
    sequences: SequenceParts,
    *,
    source: dict[str, Any],
    filters: dict[str, Any],
    skipped: dict[str, int],
    categories: tuple[pl.Series, dict[str, Any]] | None = None,
) -> None:
    """Writes the files of a sequence store.

    Args:
      folder: an existing folder, usually one of `atomic_folder`.
      sequences: the events, read once, and the ids.
      source: where the data came from (names only, no absolute paths).
      filters: the filters that were applied, by name.
      skipped: number of events left out, by reason.
      categories: result of `match_categories`; None for a store without.
    """
    num_users, num_items = len(sequences.lengths), len(sequences.item_counts)
    offsets = np.zeros(num_users + 1, dtype=np.int64)
    np.cumsum(sequences.lengths, out=offsets[1:])
    # Rows, times, offsets, raw ids and categories decide what a model learns and answers; a run
    # directory records this value and refuses to go on with another store.
    sha = hashlib.sha256()
    _write_events(folder, sequences, int(offsets[-1]), sha)
    np.save(folder / "offsets.npy", offsets)
    sha.update(offsets.data)
    users = {
        "user": np.arange(num_users, dtype=np.int64),
        "user_id": sequences.user_ids,
        "num_interactions": sequences.lengths,
    }
    items = {
        "row": np.arange(1, num_items + 1, dtype=np.int32),
        "item_id": sequences.item_ids,
        "count": sequences.item_counts,
    }
    if categories is not None:
        items[COLUMN] = categories[0]
    pl.DataFrame(users).write_parquet(folder / "users.parquet")
    pl.DataFrame(items).write_parquet(folder / "items.parquet")
    for ids in (sequences.user_ids, sequences.item_ids):
        _add_ids(sha, ids)
    if categories is not None:
        names, table = numbered(categories[0])
        _add_ids(sha, pl.Series(names))
        sha.update(table.data)
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "source": source,
        "num_users": num_users,
        "num_items": num_items,
        "num_interactions": int(offsets[-1]),
        "filters": filters,
        "skipped": skipped,
        "timestamps": sequences.timestamps_kind,
        "digest": sha.hexdigest(),
    }
    if categories is not None:
        meta["item_categories"] = categories[1]
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def _write_events(
    folder: Path, sequences: SequenceParts, num_events: int, sha: "hashlib._Hash"
) -> None:
    sha_of_times = hashlib.sha256()  # one of its own: the pieces may be of any size
    with contextlib.ExitStack() as files:
        items = _open_array(files, folder / "items.npy", num_events, np.dtype("<i4"))
        timestamps = _open_array(files, folder / "timestamps.npy", num_events, np.dtype("<i8"))
        for rows, times in sequences.parts:
            rows.tofile(items)
            times.tofile(timestamps)
            sha.update(np.ascontiguousarray(rows).data)
            sha_of_times.update(np.ascontiguousarray(times).data)
    if sequences.timestamps_kind == "seconds":
        sha.update(sha_of_times.digest())


def _open_array(files: contextlib.ExitStack, path: Path, length: int, dtype: np.dtype) -> BinaryIO:
    # A memory map would count its pages as memory of this process, and on a full disk it would
    # end the process instead of failing.
    file = files.enter_context(path.open("wb"))
    header = {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, header)
    file.flush()  # `tofile` writes past Python's buffer
    return file


def _add_ids(sha: "hashlib._Hash", ids: pl.Series) -> None:
    # All ids as text, with a zero byte between them.
    sha.update(str(ids.dtype).encode())
    for start in range(0, len(ids), _IDS_BLOCK):
        block = ids.slice(start, _IDS_BLOCK).cast(pl.String).to_list()
        sha.update(("\0" if start else "").encode() + "\0".join(block).encode())
