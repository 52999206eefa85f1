"""Which evaluated step of a run counts: the last one, or the best on the dev part."""

from collections.abc import Iterable, Mapping
from typing import Any

from recmodels._src.recipe import Recipe


class DevSelection:
    """Follows the evaluations on the dev part; made again from the records when a run resumes.

    Args:
        recipe: gives `selection` and `patience`.
        records: records of `metrics.jsonl` up to the step from which training goes on.
    """

    def __init__(self, recipe: Recipe, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._metric, self._patience = recipe.selection, recipe.patience
        self.best_step: int | None = None  # None: nothing evaluated yet, or the last one counts
        self._best_value = float("-inf")
        self._num_since = 0
        for record in records:
            if record["split"] == "dev" and (self._metric == "last" or self._metric in record):
                self.add(record["step"], record)

    def add(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Takes an evaluation; returns whether it is the best so far."""
        if self._metric == "last":
            return False
        is_best = metrics[self._metric] > self._best_value  # of equal ones the earlier stays
        self._num_since = 0 if is_best else self._num_since + 1
        if is_best:
            self.best_step, self._best_value = step, metrics[self._metric]
        return is_best

    @property
    def is_out_of_patience(self) -> bool:
        """Whether as many evaluations as the recipe allows brought nothing better."""
        return 0 < self._patience <= self._num_since
