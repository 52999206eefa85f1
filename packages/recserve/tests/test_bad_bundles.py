"""A damaged or inconsistent bundle gives one clear error and leaves nothing behind."""

import json
import os
import re

import numpy as np
import polars as pl
import pytest

import recserve


def refuse(bundle, tmp_path, *messages):
    """Builds, expects a `UserError` with all messages, and no output."""
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(recserve.UserError) as error:
        recserve.build(bundle.path, tmp_path / "index")
    text = str(error.value)
    assert "\n" not in text
    for message in messages:
        assert message in text
    assert ".tmp-" not in text
    assert sorted(os.listdir(tmp_path)) == before


def test_missing_folder(bundle, tmp_path):
    bundle.path = tmp_path / "nowhere"
    refuse(bundle, tmp_path, "nowhere is no bundle: it has no bundle.json; `recmodels train`")


def test_file_instead_of_folder(bundle, tmp_path):
    bundle.path = bundle.path / "items.parquet"
    refuse(bundle, tmp_path, "items.parquet is no bundle")


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b""])
def test_manifest_that_is_not_json(bundle, tmp_path, content):
    (bundle.path / "bundle.json").write_bytes(content)
    refuse(bundle, tmp_path, "bundle.json is corrupted: it is not JSON")


def test_manifest_that_is_no_object(bundle, tmp_path):
    (bundle.path / "bundle.json").write_text("[]")
    refuse(bundle, tmp_path, "bundle.json is corrupted: not a JSON object")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", "something", "has format 'something' but this recserve reads 'cutbce-bundle'"),
        ("version", 2, "has version 2 but this recserve reads 1"),
        ("version", None, "has version None but this recserve reads 1"),
        ("model", "sasrec", "field 'model' must be a JSON dict; got 'sasrec'"),
        ("num_items", "20", "field 'num_items' must be a JSON int; got '20'"),
        ("num_items", True, "field 'num_items' must be a JSON int; got True"),
        ("vocab_size", 20, "field 'vocab_size' must be one of [21]; got 20"),
        ("vector_dim", 0, "field 'vector_dim' must be at least 1; got 0"),
        ("similarity", "cosine", "field 'similarity' must be one of ['dot']; got 'cosine'"),
        ("item_id_type", "uuid", "field 'item_id_type' must be one of ['int64', 'string']"),
        ("hide_seen", 1, "field 'hide_seen' must be a JSON bool; got 1"),
        ("encoder", {"file": "x"}, "encoder file must be 'query_encoder.stablehlo'; got 'x'"),
        ("files", [], "field 'files' must list the files; got []"),
        ("files", {"../x": {}}, "file name '../x' leads out of the folder"),
        ("files", {"/etc/x": {}}, "file name '/etc/x' leads out of the folder"),
        ("files", {"x": {"bytes": 1}}, "entry of 'x' needs 'bytes' and 'sha256'"),
        ("files", {}, "lists no item_embeddings.npy"),
    ],
)
def test_bad_field(bundle, tmp_path, field, value, message):
    bundle.edit(**{field: value})
    refuse(bundle, tmp_path, "bundle.json", message)


FILES = [
    "item_embeddings.npy",
    "items.parquet",
    "users.parquet",
    "history_items.npy",
    "history_offsets.npy",
    "query_encoder.stablehlo",
]


@pytest.mark.parametrize("name", FILES)
def test_missing_file(bundle, tmp_path, name):
    (bundle.path / name).unlink()
    refuse(bundle, tmp_path, f"{bundle.path / name} is missing")


@pytest.mark.parametrize("name", FILES)
def test_truncated_file(bundle, tmp_path, name):
    content = (bundle.path / name).read_bytes()
    (bundle.path / name).write_bytes(content[:-1])
    sizes = f"has {len(content) - 1:,} bytes but {bundle.path}/bundle.json lists {len(content):,}"
    refuse(bundle, tmp_path, f"{bundle.path / name} {sizes}")


@pytest.mark.parametrize("name", FILES)
def test_flipped_bit(bundle, tmp_path, name):
    content = bytearray((bundle.path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle.path / name).write_bytes(content)
    refuse(bundle, tmp_path, f"{bundle.path / name} has SHA-256 ", "corrupted or from another")


@pytest.mark.parametrize("name", FILES)
def test_damaged_file_with_a_matching_checksum(bundle, tmp_path, name):
    (bundle.path / name).write_bytes(b"this is not what it should be")
    bundle.seal()
    refuse(bundle, tmp_path, f"{bundle.path / name} cannot be read")


def replace_items(bundle, **columns):
    """Writes another items.parquet."""
    table = pl.read_parquet(bundle.path / "items.parquet").with_columns(**columns)
    table.write_parquet(bundle.path / "items.parquet")


def save(bundle, name, array):
    """Writes another array."""
    np.save(bundle.path / name, array)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda b: save(b, "item_embeddings.npy", b.vectors[:-1]),
            "item_embeddings.npy has shape (20, 5) but the rest of the folder needs (21, 5)",
        ),
        (
            lambda b: save(b, "item_embeddings.npy", b.vectors.astype(np.float64)),
            "item_embeddings.npy has dtype float64 but the rest of the folder needs float32",
        ),
        (
            lambda b: save(b, "item_embeddings.npy", b.vectors[0]),
            "item_embeddings.npy has number of axes 1 but the rest of the folder needs 2",
        ),
        (
            lambda b: save(b, "item_embeddings.npy", b.vectors * np.float32(np.nan)),
            "item_embeddings.npy row 0 is not finite",
        ),
        (
            lambda b: save(b, "item_embeddings.npy", b.vectors + np.float32(1)),
            "item_embeddings.npy row 0 is padding and must be zero",
        ),
        (
            lambda b: pl.read_parquet(b.path / "items.parquet")[:-1].write_parquet(
                b.path / "items.parquet"
            ),
            "items.parquet has number of items 19 but the rest of the folder needs 20",
        ),
        (lambda b: replace_items(b, row=pl.col("row") - 1), "column 'row' must count up from 1"),
        (
            lambda b: replace_items(b, item_id=pl.lit(5, dtype=pl.Int64)),
            "items.parquet has the id 5 twice",
        ),
        (
            lambda b: replace_items(b, item_id=pl.col("item_id").cast(pl.String)),
            "items.parquet has type of column 'item_id' String but the rest of the folder needs",
        ),
        (
            lambda b: replace_items(b, item_id=pl.lit(None, dtype=pl.Int64)),
            "items.parquet has number of nulls in column 'item_id' 20",
        ),
        (
            lambda b: (
                pl.read_parquet(b.path / "items.parquet")
                .drop("item_id")
                .write_parquet(b.path / "items.parquet")
            ),
            "items.parquet cannot be read as a parquet table",
        ),
        (
            lambda b: save(b, "history_offsets.npy", np.zeros(3, np.int64)),
            "history_offsets.npy has length 3 but the rest of the folder needs 4",
        ),
        (
            lambda b: save(b, "history_offsets.npy", np.array([0, 5, 3, 9])),
            "history_offsets.npy must start at 0 and never decrease",
        ),
        (
            lambda b: save(b, "history_items.npy", np.ones(8, np.int32)),
            "history_items.npy has length 8 but the rest of the folder needs 9",
        ),
        (
            lambda b: save(b, "history_items.npy", np.full(9, 21, np.int32)),
            "history_items.npy must hold rows 1 to 20; got 21 to 21",
        ),
        (
            lambda b: save(b, "history_items.npy", np.zeros(9, np.int32)),
            "history_items.npy must hold rows 1 to 20; got 0 to 0",
        ),
    ],
)
def test_files_that_contradict_each_other(bundle, tmp_path, change, message):
    change(bundle)
    bundle.seal()
    refuse(bundle, tmp_path, str(bundle.path), message)


def test_encoder_of_another_model(bundle, tmp_path, toys):
    other = toys.write(tmp_path / "other", vectors=toys.vectors(20, 6))
    encoder = (other.path / "query_encoder.stablehlo").read_bytes()
    (bundle.path / "query_encoder.stablehlo").write_bytes(encoder)
    bundle.seal()
    refuse(bundle, tmp_path, "(4, 6)", "(4, 5)", "the encoder is of another model")


def test_id_map_of_another_model(bundle, tmp_path, toys):
    # Same size and a valid table: only the checksum tells the two apart.
    other = toys.write(tmp_path / "other", item_ids=range(900, 920))
    os.replace(other.path / "items.parquet", bundle.path / "items.parquet")
    refuse(bundle, tmp_path, "items.parquet has")


def test_files_beside_the_listed_ones_are_ignored(bundle, tmp_path):
    (bundle.path / "notes.txt").write_text("mine")
    report = recserve.build(bundle.path, tmp_path / "index")
    assert not (report.path / "notes.txt").exists()


def test_bundle_replaced_while_it_is_copied(bundle, tmp_path, toys, monkeypatch):
    from recserve._src.storage import copy_file

    other = toys.write(tmp_path / "other", item_ids=range(900, 920))

    def swap(source, target):
        if source.name == "items.parquet":
            os.rename(bundle.path, tmp_path / "gone")
            os.rename(other.path, bundle.path)
        return copy_file(source, target)

    monkeypatch.setattr("recserve._src.build.copy_file", swap)
    with pytest.raises(recserve.UserError, match=re.escape("items.parquet has")):
        recserve.build(bundle.path, tmp_path / "index")
    assert not (tmp_path / "index").exists()
    assert json.loads((bundle.path / "bundle.json").read_text())["num_items"] == 20
