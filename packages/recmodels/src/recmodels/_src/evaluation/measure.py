"""Ranks the catalog for every user, with the model and with baselines, and takes the means."""

import dataclasses
import functools
import math
from typing import Literal, NamedTuple, get_args

import numpy as np
from tqdm import tqdm

import cutbce_ops
from recmodels._src import metrics
from recmodels._src.data.popularity import popularity_counts
from recmodels._src.data.splits import Part, Split
from recmodels._src.data.store import SequenceStore
from recmodels._src.errors import UserError
from recmodels._src.evaluation import item_knn, markov
from recmodels._src.evaluation.blocks import RECENT_ITEMS, user_blocks
from recmodels._src.evaluation.bootstrap import intervals
from recmodels._src.evaluation.columns import Column, RankedColumn
from recmodels._src.evaluation.model import ModelRanker
from recmodels._src.evaluation.popularity_order import PopularityRanker, ScoredRanker
from recmodels._src.evaluation.random_order import RandomColumn
from recmodels._src.evaluation.result import Evaluation
from recmodels._src.evaluation.saved_ranks import UserRanks
from recmodels._src.recipe import Recipe

Baselines = Literal["none", "popularity", "all"]
Detail = Literal["ranks", "full"]

DEFAULT_KS = (8, 10)
_USERS_PER_BLOCK = 128  # with the op's item blocks it bounds the memory of an evaluation

_BAR_DELAY_S = 2.0  # no bar for what is over before one can read it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be measured; see `evaluate` for the fields.

    Raises:
        UserError: a choice is unknown.
    """

    part: Part
    hide_seen: bool
    ks: tuple[int, ...] | None = None
    baselines: Baselines = "popularity"
    detail: Detail = "ranks"
    progress: bool = True

    def __post_init__(self) -> None:
        for name, kind in (("baselines", Baselines), ("detail", Detail)):
            if getattr(self, name) not in get_args(kind):
                allowed = ", ".join(get_args(kind))
                raise UserError(f"`{name}` must be one of {allowed}; got {getattr(self, name)!r}.")


class Measurement(NamedTuple):
    """An evaluation and what it was made of."""

    evaluation: Evaluation
    ranks: UserRanks  # of the model


def measure(
    params: dict,
    recipe: Recipe,
    store: SequenceStore,
    request: Request,
    *,
    step: int,
    item_counts: np.ndarray | None = None,
    sharding: cutbce_ops.LossSharding | None = None,
) -> Measurement:
    """Evaluates given parameters; see `evaluate_params`."""
    ks = checked_ks(request.ks, store.num_items)
    split = Split(recipe.protocol, recipe.num_targets)
    counts = training_counts(store, recipe) if item_counts is None else item_counts
    strata = metrics.popularity_strata(counts) if request.detail == "full" else None
    ranker = ModelRanker.of_store(params, recipe, store, step, sharding)
    model = RankedColumn(ranker, ks, store.num_items, strata)
    others, left_out = baseline_columns(
        request.baselines, store, split, counts, ks, strata, request.progress
    )
    user, targets = add_all_users(
        [model, *others.values()],
        store,
        split,
        request,
        max_length=recipe.max_length,
        block_size=block_size(sharding),
    )
    columns = {name: _metrics_of(column) for name, column in others.items()}
    evaluation = Evaluation(
        part=request.part,
        protocol=recipe.protocol,
        num_targets=split.num_evaluation_targets,
        hide_seen=request.hide_seen,
        num_items=store.num_items,
        num_users=len(user),
        num_excluded_users=store.num_users - len(user),
        min_length=split.min_length,
        step=step,
        model=_metrics_of(model),
        popularity=columns.pop("popularity", {}),
        baselines=columns,
        left_out=left_out,
        intervals={} if strata is None else intervals(model.user_metrics()),
        strata={} if strata is None else _stratum_sizes(strata, targets),
    )
    return Measurement(evaluation, UserRanks(user, targets, model.ranks))


def block_size(sharding: cutbce_ops.LossSharding | None) -> int:
    """Users that are ranked at a time, a multiple of the devices that share them."""
    num_shards = 1 if sharding is None else sharding.num_position_shards
    return math.ceil(_USERS_PER_BLOCK / num_shards) * num_shards


def add_all_users(
    columns: list[Column],
    store: SequenceStore,
    split: Split,
    request: Request,
    *,
    max_length: int,
    block_size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Shows every evaluated user to every column.

    Args:
        columns: collect what their rankers answer.
        store: the sequences.
        split: decides who is evaluated on what.
        request: part, hiding and progress.
        max_length: items of a history that the model reads; baselines get `RECENT_ITEMS` at least.
        block_size: users at a time.

    Returns:
        Numbers `[U]` int64 and targets `[U, L]` int32 of the users, in the order of the columns.
    """
    users, targets = [], []
    bar = tqdm(
        total=int(split.is_evaluated(store.lengths).sum()),
        desc=f"evaluate {request.part}",
        unit="user",
        delay=_BAR_DELAY_S,
        disable=not request.progress,
    )
    blocks = user_blocks(
        store,
        split,
        request.part,
        max_length=max(max_length, RECENT_ITEMS),
        hide_seen=request.hide_seen,
        size=block_size,
    )
    with bar:
        for block in blocks:
            for column in columns:
                column.add(block)
            users.append(block.user[block.is_user])
            targets.append(block.targets[block.is_user])
            bar.update(len(users[-1]))
    return np.concatenate(users), np.concatenate(targets)


def training_counts(store: SequenceStore, recipe: Recipe) -> np.ndarray:
    """`[num_items + 1]` int64 interactions per row before the held-out ones, of all users."""
    split = Split(recipe.protocol, recipe.num_targets)
    return popularity_counts(store, split, include_short_users=True)


def baseline_columns(
    which: Baselines,
    store: SequenceStore,
    split: Split,
    item_counts: np.ndarray,
    ks: tuple[int, ...],
    strata: np.ndarray | None,
    progress: bool,
) -> tuple[dict[str, Column], dict[str, str]]:
    """The baselines by name, and why others are left out.

    Args:
        which: the choice of the caller.
        store: the sequences, for the counts of Markov and item-kNN.
        split: decides which items are held out.
        item_counts: `[V]` training interactions per row.
        ks: list lengths.
        strata: `[V]` stratum of each row; None leaves the metrics of "full" out.
        progress: whether to show a progress bar.
    """
    if which == "none":
        return {}, {}
    popularity = PopularityRanker(item_counts)
    columns: dict[str, Column] = {
        "popularity": RankedColumn(popularity, ks, store.num_items, strata)
    }
    if which == "popularity":
        return columns, {}
    left_out = {}
    neighbors = functools.partial(item_knn.make_scores, progress=progress)
    for name, reason, make_scores in (
        ("markov", markov.why_not(store), markov.make_scores),
        ("item-knn", item_knn.why_not(store, split), neighbors),
    ):
        if reason:
            left_out[name] = reason
            continue
        ranker = ScoredRanker(item_counts, make_scores(store, split))
        columns[name] = RankedColumn(ranker, ks, store.num_items, strata)
    columns["random"] = RandomColumn(ks, store.num_items, strata)
    return columns, left_out


def checked_ks(ks: tuple[int, ...] | None, num_items: int) -> tuple[int, ...]:
    """List lengths as asked for, or the default ones that the catalog allows.

    Raises:
        UserError: one is outside the catalog.
    """
    if ks is None:  # a small catalog cuts what nobody asked for
        return tuple(sorted({min(k, num_items) for k in DEFAULT_KS}))
    for k in ks:
        if not 1 <= k <= num_items:
            raise UserError(f"`k` must be between 1 and the number of items {num_items}; got {k}.")
    return ks


def _metrics_of(column: Column) -> dict[str, float]:
    return metrics.mean_metrics(column.user_metrics()) | column.list_metrics()


def _stratum_sizes(strata: np.ndarray, targets: np.ndarray) -> dict[str, dict[str, int]]:
    target_strata = np.where(targets >= 0, strata[targets], -1)
    return {
        name: {
            "num_items": int((strata[1:] == number).sum()),
            "num_users": int((target_strata == number).any(1).sum()),
        }
        for number, name in enumerate(metrics.STRATA)
    }
