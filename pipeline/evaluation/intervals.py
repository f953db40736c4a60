"""Confidence intervals of accuracies: one definition for all values, 95 %, over draws and test samples.

An interval estimates where the accuracy would lie over all test samples of this kind, and over all possible draws: the
shots of a few-shot probe, the seeds of repeated runs.

    over_draws(right)                      (n,), (draws, n) or (runs, draws, n): which samples were right
    mean_over_classes(right, labels)       (n,) and (n, L): the labels of each sample, padded with −1

1. Estimate the variance of the mean, and from it the effective number of samples: the number of independent samples
   with this variance.
2. Compute Wilson's interval (1927) for that number of samples: it stays within 0 … 1, and has a width even if all
   samples are right.

`python -m benchmarks.intervals` simulates how often they contain the true value (docs/evaluation.md).
"""

import math
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)  # normal quantile, 1.96


def wilson(share: float, samples: float, quantile: float = Z) -> tuple[float, float]:
    """Return low and high of Wilson's score interval for a share of this number of samples; 0 and 1 without samples."""
    if samples == 0:
        return 0.0, 1.0
    middle = share + quantile**2 / (2 * samples)
    spread = quantile * math.sqrt(share * (1 - share) / samples + quantile**2 / (4 * samples**2))
    scale = 1 + quantile**2 / samples
    # Rounding could exceed 0 or 1 slightly, or exclude a share of exactly 0 or 1.
    return max(0.0, min(share, (middle - spread) / scale)), min(1.0, max(share, (middle + spread) / scale))


def over_draws(right: np.ndarray) -> tuple[float, float]:
    """Return the interval of the mean over every axis: runs, draws and, as the last axis, test samples.

    The variance is that of several readers of the same cases (Gallas 2006, Acad Radiol 13): for S draws and n samples
    s²(means of draws) / S + s²(means of samples) / n − s²(residual) / (S · n), and at least its largest part. Because a
    few draws estimate their variance badly, the quantile is Student's, with Satterthwaite's degrees of freedom. An axis
    of length 1 gives no estimate of its variance, and the interval does not include it.
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

    squares = surplus**2 / freedom_left
    for part, freedom in zip(parts, freedoms, strict=True):
        squares += part**2 / freedom
    from scipy.special import stdtrit  # imported here, because the driver does not need scipy otherwise

    quantile = float(stdtrit(max(variance**2 / squares, 1.0), (1 + CONFIDENCE) / 2))
    return wilson(mean, mean * (1 - mean) / variance, quantile)


def mean_over_classes(right: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return the interval of the mean over classes of the share of right samples in each; the classes are fixed.

    A class of n samples with k right ones has the variance p (1 − p) / n with p = (k + mean) / (n + 1): p is shrunk
    slightly towards the mean over classes, so that neither a class with one sample nor a perfect class counts as
    certain. The divisor 1 − n / (n + 1)² makes it unbiased if all classes are equally hard. A sample with several
    labels counts in several classes, and these deviations add up.
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
    # The weight of each sample in the mean, and how far it moves the mean.
    weights = np.bincount(row, 1 / (classes * counts[label]))
    moves = np.bincount(row, deviations[label] / (classes * counts[label]))
    variance = float(np.square(moves).sum())
    if variance == 0:
        return wilson(mean, 1 / float(np.square(weights).sum()))
    return wilson(mean, mean * (1 - mean) / variance)
