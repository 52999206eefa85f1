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

from recmodels._src.atomic import atomic_folder
from recmodels._src.data.store import SequenceStore
from recmodels._src.models.base import output_table
from recmodels._src.models.registry import make_model
from recmodels._src.recipe import Recipe

FORMAT, VERSION = "cutbce-bundle", 1
PLATFORMS = ("cpu", "tpu", "cuda")
_ENCODER_FILE = "query_encoder.stablehlo"


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
    tables of their own for reading and scoring, the vectors read follow as further columns, where
    every query is 0.

    Args:
        path: folder to write.
        recipe: how the model was trained.
        params: arrays of the model, see `SequenceModel`.
        store: gives ids, counts and the users' histories.
        step: training steps of the model.
        overwrite: whether an existing folder is replaced.

    Raises:
        UserError: `path` exists and `overwrite` is False.
    """
    vectors = item_vectors(params, store.num_items + 1)
    with atomic_folder(Path(path), overwrite=overwrite) as folder:
        np.save(folder / "item_embeddings.npy", vectors)
        encoder = export_query_encoder(recipe, params, vectors.shape[1])
        (folder / _ENCODER_FILE).write_bytes(encoder.serialize())
        for name in ("items.parquet", "users.parquet"):
            shutil.copyfile(store.path / name, folder / name)
        np.save(folder / "history_items.npy", store.items)
        np.save(folder / "history_offsets.npy", store.offsets)
        manifest = _manifest(recipe, store, vectors.shape[1], step)
        manifest["files"] = {file.name: _checksum(file) for file in sorted(folder.iterdir())}
        (folder / "bundle.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def item_vectors(params: dict, vocab_size: int) -> np.ndarray:
    """`[V, Dq]` float32 vectors whose dot products with queries are scores; row 0 is zero.

    Args:
        params: arrays of the model, see `SequenceModel`.
        vocab_size: V, the table rows in use.
    """
    columns = [np.asarray(output_table(params), np.float32)[:vocab_size]]
    if "output_bias" in params:
        columns.append(np.asarray(params["output_bias"], np.float32)[:vocab_size, None])
    if "output_embeddings" in params:
        columns.append(np.asarray(params["item_embeddings"], np.float32)[:vocab_size])
    vectors = np.concatenate(columns, axis=1)
    vectors[0] = 0
    return vectors


def export_query_encoder(recipe: Recipe, params: dict, vector_dim: int) -> jax.export.Exported:
    """The encoder for any batch size and platform, its weights inside as constants.

    It maps `history_vectors` `[b, N, Dq]` float32 (rows of `item_vectors`, most recent last) and
    `history_mask` `[b, N]` bool (False on padding) to queries `[b, Dq]` float32.
    """
    model = make_model(recipe)
    constants = {"encoder": jax.tree.map(np.asarray, params["encoder"])}

    def query(history_vectors: Array, history_mask: Array) -> Array:
        # The vectors that the encoder reads are the first columns, or with a table of their own the
        # last ones.
        first = 0 if recipe.tie_embeddings else vector_dim - recipe.hidden_dim
        vectors = history_vectors[..., first : first + recipe.hidden_dim]
        queries = model.queries(constants, vectors, history_mask)
        if recipe.output_bias:
            queries = jnp.pad(queries, ((0, 0), (0, 1)), constant_values=1.0)
        return jnp.pad(queries, ((0, 0), (0, vector_dim - queries.shape[1])))

    (batch,) = jax.export.symbolic_shape("b")
    shape = (batch, recipe.max_length)
    with _without_source_paths():
        return jax.export.export(jax.jit(query), platforms=PLATFORMS)(
            jax.ShapeDtypeStruct((*shape, vector_dim), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.bool_),
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
            "inputs": ["history_vectors float32[b,N,Dq]", "history_mask bool[b,N]"],
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
