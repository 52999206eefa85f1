"""What the built-in recipes are for, what was published for it, and what they reached here."""

import dataclasses
from typing import Any

from recmodels._src.recipe import Recipe
from recmodels._src.recipes import RECIPES

RESULTS = "docs/results.md"


@dataclasses.dataclass(frozen=True)
class Published:
    """A published figure of a model of this kind: full ranking, same protocol and form of data."""

    metric: str
    """Name as in `Evaluation`, e.g. "ndcg@10"."""
    value: float
    """The figure."""
    source: str
    """Where it was published."""

    def __str__(self) -> str:
        return f"{self.metric} {self.value:g} ({self.source})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeFacts:
    """Data and results of a built-in recipe."""

    data: str
    """The data set that it is for."""
    num_items: int | None = None
    """Size of its catalog, without the padding row; None where it is not fixed."""
    published: Published | None = None
    """The figure to reach; None where no comparable one is known."""
    measured: str | None = None
    """What this recipe reached, in words; command and circumstances stand in `RESULTS`."""


_BEAUTY, _BEAUTY_ITEMS = "Amazon Beauty, 5-core", 12_101
_ML_1M, _ML_1M_ITEMS = "MovieLens-1M", 3_416
_PLANNED = "planned for TPU, not trained"

RECIPE_FACTS: dict[str, RecipeFacts] = {
    "sasrec-demo": RecipeFacts(
        data="generated (prepare --synthetic)", measured="hit@8 0.521 (one seed)"
    ),
    "sasrec-beauty": RecipeFacts(
        data=_BEAUTY,
        num_items=_BEAUTY_ITEMS,
        published=Published("ndcg@10", 0.0531, "arXiv 2508.06450"),
        measured="ndcg@10 0.0579 (mean of three seeds)",
    ),
    "sasrec-ml-1m": RecipeFacts(
        data=_ML_1M, num_items=_ML_1M_ITEMS, measured="hit@8 0.6335 (one seed)"
    ),
    "sasrec-ml-1m-leave-one-out": RecipeFacts(
        data=_ML_1M,
        num_items=_ML_1M_ITEMS,
        published=Published("ndcg@10", 0.1857, "arXiv 2309.07602"),
        measured="ndcg@10 0.1882 (mean of three seeds)",
    ),
    "sasrec-ml-100k": RecipeFacts(
        data="MovieLens-100K", num_items=1_682, measured="hit@8 0.5400 (one seed)"
    ),
    "bert4rec-beauty": RecipeFacts(
        data=_BEAUTY,
        num_items=_BEAUTY_ITEMS,
        published=Published("ndcg@10", 0.0170, "arXiv 2008.07873"),
        measured="ndcg@10 0.0297 (one seed)",
    ),
    "bert4rec-ml-1m": RecipeFacts(
        data=_ML_1M,
        num_items=_ML_1M_ITEMS,
        published=Published("ndcg@10", 0.1537, "arXiv 2309.07602"),
    ),
    "sasrec-yambda-50m": RecipeFacts(
        data="Yambda-50M, users with more than 30 listens",
        num_items=876_938,
        published=Published("hit@8", 0.183, "arXiv 2610.05559"),
        measured=_PLANNED,
    ),
    "sasrec-yambda-500m": RecipeFacts(data="Yambda-500M", num_items=3_004_578, measured=_PLANNED),
    "sasrec-yambda-5b": RecipeFacts(data="Yambda-5B", num_items=9_390_623, measured=_PLANNED),
}
"""Facts of every built-in recipe, by its name."""


@dataclasses.dataclass(frozen=True)
class RecipeRow:
    """A line of the list of recipes."""

    name: str
    """Name for `get_recipe`."""
    data: str
    """The data set that it is for."""
    protocol: str
    """Split."""
    model: str
    """Model and its sizes."""
    loss: str
    """Loss."""
    mesh: str
    """Devices to train on; "auto" is all there are."""
    published: Published | None
    """The figure to reach; None where no comparable one is known."""
    measured: str | None
    """What the recipe reached; None where it was not measured yet."""

    def cells(self) -> tuple[str, ...]:
        """All fields as text."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return tuple("-" if value is None else str(value) for value in values)


@dataclasses.dataclass(frozen=True)
class RecipeList:
    """The built-in recipes; `str()` is a table."""

    rows: list[RecipeRow]
    """One for each recipe."""

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        table = [tuple(field.name for field in dataclasses.fields(RecipeRow))]
        table += [row.cells() for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        return "\n".join([*lines, f"measured: commands and circumstances in {RESULTS}"])


def list_recipes() -> RecipeList:
    """The built-in recipes with data, model, loss, mesh, published figure and our result.

    Returns:
        One row for each of `RECIPES`, in their order.
    """
    return RecipeList([_row(recipe, RECIPE_FACTS[name]) for name, recipe in RECIPES.items()])


def _row(recipe: Recipe, facts: RecipeFacts) -> RecipeRow:
    return RecipeRow(
        name=recipe.name,
        data=facts.data,
        protocol=recipe.protocol,
        model=f"{recipe.model} {recipe.num_layers}x{recipe.hidden_dim}, N={recipe.max_length}",
        loss=recipe.loss,
        mesh=recipe.mesh,
        published=facts.published,
        measured=facts.measured,
    )
