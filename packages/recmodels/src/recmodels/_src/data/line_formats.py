"""Readers of formats that are lines of text: ratings.dat, one user per line, pairs.

The file is one column of lines for polars, read in pieces and taken apart by expressions.
"""

from collections.abc import Iterator
from pathlib import Path

import polars as pl

from recmodels._src.data.raw import RawEvents, in_pieces
from recmodels._src.data.table_formats import TableColumns
from recmodels._src.data.text_files import open_binary
from recmodels._src.errors import UserError

_BLOCK_BYTES = 1 << 26


def read_movielens_dat(path: Path, columns: TableColumns) -> RawEvents:
    """Reads `user::item::rating::time` lines, the ratings.dat of MovieLens, in latin-1."""
    del columns
    frames = _extract(
        _latin_1_lines(path),
        path,
        r"^\s*(?<user>[^:]*)::(?<item>[^:]*)::[^:]*::(?<time>[^:\s]*)\s*$",
        "movielens-dat",
        "user::item::rating::time",
    )
    names = {"user": 1, "item": 2, "time": 4}
    return RawEvents(frames=frames, unit="line", numeric=True, columns=names)


def read_pairs(path: Path, columns: TableColumns) -> RawEvents:
    """Reads `user item` lines: one interaction each, in time order within a user."""
    del columns
    lines = in_pieces(pl.scan_lines(path, glob=False))
    frames = _extract(lines, path, r"^\s*(?<user>\S+)\s+(?<item>\S+)\s*$", "pairs", "user item")
    return RawEvents(frames=frames, unit="line", numeric=False, columns={"user": 1, "item": 2})


def read_user_lines(path: Path, columns: TableColumns) -> RawEvents:
    """Reads `user item item ...` lines: one user each, oldest item first."""
    del columns
    words = pl.scan_lines(path, glob=False).select(words=pl.col("line").str.extract_all(r"\S+"))
    words = words.filter(pl.col("words").list.len() > 0)
    events = words.select(
        user=pl.col("words").list.first(),
        # A line with a user only has one missing item, so that it is counted as skipped.
        item=pl.when(pl.col("words").list.len() > 1)
        .then(pl.col("words").list.slice(1))
        .otherwise(pl.lit([None], dtype=pl.List(pl.String))),
    ).explode("item")
    names = {"user": 1, "item": "2.."}
    return RawEvents(frames=in_pieces(events), unit="event", numeric=False, columns=names)


def _latin_1_lines(path: Path) -> Iterator[pl.DataFrame]:
    # polars reads UTF-8 only.
    with open_binary(path) as file:
        rest = b""
        while block := file.read(_BLOCK_BYTES):
            whole, newline, rest = (rest + block).rpartition(b"\n")
            if newline:
                yield pl.read_lines((whole + newline).decode("latin-1").encode())
        if rest:
            yield pl.read_lines(rest.decode("latin-1").encode())


def _extract(
    frames: Iterator[pl.DataFrame], path: Path, pattern: str, format: str, form: str
) -> Iterator[pl.DataFrame]:
    # Blank lines become null rows, which are skipped; they keep the line numbers right.
    num_before = 0
    for frame in frames:
        lines = frame["line"]
        parts = lines.str.extract_groups(pattern).struct.unnest()
        bad = parts["user"].is_null() & lines.str.contains(r"\S")
        if bad.any():
            position = bad.arg_true()[0]
            raise UserError(
                f"line {num_before + position + 1} of {path.name} is {lines[position][:80]!r}; a "
                f"line of format {format} has the form {form!r}"
            )
        yield parts
        num_before += len(lines)
