"""Paired comparison of two runs: the same users, so that what they have in common cancels."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recmodels._src import metrics
from recmodels._src.data.splits import Part, Split
from recmodels._src.data.store import SequenceStore
from recmodels._src.errors import UserError
from recmodels._src.evaluate import measure_run, training_counts
from recmodels._src.evaluation.bootstrap import percentile_bounds, resampled_means, sign_p_values
from recmodels._src.evaluation.measure import Request, checked_ks
from recmodels._src.evaluation.saved_ranks import (
    UserRanks,
    ranks_identity,
    ranks_path,
    read_ranks,
)
from recmodels._src.recipe import Recipe
from recmodels._src.train.run_directory import RunDirectory


@dataclasses.dataclass(frozen=True)
class Difference:
    """One metric of two runs."""

    a: float  # mean over users of run A
    b: float  # mean over users of run B
    difference: float  # b - a
    low: float  # lower bound of the difference: 95 % percentile bootstrap over users, paired
    high: float  # upper bound
    p_value: float  # two-sided, from the share of resamples with the other sign


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs on the same users, with the protocol they were measured under."""

    run_a: str  # directory of run A
    run_b: str  # directory of run B
    part: Part  # which held-out part
    protocol: str  # split of both runs
    num_targets: int  # held-out items of each user
    hide_seen: bool  # whether items of the history were taken out of the ranking
    num_users: int  # users evaluated
    metrics: dict[str, Difference]  # by name, e.g. "hit@8"

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        seen = "seen items hidden" if self.hide_seen else "seen items not hidden"
        width = max([12, *(len(name) + 2 for name in self.metrics)])
        lines = [
            f"A: {self.run_a}",
            f"B: {self.run_b}",
            f"{self.part} of {self.protocol}: {self.num_users} users, {self.num_targets} held-out "
            f"item(s) each, ranked among all items, {seen}",
            f"{'':{width}}{'A':>8}{'B':>10}{'B - A':>11}{'95 % interval':>22}{'p':>8}",
        ]
        for name, found in self.metrics.items():
            interval = f"[{found.low:+.4f}, {found.high:+.4f}]"
            lines.append(
                f"{name:{width}}{found.a:8.4f}{found.b:10.4f}{found.difference:+11.4f}"
                f"{interval:>22}{found.p_value:8.3f}"
            )
        lines.append("interval and p of the difference: paired bootstrap over users")
        return "\n".join(lines)


def compare(
    run_a: str | Path,
    run_b: str | Path,
    *,
    store: str | Path | SequenceStore | None = None,
    part: Part = "test",
    hide_seen: bool | None = None,
    ks: tuple[int, ...] | None = None,
    progress: bool = True,
) -> Comparison:
    """Compares two runs user by user, at the checkpoints that their recipes choose.

    Ranks that an evaluation has left in a run directory are used again as long as the checkpoint
    is the same.

    Args:
        run_a: folder written by `train`.
        run_b: another one, trained on the same store under the same protocol.
        store: their sequence store; None takes the one recorded in the first run.
        part: held-out part, "dev" or "test".
        hide_seen: whether items of the history are taken out of the ranking; None takes the
            choice of the recipes, which must agree.
        ks: list lengths of the metrics; None takes 8 and 10, or the catalog when it is smaller.
        progress: whether to show progress bars.

    Returns:
        Both means of every metric, their difference, its interval and its p value.

    Raises:
        UserError: the runs cannot be compared, or one has no checkpoint.
        TrainingDivergedError: parameters or scores of a model are not finite.
    """
    runs = RunDirectory.open(run_a), RunDirectory.open(run_b)
    _check_comparable(*runs)
    hide_seen = _common_hide_seen(*runs) if hide_seen is None else hide_seen
    opened = runs[0].open_store(store)
    runs[1].open_store(opened)
    ks = checked_ks(ks, opened.num_items)
    request = Request(part=part, hide_seen=hide_seen, ks=ks, baselines="none", progress=progress)
    ranks_a, ranks_b = (_ranks(run, opened, request) for run in runs)
    recipe = runs[0].recipe
    strata = metrics.popularity_strata(training_counts(opened, recipe))
    return Comparison(
        run_a=str(runs[0].path),
        run_b=str(runs[1].path),
        part=part,
        protocol=recipe.protocol,
        num_targets=_held_out(recipe).num_targets,
        hide_seen=hide_seen,
        num_users=len(ranks_a.user),
        metrics=paired_differences(
            _user_metrics(ranks_a, strata, ks), _user_metrics(ranks_b, strata, ks)
        ),
    )


def paired_differences(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> dict[str, Difference]:
    """Compares the same metrics of the same users.

    Args:
        a: `[U]` float64 by name, NaN where undefined for a user.
        b: the same of the other run.
    """
    names = [name for name in a if not np.isnan(a[name]).all()]
    means_a, means_b = metrics.mean_metrics(a), metrics.mean_metrics(b)
    resampled = resampled_means(np.stack([b[name] - a[name] for name in names], axis=1))
    found = zip(names, *percentile_bounds(resampled), sign_p_values(resampled), strict=True)
    return {
        name: Difference(
            means_a[name],
            means_b[name],
            means_b[name] - means_a[name],
            float(low),
            float(high),
            float(p_value),
        )
        for name, low, high, p_value in found
    }


class _HeldOut(NamedTuple):
    """What decides the held-out items of a user; the rest of a recipe may differ."""

    protocol: str
    num_targets: int


def _held_out(recipe: Recipe) -> _HeldOut:
    split = Split(recipe.protocol, recipe.num_targets)
    return _HeldOut(recipe.protocol, split.num_evaluation_targets)


def _check_comparable(a: RunDirectory, b: RunDirectory) -> None:
    if a.store["digest"] != b.store["digest"]:
        raise UserError(
            f"{a.path} and {b.path} cannot be compared: they were trained on different stores "
            f"({a.store['path']} and {b.store['path']})."
        )
    pairs = zip(_held_out(a.recipe)._asdict().items(), _held_out(b.recipe), strict=True)
    for (name, value_a), value_b in pairs:
        if value_a != value_b:
            raise UserError(
                f"{a.path} and {b.path} cannot be compared: {name} {value_a} and {value_b} hold "
                "out different items."
            )


def _common_hide_seen(a: RunDirectory, b: RunDirectory) -> bool:
    if a.recipe.hide_seen != b.recipe.hide_seen:
        raise UserError(
            f"{a.path} and {b.path} cannot be compared as their recipes say: hide_seen is "
            f"{a.recipe.hide_seen} and {b.recipe.hide_seen}; choose one with --hide-seen."
        )
    return a.recipe.hide_seen


def _ranks(run: RunDirectory, store: SequenceStore, request: Request) -> UserRanks:
    state = run.restore()
    path = ranks_path(run.path, request.part, request.hide_seen)
    kept = None
    if path.exists():
        split = Split(run.recipe.protocol, run.recipe.num_targets)
        users = np.flatnonzero(split.is_evaluated(store.lengths))
        identity = ranks_identity(state.result, store)
        kept = read_ranks(path, identity, users, split.num_evaluation_targets, store.num_items)
    found = measure_run(run, state, store, request).ranks if kept is None else kept
    order = np.argsort(found.user)  # so that both runs have the same user at the same place
    return UserRanks(found.user[order], found.targets[order], found.ranks[order])


def _user_metrics(
    found: UserRanks, strata: np.ndarray, ks: tuple[int, ...]
) -> dict[str, np.ndarray]:
    return metrics.user_metrics(found.ranks, ks) | metrics.stratified_hits(
        found.ranks, strata[found.targets], ks
    )
