"""The losses between two records, read one step late so that the device never waits."""

import math
import time

from recmodels._src.errors import TrainingDivergedError
from recmodels._src.train.checkpoints import Checkpoints
from recmodels._src.train.step import StepMetrics


class LossWindow:
    """Collects the losses between two records and stops training at the first bad one.

    Args:
        checkpoints: for the message that names the one that is kept.
        losses: of the steps since the last record, when a run resumes.
    """

    def __init__(self, checkpoints: Checkpoints, losses: list[float]) -> None:
        self._checkpoints = checkpoints
        self.losses = losses  # of the steps since the last record
        self._pending: tuple[int, StepMetrics] | None = None
        self.restart_clock()

    def add(self, step: int, step_metrics: StepMetrics) -> None:
        """Takes the metrics of a step; reads those of the step before, which are ready by then."""
        self.read_pending()
        self._pending = (step, step_metrics)

    def finish(self) -> tuple[float, float]:
        """Mean loss and mean milliseconds per step since the last record."""
        self.read_pending()
        elapsed_ms = (time.perf_counter() - self._started) * 1e3
        loss, step_ms = math.fsum(self.losses) / len(self.losses), elapsed_ms / self._timed
        self.losses = []
        self.restart_clock()
        return loss, step_ms

    def restart_clock(self) -> None:
        """Leaves what happened since the last record out of the step time."""
        self._started, self._timed = time.perf_counter(), 0

    def read_pending(self) -> None:
        """Reads the metrics of the newest step, waiting for them."""
        if self._pending is None:
            return
        (step, values), self._pending = self._pending, None
        loss, norm = float(values.loss), float(values.gradient_norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            what = f"the loss is {loss} and the gradient norm {norm}"
            raise diverged(step, what, self._checkpoints)
        self.losses.append(loss)
        self._timed += 1


def diverged(step: int, what: str, checkpoints: Checkpoints) -> TrainingDivergedError:
    """The error for a step that left nothing to go on with."""
    kept = checkpoints.latest_step
    left = "no checkpoint was saved" if kept is None else f"the checkpoint of step {kept} is kept"
    return TrainingDivergedError(
        f"step {step}: {what}; training stopped and {left}. Lower learning_rate or "
        "gradient_clip_norm."
    )
