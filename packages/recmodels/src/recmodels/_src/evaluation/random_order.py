"""The random baseline: what a random order of the catalog gives, as exact expectations."""

import numpy as np

from recmodels._src import metrics
from recmodels._src.evaluation.blocks import UserBlock


class RandomColumn:
    """Expected metrics of ranking the items that are not hidden in random order.

    Of N such items m are held out, so the first of them has rank r with probability
    C(N-1-r, m-1) / C(N, m); all expectations below are closed forms of such sums.

    Args:
        ks: list lengths.
        num_items: size of the catalog.
        strata: `[V]` stratum of each row; None leaves stratified metrics and those of lists out.
    """

    def __init__(self, ks: tuple[int, ...], num_items: int, strata: np.ndarray | None) -> None:
        self._ks = ks
        self._num_items = num_items
        self._strata = strata
        self._values: list[dict[str, np.ndarray]] = []
        self._harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1.0, num_items + 1))])
        # Over all users: the chance that an item is in the list, its square and the log of its
        # complement; first summed as if no user hid anything, then what hiding takes away.
        self._sums = np.zeros((len(ks), 3, 1))
        self._hidden_sums = np.zeros((len(ks), 3, num_items + 1))

    def add(self, block: UserBlock) -> None:
        """See `Column`."""
        targets, hidden = block.targets[block.is_user], block.hidden[block.is_user]
        num_shown = self._num_items - (hidden > 0).sum(1)
        can_hit = (targets >= 0) & ~metrics.contained(targets, hidden)
        values = self._rank_metrics(num_shown, can_hit.sum(1), (targets >= 0).sum(1))
        self._values.append(values)
        if self._strata is None:
            return
        values |= self._stratified(num_shown, can_hit, targets, self._strata[targets])
        for number, k in enumerate(self._ks):
            self._add_lists(number, np.minimum(k / np.maximum(num_shown, 1), 1.0), hidden)

    def user_metrics(self) -> dict[str, np.ndarray]:
        """See `Column`."""
        return {
            name: np.concatenate([each[name] for each in self._values]) for name in self._values[0]
        }

    def list_metrics(self) -> dict[str, float]:
        """Expected coverage@k and overlap@k; see `metrics.list_metrics`."""
        if self._strata is None:
            return {}
        num_users = sum(len(each["mrr"]) for each in self._values)
        values: dict[str, float] = {}
        for k, everywhere, hidden in zip(self._ks, self._sums, self._hidden_sums, strict=True):
            chance, square, log_missed = everywhere - hidden[:, 1:]
            values[f"coverage@{k}"] = float((1 - np.exp(log_missed)).mean())
            if num_users > 1:
                common = (chance**2 - square).sum() / (num_users * (num_users - 1))
                values[f"overlap@{k}"] = float(common / k)
        return values

    def _rank_metrics(
        self, num_shown: np.ndarray, num_can_hit: np.ndarray, num_targets: np.ndarray
    ) -> dict[str, np.ndarray]:
        n, m = num_shown, num_can_hit
        targets = np.maximum(num_targets, 1)
        values: dict[str, np.ndarray] = {}
        for k in self._ks:
            length, most = np.minimum(k, n), np.minimum(targets, k)
            share = m / np.maximum(n, 1)  # chance that the item at a rank is held out
            others = (m - 1) / np.maximum(n - 1, 1)  # the same for another rank, given that one
            harmonic = self._harmonic[length]
            gain = metrics.ideal_gain(length) / metrics.ideal_gain(most)
            precision = harmonic + others * (length - harmonic)
            values[f"hit@{k}"] = _hit_chance(n, m, k)
            values[f"recall@{k}"] = share * length / targets
            values[f"ndcg@{k}"] = share * gain
            values[f"map@{k}"] = share * precision / most
        # A user whose held-out items are all hidden has them behind every other item.
        reciprocal = m / (n - m + 1) * (self._harmonic[n] - self._harmonic[np.maximum(m - 1, 0)])
        values["mrr"] = np.where(m > 0, reciprocal, 1 / (self._num_items + 1))
        return values

    def _stratified(
        self, num_shown: np.ndarray, can_hit: np.ndarray, targets: np.ndarray, strata: np.ndarray
    ) -> dict[str, np.ndarray]:
        values: dict[str, np.ndarray] = {}
        for k in self._ks:
            for number, name in enumerate(metrics.STRATA):
                inside = (targets >= 0) & (strata == number)
                chance = _hit_chance(num_shown, (inside & can_hit).sum(1), k)
                values[f"hit@{k}-{name}"] = np.where(inside.any(1), chance, np.nan)
        return values

    def _add_lists(self, number: int, chance: np.ndarray, hidden: np.ndarray) -> None:
        # log 0 would leave inf - inf behind; this far below 1 it makes no difference.
        log_missed = np.log1p(-np.minimum(chance, 1 - 1e-15))
        user, column = np.nonzero(hidden > 0)
        for place, each in enumerate((chance, chance**2, log_missed)):
            self._sums[number, place] += each.sum()
            self._hidden_sums[number, place] += np.bincount(
                hidden[user, column], weights=each[user], minlength=self._num_items + 1
            )


def _hit_chance(num_items: np.ndarray, num_targets: np.ndarray, k: int) -> np.ndarray:
    """Chance that at least one of the targets is among the first k items of a random order."""
    missed = np.ones(len(num_items))
    for i in range(int(num_targets.max(initial=0))):
        left = np.maximum(num_items - i, 1)
        step = np.clip(num_items - k - i, 0, None) / left
        missed = np.where(i < num_targets, missed * step, missed)
    return 1 - missed
