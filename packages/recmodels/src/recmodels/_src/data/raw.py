"""What a reader hands over."""

import dataclasses
from typing import Any, Literal

import polars as pl

Unit = Literal["row", "line", "event"]
"""What one event is in the file: a row of a table, a line, or an entry of a list."""


@dataclasses.dataclass(frozen=True)
class RawEvents:
    """Events as the file has them: file order, nulls included, types unchecked."""

    frame: pl.DataFrame
    """Columns `user`, `item` and, where the source has them, `time`, `played_pct` and
    `event_type`."""
    unit: Unit
    """What one row of `frame` is in the file."""
    numeric: bool
    """Whether the format has integer ids only."""
    columns: dict[str, Any]
    """Names of the columns in the source, for `meta.json`."""
