import hashlib
import json

import jax
import jax.export
import numpy as np
import polars as pl
import pytest
from model_cases import random_params
from train_cases import NUM_ITEMS, chain_store, finished_run, small_recipe

from recmodels import UserError
from recmodels._src.bundle import write_bundle
from recmodels._src.evaluate import make_query_function
from recmodels._src.models.base import output_table
from recmodels._src.train.run_directory import RunDirectory
from recmodels._src.train.step import initial_state


def _manifest(bundle):
    return json.loads((bundle / "bundle.json").read_text())


def _encoder(bundle):
    return jax.export.deserialize((bundle / "query_encoder.stablehlo").read_bytes())


def test_scores_are_those_of_the_model():
    _, result = finished_run()
    run = RunDirectory.open(result.run_dir)
    params = run.restore().params
    vectors = np.load(result.bundle / "item_embeddings.npy")
    encoder = _encoder(result.bundle)
    rng = np.random.default_rng(0)
    for batch in (1, 5):  # any batch size from one file
        history = rng.integers(1, NUM_ITEMS + 1, (batch, run.recipe.max_length))
        history[:, :3] = 0
        queries = encoder.call(vectors[history], history > 0)
        assert queries.shape == (batch, vectors.shape[1])
        own = make_query_function(run.recipe)(params, history) @ params["item_embeddings"].T
        scores = np.asarray(queries) @ vectors.T
        expected = np.asarray(own + params["output_bias"])
        np.testing.assert_allclose(scores[:, 1:], expected[:, 1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"model": "bert4rec", "num_targets": 2, "norm": "post"},
        {"model": "bert4rec", "tie_embeddings": False, "output_bias": False},
        {"model": "sasrec", "tie_embeddings": False, "positions": "rotary"},
    ],
    ids=str,
)
def test_every_kind_of_model_scores_as_its_bundle(tmp_path, options):
    store, recipe = chain_store(tmp_path / "store"), small_recipe(**options)
    params = random_params(recipe, NUM_ITEMS + 1)
    write_bundle(tmp_path / "bundle", recipe, params, store, step=0)
    vectors = np.load(tmp_path / "bundle" / "item_embeddings.npy")
    history = np.random.default_rng(0).integers(1, NUM_ITEMS + 1, (3, 8))
    history[0, :3], history[1] = 0, 0
    queries = np.asarray(_encoder(tmp_path / "bundle").call(vectors[history], history > 0))
    assert np.isfinite(queries).all()
    own = make_query_function(recipe)(params, history) @ output_table(params).T
    expected = np.asarray(own) + params.get("output_bias", 0)
    np.testing.assert_allclose((queries @ vectors.T)[:, 1:], expected[:, 1:], rtol=1e-4, atol=1e-4)
    assert _manifest(tmp_path / "bundle")["model"]["kind"] == options["model"]


def test_history_of_nothing_gives_a_finite_query():
    _, result = finished_run()
    vectors = np.load(result.bundle / "item_embeddings.npy")
    history = np.zeros((2, 8), np.int32)
    query = np.asarray(_encoder(result.bundle).call(vectors[history], history > 0))
    assert np.isfinite(query).all()
    np.testing.assert_array_equal(query[:, -1], 1.0)


def test_manifest_says_what_is_there():
    _, result = finished_run()
    manifest = _manifest(result.bundle)
    assert manifest["format"] == "cutbce-bundle"
    assert manifest["version"] == 1
    assert manifest["model"] == {"name": "small", "kind": "sasrec", "step": 60}
    assert (manifest["num_items"], manifest["vocab_size"]) == (NUM_ITEMS, NUM_ITEMS + 1)
    assert (manifest["vector_dim"], manifest["max_length"]) == (9, 8)
    assert (manifest["item_id_type"], manifest["user_id_type"]) == ("int64", "int64")
    assert manifest["hide_seen"] is False
    assert manifest["encoder"]["platforms"] == ["cpu", "tpu", "cuda"]
    assert tuple(_encoder(result.bundle).platforms) == ("cpu", "tpu", "cuda")
    present = {file.name for file in result.bundle.iterdir()} - {"bundle.json"}
    assert set(manifest["files"]) == present
    for name, entry in manifest["files"].items():
        content = (result.bundle / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_vectors_ids_and_histories():
    store, result = finished_run()
    vectors = np.load(result.bundle / "item_embeddings.npy")
    assert vectors.dtype == np.float32
    assert not vectors[0].any()  # padding scores 0 whatever the query
    items = pl.read_parquet(result.bundle / "items.parquet")
    assert items["row"].to_list() == list(range(1, len(vectors)))
    np.testing.assert_array_equal(items["item_id"].to_numpy(), store.item_ids())
    np.testing.assert_array_equal(np.load(result.bundle / "history_items.npy"), store.items)
    np.testing.assert_array_equal(np.load(result.bundle / "history_offsets.npy"), store.offsets)


def test_without_output_bias_vectors_are_the_table(tmp_path):
    store = chain_store(tmp_path / "store")
    recipe = small_recipe(output_bias=False)
    state = initial_state(recipe, np.ones(NUM_ITEMS + 1, np.float32))
    write_bundle(tmp_path / "bundle", recipe, state.params, store, step=0)
    vectors = np.load(tmp_path / "bundle" / "item_embeddings.npy")
    np.testing.assert_array_equal(vectors[1:], state.params["item_embeddings"][1:])
    history = np.ones((1, 8), np.int32)
    assert _encoder(tmp_path / "bundle").call(vectors[history], history > 0).shape == (1, 8)
    with pytest.raises(UserError, match="exists already"):
        write_bundle(tmp_path / "bundle", recipe, state.params, store, step=0)
