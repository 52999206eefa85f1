"""The sequence store: round trip, stability, damage."""

import json

import numpy as np
import polars as pl
import pytest
from store_cases import tiny_store

from recmodels._src.data.prepare import prepare
from recmodels._src.data.store import _FILES, SequenceStore
from recmodels._src.errors import UserError


def test_round_trip(tmp_path):
    store = tiny_store(tmp_path / "s", [[3, 1], [2], [1, 1, 3]])
    assert (store.num_users, store.num_items, store.num_interactions) == (3, 3, 6)
    assert store.lengths.tolist() == [2, 1, 3]
    assert [store.sequence(user).tolist() for user in range(3)] == [[3, 1], [2], [1, 1, 3]]
    assert store.timestamps.tolist() == [0, 1, 0, 0, 1, 2]
    assert store.item_ids().tolist() == [0, 10, 20]
    assert store.user_ids().tolist() == [100, 101, 102]


def test_arrays_are_read_only_memory_maps(tmp_path):
    store = tiny_store(tmp_path / "s", [[3, 1], [2]])
    for array in (store.items, store.offsets, store.timestamps):
        assert isinstance(array, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_files_have_the_contracted_columns(tmp_path):
    tiny_store(tmp_path / "s", [[3, 1], [2], [1, 1, 3]])
    users = pl.read_parquet(tmp_path / "s" / "users.parquet")
    assert dict(users.schema) == {
        "user": pl.Int64,
        "user_id": pl.Int64,
        "num_interactions": pl.Int64,
    }
    assert users["num_interactions"].to_list() == [2, 1, 3]
    items = pl.read_parquet(tmp_path / "s" / "items.parquet")
    assert dict(items.schema) == {"row": pl.Int32, "item_id": pl.Int64, "count": pl.Int64}
    assert items.rows() == [(1, 0, 3), (2, 10, 1), (3, 20, 2)]
    meta = json.loads((tmp_path / "s" / "meta.json").read_text())
    assert meta["format"] == "cutbce-sequence-store"
    assert meta["version"] == 1
    assert meta["timestamps"] == "order"


@pytest.mark.parametrize("user", [-1, 2])
def test_unknown_user(tmp_path, user):
    store = tiny_store(tmp_path / "s", [[3, 1], [2]])
    with pytest.raises(IndexError, match=rf"`user` must be in \[0, 2\); got {user}"):
        store.sequence(user)


def _prepare_text(tmp_path, name, text):
    (tmp_path / "events").write_text(text)
    prepare(tmp_path / "events", tmp_path / name, format="pairs")
    return SequenceStore.open(tmp_path / name)


def test_same_file_gives_the_same_store_byte_for_byte(tmp_path):
    text = "b x\na y\nb y\na z\n"
    first, second = (_prepare_text(tmp_path, name, text) for name in ("s1", "s2"))
    assert first.digest == second.digest
    for path in sorted(first.path.iterdir()):
        assert path.read_bytes() == (second.path / path.name).read_bytes()


@pytest.mark.parametrize(
    "text",
    ["b x\na y\nb z\na y\n", "b x\na y\nb y\na w\n", "c x\na y\nc y\na z\n", "b x\na y\nb y\n"],
    ids=["order", "item id", "user id", "length"],
)
def test_digest_tells_stores_apart(tmp_path, text):
    first = _prepare_text(tmp_path, "s1", "b x\na y\nb y\na z\n")
    assert first.digest != _prepare_text(tmp_path, "s2", text).digest


def _cut_items(folder):
    np.save(folder / "items.npy", np.load(folder / "items.npy")[:-1])


def _widen_items(folder):
    np.save(folder / "items.npy", np.load(folder / "items.npy").astype(np.int64))


def _truncate(folder):
    path = folder / "items.npy"
    path.write_bytes(path.read_bytes()[:-4])


def _shift_offsets(folder):
    np.save(folder / "offsets.npy", np.load(folder / "offsets.npy") + 1)


def _set_items(*rows):
    return lambda folder: np.save(folder / "items.npy", np.array(rows, np.int32))


def _drop_row(name):
    def change(folder):
        pl.read_parquet(folder / name)[1:].write_parquet(folder / name)

    return change


def _empty(name):
    return lambda folder: (folder / name).write_bytes(b"")


def _halve(name):
    def change(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return change


def _drop_meta(name):
    def change(folder):
        meta = json.loads((folder / "meta.json").read_text())
        del meta[name]
        (folder / "meta.json").write_text(json.dumps(meta))

    return change


def _change_meta(**changes):
    def change(folder):
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps(meta | changes))

    return change


DAMAGES = {
    "no meta": (lambda f: (f / "meta.json").unlink(), "is not a sequence store; write one with"),
    "other json": (lambda f: (f / "meta.json").write_text("[]"), "is not a sequence store"),
    "no json": (lambda f: (f / "meta.json").write_text("{"), "is damaged: meta.json is not JSON"),
    "version": (_change_meta(version=2), "has store version 2, this program reads 1"),
    "no items": (lambda f: (f / "items.npy").unlink(), "is damaged: items.npy is missing"),
    "no users": (lambda f: (f / "users.parquet").unlink(), "damaged: users.parquet is missing"),
    "no catalog": (lambda f: (f / "items.parquet").unlink(), "items.parquet is missing"),
    "truncated": (_truncate, "is damaged: items.npy cannot be read"),
    "short": (_cut_items, r"items.npy is int32[2], meta.json says int32[3]"),
    "wide": (_widen_items, r"items.npy is int64[3], meta.json says int32[3]"),
    "backwards": (
        lambda f: np.save(f / "offsets.npy", np.array([0, 5, 3])),
        "offsets.npy has a user that ends before it starts",
    ),
    "zero row": (_set_items(3, 0, 2), "items.npy has rows outside 1..3"),
    "large row": (_set_items(3, 4, 2), "items.npy has rows outside 1..3"),
    **{f"empty {n}": (_empty(n), f"is damaged: {n}") for n in _FILES},
    **{f"half {n}": (_halve(n), f"is damaged: {n} cannot be read") for n in _FILES},
    **{
        f"no {n}": (_drop_meta(n), f"is damaged: meta.json has no valid {n}")
        for n in ("num_users", "num_items", "num_interactions", "digest", "timestamps")
    },
    **{
        f"null {n}": (_change_meta(**{n: None}), f"is damaged: meta.json has no valid {n}")
        for n in ("source", "filters", "skipped")
    },
    "word count": (_change_meta(skipped={"x": "y"}), "is damaged: meta.json has no valid skipped"),
    "users": (_drop_row("users.parquet"), "users.parquet has 1 rows, meta.json says 2"),
    "catalog": (_drop_row("items.parquet"), "items.parquet has 2 rows, meta.json says 3"),
    "columns": (
        lambda f: pl.DataFrame({"row": [1, 2, 3]}).write_parquet(f / "items.parquet"),
        "items.parquet has no valid column row",
    ),
    "offsets": (_shift_offsets, "offsets.npy does not span the interactions"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_store(tmp_path, name):
    damage, message = DAMAGES[name]
    store = tiny_store(tmp_path / "s", [[3, 1], [2]])
    damage(store.path)
    with pytest.raises(UserError) as caught:
        SequenceStore.open(store.path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "recmodels prepare" in str(caught.value)


def test_missing_store(tmp_path):
    with pytest.raises(UserError, match="is not a sequence store; write one with `recmodels prep"):
        SequenceStore.open(tmp_path / "nowhere")
