"""Readers of formats with columns: csv, tsv, parquet, u.data and Yambda.

Only the needed columns are read, in pieces, by polars' streaming engine; no row becomes a
Python object.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import polars as pl

from recmodels._src.data import raw
from recmodels._src.data.raw import RawEvents, Unit, in_pieces
from recmodels._src.data.text_files import CSV, TSV, Separated, check_distinct, read_header
from recmodels._src.errors import UserError

_ROWS_OF_LISTS = 1 << 12  # histories in memory at a time


@dataclasses.dataclass(frozen=True)
class TableColumns:
    """Which columns of a csv, tsv or parquet file to read."""

    user: str | None = None
    """Name of the user column; its number, counted from 1, if there is no header."""
    item: str | None = None
    """Name or number of the item column."""
    time: str | None = None
    """Name or number of the time column; None keeps the order of the file."""
    has_header: bool = True
    """Whether the first line of a csv or tsv file names the columns."""


def read_csv(path: Path, columns: TableColumns) -> RawEvents:
    """Reads a comma-separated file, gzipped or not."""
    return _read_separated(path, columns, CSV)


def read_tsv(path: Path, columns: TableColumns) -> RawEvents:
    """Reads a tab-separated file, gzipped or not; quotes are ordinary characters."""
    return _read_separated(path, columns, TSV)


def read_parquet(path: Path, columns: TableColumns) -> RawEvents:
    """Reads named columns of a parquet file."""
    table = pl.scan_parquet(path)
    return _select(table, _names(table, columns, path))


def read_movielens_udata(path: Path, columns: TableColumns) -> RawEvents:
    """Reads `user<TAB>item<TAB>rating<TAB>time` lines, the u.data of MovieLens-100K."""
    del columns
    table = scan_text(path, TSV, has_header=False)
    names = table.collect_schema().names()
    if len(names) != 4:
        raise UserError(
            f"{path} has {len(names)} tab-separated columns; movielens-udata has 4: "
            "user, item, rating, time"
        )
    selected = {"user": names[0], "item": names[1], "time": names[3]}
    return _select(table, selected, unit="line", numeric=True, checks_fields=True)


def read_yambda_flat(path: Path, columns: TableColumns) -> RawEvents:
    """Reads a Yambda `flat` parquet file: one row per event."""
    del columns
    table = pl.scan_parquet(path)
    names = {"user": "uid", "item": "item_id", "time": "timestamp"}
    _check_present(table, names.values(), path)
    if isinstance(table.collect_schema()["item_id"], pl.List):
        raise UserError(
            f"{path} is not a yambda-flat file: column item_id holds lists; a file with one row "
            "per user is yambda-sequential"
        )
    return _select(table, names | _yambda_extras(table), numeric=True)


def read_yambda_sequential(path: Path, columns: TableColumns) -> RawEvents:
    """Reads a Yambda `sequential` parquet file: one row per user, a list per column.

    The dataset card says `item_ids` and `timestamps`, the published conversion script
    `item_id` and `timestamp`; both are read.
    """
    del columns
    table = pl.scan_parquet(path)
    present = table.collect_schema()
    names = {
        "user": "uid",
        "item": "item_ids" if "item_ids" in present else "item_id",
        "time": "timestamps" if "timestamps" in present else "timestamp",
    }
    _check_present(table, names.values(), path)
    names |= _yambda_extras(table)
    lists = [name for key, name in names.items() if key != "user"]
    for name in lists:
        if not isinstance(present[name], pl.List):
            raise UserError(
                f"{path} is not a yambda-sequential file: column {name} has type "
                f"{present[name]}, not a list; a file with one row per event is yambda-flat"
            )
    _check_list_lengths(table, lists, path)
    selected = table.select(**{key: pl.col(name) for key, name in names.items()})
    frames = _exploded(selected, [key for key in names if key != "user"])
    return RawEvents(frames=frames, unit="event", numeric=True, columns=names)


def _exploded(table: pl.LazyFrame, lists: list[str]) -> Iterator[pl.DataFrame]:
    # A row is a whole history, so pieces are measured in events, not in rows.
    for batch in in_pieces(table, _ROWS_OF_LISTS):
        # An empty list would explode into a null event.
        batch = batch.filter(pl.col(lists[0]).list.len() > 0)
        events_before = batch[lists[0]].list.len().cum_sum() - batch[lists[0]].list.len()
        for _, piece in batch.group_by(events_before // raw.CHUNK_EVENTS, maintain_order=True):
            yield piece.select("user", *lists).explode(lists)


def _yambda_extras(table: pl.LazyFrame) -> dict[str, str]:
    extras = {"played_pct": "played_ratio_pct", "event_type": "event_type"}
    present = table.collect_schema()
    return {key: name for key, name in extras.items() if name in present}


def _check_list_lengths(table: pl.LazyFrame, lists: list[str], path: Path) -> None:
    length = pl.col(lists[0]).list.len()
    unequal = table.filter(pl.any_horizontal(pl.col(lists[1:]).list.len().ne_missing(length)))
    first = unequal.select("uid").head(1).collect(engine="streaming")
    if first.height:
        raise UserError(
            f"{path} has lists of unequal length for uid {first.item()}; every list of a row "
            "must have one entry per event"
        )


def _read_separated(path: Path, columns: TableColumns, form: Separated) -> RawEvents:
    header = read_header(path, form) if columns.has_header else []
    table = scan_text(path, form, has_header=columns.has_header)
    names = _names(table, columns, path)
    check_distinct(path, header, [(f"--{key}", name) for key, name in names.items()])
    return _select(table, names, checks_fields=True)


def scan_text(path: Path, form: Separated, *, has_header: bool = True) -> pl.LazyFrame:
    """A file with columns, gzipped or not, every one of them as text."""
    # Everything as text: type inference from the first rows would break on a later
    # "B000123" and would turn "007" into 7.
    return pl.scan_csv(
        path,
        separator=form.separator,
        quote_char='"' if form.has_quotes else None,
        has_header=has_header,
        infer_schema=False,
        glob=False,
    )


def _names(table: pl.LazyFrame, columns: TableColumns, path: Path) -> dict[str, str]:
    # Maps user, item and time to the column names of the table.
    present = table.collect_schema().names()
    if columns.user is None or columns.item is None:
        kind = "name" if columns.has_header else "number"
        raise UserError(
            f"give the {kind} of the user and of the item column with --user and --item; "
            f"{_described(path, columns, present)}"
        )
    chosen = {"user": columns.user, "item": columns.item, "time": columns.time}
    names = {}
    for key, column in chosen.items():
        if column is None:
            continue
        if columns.has_header:
            names[key] = column
        else:
            number = int(column) if str(column).isdecimal() else 0
            names[key] = present[number - 1] if 1 <= number <= len(present) else str(column)
        if names[key] not in present:
            raise UserError(
                f"{path} has no column {column!r} for --{key}; {_described(path, columns, present)}"
            )
    for (key, name), (other, other_name) in itertools.combinations(names.items(), 2):
        if name == other_name:
            raise UserError(f"--{key} and --{other} name the same column, {chosen[key]!r}")
    return names


def _described(path: Path, columns: TableColumns, present: list[str]) -> str:
    if columns.has_header:
        return f"columns of {path.name}: {', '.join(present)}"
    return f"columns of {path.name}: numbers 1 to {len(present)}"


def _check_present(table: pl.LazyFrame, names: Iterable[str], path: Path) -> None:
    present = table.collect_schema().names()
    for name in names:
        if name not in present:
            raise UserError(
                f"{path} has no column {name!r}, which this format needs; "
                f"columns of {path.name}: {', '.join(present)}"
            )


def _select(
    table: pl.LazyFrame,
    names: dict[str, str],
    *,
    unit: Unit = "row",
    numeric: bool = False,
    checks_fields: bool = False,
) -> RawEvents:
    frames = read_columns(table, names, checks_fields=checks_fields)
    return RawEvents(frames=frames, unit=unit, numeric=numeric, columns=dict(names))


def read_columns(
    table: pl.LazyFrame, names: Mapping[str, str], *, checks_fields: bool
) -> Iterator[pl.DataFrame]:
    """Reads columns of a file piece by piece, under other names.

    Args:
      table: the file.
      names: names in the file by new name.
      checks_fields: whether lines may have the wrong number of fields.

    Raises:
      pl.exceptions.PolarsError: the file cannot be read.
    """
    columns = {key: pl.col(name) for key, name in names.items()}
    unused = [name for name in table.collect_schema().names() if name not in names.values()]
    if not (checks_fields and unused):
        return in_pieces(table.select(**columns))
    # polars counts the fields of a line only where it reads all columns, and a line with one
    # too many has its columns shifted.
    table = table.select(**columns, unused=pl.any_horizontal(pl.col(unused).is_null()))
    return (frame.drop("unused") for frame in in_pieces(table))
