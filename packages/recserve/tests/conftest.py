"""A small but fully valid bundle, written without the trainer.

The toy encoder answers with the mean of the history's vectors and a trailing 1.0, so that the last
column of an item vector acts as its bias, as in a real bundle.
"""

import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import recserve
from recserve._src import approximate

MAX_LENGTH = 4
GAP_WEIGHT = 0.01


@functools.cache
def export_toy_encoder(max_length: int, vector_dim: int, *, reads_times: bool = False) -> bytes:
    """Returns the serialized encoder; one that reads times adds their gaps to its first column."""
    import jax
    import jax.numpy as jnp

    def encode(history_vectors: Any, history_mask: Any, *gaps: Any) -> Any:
        weights = history_mask[..., None].astype(jnp.float32)
        total = (history_vectors * weights).sum(axis=1)[:, :-1]
        mean = total / jnp.maximum(weights.sum(axis=1), 1.0)
        for each in gaps:
            mean = mean.at[:, 0].add(each.sum(axis=1) * GAP_WEIGHT)
        return jnp.concatenate([mean, jnp.ones((mean.shape[0], 1), jnp.float32)], axis=1)

    (batch,) = jax.export.symbolic_shape("b")
    shapes = [
        jax.ShapeDtypeStruct((batch, max_length, vector_dim), jnp.float32),
        jax.ShapeDtypeStruct((batch, max_length), jnp.bool_),
    ]
    if reads_times:
        shapes.append(jax.ShapeDtypeStruct((batch, max_length), jnp.int32))
    limit = "jax_traceback_in_locations_limit"
    before = jax.config.jax_traceback_in_locations_limit
    jax.config.update(limit, 0)  # or the file would hold the paths of this checkout
    try:
        exported = jax.export.export(jax.jit(encode), platforms=("cpu", "tpu", "cuda"))(*shapes)
        return bytes(exported.serialize())
    finally:
        jax.config.update(limit, before)


def toy_encode(
    vectors: np.ndarray, rows: Sequence[int], times: Sequence[int] | None = None
) -> np.ndarray:
    """Returns in NumPy what the toy encoder answers for a history of rows."""
    recent = vectors[list(rows)[-MAX_LENGTH:]][:, :-1]
    mean = recent.mean(axis=0) if len(recent) else np.zeros(vectors.shape[1] - 1)
    if times is not None:
        gaps = [-1] * MAX_LENGTH + [-1, *np.diff(times)][: len(rows)]
        mean = mean.astype(np.float64)
        mean[0] += GAP_WEIGHT * sum(gaps[-MAX_LENGTH:])
    return np.append(mean, 1.0).astype(np.float32)


@dataclasses.dataclass
class ToyBundle:
    """Arguments and folder of a written bundle."""

    path: Path
    vectors: np.ndarray
    item_ids: list[Any]
    user_ids: list[Any]
    histories: list[list[int]]

    def manifest(self) -> dict[str, Any]:
        """Returns the content of bundle.json."""
        return json.loads((self.path / "bundle.json").read_text())

    def edit(self, **fields: Any) -> None:
        """Changes fields of bundle.json."""
        content = self.manifest() | fields
        (self.path / "bundle.json").write_text(json.dumps(content))

    def seal(self) -> None:
        """Writes the checksums of the files as they are now."""
        files = {}
        for path in sorted(self.path.iterdir()):
            if path.name != "bundle.json":
                content = path.read_bytes()
                files[path.name] = {
                    "bytes": len(content),
                    "sha256": hashlib.sha256(content).hexdigest(),
                }
        self.edit(files=files)


def random_vectors(num_items: int, vector_dim: int, seed: int = 0) -> np.ndarray:
    """Returns `[num_items + 1, vector_dim]`: clusters, norms that differ, a bias column, row 0."""
    rng = np.random.default_rng(seed)
    num_clusters = max(2, num_items // 150)
    centers = rng.normal(size=(num_clusters, vector_dim - 1))
    vectors = centers[rng.integers(0, num_clusters, num_items)]
    vectors = vectors + 0.7 * rng.normal(size=vectors.shape)
    vectors = vectors * 0.5 * rng.lognormal(0, 0.4, size=(num_items, 1))
    bias = rng.normal(-6, 1.5, size=(num_items, 1))
    table = np.concatenate([vectors, bias], axis=1)
    return np.concatenate([np.zeros((1, vector_dim)), table]).astype(np.float32)


def write_toy_bundle(
    path: Path,
    *,
    vectors: np.ndarray | None = None,
    item_ids: Sequence[Any] | None = None,
    user_ids: Sequence[Any] = (11, 12, 13),
    histories: Sequence[Sequence[int]] = ((1, 2, 3), (4, 5, 6, 7, 8, 9), ()),
    hide_seen: bool = True,
    times: Sequence[Sequence[int]] | None = None,
) -> ToyBundle:
    """Writes a bundle; by default 20 items with ids 100, 107, 114, ... and three users.

    With `times`, one sequence for each history, its encoder reads them.
    """
    vectors = random_vectors(20, 5) if vectors is None else vectors
    num_items, vector_dim = len(vectors) - 1, vectors.shape[1]
    item_ids = [100 + 7 * i for i in range(num_items)] if item_ids is None else item_ids
    path.mkdir(parents=True)
    np.save(path / "item_embeddings.npy", vectors)
    pl.DataFrame(
        {"row": np.arange(1, num_items + 1, dtype=np.int32), "item_id": list(item_ids)}
    ).with_columns(pl.lit(5, dtype=pl.Int64).alias("count")).write_parquet(path / "items.parquet")
    pl.DataFrame(
        {
            "user": np.arange(len(user_ids), dtype=np.int64),
            "user_id": pl.Series(list(user_ids), dtype=None if user_ids else pl.Int64),
            "num_interactions": np.array([len(rows) for rows in histories], dtype=np.int64),
        }
    ).write_parquet(path / "users.parquet")
    lengths = np.array([0, *(len(rows) for rows in histories)], dtype=np.int64)
    np.save(path / "history_offsets.npy", np.cumsum(lengths))
    np.save(path / "history_items.npy", np.array([r for h in histories for r in h], dtype=np.int32))
    reads_times = times is not None
    if times is not None:
        stamps = [stamp for each in times for stamp in each]
        np.save(path / "history_times.npy", np.array(stamps, dtype=np.int64))
    encoder = export_toy_encoder(MAX_LENGTH, vector_dim, reads_times=reads_times)
    (path / "query_encoder.stablehlo").write_bytes(encoder)
    content = {
        "format": "cutbce-bundle",
        "version": 1,
        "model": {"name": "toy", "kind": "sasrec", "step": 7},
        "num_items": num_items,
        "vocab_size": num_items + 1,
        "vector_dim": vector_dim,
        "max_length": MAX_LENGTH,
        "similarity": "dot",
        "item_id_type": "string" if isinstance(item_ids[0], str) else "int64",
        "user_id_type": "string" if isinstance([*user_ids, 0][0], str) else "int64",
        "hide_seen": hide_seen,
        "encoder": {
            "file": "query_encoder.stablehlo",
            "inputs": [
                f"history_vectors float32[b,{MAX_LENGTH},{vector_dim}]",
                f"history_mask bool[b,{MAX_LENGTH}]",
                *([f"history_gaps int32[b,{MAX_LENGTH}]"] if reads_times else []),
            ],
            "output": f"float32[b,{vector_dim}]",
            "platforms": ["cpu", "tpu", "cuda"],
        },
    }
    (path / "bundle.json").write_text(json.dumps(content))
    bundle = ToyBundle(path, vectors, list(item_ids), list(user_ids), [list(h) for h in histories])
    bundle.seal()
    return bundle


@dataclasses.dataclass(frozen=True)
class Toys:
    """The functions above; test modules take them from here instead of importing this file."""

    write: Callable[..., ToyBundle]
    encode: Callable[..., np.ndarray]
    vectors: Callable[..., np.ndarray]


@pytest.fixture(scope="session")
def toys() -> Toys:
    """Functions that write and imitate a toy bundle."""
    return Toys(write_toy_bundle, toy_encode, random_vectors)


@pytest.fixture
def bundle(tmp_path: Path) -> ToyBundle:
    """A bundle of 20 items and three users, the last of whom has no history."""
    return write_toy_bundle(tmp_path / "bundle")


@pytest.fixture
def without_scann(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ScaNN look as if it were not installed."""

    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'scann'", name="scann")

    monkeypatch.setattr(approximate, "_import_scann", missing)


@pytest.fixture(scope="session")
def large_bundle(tmp_path_factory: pytest.TempPathFactory) -> ToyBundle:
    """A bundle of 30,000 items with 33 dimensions and 400 users of 1 to 60 interactions."""
    rng = np.random.default_rng(5)
    histories = [rng.integers(1, 30_001, rng.integers(1, 61)).tolist() for _ in range(400)]
    return write_toy_bundle(
        tmp_path_factory.mktemp("large") / "bundle",
        vectors=random_vectors(30_000, 33),
        user_ids=range(400),
        histories=histories,
    )


@pytest.fixture(scope="session")
def large_index(large_bundle: ToyBundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ScaNN index folder of `large_bundle`."""
    pytest.importorskip("scann.scann_ops.py.scann_ops_pybind", reason="ScaNN is not installed")
    out = tmp_path_factory.mktemp("index") / "large"
    recserve.build(large_bundle.path, out, config=recserve.SearcherConfig(searcher="scann"))
    return out


@pytest.fixture
def child_environment() -> dict[str, str]:
    """Environment in which a child process imports the package under test on the CPU."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
