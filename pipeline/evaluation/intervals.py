"""Intervals of accuracies: one definition for all values, 95 %, over draws and test samples.

An interval tells where the accuracy would lie over all test samples of this kind, and over all draws of what was drawn:
the shots of a few-shot probe, the seeds of repeated runs.

    over_draws(right)                      (n,), (draws, n) or (runs, draws, n): what was right
    mean_over_classes(right, labels)       (n,) and (n, L): the labels of each sample, padded with −1

1. The variance of the mean is estimated, and from it the effective number of samples: as many independent samples as
   would have this variance.
2. Wilson's interval (1927) of so many samples is the result: it stays within 0 … 1 and is no point where all are right.

`python -m benchmarks.intervals` simulates how often they hold the true value (docs/evaluation.md).
"""

import math
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)  # 1.96


def wilson(share: float, samples: float, quantile: float = Z) -> tuple[float, float]:
    """Return low and high of Wilson's score interval for a share of so many samples; 0 to 1 where there is none."""
    if samples == 0:
        return 0.0, 1.0
    middle = share + quantile**2 / (2 * samples)
    spread = quantile * math.sqrt(share * (1 - share) / samples + quantile**2 / (4 * samples**2))
    scale = 1 + quantile**2 / samples
    # Rounding may lead a hair beyond 0 and 1, or leave out a share of 0 or 1.
    return max(0.0, min(share, (middle - spread) / scale)), min(1.0, max(share, (middle + spread) / scale))


def over_draws(right: np.ndarray) -> tuple[float, float]:
    """Return the interval of the mean of what was right, over every axis: runs, draws and, as the last, test samples.

    The variance is that of several readers who judge the same cases (Gallas 2006, Acad Radiol 13): for S draws and n
    samples s²(means of draws) / S + s²(means of samples) / n − s²(residual) / (S · n), and at least its largest part.
    Few draws tell their variance badly: the quantile is Student's, with Satterthwaite's degrees of freedom. An axis of
    length 1 tells no variance, and the interval knows nothing of it.
    """
    samples = right.shape[-1]
    lengths = [length for length in right.shape[:-1] if length > 1]
    right = right.reshape(*lengths, samples).astype(np.float64)
    mean = float(right.mean()) if samples else 0.0
    if not lengths or samples < 2 or mean in (0.0, 1.0):
        return wilson(mean, samples)

    # The variance of the mean that each axis contributes, and what none of them explains.
    parts = []
    freedoms = []
    residual = right - mean
    for axis in range(right.ndim):
        others = tuple(other for other in range(right.ndim) if other != axis)
        means = right.mean(axis=others, keepdims=True)
        parts.append(float(means.var(ddof=1)) / right.shape[axis])
        freedoms.append(right.shape[axis] - 1)
        residual -= means - mean
    # Each of the parts holds the residual once, the mean has it once.
    freedom_left = right.size - 1 - sum(freedoms)
    surplus = (len(parts) - 1) * float(np.square(residual).sum()) / freedom_left / right.size
    variance = max(sum(parts) - surplus, *parts)

    squares = surplus**2 / freedom_left
    for part, freedom in zip(parts, freedoms, strict=True):
        squares += part**2 / freedom
    from scipy.special import stdtrit  # here, because the driver has no other use for scipy

    quantile = float(stdtrit(max(variance**2 / squares, 1.0), (1 + CONFIDENCE) / 2))
    return wilson(mean, mean * (1 - mean) / variance, quantile)


def mean_over_classes(right: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return the interval of the mean over classes of the share that was right in each; the classes stay the same.

    A class of n samples with k right has the variance p (1 − p) / n with p = (k + mean) / (n + 1), drawn a little to
    the mean over classes, so that neither a class of one sample nor a perfect one counts as certain. The divisor
    1 − n / (n + 1)² makes it unbiased where all classes are equally hard. A sample of several labels counts in several
    classes, and these deviations add up.
    """
    row, column = np.nonzero(labels >= 0)
    label = labels[row, column]
    counts = np.bincount(label)
    classes = int((counts > 0).sum())
    if classes == 0:
        return 0.0, 1.0
    hits = np.bincount(label, weights=right[row])
    shares = hits / np.maximum(counts, 1)
    mean = float(shares.sum()) / classes
    smoothed = (hits + mean) / (counts + 1)
    deviations = np.sqrt(smoothed * (1 - smoothed) / (1 - counts / (counts + 1) ** 2))
    # What a sample weighs in the mean, and how far it moves it.
    weights = np.bincount(row, 1 / (classes * counts[label]))
    moves = np.bincount(row, deviations[label] / (classes * counts[label]))
    variance = float(np.square(moves).sum())
    if variance == 0:
        return wilson(mean, 1 / float(np.square(weights).sum()))
    return wilson(mean, mean * (1 - mean) / variance)
