"""Simulate how often the confidence intervals of evaluations cover the true accuracy, for every kind of value.

    OMP_NUM_THREADS=1 python -m benchmarks.intervals [--repetitions 4000] [--seed 1]

Each repetition draws test samples, and also shots or runs if the value has several, from a simulation with known true
accuracy, and computes the interval with pipeline/evaluation/intervals.py. A 95 % interval should cover the truth in
95 % of the repetitions. docs/evaluation.md shows the table; tests/test_pipeline/evaluation/test_intervals.py runs fewer
repetitions.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from sklearn.neighbors import KNeighborsClassifier

from pipeline.evaluation.intervals import mean_over_classes, over_draws
from pipeline.evaluation.probes import fit

Repetition = Callable[[np.random.Generator], tuple[float, tuple[float, float]]]  # → the truth, and the interval


class Case(NamedTuple):
    """A simulation to draw from."""

    kind: str
    of: str
    repeat: Repetition


def share(accuracy: float, samples: int, rng: np.random.Generator) -> tuple[float, tuple[float, float]]:
    return accuracy, over_draws(rng.random(samples) < accuracy)


def latent(
    level: float, spreads: tuple[float, ...], lengths: tuple[int, ...], rng: np.random.Generator
) -> tuple[float, tuple[float, float]]:
    """Simulate correctness: whether level + a normal effect per axis (run, draw, sample) + normal noise is above 0."""
    score = level + rng.normal(size=lengths)
    for axis, spread in enumerate(spreads):
        shape = [1] * len(lengths)
        shape[axis] = lengths[axis]
        score = score + spread * rng.normal(size=shape)
    truth = NormalDist().cdf(level / math.sqrt(1 + sum(spread**2 for spread in spreads)))
    return truth, over_draws(score > 0)


def from_pool(
    pool: np.ndarray, lengths: tuple[int, ...], rng: np.random.Generator
) -> tuple[float, tuple[float, float]]:
    """Select draws and samples independently from the correct predictions of a large simulation."""
    chosen = pool
    for axis, length in enumerate(lengths):
        chosen = chosen.take(rng.integers(pool.shape[axis], size=length), axis)
    return float(pool.mean()), over_draws(chosen)


def classes(
    sizes: np.ndarray, accuracy: float, alike: float, rng: np.random.Generator
) -> tuple[float, tuple[float, float]]:
    """Simulate classes of these sizes with random accuracies; a larger `alike` means more similar accuracies."""
    of_class = rng.beta(accuracy * alike, (1 - accuracy) * alike, len(sizes))
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return float(of_class.mean()), mean_over_classes(rng.random(len(labels)) < of_class[labels], labels[:, None])


def two_labels(samples: int, accuracy: float, rng: np.random.Generator) -> tuple[float, tuple[float, float]]:
    """Simulate samples of equal difficulty, half of which have two of 20 labels."""
    labels = rng.integers(20, size=(samples, 2))
    labels[::2, 1] = -1
    labels[labels[:, 0] == labels[:, 1], 1] = -1
    return accuracy, mean_over_classes(rng.random(samples) < accuracy, labels)


def neighbours(rng: np.random.Generator) -> np.ndarray:
    """Return correctness (200,000,) of scikit-learn's 10-NN with 200 training points on two overlapping clouds."""
    labels = rng.integers(2, size=200_200)
    points = rng.normal(size=(len(labels), 2)) + 1.8 * labels[:, None]
    voters = KNeighborsClassifier(10).fit(points[:200], labels[:200])
    return voters.predict(points[200:]) == labels[200:]


def few_shots(rng: np.random.Generator) -> np.ndarray:
    """Return correctness (400, 20,000) of the few-shot probe for 400 draws of 5 shots per class on ten clouds."""
    centres = 0.75 * rng.normal(size=(10, 16))
    labels = rng.integers(10, size=20_000)
    points = torch.from_numpy(centres[labels] + rng.normal(size=(20_000, 16)))
    of_shots = np.repeat(np.arange(10), 5)
    right = []
    for _ in range(400):
        shots = torch.from_numpy(centres[of_shots] + rng.normal(size=(50, 16)))
        right.append(fit(shots, torch.from_numpy(of_shots)).scores(points).argmax(1).numpy() == labels)
    return np.stack(right)


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for samples in (100, 1000):
        for accuracy in (0.5, 0.9, 0.98):
            yield Case("share", f"{samples:,} at {accuracy:.0%}", partial(share, accuracy, samples))
    pool = neighbours(rng)
    for samples in (100, 1000):
        yield Case("kNN", f"{samples:,}, 200 training points", partial(from_pool, pool, (samples,)))
    pool = few_shots(rng)
    for draws, samples in ((3, 100), (3, 1000), (5, 1000), (10, 1000)):
        yield Case(
            "few-shot", f"{draws} × {samples:,}, the probe on clouds", partial(from_pool, pool, (draws, samples))
        )
    for draws in (2, 3, 5, 10):
        for spread, hard in ((0.05, 0.5), (0.2, 0.5), (0.2, 2.0)):
            of = f"{draws} × 500, spread of draws {spread}, of samples {hard}"
            yield Case("few-shot", of, partial(latent, 1.3, (spread, hard), (draws, 500)))
    for runs in (3, 5):
        of = f"{runs} × 1,000, spread of runs 0.1, of samples 2"
        yield Case("mean over seeds", of, partial(latent, 1.3, (0.1, 2.0), (runs, 1000)))
        of = f"{runs} × 3 draws × 500, spreads 0.1, 0.1, 2"
        yield Case("mean over seeds", of, partial(latent, 1.3, (0.1, 0.1, 2.0), (runs, 3, 500)))
    unequal = np.array([1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 200])
    sizes = {"102 × 1": np.ones(102, int), "102 × 10": np.full(102, 10), "1, 2, 3, 5 … 200": unequal}
    sizes |= {"990, 3": np.array([990, 3]), "4,997, 3": np.array([4997, 3]), "9 × 500, 5": np.array([500] * 9 + [5])}
    for name, size in sizes.items():
        for accuracy, alike in ((0.5, 1e6), (0.9, 10.0), (0.98, 1e6), (0.98, 10.0)):
            of = f"{name} at {accuracy:.0%}" + (", classes differ" if alike == 10 else "")
            yield Case("mean per class", of, partial(classes, size, accuracy, alike))
    yield Case("mean per class", "300 of one or two labels at 80%", partial(two_labels, 300, 0.8))


def coverage(repeat: Repetition, repetitions: int, rng: np.random.Generator) -> tuple[float, float]:
    """Return the share of repetitions whose interval covers the true accuracy, and the intervals' mean width."""
    held = 0
    width = 0.0
    for _ in range(repetitions):
        truth, (low, high) = repeat(rng)
        held += low <= truth <= high
        width += high - low
    return held / repetitions, width / repetitions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    print("| value | test samples | coverage | mean width, points |\n|---|---|---|---|")
    for case in cases(rng):
        held, width = coverage(case.repeat, options.repetitions, rng)
        print(f"| {case.kind} | {case.of} | {held:.1%} | {100 * width:.1f} |", flush=True)


if __name__ == "__main__":
    main()
