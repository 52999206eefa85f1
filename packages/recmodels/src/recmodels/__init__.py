"""Training and evaluation of sequential recommenders over the full catalog."""

from recmodels._src.bundle import write_bundle as write_bundle
from recmodels._src.compare import Comparison as Comparison
from recmodels._src.compare import Difference as Difference
from recmodels._src.compare import compare as compare
from recmodels._src.data.loaders import FORMATS as FORMATS
from recmodels._src.data.pipeline import evaluation_batches as evaluation_batches
from recmodels._src.data.pipeline import train_batches as train_batches
from recmodels._src.data.prepare import PrepareReport as PrepareReport
from recmodels._src.data.prepare import prepare as prepare
from recmodels._src.data.prepare import prepare_synthetic as prepare_synthetic
from recmodels._src.data.splits import Split as Split
from recmodels._src.data.store import SequenceStore as SequenceStore
from recmodels._src.errors import TrainingDivergedError as TrainingDivergedError
from recmodels._src.errors import TrainingInterruptedError as TrainingInterruptedError
from recmodels._src.errors import UserError as UserError
from recmodels._src.evaluate import Evaluation as Evaluation
from recmodels._src.evaluate import evaluate as evaluate
from recmodels._src.plan import PlanReport as PlanReport
from recmodels._src.plan import plan as plan
from recmodels._src.recipe import RECIPES as RECIPES
from recmodels._src.recipe import Recipe as Recipe
from recmodels._src.recipe import get_recipe as get_recipe
from recmodels._src.train.loop import TrainResult as TrainResult
from recmodels._src.train.loop import train as train
