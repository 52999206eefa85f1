"""What an evaluation found, with the protocol beside the numbers."""

import dataclasses
from typing import Any

from recmodels._src.data.splits import Part


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Metrics of a model and of baselines, with the protocol they were measured under."""

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
    popularity: dict[str, float]  # the same for the most counted training items; {} if left out
    # The same for "markov", "item-knn" and "random", as far as they were asked for.
    baselines: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    # Why a baseline that was asked for is missing, by its name.
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    # [low, high] of metrics of the model: 95 % percentile bootstrap over users.
    intervals: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    # "num_items" and "num_users" of "head", "mid" and "tail": items in that third of the training
    # interactions, and users with a held-out item among them.
    strata: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)

    @property
    def columns(self) -> dict[str, dict[str, float]]:
        """Metrics by the name of who made the ranking, the model first."""
        popularity = {"popularity": self.popularity} if self.popularity else {}
        return {"model": self.model} | popularity | self.baselines

    @classmethod
    def from_dict(cls, content: Any) -> "Evaluation":
        """What `to_dict` gave, read back from JSON.

        Raises:
            ValueError: it is not.
        """
        try:
            evaluation = cls(**content)
            str(evaluation)  # formats every number there is
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise ValueError(f"no evaluation: {error}") from None
        return evaluation

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
            *self._table(),
        ]
        if self.intervals:
            lines.append("in brackets: 95 % interval of the model, bootstrap over users")
        if self.strata:
            sizes = (
                f"{name} {size['num_items']} items, {size['num_users']} users"
                for name, size in self.strata.items()
            )
            lines.append(f"thirds of the training interactions: {'; '.join(sizes)}")
        lines += [f"{name} is left out: {reason}" for name, reason in self.left_out.items()]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        others = {name: values for name, values in self.columns.items() if name != "model"}
        gap = 18 if self.intervals else 0
        width = max([12, *(len(name) + 2 for name in self.model)])
        lines = [f"{'':{width}}{'model':>8}{'':{gap}}" + "".join(f"{name:>12}" for name in others)]
        for name, value in self.model.items():
            low_high = self.intervals.get(name)
            interval = f"  [{low_high[0]:.4f}, {low_high[1]:.4f}]" if low_high else ""
            cells = "".join(f"{values[name]:12.4f}" for values in others.values())
            lines.append(f"{name:{width}}{value:8.4f}{interval:{gap}}{cells}".rstrip())
        return lines
