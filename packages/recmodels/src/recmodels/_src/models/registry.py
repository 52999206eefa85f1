"""The models by the names that recipes use."""

from recmodels._src.models.base import SequenceModel
from recmodels._src.models.bert4rec import BERT4Rec
from recmodels._src.models.sasrec import SASRec
from recmodels._src.recipe import ModelName, Recipe

_MODELS: dict[ModelName, type[SequenceModel]] = {"sasrec": SASRec, "bert4rec": BERT4Rec}


def make_model(recipe: Recipe) -> SequenceModel:
    """The model that a recipe names."""
    return _MODELS[recipe.model](recipe)
