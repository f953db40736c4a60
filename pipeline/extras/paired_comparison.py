"""Compares the accuracies of two models on the same test images: is the difference more than chance?

    outcomes = PairedOutcomes.of(right_a, right_b)     boolean arrays (n,): the images that each model gets right
    outcomes.interval                                  95 % interval of accuracy B − accuracy A
    outcomes.better                                    "A", "B", or "" if the difference is within chance

Images that both models get right, or both get wrong, say nothing about the difference. It depends only on the images
that a single model gets right. The more alike the models are, the fewer such images there are, and the more precise is
the difference: two separate intervals ignore this.

1. Test: the exact McNemar test, two-sided. If both models are equally good, each image that only one of them gets right
   is a fair coin toss (McNemar 1947, Psychometrika 12).
2. Interval: the differences that a score test does not reject (Tango 1998, Statistics in Medicine 17). It has a nonzero
   width even if the models agree on all images. Fagerland, Lydersen and Laake 2014 (Statistics in Medicine 33) compare
   it with others and recommend it.
3. With few such images, the exact test is stricter than the score test. The interval is therefore extended to 0 if the
   exact test does not reject 0: it excludes 0 if and only if a model is called better.

`python -m benchmarks.paired_comparison` simulates the coverage and the false alarms (docs/evaluation.md).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline.evaluation.intervals import CONFIDENCE, Z, wilson

HALVINGS = 50  # steps of a bisection
# With fewer images that only one model gets right, even the most uneven result has a probability above 5 %.
FEWEST_DISCORDANT = 6


def score_interval(only_a: int, only_b: int, images: int) -> tuple[float, float]:
    """Return Tango's 95 % score interval (low, high) of accuracy B − accuracy A; (−1, 1) if there are no images.

    A difference d is accepted if images · (d − observed)² ≤ Z² · variance(d), with variance(d) = P(only A) + P(only B)
    − d², and the probabilities that are most likely if their difference is d.
    """
    if images == 0:
        return -1.0, 1.0
    observed = (only_b - only_a) / images

    def is_accepted(difference: float) -> bool:
        # The most likely P(only A) is the larger root of 2 n p² + b p + c = 0.
        b = (2 * images - only_b + only_a) * difference - only_b - only_a
        c = -only_a * difference * (1 - difference)
        share_a = (math.sqrt(max(b * b - 8 * images * c, 0.0)) - b) / (4 * images)
        variance = 2 * share_a + difference * (1 - difference)
        return images * (difference - observed) ** 2 <= Z**2 * variance

    ends = []
    for bound in (-1.0, 1.0):
        inside, outside = observed, bound
        for _ in range(HALVINGS):
            middle = (inside + outside) / 2
            if is_accepted(middle):
                inside = middle
            else:
                outside = middle
        ends.append(inside)
    return ends[0], ends[1]


@dataclass(frozen=True)
class PairedOutcomes:
    """The numbers of images that two models A and B classify correctly."""

    both: int
    only_a: int
    only_b: int
    neither: int

    @classmethod
    def of(cls, right_a: np.ndarray, right_b: np.ndarray) -> "PairedOutcomes":
        """Count the outcomes of boolean arrays (n,): whether A, and whether B, classifies each image correctly."""
        both = int((right_a & right_b).sum())
        only_a = int((right_a & ~right_b).sum())
        only_b = int((right_b & ~right_a).sum())
        return cls(both, only_a, only_b, len(right_a) - both - only_a - only_b)

    @property
    def images(self) -> int:
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def right(self) -> tuple[int, int]:
        """The numbers of images that A, and that B, classifies correctly."""
        return self.both + self.only_a, self.both + self.only_b

    @property
    def difference(self) -> float:
        """Accuracy B − accuracy A; 0 if there are no images."""
        return (self.only_b - self.only_a) / max(self.images, 1)

    def accuracy(self, right: int) -> tuple[float, float, float]:
        """Return a model's accuracy with its own 95 % interval (value, low, high)."""
        value = right / max(self.images, 1)
        return value, *wilson(value, self.images)

    @cached_property
    def p_value(self) -> float:
        """The probability of a difference at least this large if both models are equally good (exact McNemar test)."""
        if self.only_a + self.only_b == 0:
            return 1.0
        from scipy.stats import binomtest  # imported here, because it takes half a second

        return float(binomtest(self.only_b, self.only_a + self.only_b).pvalue)

    @property
    def better(self) -> str:
        """The better model, "A" or "B"; "" if the difference is within chance."""
        if self.p_value >= 1 - CONFIDENCE:
            return ""
        return "B" if self.only_b > self.only_a else "A"

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of accuracy B − accuracy A; it excludes 0 if and only if a model is called better."""
        low, high = score_interval(self.only_a, self.only_b, self.images)
        if not self.better:
            return min(low, 0.0), max(high, 0.0)
        return low, high
