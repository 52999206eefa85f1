"""Exact full-catalog losses and ranking for recommenders, without storing logits."""

from importlib.metadata import version as _version

from cutbce_ops._src.binary_cross_entropy.api import (
    BinaryCrossEntropyOutput as BinaryCrossEntropyOutput,
)
from cutbce_ops._src.binary_cross_entropy.api import (
    cut_binary_cross_entropy as cut_binary_cross_entropy,
)
from cutbce_ops._src.binary_cross_entropy.api import (
    cut_binary_cross_entropy_per_position as cut_binary_cross_entropy_per_position,
)
from cutbce_ops._src.binary_cross_entropy.api import (
    cut_binary_cross_entropy_with_aux as cut_binary_cross_entropy_with_aux,
)
from cutbce_ops._src.binary_cross_entropy.config import TileConfig as TileConfig
from cutbce_ops._src.binary_cross_entropy.dispatch import Choice as Choice
from cutbce_ops._src.binary_cross_entropy.plan import Plan as Plan
from cutbce_ops._src.binary_cross_entropy.plan import (
    plan_cut_binary_cross_entropy as plan_cut_binary_cross_entropy,
)
from cutbce_ops._src.binary_cross_entropy.plan import (
    select_implementation as select_implementation,
)
from cutbce_ops._src.hardware import HardwareSpec as HardwareSpec
from cutbce_ops._src.metrics import ConfusionCounts as ConfusionCounts
from cutbce_ops._src.metrics import auc_pr as auc_pr
from cutbce_ops._src.metrics import binary_accuracy as binary_accuracy
from cutbce_ops._src.metrics import f_beta as f_beta
from cutbce_ops._src.metrics import precision as precision
from cutbce_ops._src.metrics import recall as recall
from cutbce_ops._src.ranking.api import cut_target_ranks as cut_target_ranks
from cutbce_ops._src.ranking.api import cut_top_k as cut_top_k
from cutbce_ops._src.sharding import LossSharding as LossSharding
from cutbce_ops._src.softmax_cross_entropy.api import (
    cut_softmax_cross_entropy as cut_softmax_cross_entropy,
)
from cutbce_ops._src.softmax_cross_entropy.api import (
    cut_softmax_cross_entropy_per_position as cut_softmax_cross_entropy_per_position,
)

__version__ = _version("cutbce-ops")
