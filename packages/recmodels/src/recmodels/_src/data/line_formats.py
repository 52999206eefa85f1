"""Readers of formats that are lines of text: ratings.dat, one user per line, pairs.

The file is one column of lines for polars, taken apart by expressions.
"""

import gzip
from pathlib import Path

import polars as pl

from recmodels._src.data.raw import RawEvents
from recmodels._src.data.table_formats import TableColumns
from recmodels._src.errors import UserError

GZIP_MAGIC = b"\x1f\x8b"
"""First bytes of every gzip file, whatever its name."""


def read_movielens_dat(path: Path, columns: TableColumns) -> RawEvents:
    """Reads `user::item::rating::time` lines, the ratings.dat of MovieLens, in latin-1."""
    del columns
    frame = _extract(
        path,
        r"^\s*(?<user>[^:]*)::(?<item>[^:]*)::[^:]*::(?<time>[^:\s]*)\s*$",
        "movielens-dat",
        "user::item::rating::time",
        encoding="latin-1",
    )
    names = {"user": 1, "item": 2, "time": 4}
    return RawEvents(frame=frame, unit="line", numeric=True, columns=names)


def read_pairs(path: Path, columns: TableColumns) -> RawEvents:
    """Reads `user item` lines: one interaction each, in time order within a user."""
    del columns
    frame = _extract(path, r"^\s*(?<user>\S+)\s+(?<item>\S+)\s*$", "pairs", "user item")
    return RawEvents(frame=frame, unit="line", numeric=False, columns={"user": 1, "item": 2})


def read_user_lines(path: Path, columns: TableColumns) -> RawEvents:
    """Reads `user item item ...` lines: one user each, oldest item first."""
    del columns
    words = _lines(path).select(
        words=pl.col("line").str.extract_all(r"\S+"), number=pl.int_range(1, pl.len() + 1)
    )
    words = words.filter(pl.col("words").list.len() > 0)
    frame = words.select(
        user=pl.col("words").list.first(),
        # A line with a user only has one missing item, so that it is counted as skipped.
        item=pl.when(pl.col("words").list.len() > 1)
        .then(pl.col("words").list.slice(1))
        .otherwise(pl.lit([None], dtype=pl.List(pl.String))),
    ).explode("item")
    return RawEvents(frame=frame, unit="event", numeric=False, columns={"user": 1, "item": "2.."})


def _lines(path: Path, encoding: str = "utf-8") -> pl.DataFrame:
    if encoding == "utf-8":
        return pl.scan_lines(path, glob=False).collect(engine="streaming")
    content = path.read_bytes()
    if content.startswith(GZIP_MAGIC):
        content = gzip.decompress(content)
    # polars reads UTF-8 only.
    return pl.read_lines(content.decode(encoding).encode())


def _extract(
    path: Path, pattern: str, format: str, form: str, encoding: str = "utf-8"
) -> pl.DataFrame:
    # Blank lines become null rows, which are skipped; they keep the line numbers right.
    lines = _lines(path, encoding)["line"]
    parts = lines.str.extract_groups(pattern).struct.unnest()
    bad = parts["user"].is_null() & lines.str.contains(r"\S")
    if bad.any():
        position = bad.arg_true()[0]
        raise UserError(
            f"line {position + 1} of {path.name} is {lines[position][:80]!r}; a line of format "
            f"{format} has the form {form!r}"
        )
    return parts
