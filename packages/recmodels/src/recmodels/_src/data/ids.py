"""Checks and types of the raw columns: ids and timestamps."""

import dataclasses

import polars as pl

from recmodels._src.data.raw import Unit
from recmodels._src.errors import UserError

# "007" and "7" must stay two ids, so only integers in their usual spelling are integers.
_CANONICAL_INTEGER = r"^(0|-?[1-9][0-9]*)$"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a column comes from, for messages."""

    file: str
    """Name of the file."""
    unit: Unit
    """What one entry of the column is in that file."""
    start: int = 0
    """How many entries of the file come before the column, which may be a piece of it."""

    def of(self, position: int) -> str:
        """Words for the entry at a 0-based position of the column, such as `row 3 of x.csv`."""
        return f"{self.unit} {self.start + position + 1} of {self.file}"


def normalise_ids(ids: pl.Series, name: str, place: Place, *, numeric: bool) -> pl.Series:
    """Gives an id column one of two types: integers, or strings.

    Args:
      ids: raw column; nulls stay null and empty strings become null.
      name: `"user"` or `"item"`.
      place: for messages.
      numeric: whether the format allows integers only.

    Returns:
      An integer column (of its own width if it had one) when every id is an integer that
      int64 can hold, otherwise strings.

    Raises:
      UserError: the type cannot be an id, or an id of a numeric format is not an integer.
    """
    if isinstance(ids.dtype, pl.Categorical | pl.Enum):
        ids = ids.cast(pl.String)
    if ids.dtype == pl.String:
        ids = _parse_strings(ids, name, place, numeric=numeric)
    elif ids.dtype == pl.Null:
        ids = ids.cast(pl.Int64)
    elif not ids.dtype.is_integer():
        raise UserError(
            f"the {name} column of {place.file} has type {ids.dtype}; ids must be integers or "
            "strings, so convert the column"
        )
    if ids.dtype == pl.UInt64 and (ids > 2**63 - 1).any():
        # Hashes above the range of int64 keep their digits as text.
        ids = ids.cast(pl.String)
    return ids


def _parse_strings(ids: pl.Series, name: str, place: Place, *, numeric: bool) -> pl.Series:
    ids = ids.replace("", None)
    numbers = ids.cast(pl.Int64, strict=False)
    bad = ids.is_not_null() & (numbers.is_null() | ~ids.str.contains(_CANONICAL_INTEGER))
    if not bad.any():
        return numbers
    if numeric:
        position = bad.arg_true()[0]
        raise UserError(
            f"{place.of(position)} has the {name} id {ids[position]!r}; this format has integer "
            "ids only, so read the file as csv, tsv or parquet"
        )
    has_nul = ids.str.contains("\0", literal=True).fill_null(False)
    if has_nul.any():
        raise UserError(
            f"{place.of(has_nul.arg_true()[0])} has a NUL byte in its {name}, as a damaged or "
            "UTF-16 file has; take it out, or convert the file to UTF-8"
        )
    return ids


def normalise_times(times: pl.Series, place: Place) -> pl.Series:
    """Checks a timestamp column.

    Args:
      times: raw column; nulls stay null.
      place: for messages.

    Returns:
      int64 column.

    Raises:
      UserError: a timestamp is not an integer.
    """
    remedy = "whole seconds, so convert them, or leave out --time to keep the order of the file"
    if times.dtype == pl.String:
        times = times.replace("", None)
    elif times.dtype != pl.Null and not times.dtype.is_integer():
        raise UserError(
            f"the time column of {place.file} has type {times.dtype}; timestamps must be {remedy}"
        )
    numbers = times.cast(pl.Int64, strict=False)
    bad = times.is_not_null() & numbers.is_null()
    if bad.any():
        position = bad.arg_true()[0]
        raise UserError(
            f"{place.of(position)} has the timestamp {times[position]!r}; "
            f"timestamps must be {remedy}"
        )
    return numbers
