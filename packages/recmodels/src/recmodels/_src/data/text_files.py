"""Text files of events, gzipped or not: their header, and the line that a parser stumbles over."""

import csv
import dataclasses
import gzip
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from recmodels._src.errors import UserError

_GZIP_MAGIC = b"\x1f\x8b"  # first bytes of every gzip file, whatever its name


@dataclasses.dataclass(frozen=True)
class Separated:
    """How the lines of a file are taken apart."""

    separator: str
    """The character between two fields."""
    has_quotes: bool
    """Whether double quotes hold separators and newlines together."""


CSV, TSV = Separated(",", has_quotes=True), Separated("\t", has_quotes=False)


_OPEN_QUOTE = (
    "opens a quote and does not close it at the end of the field; in a quoted field a quote is "
    "written twice"
)


class _Record(NamedTuple):
    fields: list[str]
    number: int  # of its first line, from 1
    text: str


def open_binary(path: Path) -> BinaryIO:
    """Opens a file to read its bytes, those inside when it is gzipped."""
    with path.open("rb") as file:
        is_gzip = file.read(2) == _GZIP_MAGIC
    return cast(BinaryIO, gzip.open(path) if is_gzip else path.open("rb"))


def check_text(path: Path, wanted: str, remedy: str) -> None:
    """Refuses a binary file, which would be a table with unreadable column names.

    Args:
      path: the file.
      wanted: what it is to be, for the message, such as "csv".
      remedy: end of the message.

    Raises:
      UserError: it is a parquet file, or binary.
    """
    with open_binary(path) as file:
        start = file.read(4096)
    if b"\0" in start:
        kind = "a parquet file" if start.startswith(b"PAR1") else "binary"
        raise UserError(f"{path} is {kind}, and {wanted} is a text format; {remedy}")


def read_header(path: Path, form: Separated) -> list[str]:
    """The fields of the first line that is not blank.

    Raises:
      UserError: it is no text in UTF-8, or a quote in it stays open.
    """
    return next(_records(path, form), _Record([], 1, "")).fields


def check_distinct(path: Path, header: list[str], columns: Iterable[tuple[str, str]]) -> None:
    """Refuses a header that has a column twice that is to be read.

    Args:
      path: the file.
      header: its columns.
      columns: option and the name of the column that it gave.

    Raises:
      UserError: one of the names is there twice.
    """
    for option, name in columns:
        if header.count(name) > 1:  # for polars only the first one keeps its name
            places = [str(place) for place, each in enumerate(header, 1) if each == name]
            raise UserError(
                f"{path.name} has {len(places)} columns {name!r} for {option}, at places "
                f"{' and '.join(places)} of its header; give them different names"
            )


def find_bad_line(path: Path, form: Separated | None) -> str | None:
    """Looks through a file that a parser refused.

    Args:
      path: the file.
      form: how its lines are taken apart; None when only the encoding matters.

    Returns:
      What is wrong with the first bad line, naming it and the file; None without one.
    """
    try:
        if form is None:
            for _ in _lines(path):
                pass
            return None
        return _first_misfit(path, form)
    except UserError as error:
        return str(error)


def _first_misfit(path: Path, form: Separated) -> str | None:
    records = _records(path, form)
    header = next(records, _Record([], 1, ""))
    for record in itertools.chain([header], records):
        where, num_fields = f"line {record.number} of {path.name}", len(record.fields)
        if form.has_quotes and record.text.count('"') % 2:
            return f"{where} {_OPEN_QUOTE}"
        if num_fields > len(header.fields):
            hint = ", or quote a field that holds a comma" if form.has_quotes else ""
            return (
                f"{where} has {num_fields} fields, line {header.number} has {len(header.fields)}; "
                f"take out what is too much{hint}"
            )
    return None


def _records(path: Path, form: Separated) -> Iterator[_Record]:
    """Every record, blank lines left out."""
    quoting = csv.QUOTE_MINIMAL if form.has_quotes else csv.QUOTE_NONE
    text: list[str] = []
    lines = _copied_to(text, _lines(path))
    reader = csv.reader(lines, delimiter=form.separator, quoting=quoting, strict=True)
    number = 1
    try:
        for fields in reader:
            if fields:
                yield _Record(fields, number, "".join(text))
            number = reader.line_num + 1
            text.clear()
    except csv.Error as error:
        # Text after the closing quote, the end of the file in a quote, or an endless field.
        is_quote = form.has_quotes and any('"' in line for line in text)
        raise UserError(
            f"line {number} of {path.name} {_OPEN_QUOTE if is_quote else f'is unreadable: {error}'}"
        ) from None


def _copied_to(copy: list[str], lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        copy.append(line)
        yield line


def _lines(path: Path) -> Iterator[str]:
    with open_binary(path) as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"line {number} of {path.name} is no UTF-8 text: its byte {error.start + 1} is "
                    f"0x{line[error.start]:02x}; convert the file to UTF-8"
                ) from None
