"""The bundle: everything serving needs of a trained model, and nothing of training."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import polars as pl
from jax import Array

from recmodels._src import storage
from recmodels._src.atomic import atomic_folder
from recmodels._src.data.store import SequenceStore
from recmodels._src.models.base import output_table
from recmodels._src.models.registry import make_model
from recmodels._src.models.side_inputs import mean_of_categories, with_gaps
from recmodels._src.recipe import Recipe
from recmodels._src.storage import as_path

FORMAT, VERSION = "cutbce-bundle", 1
PLATFORMS = ("cpu", "tpu", "cuda")
_MANIFEST = "bundle.json"
_ENCODER_FILE = "query_encoder.stablehlo"
_ROWS_PER_BLOCK = 1 << 16


def write_bundle(
    path: str | Path,
    recipe: Recipe,
    params: dict,
    store: SequenceStore,
    *,
    step: int,
    overwrite: bool = False,
) -> None:
    """Writes the bundle of a model; it appears complete or not at all.

    The score of an item is the dot product of query and item vector. With an output bias the item
    vectors have one more column, the bias, and every query 1 there, so that this stays true. With
    tables of their own for reading and scoring, or with categories, which are read only, the
    vectors read follow as further columns, where every query is 0. With time gaps the times of the
    histories are in the bundle too.

    Args:
        path: folder to write.
        recipe: how the model was trained.
        params: arrays of the model, see `SequenceModel`.
        store: gives ids, counts, categories and the users' histories.
        step: training steps of the model.
        overwrite: whether an existing folder is replaced.

    Raises:
        UserError: `path` exists and `overwrite` is False, or the store lacks what the recipe reads.
    """
    categories = store.item_categories.table if recipe.item_categories else None
    if recipe.time_gaps:
        store.check_has_times()
    vectors = item_vectors(params, store.num_items + 1, categories)
    with atomic_folder(as_path(path), overwrite=overwrite, last=_MANIFEST) as folder:
        np.save(folder / "item_embeddings.npy", vectors)
        encoder = export_query_encoder(recipe, params, vectors.shape[1])
        (folder / _ENCODER_FILE).write_bytes(encoder.serialize())
        for name in ("items.parquet", "users.parquet"):
            shutil.copyfile(store.path / name, folder / name)
        np.save(folder / "history_items.npy", store.items)
        np.save(folder / "history_offsets.npy", store.offsets)
        if recipe.time_gaps:
            np.save(folder / "history_times.npy", store.timestamps)
        manifest = _manifest(recipe, store, vectors.shape[1], step)
        manifest["files"] = {file.name: _checksum(file) for file in sorted(folder.iterdir())}
        (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def is_whole(path: str | Path) -> bool:
    """Whether a bundle has all its files, in the sizes that its manifest names."""
    folder = as_path(path)
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
        return all(storage.size(folder / name) == size for name, size in sizes.items())
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return False


def item_vectors(
    params: dict, vocab_size: int, item_categories: np.ndarray | None = None
) -> np.ndarray:
    """`[V, Dq]` float32 vectors whose dot products with queries are scores; row 0 is zero.

    Args:
        params: arrays of the model, see `SequenceModel`.
        vocab_size: V, the table rows in use.
        item_categories: `[V, K]` int32 categories of each row, if the model reads them.
    """
    columns = [np.asarray(output_table(params), np.float32)[:vocab_size]]
    if "output_bias" in params:
        columns.append(np.asarray(params["output_bias"], np.float32)[:vocab_size, None])
    if "output_embeddings" in params or item_categories is not None:
        columns.append(_vectors_read(params, vocab_size, item_categories))
    vectors = np.concatenate(columns, axis=1)
    vectors[0] = 0
    return vectors


def _vectors_read(params: dict, vocab_size: int, item_categories: np.ndarray | None) -> np.ndarray:
    vectors = np.array(params["item_embeddings"], np.float32)[:vocab_size]
    if item_categories is not None:
        table = params["category_embeddings"]
        for start in range(0, vocab_size, _ROWS_PER_BLOCK):
            block = slice(start, start + _ROWS_PER_BLOCK)
            vectors[block] += mean_of_categories(table, item_categories[block])
    return vectors


def export_query_encoder(recipe: Recipe, params: dict, vector_dim: int) -> jax.export.Exported:
    """The encoder for any batch size and platform, its weights inside as constants.

    It maps `history_vectors` `[b, N, Dq]` float32 (rows of `item_vectors`, most recent last) and
    `history_mask` `[b, N]` bool (False on padding), with time gaps also `history_gaps` `[b, N]`
    int32 (seconds since the event before, -1 on padding and on a user's first event), to queries
    `[b, Dq]` float32.
    """
    model = make_model(recipe)
    names = ("encoder", "gap_embeddings")
    constants = {name: jax.tree.map(np.asarray, params[name]) for name in names if name in params}
    is_read_apart = recipe.item_categories or not recipe.tie_embeddings

    def query(history_vectors: Array, history_mask: Array, *gaps: Array) -> Array:
        # The vectors that the encoder reads are the first columns, or if they are no item vectors
        # the last ones.
        first = vector_dim - recipe.hidden_dim if is_read_apart else 0
        vectors = history_vectors[..., first : first + recipe.hidden_dim]
        vectors = with_gaps(constants, vectors, *gaps) if gaps else vectors
        queries = model.queries(constants, vectors, history_mask)
        if recipe.output_bias:
            queries = jnp.pad(queries, ((0, 0), (0, 1)), constant_values=1.0)
        return jnp.pad(queries, ((0, 0), (0, vector_dim - queries.shape[1])))

    (batch,) = jax.export.symbolic_shape("b")
    shape = (batch, recipe.max_length)
    gaps = (jax.ShapeDtypeStruct(shape, jnp.int32),) if recipe.time_gaps else ()
    with _without_source_paths():
        return jax.export.export(jax.jit(query), platforms=PLATFORMS)(
            jax.ShapeDtypeStruct((*shape, vector_dim), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.bool_),
            *gaps,
        )


@contextlib.contextmanager
def _without_source_paths() -> Iterator[None]:
    """Keeps the paths of this machine's source files out of the program that is lowered inside."""
    name = "jax_traceback_in_locations_limit"
    limit = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, limit)


def _manifest(recipe: Recipe, store: SequenceStore, vector_dim: int, step: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": {"name": recipe.name, "kind": recipe.model, "step": step},
        "num_items": store.num_items,
        "vocab_size": store.num_items + 1,
        "vector_dim": vector_dim,
        "max_length": recipe.max_length,
        "similarity": "dot",
        "item_id_type": _id_type(store.path / "items.parquet", "item_id"),
        "user_id_type": _id_type(store.path / "users.parquet", "user_id"),
        "hide_seen": recipe.hide_seen,
        "encoder": {
            "file": _ENCODER_FILE,
            "inputs": [
                "history_vectors float32[b,N,Dq]",
                "history_mask bool[b,N]",
                *(["history_gaps int32[b,N]"] if recipe.time_gaps else []),
            ],
            "output": "float32[b,Dq]",
            "platforms": list(PLATFORMS),
        },
    }


def _id_type(parquet: Path, column: str) -> str:
    return "string" if pl.read_parquet_schema(parquet)[column] == pl.String else "int64"


def _checksum(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}
