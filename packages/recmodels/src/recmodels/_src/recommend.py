"""The best items for every user of a run, written in the caller's ids."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from tqdm import tqdm

from recmodels._src import metrics
from recmodels._src.atomic import atomic_file, check_output
from recmodels._src.data.pipeline import history_batches
from recmodels._src.data.splits import PAD_TARGET
from recmodels._src.data.store import SequenceStore
from recmodels._src.errors import UserError
from recmodels._src.evaluation.blocks import UserBlock
from recmodels._src.evaluation.model import ModelRanker
from recmodels._src.train.run_directory import RunDirectory

_FILE = "recommendations.csv"
_NUM_EXAMPLES = 3  # users shown when the result is printed
_USERS_PER_BLOCK = 128
_USERS_PER_PIECE = 1 << 16  # of the file
_BAR_DELAY_S = 2.0  # no bar for what is over before one can read it


@dataclasses.dataclass(frozen=True)
class Recommendations:
    """Where the recommendations are; `str()` shows some of them."""

    path: Path
    """CSV file with the columns `user_id`, `rank` (1 is best) and `item_id`."""
    num_users: int
    """Users in it: all of the store."""
    k: int
    """Items of each user; fewer where fewer are left."""
    examples: list[tuple[Any, list[Any]]]
    """The first few users and their items, best first, in raw ids."""

    def __str__(self) -> str:
        """The place of the file and the first users of it."""
        lines = [f"recommendations for {self.num_users:,} users: {self.path}"]
        for user_id, item_ids in self.examples:
            lines.append(f"  {user_id}: {', '.join(str(item_id) for item_id in item_ids)}")
        return "\n".join(lines)


def recommend(
    run_dir: str | Path,
    *,
    k: int = 10,
    store: str | Path | SequenceStore | None = None,
    hide_seen: bool | None = None,
    progress: bool = True,
) -> Recommendations:
    """Writes the best items for every user of a run, given all that the user has done.

    They are in `recommendations.csv` in the run directory; a file of that name is replaced.

    Args:
        run_dir: folder written by `train`.
        k: items for each user.
        store: sequence store of the run; None takes the one recorded in the run.
        hide_seen: whether items that the user had are left out; None takes the recipe's choice.
        progress: whether to show a progress bar.

    Returns:
        The place of the file, and some of its content.

    Raises:
        UserError: `k` is not positive, there is no run or checkpoint, it is another store, or the
            folder of the run cannot be written to.
        TrainingDivergedError: parameters or scores of the model are not finite.
    """
    check_k(k)
    run = RunDirectory.open(run_dir)
    store = run.open_store(store)
    hide_seen = run.recipe.hide_seen if hide_seen is None else hide_seen
    path = run.path / _FILE
    check_output(path, overwrite=True)  # before the long work
    rows = _best_rows(run, store, min(k, store.num_items), hide_seen, progress)
    item_ids, user_ids = _raw_ids(store, "items", "item_id"), _raw_ids(store, "users", "user_id")
    with atomic_file(path, overwrite=True) as temporary, temporary.open("wb") as file:
        for start in range(0, store.num_users, _USERS_PER_PIECE):
            piece = rows[start : start + _USERS_PER_PIECE]
            _table(piece, start, user_ids, item_ids).write_csv(file, include_header=start == 0)
    return Recommendations(
        path=path,
        num_users=store.num_users,
        k=k,
        examples=list(_examples(rows[:_NUM_EXAMPLES], user_ids, item_ids)),
    )


def check_k(k: int) -> None:
    """Refuses a number of items that is not positive.

    Raises:
        UserError: `k` is below 1.
    """
    if k < 1:
        raise UserError(f"`k` must be at least 1; got {k}")


def _best_rows(
    run: RunDirectory, store: SequenceStore, k: int, hide_seen: bool, progress: bool
) -> np.ndarray:
    # `[num_users, k]` int32, -1 where no item is left.
    state = run.restore()
    ranker = ModelRanker.of_store(state.result, run.recipe, store, int(state.step))
    rows = np.empty((store.num_users, k), np.int32)
    nothing_asked = np.full((_USERS_PER_BLOCK, 1), PAD_TARGET, np.int64)
    with tqdm(
        total=store.num_users,
        desc="recommend",
        unit="user",
        delay=_BAR_DELAY_S,
        disable=not progress,
    ) as bar:
        for batch in history_batches(store, run.recipe.max_length, _USERS_PER_BLOCK):
            seen = batch["seen"] if hide_seen else np.empty((_USERS_PER_BLOCK, 0), np.int32)
            block = UserBlock(
                user=batch["user"],
                history=batch["history"],
                targets=nothing_asked,
                hidden=metrics.distinct(seen),
                gaps=batch["gaps"],
            )
            found = ranker.rank(block, k).rows
            rows[block.user[block.is_user]] = found[block.is_user]
            bar.update(int(block.is_user.sum()))
    return rows


def _raw_ids(store: SequenceStore, table: str, column: str) -> pl.Series:
    return pl.read_parquet(store.path / f"{table}.parquet", columns=[column])[column]


def _table(
    rows: np.ndarray, first_user: int, user_ids: pl.Series, item_ids: pl.Series
) -> pl.DataFrame:
    user, place = np.nonzero(rows > 0)
    columns = {
        "user_id": user_ids.gather(first_user + user),
        "rank": place + 1,
        "item_id": item_ids.gather(rows[user, place] - 1),
    }
    return pl.DataFrame(columns)


def _examples(
    rows: np.ndarray, user_ids: pl.Series, item_ids: pl.Series
) -> Iterator[tuple[Any, list[Any]]]:
    for user, best in enumerate(rows):
        yield user_ids[user], item_ids.gather(best[best > 0] - 1).to_list()
