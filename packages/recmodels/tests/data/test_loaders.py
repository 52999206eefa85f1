"""Every format gives the sequences that are in the file."""

import gzip
from pathlib import Path

import polars as pl
import pytest

from recmodels._src.data.prepare import prepare
from recmodels._src.data.store import SequenceStore

# user 7: items 30, 10, 20; user 12: items 10, 40
EXPECTED = {7: [30, 10, 20], 12: [10, 40]}

TEXTS = {
    "csv": ("sku,who,when,note\n30,7,5,a\n10,12,1,b\n10,7,6,c\n20,7,7,d\n40,12,2,e\n",
            {"user": "who", "item": "sku", "time": "when"}),
    "tsv": ("user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
            "7\t20\t1\t7\n7\t30\t1\t5\n12\t10\t3\t1\n7\t10\t2\t6\n12\t40\t5\t2\n",
            {"user": "user_id:token", "item": "item_id:token", "time": "timestamp:float"}),
    "movielens-dat": ("7::30::5::5\n12::10::3::1\n7::10::1::6\n7::20::2::7\n12::40::4::2\n", {}),
    "movielens-udata": ("7\t20\t5\t7\n7\t30\t1\t5\n12\t10\t3\t1\n12\t40\t1\t2\n7\t10\t2\t6\n", {}),
    "user-lines": ("12 10 40\n7 30 10 20\n", {}),
    "pairs": ("7 30\n12 10\n7 10\n7 20\n12 40\n", {}),
}  # fmt: skip


def sequences(store: SequenceStore) -> dict:
    """All histories in raw ids."""
    item_ids, user_ids = store.item_ids(), store.user_ids()
    return {
        user_ids[user]: item_ids[store.sequence(user) - 1].tolist()
        for user in range(store.num_users)
    }


def prepared(path: Path, out: Path, **options) -> SequenceStore:
    """Prepares and opens."""
    prepare(path, out, **options)
    return SequenceStore.open(out)


@pytest.mark.parametrize("line_end", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("gzipped", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("format", TEXTS)
def test_text_formats(tmp_path, format, gzipped, line_end):
    text, columns = TEXTS[format]
    content = text.replace("\n", line_end).encode()
    path = tmp_path / "data.txt"
    path.write_bytes(gzip.compress(content) if gzipped else content)
    store = prepared(path, tmp_path / "store", format=format, **columns)
    assert sequences(store) == EXPECTED
    assert store.item_ids().tolist() == [10, 20, 30, 40]
    has_time = format not in ("user-lines", "pairs")
    assert store.meta["timestamps"] == ("seconds" if has_time else "order")
    assert store.timestamps.tolist() == ([5, 6, 7, 1, 2] if has_time else [0, 1, 2, 0, 1])
    assert store.meta["source"]["name"] == "data.txt"
    assert store.meta["skipped"] == {}


@pytest.mark.parametrize(("format", "separator"), [("csv", ","), ("tsv", "\t")])
def test_columns_by_number_without_header(tmp_path, format, separator):
    lines = ["7,x,30,5", "12,x,10,1", "7,x,10,6", "7,x,20,7", "12,x,40,2"]
    path = tmp_path / "ratings.csv"
    path.write_text("\n".join(lines).replace(",", separator))
    store = prepared(
        path, tmp_path / "s", format=format, has_header=False, user="1", item="3", time="4"
    )
    assert sequences(store) == EXPECTED


def test_csv_quotes_byte_order_mark_and_string_ids(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('user,item\n"Doe, J.",B000123\nü,"007"\nü,7\n', encoding="utf-8-sig")
    store = prepared(path, tmp_path / "s", format="csv", user="user", item="item")
    assert sequences(store) == {"Doe, J.": ["B000123"], "ü": ["007", "7"]}
    assert store.item_ids().tolist() == ["007", "7", "B000123"]


def test_movielens_dat_in_latin_1(tmp_path):
    path = tmp_path / "ratings.dat"
    path.write_bytes("1::2::très bien::3\n1::4::5::1\n".encode("latin-1"))
    store = prepared(path, tmp_path / "s", format="movielens-dat")
    assert sequences(store) == {1: [4, 2]}


@pytest.mark.parametrize(
    "dtype", [pl.Int8, pl.UInt8, pl.Int32, pl.UInt32, pl.Int64, pl.UInt64, pl.String, pl.Enum]
)
def test_parquet_id_types(tmp_path, dtype):
    raw = pl.Series(["30", "10", "20"])
    item = raw.cast(pl.Enum(["30", "20", "10"])) if dtype is pl.Enum else raw.cast(dtype)
    path = tmp_path / "a.parquet"
    pl.DataFrame({"u": [7, 7, 7], "i": item, "t": [1, 2, 3]}).write_parquet(path)
    store = prepared(path, tmp_path / "s", format="parquet", user="u", item="i", time="t")
    assert sequences(store) == {7: [30, 10, 20]}
    assert store.item_ids().dtype == "int64"


def _yambda(rows: list[tuple], **types) -> pl.DataFrame:
    schema = {
        "uid": pl.UInt32,
        "timestamp": pl.UInt32,
        "item_id": pl.UInt32,
        "is_organic": pl.UInt8,
        "played_ratio_pct": pl.UInt16,
        "track_length_seconds": pl.UInt32,
    }
    return pl.DataFrame(rows, schema=schema | types, orient="row")


ROWS = [
    (7, 5, 30, 1, 100, 200),
    (7, 5, 10, 1, 49, 200),
    (7, 10, 20, 0, 50, 9),
    (12, 0, 10, 1, 0, 5),
    (12, 5, 40, 1, 159, 60),
]


def test_yambda_flat(tmp_path):
    _yambda(ROWS).write_parquet(tmp_path / "listens.parquet")
    store = prepared(tmp_path / "listens.parquet", tmp_path / "s", format="yambda-flat")
    assert sequences(store) == EXPECTED
    assert store.timestamps.tolist() == [5, 5, 10, 0, 5]


@pytest.mark.parametrize("plural", [False, True], ids=["item_id", "item_ids"])
def test_yambda_sequential_in_both_spellings(tmp_path, plural):
    frame = _yambda(ROWS).group_by("uid", maintain_order=True).agg(pl.all())
    nobody = frame.head(1).with_columns(
        pl.lit(99, pl.UInt32).alias("uid"), pl.exclude("uid").list.head(0)
    )
    frame = pl.concat([nobody, frame])
    if plural:
        frame = frame.rename({"item_id": "item_ids", "timestamp": "timestamps"})
    frame.write_parquet(tmp_path / "a.parquet")
    store = prepared(tmp_path / "a.parquet", tmp_path / "s", format="yambda-sequential")
    assert sequences(store) == EXPECTED
    store = prepared(
        tmp_path / "a.parquet", tmp_path / "s2", format="yambda-sequential", min_played_pct=50
    )
    assert sequences(store) == {7: [30, 20], 12: [40]}


def test_yambda_played_filter_drops_nulls_and_counts(tmp_path):
    rows = [*ROWS, (12, 10, 50, 1, None, None)]
    _yambda(rows).write_parquet(tmp_path / "a.parquet")
    store = prepared(
        tmp_path / "a.parquet", tmp_path / "s", format="yambda-flat", min_played_pct=50
    )
    assert sequences(store) == {7: [30, 20], 12: [40]}
    assert store.meta["skipped"] == {"played less than 50 %": 3}
    assert store.meta["filters"] == {
        "min_played_pct": 50, "deduplicate": "none", "min_interactions": 1, "k_core": 0,
    }  # fmt: skip


def test_yambda_multi_event_keeps_listens(tmp_path):
    kinds = ["listen", "like", "listen", "dislike", "listen"]
    frame = _yambda(ROWS).with_columns(event_type=pl.Series(kinds, dtype=pl.Categorical))
    frame.write_parquet(tmp_path / "multi_event.parquet")
    store = prepared(tmp_path / "multi_event.parquet", tmp_path / "s", format="yambda-flat")
    assert sequences(store) == {7: [30, 20], 12: [40]}
    assert store.meta["skipped"] == {"event that is not a listen": 2}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_negative_ids_are_ids_like_any_other(tmp_path, kind):
    frame = pl.DataFrame({"u": [3, -7, 3], "i": [-5, 4, -(2**63)], "t": [1, 2, 3]})
    if kind == "csv":
        frame.write_csv(tmp_path / "events")
    else:
        frame.write_parquet(tmp_path / "events")
    store = prepared(tmp_path / "events", tmp_path / "s", format=kind, user="u", item="i", time="t")
    assert sequences(store) == {3: [-5, -(2**63)], -7: [4]}
