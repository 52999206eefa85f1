"""The models by the names that recipes use."""

from recmodels._src.models.base import SequenceModel
from recmodels._src.models.sasrec import SASRec
from recmodels._src.recipe import Recipe


def make_model(recipe: Recipe) -> SequenceModel:
    """The model that a recipe names."""
    return SASRec(recipe)
