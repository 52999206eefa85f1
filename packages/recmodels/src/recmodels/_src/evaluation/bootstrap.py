"""Bootstrap over users: how far a mean would move with other users of the same kind."""

import numpy as np

CONFIDENCE = 0.95
NUM_RESAMPLES = 1000
_SEED = 0
_BLOCK = 1 << 21  # drawn users at a time


def resampled_means(values: np.ndarray) -> np.ndarray:
    """Means over users drawn with replacement, as many as there are.

    Args:
        values: `[U, M]` float64, M values of each user; NaN where one is not defined for a user.

    Returns:
        `[NUM_RESAMPLES, M]` float64, the same in every call; NaN where no user drawn has a value.
    """
    num_users = len(values)
    known = ~np.isnan(values)
    stacked = np.concatenate([np.where(known, values, 0.0), known], axis=1)
    generator = np.random.default_rng(_SEED)
    per_block = max(1, _BLOCK // num_users)
    sums = []
    for begin in range(0, NUM_RESAMPLES, per_block):
        num = min(per_block, NUM_RESAMPLES - begin)
        drawn = generator.integers(num_users, size=(num, num_users))
        drawn += num_users * np.arange(num)[:, None]
        times = np.bincount(drawn.ravel(), minlength=num * num_users).reshape(num, num_users)
        sums.append(times.astype(np.float64) @ stacked)
    totals, weights = np.split(np.concatenate(sums), 2, axis=1)
    return np.divide(totals, weights, out=np.full_like(totals, np.nan), where=weights > 0)


def intervals(values: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Percentile interval of each mean at the confidence `CONFIDENCE`.

    Args:
        values: `[U]` float64 by name, NaN where undefined for a user.

    Returns:
        `[low, high]` by name; metrics without any user are left out.
    """
    known = {name: each for name, each in values.items() if not np.isnan(each).all()}
    if not known:
        return {}
    bounds = percentile_bounds(resampled_means(np.stack(list(known.values()), axis=1)))
    return {name: pair.tolist() for name, pair in zip(known, bounds.T, strict=True)}


def percentile_bounds(means: np.ndarray) -> np.ndarray:
    """`[2, M]` low and high bound of the resampled means `[R, M]`."""
    outside = (1 - CONFIDENCE) / 2
    return np.nanquantile(means, [outside, 1 - outside], axis=0)


def sign_p_values(differences: np.ndarray) -> np.ndarray:
    """Two-sided p value of each mean difference, from the resamples on the other side of 0.

    Args:
        differences: `[R, M]` resampled mean differences.

    Returns:
        `[M]` float64: 1 where every difference is 0, never below 2 / (R + 1).
    """
    beyond = np.minimum((differences <= 0).sum(0), (differences >= 0).sum(0))
    known = (~np.isnan(differences)).sum(0)
    return np.minimum(2 * (beyond + 1) / (known + 1), 1.0)
