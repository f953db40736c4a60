"""Simulate the comparison of two models on the same images: coverage of its interval, and its false alarms.

    OMP_NUM_THREADS=1 python -m benchmarks.paired_comparison [--repetitions 4000] [--seed 1]

An image is classified correctly if the sum of its easiness, which both models share, and of each model's own noise is
large enough. The correlation of the two sums determines how alike the models are: two seeds of one recipe agree on
most images. Each repetition draws the images, and computes what `predict --against` prints
(pipeline/extras/paired_comparison.py).

- coverage: how often the 95 % interval contains the true difference
- width: mean width of the interval in points; "separate" is the width of an interval from the two separate intervals,
  as if the images were different ones (half the widths, squared and added)
- called better: how often a model is called better; if both are equally good, this is a false alarm
- one right: how often a single model is right
- wrong model: how often the worse model is called better
"""

import argparse
from collections.abc import Iterator
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from scipy.stats import multivariate_normal

from pipeline.extras.paired_comparison import PairedOutcomes

SIZES = (50, 200, 1000, 10_000)
ACCURACIES = ((0.5, 0.5), (0.5, 0.55), (0.7, 0.7), (0.9, 0.9), (0.9, 0.92), (0.99, 0.99), (0.97, 0.99))
CORRELATIONS = (0.5, 0.8, 0.95)


class Case(NamedTuple):
    """Two models and a number of images."""

    images: int
    accuracies: tuple[float, float]  # of A and B
    correlation: float

    def probabilities(self) -> np.ndarray:
        """Return the probabilities (4,) of an image that both, only A, only B and neither classify correctly."""
        a, b = self.accuracies
        limits = [NormalDist().inv_cdf(a), NormalDist().inv_cdf(b)]
        covariance = [[1, self.correlation], [self.correlation, 1]]
        both = float(multivariate_normal(cov=covariance).cdf(limits))
        return np.array([both, a - both, b - both, 1 - a - b + both])


class Result(NamedTuple):
    """Shares of the repetitions, and mean widths of the intervals."""

    coverage: float
    width: float
    separate_width: float
    called_better: float
    called_wrong: float


def cases() -> Iterator[Case]:
    for images in SIZES:
        for accuracies in ACCURACIES:
            for correlation in CORRELATIONS:
                yield Case(images, accuracies, correlation)


def simulate(case: Case, repetitions: int, rng: np.random.Generator) -> Result:
    """Draw sets of images, and compare the two models on each."""
    a, b = case.accuracies
    truth = b - a
    best = "B" if b > a else ""
    outcomes_of = cache(PairedOutcomes)  # the same counts occur often
    totals = np.zeros(5)
    for counts in rng.multinomial(case.images, case.probabilities(), size=repetitions).tolist():
        outcomes = outcomes_of(*counts)
        low, high = outcomes.interval
        separate = 0.0
        for right in outcomes.right:
            _, low_end, high_end = outcomes.accuracy(right)
            separate += ((high_end - low_end) / 2) ** 2
        better = outcomes.better
        totals += [
            low - 1e-12 <= truth <= high + 1e-12,
            high - low,
            2 * separate**0.5,
            better != "",
            best != "" and better not in ("", best),
        ]
    return Result(*(totals / repetitions).tolist())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    print(
        "| images | accuracies | correlation | one right | coverage | width | separate | called better | wrong model |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for case in cases():
        result = simulate(case, options.repetitions, rng)
        a, b = case.accuracies
        discordant = float(case.probabilities()[1:3].sum())
        print(
            f"| {case.images:,} | {a:.0%}, {b:.0%} | {case.correlation} | {discordant:.1%} | {result.coverage:.1%} | "
            f"{100 * result.width:.2f} | {100 * result.separate_width:.2f} | {result.called_better:.1%} | "
            f"{result.called_wrong:.2%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
