import numpy as np
import pytest

from recmodels._src.evaluation import bootstrap


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    # 300 draws of 80 users: 95 % of the intervals should hold the true mean, give or take 3 %.
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(300):
        low, high = bootstrap.intervals({"m": rng.binomial(1, 0.3, 80).astype(float)})["m"]
        covered.append(low <= 0.3 <= high)
    assert 0.91 <= np.mean(covered) <= 0.98


def test_interval_of_many_users_is_the_normal_one(monkeypatch):
    values = np.random.default_rng(1).normal(2.0, 3.0, 5000)
    low, high = bootstrap.intervals({"m": values})["m"]
    half = 1.96 * values.std() / np.sqrt(len(values))
    np.testing.assert_allclose([low, high], values.mean() + np.array([-half, half]), atol=half / 5)
    # Whatever the memory, the same users are drawn.
    monkeypatch.setattr(bootstrap, "_BLOCK", 5000 * 7)
    np.testing.assert_allclose(bootstrap.intervals({"m": values})["m"], [low, high])


def test_users_without_a_value_are_left_out_of_the_mean():
    values = np.array([np.nan, 1.0, np.nan, 0.0, 1.0, 1.0])
    found = bootstrap.resampled_means(values[:, None])[:, 0]
    known = found[~np.isnan(found)]
    assert known.mean() == pytest.approx(0.75, abs=0.03)
    assert known.max() == 1.0
    assert bootstrap.intervals({"m": values, "nobody": np.full(6, np.nan)}).keys() == {"m"}


def test_p_value_says_how_often_the_sign_turns():
    differences = np.stack([np.zeros(999), np.full(999, 0.1), np.linspace(-1, 9, 999)], axis=1)
    equal, above, mostly_above = bootstrap.sign_p_values(differences)
    assert equal == 1.0
    assert above == pytest.approx(2 / 1000)
    assert mostly_above == pytest.approx(0.2, abs=0.005)
