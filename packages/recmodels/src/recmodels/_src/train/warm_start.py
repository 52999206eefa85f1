"""Starting from the parameters of a finished run, also when the catalog has grown since."""

from pathlib import Path

import jax
import numpy as np
import polars as pl

from recmodels._src.data.categories import COLUMN, numbered
from recmodels._src.data.store import SequenceStore
from recmodels._src.errors import UserError
from recmodels._src.models.base import TABLES
from recmodels._src.recipe import Recipe
from recmodels._src.storage import local_copy
from recmodels._src.train.placement import Placement
from recmodels._src.train.processes import to_host
from recmodels._src.train.run_directory import RunDirectory
from recmodels._src.train.step import TrainState

_BY_ITEM = (*sorted(TABLES), "output_bias")


def check_source(path: Path, recipe: Recipe, store: SequenceStore) -> None:
    """Refuses a run that cannot be started from; call it before anything is written.

    Args:
        path: run to start from.
        recipe: what is to be trained.
        store: its sequences.

    Raises:
        UserError: `path` is no finished run, its model is another, or its ids have another type.
    """
    _common_rows(path, store)
    old = RunDirectory.open(path).recipe
    for name, now in recipe.model_settings().items():
        was = getattr(old, name)
        if was != now:
            raise UserError(
                f"the model of {path} is another: `{name}` is {was!r} there and {now!r} here."
            )


def start_from(
    state: TrainState, path: Path, run: RunDirectory, store: SequenceStore, placement: Placement
) -> TrainState:
    """The first state of `run` with the parameters of the finished run at `path`.

    Rows go by item id: items that both catalogs have keep what was learned, new ones keep their
    random start, and those that are gone are left out; categories go by name likewise. The
    optimizer starts anew.

    Args:
        state: first state of `run`.
        path: finished run to start from.
        run: the run that begins.
        store: its sequences.
        placement: its layout.

    Raises:
        UserError: `path` cannot be read any more; see also `check_source`.
    """
    old_rows, new_rows = _common_rows(path, store)
    old = jax.tree.map(np.asarray, RunDirectory.open(path).restore().result)
    params = jax.tree.map(lambda leaf: np.array(to_host(leaf)), state.params)
    for name in params.keys() & set(_BY_ITEM):
        params[name][new_rows] = old[name][old_rows]
    if "category_embeddings" in params:
        old_rows, new_rows = _common_categories(path, store)
        params["category_embeddings"][new_rows] = old["category_embeddings"][old_rows]
    for name in params.keys() & {"encoder", "gap_embeddings"}:
        params[name] = old[name]
    layout = placement.state(run.recipe)
    params = jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, layout.params))
    average = None if state.average is None else jax.tree.map(jax.numpy.copy, params)
    return state._replace(params=params, average=average)


def _common_rows(path: Path, store: SequenceStore) -> tuple[np.ndarray, np.ndarray]:
    items = path / "bundle" / "items.parquet"
    if not items.is_file() or not (path / "summary.json").is_file():
        raise UserError(f"{path} is no finished run to start from; finish it or choose another.")
    with local_copy(items) as file:
        old = _with_rows(file, "old")
    new = _with_rows(store.path / "items.parquet", "new")
    if old["item_id"].dtype != new["item_id"].dtype:
        raise UserError(
            f"the item ids of {path} are {old['item_id'].dtype}, those of {store.location} "
            f"{new['item_id'].dtype}."
        )
    both = old.join(new, on="item_id", how="inner")
    return both["old"].to_numpy(), both["new"].to_numpy()


def _with_rows(items: Path, name: str) -> pl.DataFrame:
    return pl.read_parquet(items, columns=["item_id"]).with_row_index(
        name, offset=1
    )  # 0 is padding


def _common_categories(path: Path, store: SequenceStore) -> tuple[np.ndarray, np.ndarray]:
    with local_copy(path / "bundle" / "items.parquet") as file:
        old_names = numbered(pl.read_parquet(file)[COLUMN]).names
    old = pl.DataFrame({"name": old_names}).with_row_index("old", offset=1)  # row 0 is unused
    new = pl.DataFrame({"name": store.item_categories.names}).with_row_index("new", offset=1)
    both = old.join(new, on="name", how="inner")
    return both["old"].to_numpy(), both["new"].to_numpy()
