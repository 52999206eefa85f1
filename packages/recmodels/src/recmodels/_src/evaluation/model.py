"""The model as a ranker of the catalog: its queries against the whole table, block by block."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import cutbce_ops
from recmodels._src.data.store import SequenceStore
from recmodels._src.errors import TrainingDivergedError
from recmodels._src.evaluation.blocks import Ranked, UserBlock
from recmodels._src.models.base import output_table
from recmodels._src.models.registry import make_model
from recmodels._src.models.side_inputs import SideInputs, with_side_inputs
from recmodels._src.recipe import Recipe
from recmodels._src.train.placement import item_categories
from recmodels._src.train.processes import to_host
from recmodels._src.train.sharded import take_categories, take_rows
from recmodels._src.train.step import is_usable

QueryFunction = Callable[..., Array]
_NO_SIDE_INPUTS = SideInputs()


@dataclasses.dataclass
class ModelRanker:
    """Ranks by the dot products of a query and all item vectors; equal scores by lower row.

    Args:
        params: arrays of the model, see `SequenceModel`.
        recipe: how they were trained.
        vocab_size: table rows in use.
        step: training steps of the parameters, for messages.
        sharding: how the parameters are laid out over a mesh; None on one device.
        item_categories: of each row, laid out as the table, if the recipe reads them.

    Raises:
        TrainingDivergedError: parameters or, when ranking, scores are not finite.
    """

    params: dict
    recipe: Recipe
    vocab_size: int
    step: int
    sharding: cutbce_ops.LossSharding | None = None
    item_categories: Array | None = None

    @classmethod
    def of_store(
        cls,
        params: dict,
        recipe: Recipe,
        store: SequenceStore,
        step: int,
        sharding: cutbce_ops.LossSharding | None = None,
    ) -> "ModelRanker":
        """For the catalog of a store, with its categories if the recipe reads them."""
        num_rows = params["item_embeddings"].shape[0]
        categories = item_categories(recipe, store, num_rows, sharding)
        return cls(params, recipe, store.num_items + 1, step, sharding, categories)

    def __post_init__(self) -> None:
        self._check_finite(is_usable(self.params))
        self._largest = _largest_entries(self.params)

    def rank(self, block: UserBlock, list_length: int) -> Ranked:
        """See `Ranker`."""
        read = slice(-self.recipe.max_length, None)
        gaps = None if block.gaps is None else block.gaps[:, read]
        history, side = block.history[:, read], SideInputs(self.item_categories, gaps)
        queries = _queries(self.params, history, side, self.recipe, self.sharding)
        self._check_finite(_scores_are_finite(queries, self._largest))
        padding_row = np.zeros((len(history), 1), np.int32)  # row 0 is never recommended
        ranks, rows = _rank(
            queries,
            output_table(self.params),
            self.params.get("output_bias"),
            block.targets.astype(np.int32),
            np.concatenate([padding_row, block.hidden.astype(np.int32)], axis=1),
            list_length=list_length,
            vocab_size=self.vocab_size,
            sharding=self.sharding,
        )
        return Ranked(to_host(ranks).astype(np.int64), to_host(rows))

    def _check_finite(self, is_finite: Array) -> None:
        if not is_finite:
            raise TrainingDivergedError(
                f"step {self.step}: the parameters or the scores of the model are not finite, so "
                "it cannot be evaluated; lower learning_rate or gradient_clip_norm."
            )


def make_query_function(
    recipe: Recipe, sharding: cutbce_ops.LossSharding | None = None
) -> QueryFunction:
    """`queries(params, history [Q, N] int32, side) -> [Q, D] float32`, which score the items.

    `side` are the `SideInputs` of the recipe, `gaps` those of the history, `[Q, N]`.
    """
    model = make_model(recipe)

    def queries(params: dict, history: Array, side: SideInputs = _NO_SIDE_INPUTS) -> Array:
        vectors = take_rows(params["item_embeddings"], history, sharding)
        categories = take_categories(side.item_categories, history, sharding)
        vectors = with_side_inputs(params, vectors, categories, side.gaps)
        return model.queries(params, vectors, history > 0)

    return queries


@jax.jit(static_argnames=("recipe", "sharding"))
def _queries(
    params: dict,
    history: Array,
    side: SideInputs,
    recipe: Recipe,
    sharding: cutbce_ops.LossSharding | None,
) -> Array:
    return make_query_function(recipe, sharding)(params, history, side)


@jax.jit(static_argnames=("list_length", "vocab_size", "sharding"))
def _rank(queries, embeddings, bias, targets, exclude, *, list_length, vocab_size, sharding):
    options = {
        "bias": bias,
        "exclude": exclude,
        "vocab_size": vocab_size,
        "sharding": sharding,
    }
    ranks = cutbce_ops.cut_target_ranks(queries, embeddings, targets, **options)
    if list_length == 0:
        return ranks, jnp.empty((queries.shape[0], 0), jnp.int32)
    return ranks, cutbce_ops.cut_top_k(queries, embeddings, list_length, **options)[1]


@jax.jit
def _largest_entries(params: dict) -> tuple[Array, Array]:
    bias = params.get("output_bias", jnp.zeros(1))
    return jnp.abs(output_table(params)).max(), jnp.abs(bias).max()


@jax.jit
def _scores_are_finite(queries: Array, largest: tuple[Array, Array]) -> Array:
    # A bound on every score: a NaN has no rank, and would count as ranked before everything.
    embedding, bias = largest
    return jnp.isfinite(jnp.abs(queries).sum(-1).max() * embedding + bias)
