"""Two models on the same images, compared with sums by hand, scipy's likelihood optimizer and simulations."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import xlogy

from benchmarks.paired_comparison import Case, simulate
from pipeline.extras.paired_comparison import FEWEST_DISCORDANT, PairedOutcomes, score_interval

pytestmark = pytest.mark.quick

Z = 1.959964


def coin_tosses(only_a: int, only_b: int) -> float:
    """Return the probability that fair coin tosses are at least this uneven: the exact McNemar test by hand."""
    tosses = only_a + only_b
    tail = sum(math.comb(tosses, heads) for heads in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**tosses)


def score(difference: float, only_a: int, only_b: int, images: int) -> float:
    """Return the deviations between the observed difference and another, at the optimum of the likelihood."""

    def loss(share_a: float) -> float:
        alike = max(1 - 2 * share_a - difference, 0.0)
        likelihood = xlogy(only_a, share_a) + xlogy(only_b, share_a + difference)
        return -float(likelihood + xlogy(images - only_a - only_b, alike))

    bounds = (max(0.0, -difference), (1 - difference) / 2)
    share_a = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
    variance = (2 * share_a + difference - difference**2) / images
    return float(((only_b - only_a) / images - difference) / np.sqrt(variance))


@pytest.mark.parametrize(
    ("only_a", "only_b", "images"),
    [(16, 6, 161), (1, 7, 21), (5, 1, 50), (0, 3, 60), (3, 0, 60), (40, 60, 10_000), (1, 30, 40)],
)
def test_ends_of_the_interval_are_just_accepted_by_a_score_test(only_a: int, only_b: int, images: int) -> None:
    low, high = score_interval(only_a, only_b, images)
    assert score(low, only_a, only_b, images) == pytest.approx(Z, abs=1e-5)
    assert score(high, only_a, only_b, images) == pytest.approx(-Z, abs=1e-5)
    assert score_interval(only_b, only_a, images) == pytest.approx((-high, -low))


def test_interval_is_the_published_one() -> None:
    """Responses before and after a therapy (Cavo et al. 2012), from the tests of the R package contingencytables."""
    assert score_interval(16, 6, 161) == pytest.approx((-0.1240, -0.0054), abs=5e-5)


def test_models_that_agree_on_all_images_have_a_nonzero_interval() -> None:
    low, high = PairedOutcomes(40, 0, 0, 10).interval
    assert (low, high) == pytest.approx((-(Z**2) / (50 + Z**2), Z**2 / (50 + Z**2)))
    assert PairedOutcomes(40, 0, 0, 10).p_value == 1
    assert PairedOutcomes(40, 0, 0, 10).better == ""
    nothing = PairedOutcomes(0, 0, 0, 0)
    assert nothing.interval == (-1, 1)
    assert nothing.difference == 0
    assert nothing.accuracy(0) == (0, 0, 1)


def test_better_is_the_exact_test_and_the_interval_never_contradicts_it() -> None:
    counts = [(only_a, only_b) for only_a in range(12) for only_b in range(12)]
    # Results next to the boundary of the test, where it differs most from the score test.
    for tosses in (22, 31, 100, 301, 900):
        for uneven in range(int(1.9 * math.sqrt(tosses)), int(2.3 * math.sqrt(tosses)) + 2):
            counts.append(((tosses - uneven) // 2, (tosses + uneven) // 2))
    for only_a, only_b in counts:
        outcomes = PairedOutcomes(1000, only_a, only_b, 500)
        assert outcomes.p_value == pytest.approx(coin_tosses(only_a, only_b))
        expected = ""
        if coin_tosses(only_a, only_b) < 0.05:
            expected = "A" if only_a > only_b else "B"
        assert outcomes.better == expected
        low, high = outcomes.interval
        assert low <= outcomes.difference <= high
        assert (low > 0 or high < 0) == (expected != ""), (only_a, only_b)
    assert coin_tosses(0, FEWEST_DISCORDANT) < 0.05 < coin_tosses(0, FEWEST_DISCORDANT - 1)


def test_outcomes_are_counted_like_in_a_plain_loop() -> None:
    rng = np.random.default_rng(4)
    right_a = rng.random(200) < 0.7
    right_b = rng.random(200) < 0.4
    outcomes = PairedOutcomes.of(right_a, right_b)
    pairs = [(bool(a), bool(b)) for a, b in zip(right_a, right_b, strict=True)]
    assert outcomes.both == pairs.count((True, True))
    assert outcomes.only_a == pairs.count((True, False))
    assert outcomes.only_b == pairs.count((False, True))
    assert outcomes.neither == pairs.count((False, False))
    assert outcomes.difference == pytest.approx(right_b.mean() - right_a.mean())
    assert outcomes.right == (right_a.sum(), right_b.sum())


@pytest.mark.parametrize("accuracies", [(0.5, 0.5), (0.9, 0.92), (0.99, 0.99)])
@pytest.mark.parametrize(("images", "correlation"), [(60, 0.5), (1000, 0.95)])
def test_intervals_cover_and_false_alarms_are_as_rare_as_promised(
    accuracies: tuple[float, float], images: int, correlation: float
) -> None:
    """Three standard deviations of a count of 800 are 2.3 points."""
    result = simulate(Case(images, accuracies, correlation), 800, np.random.default_rng(3))
    assert result.coverage >= 0.95 - 0.023
    if accuracies[0] == accuracies[1]:
        assert result.called_better <= 0.05 + 0.023
    assert result.called_wrong <= 0.025


def test_interval_of_similar_models_is_narrower_than_separate_intervals() -> None:
    result = simulate(Case(1000, (0.9, 0.92), 0.95), 200, np.random.default_rng(3))
    assert result.width < 0.6 * result.separate_width
