"""Known laws are recovered: their parameters, the coverage of intervals, and the held-out point."""

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import curve_fit

from benchmarks.laws import LAWS, QUANTITIES, SIZES, Case, coverage, points_of
from pipeline.extras.power_law import ValueTests, fit, law_of, leave_largest_out

# Floor, amounts and exponents, at x = 1; the sizes and samples of a study, whose geometric mean is 1.
PLANTED = {"floor": 0.25, "amount 1": 0.2, "amount 2": 0.3, "exponent 1": 0.35, "exponent 2": 0.45}
SIDES = np.array([0.1, 0.3162, 1.0, 3.162, 10.0])
X = np.stack(np.meshgrid(SIDES, SIDES), axis=-1).reshape(-1, 2)
EXACT = 0.25 + 0.2 * X[:, 0] ** -0.35 + 0.3 * X[:, 1] ** -0.45


def test_noise_free_law_is_recovered_and_predicts_the_largest_point():
    law = fit(X, EXACT, draws=10)
    for name, (value, low, high) in law.parameters().items():
        assert value == pytest.approx(PLANTED[name], rel=1e-4), name
        assert low <= PLANTED[name] * 1.001
        assert high >= PLANTED[name] * 0.999
    number, value, low, high = leave_largest_out(X, EXACT, draws=10)
    assert number == len(X) - 1
    assert value == pytest.approx(EXACT[-1], rel=1e-5)
    assert low <= value <= high


def test_noisy_law_in_one_variable_agrees_with_scipy_and_scales():
    rng = np.random.default_rng(3)
    x = np.geomspace(1e6, 1e9, 12)
    y = (0.1 + 0.4 * (x / 1e7) ** -0.5) * (1 + 0.02 * rng.standard_normal(12))
    law = fit(x[:, None], y)

    def values(x, e, a, b):
        return e + a * (x / 1e7) ** -b

    # scipy's weights, like ours, are the values of the law that the noisy values weight.
    first, _ = curve_fit(values, x, y, p0=(0.1, 0.4, 0.5), sigma=y, xtol=1e-12)
    expected, _ = curve_fit(values, x, y, p0=first, sigma=values(x, *first), xtol=1e-12)
    assert law.at(x[:, None]) == pytest.approx(values(x, *expected), rel=1e-5)
    # The noise by hand: relative residuals with n − 3 degrees of freedom.
    residuals = (y - values(x, *expected)) / values(x, *first)
    assert law.noise == pytest.approx(np.sqrt((residuals**2).sum() / 9), rel=1e-3)

    # 2. At the ends of the interval of the floor, the best law with this floor is just rejected by an F test at 90 %.
    value, low, high = law.parameters()["floor"]
    assert value == pytest.approx(expected[0], rel=1e-3)
    assert low < value < high
    for end in (low, high):
        weights = values(x, *first)
        best, _ = curve_fit(lambda x, a, b, end=end: values(x, end, a, b), x, y, p0=expected[1:], sigma=weights)
        rejected = (((y - values(x, end, *best)) / weights) ** 2).sum() - (residuals**2).sum()
        assert rejected / law.noise**2 == pytest.approx(stats.f.ppf(0.9, 1, 9), rel=0.2)
    # 3. Well between the points, a forecast's uncertainty is the noise of one measurement, and a little of the law.
    ((low,), (high,)) = law.interval_at(np.array([[3e7]]))
    assert high - low == pytest.approx(2 * stats.t.ppf(0.95, 9) * law.noise * values(3e7, *expected), rel=0.3)
    assert high - low > 2 * stats.t.ppf(0.95, 9) * law.noise * values(3e7, *expected) * 0.9


def test_parameters_are_not_negative_and_every_interval_contains_its_estimate():
    # The second half falls faster than any law with a floor of 0 or more; unconstrained, the floor would be negative.
    x = np.geomspace(1.0, 100.0, 10)
    y = 1.0 - 0.19 * np.log(x)
    unconstrained, _ = curve_fit(lambda x, e, a, b: e + a * x**-b, x, y, p0=(0.0, 1.0, 0.3), sigma=y, maxfev=20000)
    assert unconstrained[0] < -0.1
    for name, (value, low, high) in fit(x[:, None], y, draws=50).parameters().items():
        assert 0 <= low <= value <= high, name


def test_percentile_at_a_bound_is_that_of_half_of_the_studies():
    # If the true floor is 0, half of the studies prefer a negative floor, which is not allowed: their statistic is 0.
    # The 90th percentile of all is then the 80th of the F distribution; far from the bound it is F's 90th.
    x = np.geomspace(1e6, 1e9, 12)[:, None] / 10**7.5
    y = 0.4 * x[:, 0] ** -0.5 * (1 + 0.02 * np.random.default_rng(3).standard_normal(12))
    law = fit(x, y)
    test = ValueTests(x, y, law.at(x), 1000).linear(0)
    assert test.critical(0.0) == pytest.approx(stats.f.ppf(0.8, 1, 9), rel=0.2)
    shifted = ValueTests(x, y + 0.5, law.at(x) + 0.5, 1000).linear(0)
    assert shifted.critical(0.5) == pytest.approx(stats.f.ppf(0.9, 1, 9), rel=0.15)


def test_restored_law_gives_the_same_forecast():
    law = fit(X, EXACT * (1 + 0.01 * np.random.default_rng(5).standard_normal(len(X))), draws=50)
    at = np.array([[40.0, 40.0], [10.0, 10.0]])
    first, second = law.interval_at(at), law_of(law.record()).interval_at(at)
    assert np.array_equal(first, second)
    assert (first[0] < law.at(at)).all()
    assert (law.at(at) < first[1]).all()


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([[1.0], [2.0], [3.0]], [3.0, 2.0, 1.0], "3 points, expected at least 4 for a law with 3 parameters"),
        ([[1.0], [1.0], [2.0], [2.0]], [4.0, 3.0, 2.0, 1.0], "a variable of the law has 2 values, expected at least 3"),
        ([[1.0], [2.0], [3.0], [4.0]], [3.0, 2.0, 1.0, 0.0], "a value is 0 or less"),
        ([[1.0], [2.0], [3.0], [0.0]], [3.0, 2.0, 1.0, 1.0], "a value is 0 or less"),
        ([[1.0], [2.0], [3.0], [np.inf]], [3.0, 2.0, 1.0, 1.0], "a value is infinite or NaN"),
        ([[1.0], [2.0], [3.0], [4.0]], [3.0, 2.0, np.nan, 1.0], "a value is infinite or NaN"),
    ],
)
def test_unsuitable_points_are_rejected(x, y, message):
    with pytest.raises(ValueError, match=message):
        fit(np.array(x), np.array(y))


def test_intervals_of_a_noisy_study_of_three_sizes_hold_about_nine_times_of_ten():
    """A 90 % interval misses on average 2.4 of 24 studies, and more than 7 once in 300 times."""
    held = coverage(Case("3 sizes", "high floor", 0.03), studies=24, seed=1000, draws=100)
    assert set(held) == set(QUANTITIES), held
    assert min(held.values()) >= 17 / 24, held
    # Some studies must miss an interval: much too wide intervals would contain every value.
    assert np.mean(list(held.values())) < 0.99, held


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("noise", [0.01, 0.03])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("grid", SIZES)
def test_intervals_hold_nine_times_of_ten_on_the_grids_of_studies(grid, law, noise):
    """In 300 studies the deviation is 1.7 points. docs/studies.md has the shares of 400 studies with new seeds."""
    assert len(points_of(grid)) == 5 * len(SIZES[grid])
    held = coverage(Case(grid, law, noise), studies=300, seed=1000, draws=200)
    print(grid, law, noise, held)
    for quantity, share in held.items():
        assert 0.85 <= share <= 0.98, (quantity, held)
