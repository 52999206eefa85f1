"""Every bad input gives one clear line and leaves nothing behind."""

import dataclasses
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recmodels._src.data import sequences
from recmodels._src.data.prepare import prepare
from recmodels._src.errors import UserError


@dataclasses.dataclass(frozen=True)
class Case:
    """A file, how it is read, and what the message must say."""

    content: str | bytes | pl.DataFrame
    options: dict[str, Any]
    message: str


CSV = {"format": "csv", "user": "u", "item": "i", "time": "t"}
TSV = CSV | {"format": "tsv"}
PARQUET = CSV | {"format": "parquet"}
FLAT = {"format": "yambda-flat"}
SEQUENTIAL = {"format": "yambda-sequential"}


def _frame(**columns) -> pl.DataFrame:
    return pl.DataFrame({"u": [1, 2], "i": [3, 4], "t": [5, 6]} | columns, strict=False)


CASES = {
    # The file as a whole.
    "empty file": Case("", CSV, "is empty; a file with interactions is needed"),
    "empty gz": Case(gzip.compress(b""), CSV, "is empty; a file with interactions is needed"),
    "header only": Case("u,i,t\n", CSV, "has no interactions; a file with"),
    "blank lines only": Case("\n \n", {"format": "pairs"}, "has no interactions left (2 x blank"),
    "csv is no parquet": Case("u,i,t\n1,2,3\n", PARQUET, "is not a readable parquet file: "),
    "parquet is no csv": Case(_frame(), CSV, "is a parquet file, and csv is a text format"),
    "binary is no text": Case(
        b"\x7fELF\0\0", {"format": "pairs"}, "is binary, and pairs is a text"
    ),
    "latin-1 is no csv": Case(
        b"u,i,t\n\n1,2,3\n\xe9,2,3\n",
        CSV,
        "line 4 of input is no UTF-8 text: its byte 1 is 0xe9; convert the file to UTF-8",
    ),
    "latin-1 in an unused column": Case(
        b"u,i,t,title\n1,2,3,caf\xe9\n",
        CSV,
        "line 2 of input is no UTF-8 text: its byte 10 is 0xe9",
    ),
    "latin-1 header": Case(b"u,i,t,\xe9\n1,2,3,4\n", CSV, "line 1 of input is no UTF-8 text"),
    "latin-1 is no tsv": Case(
        gzip.compress(b"u\ti\tt\n1\t\xe92\t3\n"),
        TSV,
        "line 2 of input is no UTF-8 text: its byte 3",
    ),
    "latin-1 is no pairs": Case(
        b"1 2\n1 \xe9\n",
        {"format": "pairs"},
        "line 2 of input is no UTF-8 text: its byte 3 is 0xe9",
    ),
    "latin-1 is no user-lines": Case(
        b"1 2\n1 \xe9\n", {"format": "user-lines"}, "line 2 of input is no UTF-8 text"
    ),
    "parquet format of a cut file": Case(b"PAR1\0\0", PARQUET, "not a readable parquet file"),
    "broken gz": Case(gzip.compress(b"u,i,t\n1,2,3\n" * 99)[:-20], CSV, "not a readable csv file"),
    "too many fields": Case(
        'u,i,t\n1,"2\n3",4\n1,2,3,4\n',
        CSV,
        "line 4 of input has 4 fields, line 1 has 3; take out what is too much, or quote a field",
    ),
    # Whatever the columns that are read: those behind the extra separator are shifted.
    "too many fields before unused columns": Case(
        "t,title,u,i,x\n1,a,2,3,0\n1,a,b,2,3,0\n", CSV, "line 3 of input has 6 fields, line 1 has 5"
    ),
    "too many fields in tsv": Case(
        "u\ti\tt\tx\n1\t2\t3\t4\t5\n", TSV, "line 2 of input has 5 fields, line 1 has 4; take out w"
    ),
    "too many fields without header": Case(
        gzip.compress(b"1,2\n1,2,3\n"),
        {"format": "csv", "has_header": False, "user": "1", "item": "2"},
        "line 2 of input has 3 fields, line 1 has 2",
    ),
    "too many fields in u.data": Case(
        "1\t2\t3\t4\n1\t2\t3\t4\t5\n",
        {"format": "movielens-udata"},
        "line 2 of input has 5 fields, line 1 has 4",
    ),
    "open quote": Case(
        'u,i,t\n1,2,3\n1,"2,3\n' + "1,2,3\n" * 40_000,
        CSV,
        "line 3 of input opens a quote and does not close it at the end of the field; in a quoted",
    ),
    "quote closed by another line": Case(
        'u,i,t\n1,"2,3\n1,2,3\n1,"2",3\n',
        CSV,
        "line 2 of input opens a quote and does not close it",
    ),
    "quote inside of a field": Case(
        'u,i,t\n1,"a\nb",3\n1,2"2,3\n1,7,5\n', CSV, "line 4 of input opens a quote and does not"
    ),
    "open quote in the header": Case('u,"i,t\n1,2,3\n', CSV, "line 1 of input opens a quote and"),
    "used column twice": Case(
        "u,i,t,i\n1,2,3,4\n",
        CSV,
        "input has 2 columns 'i' for --item, at places 2 and 4 of its header; give them different",
    ),
    "used column twice in tsv": Case(
        "\ufefft\tu\tt\ti\tt\n1\t2\t3\t4\t5\n",
        TSV,
        "3 columns 't' for --time, at places 1 and 3 and 5",
    ),
    "one column for two": Case(
        "u,i,t\n1,2,3\n", CSV | {"item": "u"}, "--user and --item name the same column, 'u'"
    ),
    "pairs with three words": Case(
        "1 2\n\n1 2 3\n",
        {"format": "pairs"},
        "line 3 of input is '1 2 3'; a line of format pairs has the form 'user item'",
    ),
    "csv is no movielens-dat": Case(
        "1,2,3,4\n", {"format": "movielens-dat"}, "has the form 'user::item::rating::time'"
    ),
    "csv is no u.data": Case(
        "1,2,3,4\n",
        {"format": "movielens-udata"},
        "has 1 tab-separated columns; movielens-udata has 4: user, item, rating, time",
    ),
    # Columns and options.
    "wrong format name": Case(
        "1 2\n",
        {"format": "cvs"},
        "`format` must be one of yambda-flat, yambda-sequential, csv, tsv, parquet, "
        "movielens-dat, movielens-udata, user-lines, pairs; got 'cvs'",
    ),
    "missing column": Case(
        "u,item,t\n1,2,3\n",
        CSV,
        "has no column 'i' for --item; columns of input: u, item, t",
    ),
    "missing parquet column": Case(
        _frame(), PARQUET | {"time": "when"}, "has no column 'when' for --time; columns of"
    ),
    "columns not named": Case(
        "u,i,t\n1,2,3\n",
        {"format": "csv"},
        "give the name of the user and of the item column with --user and --item; columns of "
        "input: u, i, t",
    ),
    "column number too large": Case(
        "1,2,3\n",
        {"format": "csv", "has_header": False, "user": "1", "item": "4"},
        "has no column '4' for --item; columns of input: numbers 1 to 3",
    ),
    "name without header": Case(
        "1,2,3\n",
        {"format": "csv", "has_header": False, "user": "u", "item": "2"},
        "has no column 'u' for --user; columns of input: numbers 1 to 3",
    ),
    "column option of a fixed format": Case(
        "1 2\n", {"format": "pairs", "user": "u"}, "--user is for csv, tsv and parquet"
    ),
    "no-header of a fixed format": Case(
        "1 2\n", {"format": "pairs", "has_header": False}, "--no-header is for csv and tsv"
    ),
    "played ratio of csv": Case(
        "u,i,t\n1,2,3\n", CSV | {"min_played_pct": 5}, "--min-played-pct is for the yambda formats"
    ),
    "played ratio that is absent": Case(
        pl.DataFrame({"uid": [1], "timestamp": [2], "item_id": [3]}),
        FLAT | {"min_played_pct": 5},
        "--min-played-pct needs the column played_ratio_pct, which the file lacks",
    ),
    "negative filter": Case(
        "1 2\n",
        {"format": "pairs", "min_interactions": -1},
        "`min_interactions` must not be negative; got -1",
    ),
    "everything filtered": Case(
        "1 2\n2 3\n",
        {"format": "pairs", "min_interactions": 2},
        "has no interactions left (2 x user with fewer than 2 events); check the columns",
    ),
    "no yambda columns": Case(
        _frame(), FLAT, "has no column 'uid', which this format needs; columns of input: u, i, t"
    ),
    "flat is no sequential": Case(
        pl.DataFrame({"uid": [1], "timestamp": [2], "item_id": [3]}),
        SEQUENTIAL,
        "is not a yambda-sequential file: column item_id has type Int64, not a list",
    ),
    "sequential is no flat": Case(
        pl.DataFrame({"uid": [1], "timestamp": [[2]], "item_id": [[3]]}),
        FLAT,
        "a file with one row per user is yambda-sequential",
    ),
    "unequal lists": Case(
        pl.DataFrame({"uid": [1, 8], "timestamp": [[2], [3]], "item_id": [[3], [4, 5]]}),
        SEQUENTIAL,
        "has lists of unequal length for uid 8",
    ),
    # Ids.
    "float ids": Case(
        _frame(i=[1.0, float("nan")]),
        PARQUET,
        "the item column of input has type Float64; ids must be integers or strings",
    ),
    "word as movielens id": Case(
        "1::2::3::4\n\n1::x7::3::4\n",
        {"format": "movielens-dat"},
        "line 3 of input has the item id 'x7'; this format has integer ids only",
    ),
    "word as u.data id": Case(
        "1\t2\t3\t4\nbob\t2\t3\t4\n",
        {"format": "movielens-udata"},
        "line 2 of input has the user id 'bob'; this format has integer ids only",
    ),
    "word as yambda id": Case(
        pl.DataFrame({"uid": ["1", "x"], "timestamp": [2, 3], "item_id": [3, 4]}),
        FLAT,
        "row 2 of input has the user id 'x'; this format has integer ids only",
    ),
    # Timestamps.
    "word as time": Case(
        "u,i,t\n1,2,3\n1,2,noon\n", CSV, "row 2 of input has the timestamp 'noon'"
    ),
    "fraction as time": Case("u,i,t\n1,2,3.5\n", CSV, "row 1 of input has the timestamp '3.5'"),
    "nan as time": Case("u,i,t\n1,2,NaN\n", CSV, "row 1 of input has the timestamp 'NaN'"),
    "float times": Case(
        _frame(t=[1.5, float("nan")]),
        PARQUET,
        "the time column of input has type Float64; timestamps must be whole seconds",
    ),
    "time beyond int64": Case(
        _frame(t=np.array([1, 2**63], dtype=np.uint64)),
        PARQUET,
        "row 2 of input has the timestamp 9223372036854775808",
    ),
}


def _write(path: Path, content: str | bytes | pl.DataFrame) -> None:
    if isinstance(content, pl.DataFrame):
        content.write_parquet(path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("name", CASES)
def test_bad_input(tmp_path, name):
    case = CASES[name]
    _write(tmp_path / "input", case.content)
    with pytest.raises(UserError) as caught:
        prepare(tmp_path / "input", tmp_path / "store", **case.options)
    message = str(caught.value)
    assert case.message in message
    assert "\n" not in message
    assert [p.name for p in tmp_path.iterdir()] == ["input"]


def test_an_unused_column_twice_is_no_mistake(tmp_path):
    (tmp_path / "input").write_text('x,u,"i",x,t\n1,2,"3, 4",5,6\n')
    assert prepare(tmp_path / "input", tmp_path / "store", **CSV).num_interactions == 1


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.csv does not exist; check the path"):
        prepare(tmp_path / "nothing.csv", tmp_path / "store", **CSV)
    with pytest.raises(UserError, match="is a folder; name the file in it"):
        prepare(tmp_path, tmp_path / "store", **CSV)


def test_existing_store_is_refused_before_reading(tmp_path):
    (tmp_path / "store").mkdir()
    with pytest.raises(UserError, match="exists already; choose another name or pass --overwrite"):
        prepare(tmp_path / "nothing.csv", tmp_path / "store", **CSV)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_overwrite_replaces_stores_only(tmp_path, kind):
    (tmp_path / "input").write_text("1 1\n1 2\n")
    out = tmp_path / "precious"
    content = out / "thesis.txt" if kind == "folder" else out
    content.parent.mkdir(exist_ok=True)
    content.write_text("years of work")
    message = {
        "folder": "exists and is not a whole sequence store; --overwrite rep",
        "file": "precious is a file, and a folder is to be written; choose another name",
    }
    with pytest.raises(UserError, match=message[kind]):
        prepare(tmp_path / "input", out, format="pairs", overwrite=True)
    assert content.read_text() == "years of work"


def test_catalog_beyond_int32(tmp_path, monkeypatch):
    monkeypatch.setattr(sequences, "MAX_ITEMS", 2)
    (tmp_path / "input").write_text("1 1\n1 2\n1 3\n")
    with pytest.raises(UserError, match="input has 3 items; a catalog holds at most 2, so filter"):
        prepare(tmp_path / "input", tmp_path / "store", format="pairs")
    assert sequences.MAX_ITEMS == 2
    assert [p.name for p in tmp_path.iterdir()] == ["input"]


def test_rows_fit_int32():
    assert np.iinfo(np.int32).max == sequences.MAX_ITEMS


@pytest.mark.parametrize("stage", ["users.write_parquet", "meta"])
def test_failure_while_writing_leaves_nothing(tmp_path, monkeypatch, stage):
    (tmp_path / "input").write_text("1 1\n1 2\n1 3\n")

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    if stage == "meta":
        monkeypatch.setattr(Path, "write_text", fail)
    else:
        monkeypatch.setattr(pl.DataFrame, "write_parquet", fail)
    with pytest.raises(OSError, match="no space"):
        prepare(tmp_path / "input", tmp_path / "store", format="pairs")
    assert [p.name for p in tmp_path.iterdir()] == ["input"]
