"""The formats that can be read, and the one function that reads them.

Every reader returns the raw columns of the file in pieces, in file order, nulls included, so
that a message can name the row of a bad value; `sequences.py` checks and numbers them.
"""

import dataclasses
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

import polars as pl

from recmodels._src.data import line_formats, table_formats
from recmodels._src.data.raw import RawEvents
from recmodels._src.data.table_formats import TableColumns
from recmodels._src.data.text_files import CSV, TSV, Separated, check_text, find_bad_line
from recmodels._src.errors import UserError

Format = Literal[
    "yambda-flat",
    "yambda-sequential",
    "csv",
    "tsv",
    "parquet",
    "movielens-dat",
    "movielens-udata",
    "user-lines",
    "pairs",
]
FORMATS: tuple[str, ...] = get_args(Format)
"""Names of all formats."""


@dataclasses.dataclass(frozen=True)
class _Reader:
    read: Callable[[Path, TableColumns], RawEvents]
    named_columns: bool = False  # whether the user names the columns
    header_optional: bool = False
    played_pct: bool = False  # whether the format has a played ratio
    text: bool = True
    utf_8: bool = True  # text formats only
    form: Separated | None = None  # of text with columns


_READERS: dict[str, _Reader] = {
    "yambda-flat": _Reader(table_formats.read_yambda_flat, played_pct=True, text=False),
    "yambda-sequential": _Reader(table_formats.read_yambda_sequential, played_pct=True, text=False),
    "csv": _Reader(table_formats.read_csv, named_columns=True, header_optional=True, form=CSV),
    "tsv": _Reader(table_formats.read_tsv, named_columns=True, header_optional=True, form=TSV),
    "parquet": _Reader(table_formats.read_parquet, named_columns=True, text=False),
    "movielens-dat": _Reader(line_formats.read_movielens_dat, utf_8=False),
    "movielens-udata": _Reader(table_formats.read_movielens_udata, form=TSV),
    "user-lines": _Reader(line_formats.read_user_lines),
    "pairs": _Reader(line_formats.read_pairs),
}


def read_events(
    path: str | Path,
    format: str,
    columns: TableColumns,
    *,
    min_played_pct: int = 0,
) -> RawEvents:
    """Opens a file of events; the events are read while the result is iterated over.

    Args:
      path: the file.
      format: one of `FORMATS`.
      columns: names of the columns, for csv, tsv and parquet; otherwise `TableColumns()`.
      min_played_pct: only checked here: 0 unless the format has a played ratio.

    Returns:
      The raw columns.

    Raises:
      UserError: the format is unknown, an option does not belong to it, or the file is
        missing, empty or of another format. Some of it shows only while reading.
    """
    if format not in _READERS:
        raise UserError(f"`format` must be one of {', '.join(FORMATS)}; got {format!r}")
    reader = _READERS[format]
    _check_options(format, reader, columns, min_played_pct)
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path} does not exist; check the path of the input file")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the file in it to read")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty; a file with interactions is needed")
    with _as_user_errors(path, format):
        if reader.text:
            check_text(path, format, "check --format")
        events = reader.read(path, columns)
    return dataclasses.replace(events, frames=_checked(events.frames, path, format))


def _checked(frames: Iterator[pl.DataFrame], path: Path, format: str) -> Iterator[pl.DataFrame]:
    num_rows = 0
    with _as_user_errors(path, format):
        for frame in frames:
            num_rows += frame.height
            yield frame
    if num_rows == 0:
        raise UserError(f"{path} has no interactions; a file with interactions is needed")


def _check_options(
    format: str, reader: _Reader, columns: TableColumns, min_played_pct: int
) -> None:
    # An option that does nothing would be a silent mistake, so it is refused.
    if not reader.named_columns:
        for option in ("user", "item", "time"):
            if getattr(columns, option) is not None:
                raise UserError(
                    f"--{option} is for csv, tsv and parquet; the columns of {format} are fixed"
                )
    if not columns.has_header and not reader.header_optional:
        raise UserError(f"--no-header is for csv and tsv; got format {format}")
    if min_played_pct and not reader.played_pct:
        raise UserError(f"--min-played-pct is for the yambda formats; got format {format}")


@contextmanager
def _as_user_errors(path: Path, format: str) -> Iterator[None]:
    # Whatever the parser dislikes means: not a (whole) file of that format.
    try:
        yield
    except pl.exceptions.NoDataError as error:
        raise UserError(f"{path} is empty; a file with interactions is needed") from error
    except (pl.exceptions.PolarsError, OSError, EOFError, zlib.error) as error:
        is_parsing = isinstance(error, pl.exceptions.PolarsError)
        bad_line = _bad_line(path, _READERS[format]) if is_parsing else None
        if bad_line is not None:
            raise UserError(bad_line) from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        raise UserError(
            f"{path} is not a readable {format} file: {reason}; check --format and the file"
        ) from error


def _bad_line(path: Path, reader: _Reader) -> str | None:
    if not (reader.text and reader.utf_8):
        return None
    try:
        return find_bad_line(path, reader.form)
    except (OSError, EOFError, zlib.error):  # a cut gzip file, which was complained of already
        return None
