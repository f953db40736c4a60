"""Computes 95 % confidence intervals of accuracies, over draws and test samples, in the same way for all values.

An interval estimates the range of the accuracy over all test samples of this kind and over all possible draws: the
shots of a few-shot probe, the seeds of repeated runs.

    over_draws(right)                      (n,), (draws, n) or (runs, draws, n): the correctly classified samples
    mean_over_classes(right, labels)       (n,) and (n, L): the labels of each sample, padded with −1

1. Over draws: estimate the variance of the mean, and from it the effective number of samples: the number of independent
   samples with this variance. Compute the Wilson score interval (1927) for that number: it stays within 0 … 1, and has
   a nonzero width even if all samples are classified correctly.
2. Over classes: generalise the Wilson score interval to the proportions of several classes, because a rare class can
   dominate the mean.

`python -m benchmarks.intervals` simulates how often the intervals contain the true value (docs/evaluation.md).
"""

import math
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)  # normal quantile, 1.96
HALVINGS = 35  # steps of a bisection
ROUNDING = 1e-20  # of a variance; the smallest variance of a million samples and several draws is above 1e-14


def wilson(share: float, samples: float, quantile: float = Z) -> tuple[float, float]:
    """Return the Wilson score interval (low, high) of a proportion of `samples` samples; (0, 1) if there are none."""
    if samples == 0:
        return 0.0, 1.0
    middle = share + quantile**2 / (2 * samples)
    spread = quantile * math.sqrt(share * (1 - share) / samples + quantile**2 / (4 * samples**2))
    scale = 1 + quantile**2 / samples
    # Rounding could exceed 0 or 1 slightly, or exclude a share of exactly 0 or 1.
    return max(0.0, min(share, (middle - spread) / scale)), min(1.0, max(share, (middle + spread) / scale))


def over_draws(right: np.ndarray) -> tuple[float, float]:
    """Return the interval of the mean over all axes: runs, draws and, as the last axis, test samples.

    The variance is computed as for several readers of the same cases (Gallas 2006, Acad Radiol 13). For S draws and n
    samples, it is s²(means of draws) / S + s²(means of samples) / n − s²(residual) / (S · n), and at least the largest
    of these terms. Because a few draws give a poor estimate of their variance, the quantile is Student's, with
    Satterthwaite's degrees of freedom. An axis of length 1 gives no estimate of its variance, which is therefore not
    included in the interval.
    """
    samples = right.shape[-1]
    lengths = [length for length in right.shape[:-1] if length > 1]
    right = right.reshape(*lengths, samples).astype(np.float64)
    mean = float(right.mean()) if samples else 0.0
    if not lengths or samples < 2 or mean in (0.0, 1.0):
        return wilson(mean, samples)

    # The variance of the mean that each axis contributes, and the residual that no axis explains.
    parts = []
    freedoms = []
    residual = right - mean
    for axis in range(right.ndim):
        others = tuple(other for other in range(right.ndim) if other != axis)
        means = right.mean(axis=others, keepdims=True)
        parts.append(float(means.var(ddof=1)) / right.shape[axis])
        freedoms.append(right.shape[axis] - 1)
        residual -= means - mean
    # Each part contains the residual once, and the variance of the mean must contain it only once.
    freedom_left = right.size - 1 - sum(freedoms)
    surplus = (len(parts) - 1) * float(np.square(residual).sum()) / freedom_left / right.size
    variance = max(sum(parts) - surplus, *parts)
    # All draws and all samples may have the same mean, apart from rounding, for example with two samples and two draws.
    if variance < ROUNDING:
        return wilson(mean, samples)

    squares = surplus**2 / freedom_left
    for part, freedom in zip(parts, freedoms, strict=True):
        squares += part**2 / freedom
    from scipy.special import stdtrit  # imported here, because the driver does not need scipy otherwise

    quantile = float(stdtrit(max(variance**2 / squares, 1.0), (1 + CONFIDENCE) / 2))
    return wilson(mean, mean * (1 - mean) / variance, quantile)


def mean_over_classes(right: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return the interval of the mean per-class accuracy, for a fixed set of classes.

    The interval contains the means θ that a score test does not reject, as Wilson's does for a single proportion:

    1. Each class has the proportion p that is most likely if the mean over classes is θ. First, one sample with the
       mean proportion is added to each class: neither a class with one sample nor a perfect class counts as certain.
    2. The variance of the observed mean is then Σ p (1 − p) / n / classes². Dividing by 1 − n / (n + 1)² would make it
       unbiased if all classes were equally hard. However, θ alone determines the p of a class that dominates the
       variance, so each class's term is divided by 1 − s n / (n + 1)², with s the share of the variance that comes from
       the other classes. The terms are not divided if all classes are perfect, or all wrong.
    3. Reject θ if it differs from the observed mean by more than 1.96 standard deviations and half a step. A step of
       the mean is one sample of the class that dominates the variance, and vanishes with many classes.

    A sample with several labels counts in several classes, and its deviations add up.
    """
    row, column = np.nonzero(labels >= 0)
    label = labels[row, column]
    present, label = np.unique(label, return_inverse=True)
    classes = len(present)
    if classes == 0:
        return 0.0, 1.0
    counts = np.bincount(label).astype(np.float64)  # each (classes,) from here on
    hits = np.bincount(label, weights=right[row])
    mean = float((hits / counts).mean())
    has_several = len(row) > len(np.unique(row))
    # A prior of exactly 0 or 1 would fix the share of all classes.
    prior = min(max(mean, 1 / (2 * len(row) + 2)), 1 - 1 / (2 * len(row) + 2))

    def at(multiplier: float) -> tuple[float, float]:
        """Return θ for a Lagrange multiplier of the constraint, and the largest accepted distance from the mean."""
        # The root in 0 … 1 of: multiplier · p² − (counts + 1 + multiplier) · p + hits + prior = 0.
        middle = counts + 1 + multiplier
        shares = 2 * (hits + prior) / (middle + np.sqrt(np.maximum(middle**2 - 4 * multiplier * (hits + prior), 0.0)))
        shares = shares.clip(1e-12, 1 - 1e-12)
        variances = shares * (1 - shares) / counts
        parts = variances / variances.sum()
        if 0 < mean < 1:
            variances /= 1 - (1 - parts) * counts / (counts + 1) ** 2
        variance = float(variances.sum())
        if has_several:
            moves = np.bincount(row, np.sqrt(variances / counts)[label])
            variance = float(np.square(moves).sum())
        half_step = float((parts**2 / counts).sum()) / (2 * classes)
        return float(shares.mean()), Z * math.sqrt(variance) / classes + half_step

    ends = []
    for sign in (1, -1):
        # A larger multiplier moves θ further from the mean: halve the range of its logarithm.
        inside, outside = math.log(1e-4), math.log(1e9)
        for _ in range(HALVINGS):
            middle = (inside + outside) / 2
            theta, distance = at(sign * math.exp(middle))
            if sign * (mean - theta) <= distance:
                inside = middle
            else:
                outside = middle
        ends.append(at(sign * math.exp(inside))[0])
    return max(0.0, min(mean, ends[0])), min(1.0, max(mean, ends[1]))
