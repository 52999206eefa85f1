"""Top-k item recommendation from a trained bundle: build an ANN index folder, query it.

    import recserve

    recserve.build("run/bundle", "my-index")
    recommender = recserve.Recommender.open("my-index")
    recommender.recommend([3182, 77, 1204], k=8)

Importing this package loads neither JAX nor ScaNN nor polars; each is imported by the call that
needs it.
"""

from recserve._src.build import BuildReport as BuildReport
from recserve._src.build import build as build
from recserve._src.config import ScannSizes as ScannSizes
from recserve._src.config import SearcherConfig as SearcherConfig
from recserve._src.config import SearcherPlan as SearcherPlan
from recserve._src.config import derive_scann_sizes as derive_scann_sizes
from recserve._src.config import plan_searcher as plan_searcher
from recserve._src.errors import UserError as UserError
from recserve._src.recall import RecallReport as RecallReport
from recserve._src.recall import measure_recall as measure_recall
from recserve._src.recommender import Recommendation as Recommendation
from recserve._src.recommender import Recommender as Recommender
from recserve._src.version import __version__ as __version__
