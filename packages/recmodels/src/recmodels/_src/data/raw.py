"""What a reader hands over."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import polars as pl

Unit = Literal["row", "line", "event"]
"""What one event is in the file: a row of a table, a line, or an entry of a list."""

CHUNK_EVENTS = 1 << 22
"""Events that are in memory at a time while a file is read: about 100 MB of two ids and a time."""


@dataclasses.dataclass(frozen=True)
class RawEvents:
    """Events as the file has them: file order, nulls included, types unchecked."""

    frames: Iterator[pl.DataFrame]
    """Pieces of about `CHUNK_EVENTS` events, to be read once. Columns `user`, `item` and, where
    the source has them, `time`, `played_pct` and `event_type`."""
    unit: Unit
    """What one row of a frame is in the file."""
    numeric: bool
    """Whether the format has integer ids only."""
    columns: dict[str, Any]
    """Names of the columns in the source, for `meta.json`."""


def in_pieces(table: pl.LazyFrame, num_rows: int | None = None) -> Iterator[pl.DataFrame]:
    """Reads a table piece by piece, in order; nothing is read before the first piece.

    Args:
      table: any query that polars streams.
      num_rows: rows of a piece; None takes `CHUNK_EVENTS`.
    """
    return table.collect_batches(
        chunk_size=num_rows or CHUNK_EVENTS, maintain_order=True, lazy=True, engine="streaming"
    )
