"""Full-catalog evaluation: every user, every item, no sampling, popularity beside the model."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

import cutbce_ops
from recmodels._src import metrics
from recmodels._src.data.pipeline import evaluation_batches
from recmodels._src.data.popularity import popularity_counts
from recmodels._src.data.splits import Part, Split
from recmodels._src.data.store import SequenceStore
from recmodels._src.errors import TrainingDivergedError, UserError
from recmodels._src.models import sasrec
from recmodels._src.recipe import Recipe
from recmodels._src.train.run_directory import RunDirectory
from recmodels._src.train.sharded import take_rows
from recmodels._src.train.step import encoder_graph, is_usable

DEFAULT_KS = (8, 10)
_USERS_PER_BLOCK = 128  # with the op's item blocks it bounds the memory of an evaluation

_BAR_DELAY_S = 2.0  # no bar for what is over before one can read it

QueryFunction = Callable[[dict, Array], Array]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Metrics of a model and of popularity, with the protocol they were measured under."""

    part: Part  # which held-out part
    protocol: str  # split the run was trained under
    num_targets: int  # held-out items of each user
    hide_seen: bool  # whether items of the history were taken out of the ranking
    num_items: int  # catalog ranked, without the padding row
    num_users: int  # users evaluated
    num_excluded_users: int  # users too short for the split, trained on but not evaluated
    min_length: int  # interactions a user needs to be evaluated
    step: int  # training steps of the evaluated model
    model: dict[str, float]  # metric by name, e.g. "hit@8"
    popularity: dict[str, float]  # the same for the most counted training items

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        seen = "seen items hidden" if self.hide_seen else "seen items not hidden"
        lines = [
            f"{self.part} of {self.protocol}, step {self.step}: {self.num_users} users, "
            f"{self.num_targets} held-out item(s) each, ranked among all {self.num_items} items, "
            f"{seen}",
            f"{self.num_excluded_users} user(s) with fewer than {self.min_length} interactions are "
            "not evaluated",
            f"{'':12}{'model':>10}{'popularity':>12}",
        ]
        for name, value in self.model.items():
            lines.append(f"{name:12}{value:10.4f}{self.popularity[name]:12.4f}")
        return "\n".join(lines)


def evaluate(
    run_dir: str | Path,
    *,
    store: str | Path | SequenceStore | None = None,
    part: Part = "test",
    hide_seen: bool | None = None,
    ks: tuple[int, ...] | None = None,
    progress: bool = True,
) -> Evaluation:
    """Evaluates the newest checkpoint of a run.

    Args:
        run_dir: folder written by `train`.
        store: sequence store of the run; None takes the one recorded in the run.
        part: held-out part, "dev" or "test".
        hide_seen: whether items of the history are taken out of the ranking; None takes the
            recipe's choice.
        ks: list lengths of the metrics; None takes 8 and 10, or the catalog when it is smaller.
        progress: whether to show a progress bar.

    Returns:
        Model and popularity metrics over all users that are long enough.

    Raises:
        UserError: no run or checkpoint there, another store, or a `k` outside the catalog.
        TrainingDivergedError: parameters or scores of the model are not finite.
    """
    run = RunDirectory.open(run_dir)
    store = run.open_store(store)
    state = run.restore()
    return evaluate_params(
        state.params,
        run.recipe,
        store,
        part=part,
        step=int(state.step),
        hide_seen=run.recipe.hide_seen if hide_seen is None else hide_seen,
        ks=ks,
        progress=progress,
    )


def evaluate_params(
    params: dict,
    recipe: Recipe,
    store: SequenceStore,
    *,
    part: Part,
    step: int,
    hide_seen: bool,
    ks: tuple[int, ...] | None = None,
    item_counts: np.ndarray | None = None,
    sharding: cutbce_ops.LossSharding | None = None,
    progress: bool = True,
) -> Evaluation:
    """Evaluates given parameters; see `evaluate`.

    Args:
        params: arrays of the model, see `sasrec.build`.
        recipe: how they were trained.
        store: the sequences.
        part: held-out part.
        step: training steps of the parameters, reported only.
        hide_seen: whether items of the history are taken out of the ranking.
        ks: list lengths of the metrics; None takes 8 and 10, or the catalog when it is smaller.
        item_counts: result of `training_counts`, if at hand.
        sharding: how the parameters are laid out over a mesh; None on one device.
        progress: whether to show a progress bar.

    Raises:
        UserError: a `k` is outside the catalog.
        TrainingDivergedError: parameters or scores of the model are not finite.
    """
    ks = _checked_ks(ks, store.num_items)
    _check_finite(is_usable(params), step)
    split = Split(recipe.protocol, recipe.num_targets)
    counts = training_counts(store, recipe) if item_counts is None else item_counts
    num_users = int(split.is_evaluated(store.lengths).sum())
    model_ranks, popularity_ranks = [], []
    largest = _largest_entries(params)
    bar = tqdm(
        total=num_users,
        desc=f"evaluate {part}",
        unit="user",
        delay=_BAR_DELAY_S,
        disable=not progress,
    )
    num_shards = 1 if sharding is None else sharding.num_position_shards
    users_per_block = math.ceil(_USERS_PER_BLOCK / num_shards) * num_shards
    for batch in evaluation_batches(store, split, part, recipe.max_length, users_per_block):
        real = batch["user"] >= 0
        targets = metrics.distinct(batch["targets"])
        seen = batch["seen"] if hide_seen else np.empty((len(real), 0), np.int32)
        hidden = metrics.distinct(seen)
        queries = _queries(params, batch["history"], recipe, sharding)
        _check_finite(_scores_are_finite(queries, largest), step)
        for ranks, found in (
            (model_ranks, _model_ranks(params, queries, targets, hidden, len(counts), sharding)),
            (popularity_ranks, metrics.popularity_ranks(counts, targets, hidden)),
        ):
            # A held-out item that is hidden can never be recommended: behind every other item.
            is_hidden = metrics.contained(targets, hidden)
            ranks.append(np.where(is_hidden, store.num_items, found)[real])
        bar.update(int(real.sum()))
    bar.close()
    width = split.num_evaluation_targets
    results = [
        metrics.ranking_metrics(np.concatenate([*ranks, np.empty((0, width), np.int64)]), ks)
        for ranks in (model_ranks, popularity_ranks)
    ]
    return Evaluation(
        part=part,
        protocol=recipe.protocol,
        num_targets=width,
        hide_seen=hide_seen,
        num_items=store.num_items,
        num_users=num_users,
        num_excluded_users=store.num_users - num_users,
        min_length=split.min_length,
        step=step,
        model=results[0],
        popularity=results[1],
    )


def training_counts(store: SequenceStore, recipe: Recipe) -> np.ndarray:
    """`[num_items + 1]` int64 interactions per row before the held-out ones, of all users."""
    split = Split(recipe.protocol, recipe.num_targets)
    return popularity_counts(store, split, include_short_users=True)


def make_query_function(
    recipe: Recipe, sharding: cutbce_ops.LossSharding | None = None
) -> QueryFunction:
    """`queries(params, history [Q, S] int32) -> [Q, D] float32`: activation of the last item."""
    encoder = encoder_graph(recipe)

    def queries(params: dict, history: Array) -> Array:
        vectors = take_rows(params["item_embeddings"], history, sharding)
        return sasrec.encode(encoder, params, vectors, history > 0)[:, -1].astype(jnp.float32)

    return queries


@jax.jit(static_argnames=("recipe", "sharding"))
def _queries(
    params: dict, history: Array, recipe: Recipe, sharding: cutbce_ops.LossSharding | None
) -> Array:
    return make_query_function(recipe, sharding)(params, history)


def _model_ranks(
    params: dict,
    queries: Array,
    targets: np.ndarray,
    hidden: np.ndarray,
    vocab_size: int,
    sharding: cutbce_ops.LossSharding | None,
) -> np.ndarray:
    padding_row = np.zeros((len(targets), 1), np.int32)  # row 0 is never recommended
    ranks = _target_ranks(
        queries,
        params["item_embeddings"],
        params.get("output_bias"),
        targets.astype(np.int32),
        np.concatenate([padding_row, hidden.astype(np.int32)], axis=1),
        vocab_size=vocab_size,
        sharding=sharding,
    )
    return np.asarray(ranks).astype(np.int64)


@jax.jit(static_argnames=("vocab_size", "sharding"))
def _target_ranks(queries, embeddings, bias, targets, exclude, *, vocab_size, sharding):
    return cutbce_ops.cut_target_ranks(
        queries,
        embeddings,
        targets,
        bias=bias,
        exclude=exclude,
        vocab_size=vocab_size,
        sharding=sharding,
    )


@jax.jit
def _largest_entries(params: dict) -> tuple[Array, Array]:
    bias = params.get("output_bias", jnp.zeros(1))
    return jnp.abs(params["item_embeddings"]).max(), jnp.abs(bias).max()


@jax.jit
def _scores_are_finite(queries: Array, largest: tuple[Array, Array]) -> Array:
    # A bound on every score: a NaN has no rank, and would count as ranked before everything.
    embedding, bias = largest
    return jnp.isfinite(jnp.abs(queries).sum(-1).max() * embedding + bias)


def _check_finite(is_finite: Array, step: int) -> None:
    if not is_finite:
        raise TrainingDivergedError(
            f"step {step}: the parameters or the scores of the model are not finite, so it cannot "
            "be evaluated; lower learning_rate or gradient_clip_norm."
        )


def _checked_ks(ks: tuple[int, ...] | None, num_items: int) -> tuple[int, ...]:
    if ks is None:  # a small catalog cuts what nobody asked for
        return tuple(sorted({min(k, num_items) for k in DEFAULT_KS}))
    for k in ks:
        if not 1 <= k <= num_items:
            raise UserError(f"`k` must be between 1 and the number of items {num_items}; got {k}.")
    return ks
