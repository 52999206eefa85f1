"""Item categories: from the file to the store."""

import gzip
import json

import numpy as np
import polars as pl
import pytest

from recmodels import UserError, describe, prepare
from recmodels._src.cli import main
from recmodels._src.data.categories import MAX_CATEGORIES, numbered
from recmodels._src.data.store import SequenceStore

_EVENTS = "user,sku,ts\na,7,1\na,8,2\nb,9,1\nb,7,5\n"
_PAIRS = "item_id,category\n7,toys\n7,books\n7,toys\n9,toys\n55,food\n,food\n8,\n"


_AS_IT_IS = ""  # pairs of a file that is there already, or is not


def _prepare(
    folder, pairs: str | None = _PAIRS, *, events=_EVENTS, name="pairs.csv", out="store", **options
):
    (folder / "events.csv").write_text(events)
    if pairs:
        (folder / name).write_text(pairs)
    given = {} if pairs is None else {"item_categories": folder / name}
    report = prepare(
        folder / "events.csv", folder / out, format="csv", user="user", item="sku", time="ts",
        **given, **options,
    )  # fmt: skip
    return SequenceStore.open(folder / out), report


def test_categories_reach_the_store_and_the_report(tmp_path):
    store, report = _prepare(tmp_path)
    assert pl.read_parquet(store.path / "items.parquet")["categories"].to_list() == [
        ["books", "toys"], [], ["toys"],
    ]  # fmt: skip
    names, table = store.item_categories
    assert names == ["books", "toys"]
    assert table.tolist() == [[0, 0], [1, 2], [0, 0], [2, 0]]
    assert store.num_categories == 2
    assert str(report).splitlines()[-3:] == [
        "categories      2; 1 items have none",
        "left out        1 x item that is not in the interactions in pairs.csv",
        "left out        2 x line without item or category in pairs.csv",
    ]
    card = dict(describe(store).lines())
    assert card["categories"] == "2; 66.7% of the items have one or more"


def test_a_store_without_categories(tmp_path):
    store, report = _prepare(tmp_path, None)
    assert (store.num_categories, report.item_categories) == (0, None)
    assert "categories" not in dict(describe(store).lines())
    with pytest.raises(UserError, match=r"store has none; prepare it with --item-categories$"):
        store.item_categories  # noqa: B018


@pytest.mark.parametrize("name", ["x.tsv", "x.csv.gz", "x.parquet"])
def test_every_kind_of_file_gives_the_same_store(tmp_path, name):
    expected, _ = _prepare(tmp_path)
    if name == "x.parquet":
        table = pl.read_csv(_PAIRS.encode()).with_columns(pl.col("category").cast(pl.Categorical))
        table.write_parquet(tmp_path / name)
    elif name == "x.tsv":
        (tmp_path / name).write_text(_PAIRS.replace(",", "\t"))
    else:
        (tmp_path / name).write_bytes(gzip.compress(_PAIRS.encode()))
    store, _ = _prepare(tmp_path, _AS_IT_IS, name=name, out="other")
    assert store.digest == expected.digest
    np.testing.assert_array_equal(store.item_categories.table, expected.item_categories.table)


@pytest.mark.parametrize("pairs", [None, _PAIRS.replace("9,toys", "9,books")])
def test_digest_tells_categories_apart(tmp_path, pairs):
    one, _ = _prepare(tmp_path)
    assert _prepare(tmp_path, pairs, out="other")[0].digest != one.digest


def test_digest_tells_times_apart(tmp_path):
    one, _ = _prepare(tmp_path, None)
    later = _EVENTS.replace("b,7,5", "b,7,6")
    assert _prepare(tmp_path, None, events=later, out="other")[0].digest != one.digest


def test_ids_are_compared_as_written(tmp_path):
    pairs = "item_id,category\n7,toys\n007,books\n9,food\n"
    store, report = _prepare(tmp_path, pairs)
    assert store.item_categories.names == ["food", "toys"]
    assert (report.item_categories or {})["num_unknown_items"] == 1
    words, _ = _prepare(tmp_path, pairs, events=_EVENTS.replace("8", "x8"), out="words")
    assert words.item_categories.names == ["food", "toys"]


def test_numbers_go_by_name_whatever_the_order():
    lists = pl.Series([["b", "c"], [], ["a"]])
    assert numbered(lists).table.tolist() == [[0, 0], [2, 3], [0, 0], [1, 0]]
    assert numbered(lists).names == ["a", "b", "c"]


_TOO_MANY = "item_id,category\n" + "".join(f"7,{n}\n" for n in range(MAX_CATEGORIES + 1))

_WITH_LATE_NUL = "item_id,category\n" + "7,a\n" * 3000 + "7,a\0b\n"


@pytest.mark.parametrize(
    ("pairs", "name", "message"),
    [
        ("sku,category\n7,a\n", "x.csv", r"no column 'item_id'; name .* columns of x.csv: sku, ca"),
        ("item_id,category\nx,a\n", "x.csv", r"no item of x.csv is in .* ids such as 'x', .* 7$"),
        ("item_id,category\n", "x.csv", r"x.csv has no pair of an item and a category"),
        ("\n", "x.csv", r"x.csv cannot be read: empty CSV; check the file"),
        ("PAR1", "x.parquet", r"x.parquet cannot be read: .*; check the file"),
        ("7 a", "x.txt", r"must be a .csv, .tsv or .parquet file; got x.txt"),
        ("item_id,category\n7,a\n8,b,c\n", "x.csv", r"line 3 of x.csv has 3 fields, line 1 has 2"),
        ("item_id,n,category\n7,1,a\n8,1,b,c\n", "x.csv", r"line 3 of x.csv has 4 fields, line 1"),
        (
            "item_id,item_id,category\n7,8,a\n",
            "x.csv",
            r"2 columns 'item_id' for --category-columns, at places 1 and 2",
        ),
        ('item_id,category\n7,"a\n', "x.csv", r"line 2 of x.csv opens a quote and does not close"),
        ("item_id,category\n7,a\0b\n", "x.csv", r"x.csv is binary, and csv is a text format"),
        (_WITH_LATE_NUL, "x.csv", r"row 3001 of x.csv has a NUL byte in its category"),
        ("PAR1\0", "x.tsv", r"x.tsv is a parquet file, and tsv is a text format; check the file"),
        (_TOO_MANY, "x.csv", r"item 7 has 33 categories in x.csv; an item may have 32"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(tmp_path, pairs, name, message):
    with pytest.raises(UserError, match=message):
        _prepare(tmp_path, pairs, name=name)
    assert not (tmp_path / "store").exists()


def test_no_such_file(tmp_path):
    with pytest.raises(UserError, match=r"x.csv does not exist; check the path of the item cat"):
        _prepare(tmp_path, _AS_IT_IS, name="x.csv")


def test_numbers_with_a_point_are_no_categories(tmp_path):
    pl.DataFrame({"item_id": [7], "category": [0.5]}).write_parquet(tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"category column of x.parquet has type Float64"):
        _prepare(tmp_path, _AS_IT_IS, name="x.parquet")


def test_command(tmp_path, capsys):
    (tmp_path / "events.csv").write_text(_EVENTS)
    (tmp_path / "pairs.csv").write_text("dept,sku\ntoys,7\n")
    base = ["prepare", str(tmp_path / "events.csv"), "--format", "csv", "--user", "user"]
    base += ["--item", "sku", "--time", "ts", "--out", str(tmp_path / "store")]
    columns = ["--category-columns", "sku,dept"]
    assert main([*base, *columns]) == 2
    assert "--category-columns needs --item-categories" in capsys.readouterr().err
    file = ["--item-categories", str(tmp_path / "pairs.csv")]
    assert main([*base, *file, "--category-columns", "sku"]) == 2
    assert "must be the names of an item column and a category col" in capsys.readouterr().err
    assert main([*base, *file, "--category-columns", "sku,sku"]) == 2
    assert "must be the names of an item column and a category col" in capsys.readouterr().err
    assert main(["prepare", "--synthetic", "--out", str(tmp_path / "s"), *file]) == 2
    assert "--item-categories does not go with --synthetic" in capsys.readouterr().err
    assert main([*base, *file, *columns]) == 0
    assert SequenceStore.open(tmp_path / "store").item_categories.names == ["toys"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("2", "meta.json has no valid item_categories"),
        (3, "items.parquet has 2 categories, meta.json says 3"),
    ],
)
def test_damage_is_named(tmp_path, value, message):
    store, _ = _prepare(tmp_path)
    meta = json.loads((store.path / "meta.json").read_text())
    meta["item_categories"]["num_categories"] = value
    (store.path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match=message):
        SequenceStore.open(store.path).item_categories  # noqa: B018


def test_text_in_another_encoding(tmp_path):
    (tmp_path / "x.csv").write_bytes("item_id,category\n7,caf\xe9\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"x.csv cannot be read: line 2 of x.csv is no UTF-8 text"):
        _prepare(tmp_path, _AS_IT_IS, name="x.csv")


def test_a_cut_gzip_file(tmp_path):
    whole = gzip.compress(_PAIRS.encode() * 100)
    (tmp_path / "x.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"x.csv.gz cannot be read: .*; check the file"):
        _prepare(tmp_path, _AS_IT_IS, name="x.csv.gz")
