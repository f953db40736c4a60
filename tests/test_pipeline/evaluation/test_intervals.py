"""Intervals compared with scipy, with plain sums, and with simulations whose true value is known."""

import itertools
from functools import partial

import numpy as np
import pytest
from scipy import optimize, stats

from benchmarks import intervals as simulations
from pipeline.evaluation.intervals import mean_over_classes, over_draws, wilson

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("right", "samples"), [(0, 10), (10, 10), (1, 3), (355, 400), (49_000, 50_000)])
def test_interval_of_a_share_matches_scipys_wilson_interval(right: int, samples: int) -> None:
    expected = stats.binomtest(right, samples).proportion_ci(0.95, method="wilson")
    assert wilson(right / samples, samples) == pytest.approx((expected.low, expected.high), abs=1e-12)
    is_right = np.arange(samples) < right
    for shape in ((samples,), (1, samples), (1, 1, samples)):
        assert over_draws(is_right.reshape(shape)) == pytest.approx((expected.low, expected.high), abs=1e-12)


def two_way(right: np.ndarray) -> tuple[float, float]:
    """Compute the interval from the textbook's sums of squares of two crossed factors, cell by cell."""
    draws, samples = right.shape
    mean = right.mean()
    of_draws = sum(samples * (right[s].mean() - mean) ** 2 for s in range(draws)) / (draws - 1)
    of_samples = sum(draws * (right[:, i].mean() - mean) ** 2 for i in range(samples)) / (samples - 1)
    left = 0.0
    for s, i in itertools.product(range(draws), range(samples)):
        left += (right[s, i] - right[s].mean() - right[:, i].mean() + mean) ** 2
    left /= (draws - 1) * (samples - 1)
    a, b, c = (square / (draws * samples) for square in (of_draws, of_samples, left))
    variance = max(a + b - c, a, b)
    freedom = variance**2 / (a**2 / (draws - 1) + b**2 / (samples - 1) + c**2 / ((draws - 1) * (samples - 1)))
    t = stats.t.ppf(0.975, max(freedom, 1.0))
    # The roots of (mean − p)² = t² · p (1 − p) · variance / (mean (1 − mean)), which define Wilson's interval.
    k = t**2 * variance / (mean * (1 - mean))
    low, high = np.roots([1 + k, -2 * mean - k, mean**2])[::-1]
    return low, high


@pytest.mark.parametrize("seed", [3, 11])
@pytest.mark.parametrize("draws", [2, 3, 7])
@pytest.mark.parametrize(("spread", "hard"), [(0.0, 0.0), (0.0, 4.0), (1.5, 0.3), (0.2, 1.0)])
def test_few_shot_intervals_match_two_crossed_factors(seed: int, draws: int, spread: float, hard: float) -> None:
    rng = np.random.default_rng(seed)
    score = 1 + spread * rng.normal(size=(draws, 1)) + hard * rng.normal(size=(1, 150)) + rng.normal(size=(draws, 150))
    right = score > 0
    assert over_draws(right) == pytest.approx(two_way(right.astype(float)), abs=1e-9)
    assert over_draws(right[None]) == over_draws(right), "an axis of one tells nothing"


def test_identical_draws_give_the_interval_of_the_samples_only() -> None:
    right = np.random.default_rng(5).random(2000) < 0.8
    low, high = over_draws(np.stack([right] * 3))
    assert (low, high) == pytest.approx(wilson(right.mean(), 2000), abs=2e-4)
    all_right = over_draws(np.ones((3, 100), bool))
    assert all_right == pytest.approx(wilson(1.0, 100))
    assert over_draws(np.ones((3, 0), bool)) == (0.0, 1.0)


@pytest.mark.parametrize("size", [2, 3, 7, 10])
def test_draws_and_samples_with_equal_means_give_the_interval_of_the_samples(size: int) -> None:
    """Each draw gets one other sample right: neither draws nor samples differ in their means."""
    assert over_draws(np.eye(size, dtype=bool)) == pytest.approx(wilson(1 / size, size))


@pytest.mark.parametrize("sizes", [[1] * 102, [10] * 102, [1, 4, 9, 50, 200]])
@pytest.mark.parametrize("accuracy", [1.0, 0.0, 0.9])
def test_mean_over_classes_always_has_a_nonzero_interval(sizes: list[int], accuracy: float) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    right = np.random.default_rng(9).random(len(labels)) < accuracy
    low, high = mean_over_classes(right, labels[:, None])
    assert 0 <= low < high <= 1
    assert high - low > 0.5 / sum(sizes)
    mean = np.mean([right[labels == label].mean() for label in range(len(sizes))])
    assert low <= mean <= high
    # With one class per sample, or equal and perfect classes, all samples are independent.
    if len(set(sizes)) == 1 and (accuracy != 0.9 or sizes[0] == 1):
        expected = wilson(right.mean(), len(right))
        assert (low, high) == pytest.approx(expected, abs=0.004)


@pytest.mark.parametrize("samples", [0, 1, 5])
def test_mean_over_no_classes_has_the_interval_0_to_1(samples: int) -> None:
    assert mean_over_classes(np.ones(samples, bool), np.full((samples, 2), -1)) == (0.0, 1.0)


def test_completely_right_or_wrong_classes_still_have_an_interval() -> None:
    labels = np.repeat(np.arange(20), 10)
    low, high = mean_over_classes(labels % 2 == 0, labels[:, None])
    assert 0.01 < high - low < 0.1
    assert low + high == pytest.approx(1.0)


def test_ends_of_a_mean_over_classes_are_just_accepted_by_a_score_test_with_several_labels() -> None:
    rng = np.random.default_rng(21)
    labels = np.stack([rng.integers(4, size=60), rng.integers(4, 7, size=60), np.full(60, -1)], axis=1)
    labels[::3, 1] = -1
    right = rng.random(60) < 0.7
    classes = {label: [i for i in range(60) if label in labels[i]] for label in range(7)}
    hits = {label: sum(right[i] for i in members) for label, members in classes.items()}
    mean = np.mean([hits[label] / len(members) for label, members in classes.items()])

    def share(label: int, multiplier: float) -> float:
        """Maximize the likelihood, with one more sample of the mean share, minus the multiplier times the share."""
        n = len(classes[label]) + 1
        k = hits[label] + mean
        return optimize.brentq(lambda p: k / p - (n - k) / (1 - p) - multiplier, 1e-9, 1 - 1e-9, xtol=1e-14)

    for end in mean_over_classes(right, labels):

        def miss(multiplier: float, end: float = end) -> float:
            return np.mean([share(label, multiplier) for label in classes]) - end

        multiplier = optimize.brentq(miss, -1e4, 1e4)
        p = {label: share(label, multiplier) for label in classes}
        assert np.mean(list(p.values())) == pytest.approx(end, abs=1e-9)
        raw = {label: p[label] * (1 - p[label]) / len(members) for label, members in classes.items()}
        part = {label: value / sum(raw.values()) for label, value in raw.items()}
        deviation = {}
        step = 0.0
        for label, members in classes.items():
            n = len(members)
            correction = 1 - (1 - part[label]) * n / (n + 1) ** 2
            deviation[label] = np.sqrt(p[label] * (1 - p[label]) / correction)
            step += part[label] ** 2 / (7 * n)
        variance = 0.0
        for i in range(60):
            variance += sum(deviation[c] / (7 * len(classes[c])) for c in labels[i] if c >= 0) ** 2
        assert abs(end - mean) == pytest.approx(1.959964 * np.sqrt(variance) + step / 2, abs=1e-6)


def test_a_rare_class_decides_the_interval_of_the_mean() -> None:
    """Of 4,997 and 3 samples, half of the mean is known, and the other half is a share of 3 samples."""
    labels = np.repeat([0, 1], [4997, 3])[:, None]
    for hits in (1, 2):
        right = np.concatenate([np.arange(4997) < 4500, np.arange(3) < hits])
        low, high = mean_over_classes(right, labels)
        # scipy's Wilson interval with a continuity correction of half a sample.
        rare = stats.binomtest(hits, 3).proportion_ci(0.95, method="wilsoncc")
        known = 4500 / 4997
        assert (low, high) == pytest.approx(((known + rare.low) / 2, (known + rare.high) / 2), abs=0.03)


UNEQUAL = np.array([1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 200])
WORLDS = {
    "share": partial(simulations.share, 0.9, 100),
    "share near 1": partial(simulations.share, 0.98, 400),
    "few-shot": partial(simulations.latent, 1.3, (0.1, 1.0), (3, 300)),
    "few-shot of ten draws": partial(simulations.latent, 0.5, (0.2, 2.0), (10, 200)),
    "runs and draws": partial(simulations.latent, 1.3, (0.1, 0.1, 2.0), (3, 3, 200)),
    "102 classes of 1": partial(simulations.classes, np.ones(102, int), 0.9, 10.0),
    "102 classes of 10": partial(simulations.classes, np.full(102, 10), 0.98, 10.0),
    "unequal classes": partial(simulations.classes, UNEQUAL, 0.9, 10.0),
    "several labels": partial(simulations.two_labels, 300, 0.8),
}


@pytest.mark.parametrize("world", WORLDS)
def test_intervals_contain_the_true_value_as_often_as_promised(world: str) -> None:
    """Expect 92 to 97 % of 800 repetitions, with two standard deviations of the count (1.5 points) on either side."""
    held, width = simulations.coverage(WORLDS[world], 800, np.random.default_rng(17))
    assert 0.905 <= held <= 0.985
    assert width < 0.25


RARE = {
    "990 and 3": (np.array([990, 3]), 0.95, 1e6),
    "4,997 and 3, classes differ": (np.array([4997, 3]), 0.8, 10.0),
    "nine of 500 and one of 5": (np.array([500] * 9 + [5]), 0.8, 1e6),
    "nine of 500 and one of 5, near 1": (np.array([500] * 9 + [5]), 0.98, 1e6),
}


@pytest.mark.parametrize("world", RARE)
def test_intervals_of_means_that_a_rare_class_decides_hold_at_least_95_percent(world: str) -> None:
    """Three samples have four possible shares, so an interval holds either too rarely or more often than promised."""
    held, width = simulations.coverage(partial(simulations.classes, *RARE[world]), 400, np.random.default_rng(23))
    assert held >= 0.95 - 2 * 0.011
    assert width < 0.6
