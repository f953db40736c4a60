"""Computes the outcomes of evaluation protocols: the few-shot probe of frozen features, and the head's predictions.

The few-shot probe fits a ridge regression to a few images per class, in closed form. It reads features block by block,
so data sets can have any size, and returns for every test sample whether it was classified correctly:

    few_shot(Inputs("fewshot", train, test, test.labels, device, beat), FewShotConfig((5,), (0,)))
    → Outcome(right={"5shot": [array([True, False, …])]}, shots={"5shot": {"0": [17, 205, …]}})

The protocols linear, knn and logistic are in pipeline/extras/probes.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from data.draws import few_shot_rows
from data.optional import load_optional
from pipeline.evaluation.features import Beat, FeatureStore
from pipeline.evaluation.protocols import L2, PROTOCOLS, FewShotConfig

# N: readable rows of the test set, D: features, C: classes, L: maximum number of labels per sample

BIAS = 100.0  # value of the constant feature: large, so that its weight is almost unregularised


# ------------------------------------------------------------------------------------------------ inputs and outcome


@dataclass(frozen=True)
class Inputs:
    """The inputs of a protocol; they exist only on rank 0."""

    name: str  # name of the protocol
    train: FeatureStore | None  # None for protocols of the head
    test: FeatureStore
    labels: np.ndarray  # (N, L) of the test set, padded with −1; a prediction is right if it is any of them
    device: torch.device
    beat: Beat

    def is_right(self, predicted: np.ndarray) -> np.ndarray:
        """Return a boolean array (N,): whether any prediction, (N,) or (N, K), is a label; padding never matches."""
        return (predicted.reshape(len(predicted), -1, 1) == self.labels[:, None, :]).any((1, 2))

    def training_set(self) -> FeatureStore:
        """Return the training set, which only protocols of features have."""
        assert self.train is not None, "the stage rejects a protocol of features without a training set"
        return self.train


@dataclass(frozen=True)
class Outcome:
    """The outcome of a protocol on a test set."""

    right: dict[str, list[np.ndarray]]  # value name → correctness of each sample, (N,) bool per seed
    shots: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # value name → seed → sample numbers
    chosen: dict[str, float] = field(default_factory=dict)  # settings selected on held-out training samples
    notes: dict[str, str] = field(default_factory=dict)  # value name → a limitation to report with it


# ------------------------------------------------------------------------------------------------ linear maps


class Classifier(Protocol):
    """A classifier that was fitted to features."""

    def scores(self, features: Tensor) -> Tensor:
        """Return the scores (N, C) of features (N, D), in float64."""


class LinearMap(NamedTuple):
    """A linear map fitted by regularised least squares."""

    mean: Tensor  # (D,)
    std: Tensor  # (D,)
    weights: Tensor  # (D + 1, C)

    def scores(self, features: Tensor) -> Tensor:
        """Return the scores (N, C) of features (N, D), in float64."""
        return standardised(features.double(), self.mean, self.std) @ self.weights


def predict(fitted: Classifier, store: FeatureStore, rows: np.ndarray, beat: Beat) -> np.ndarray:
    """Return the highest-scoring class for each row of a store."""
    predicted = []
    for _, features in store.blocks(rows):
        predicted.append(fitted.scores(features).argmax(1).cpu().numpy())
        beat()
    return np.concatenate(predicted)


def standardised(features: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Centre and scale features (N, D), and append a constant feature; return (N, D + 1)."""
    return pad((features - mean) / std, (0, 1), value=BIAS)


# ------------------------------------------------------------------------------------------------ least squares

# The few-shot probe, exactly as big_vision evaluators/fewshot_lsr.py computes it (paper, section 4.1):
# 1. pick `shots` rows of every class of the training set, by a seed;
# 2. standardise features with the mean and deviation of the picked rows;
# 3. fit a linear map from features to {−1, 1}^C on the picked rows in closed form: regularised least squares;
# 4. predict the class with the largest score on the test set.


def few_shot(inputs: Inputs, settings: FewShotConfig) -> Outcome:
    """Fit the closed-form linear map to the shots drawn with each seed; the values are named 1shot, 5shot, …

    Seeds that pick the same images count as one draw: only the first of these seeds has a result.
    """
    train = inputs.training_set()
    test = inputs.test
    rows = train.rows
    labels = train.labels[:, 0]
    images_of_class = np.bincount(labels[labels >= 0], minlength=train.index.classes)
    outcome = Outcome({})
    for count in settings.shots:
        value = f"{count}shot"
        outcome.right[value] = []
        outcome.shots[value] = {}
        for seed in settings.seeds:
            picked = few_shot_rows(labels, count, seed)
            shots = rows[picked].tolist()
            if any(sorted(shots) == sorted(earlier) for earlier in outcome.shots[value].values()):
                continue
            fitted = fit(train.features(rows[picked]), torch.from_numpy(labels[picked]), settings.l2)
            inputs.beat()
            outcome.right[value].append(inputs.is_right(predict(fitted, test, test.rows, inputs.beat)))
            outcome.shots[value][str(seed)] = shots
        small_classes = int((images_of_class < count).sum())
        if small_classes:
            note = (
                f"{small_classes:,} of {len(images_of_class):,} classes have fewer than {count} training images "
                f"(fewest: {images_of_class.min()})"
            )
            draws = len(outcome.shots[value])
            if draws == 1 < len(settings.seeds):
                note += f"; all {len(settings.seeds)} seeds picked the same images, so there is only one draw"
            elif draws < len(settings.seeds):
                note += f"; {len(settings.seeds)} seeds produced only {draws} distinct draws"
            outcome.notes[value] = note
    return outcome


def fit(x: Tensor, labels: Tensor, l2: float = L2) -> LinearMap:
    """Fit the linear map to features (N, D) and labels (N,), in float64.

    The difference from the original implementation's float32 result is no larger than the differences between that
    implementation's results on different platforms.
    """
    x = x.double()
    mean = x.mean(0)
    std = x.std(0, correction=0) + 1e-5
    x = standardised(x, mean, std)
    # The classes are those of these rows: test samples of higher classes are always predicted incorrectly.
    y = 2.0 * one_hot(labels.long()).double() - 1
    # Ridge regression through the eigenvectors of the smaller of the two Gram matrices, which is cheaper to decompose.
    if len(x) < x.shape[1]:
        return LinearMap(mean, std, x.T @ solve_gram(x @ x.T, y, l2))
    return LinearMap(mean, std, solve_gram(x.T @ x, x.T @ y, l2))


def solve_gram(gram: Tensor, y: Tensor, l2: float) -> Tensor:
    """Solve (gram + l2 · I) x = y for a Gram matrix (K, K) and targets (K, C); return x (K, C)."""
    values, vectors = torch.linalg.eigh(gram)
    if l2 == 0:
        # A constant feature makes the Gram matrix singular: leave out its directions, as least squares does.
        is_zero = values <= values.max() * len(values) * torch.finfo(values.dtype).eps
        values = values.masked_fill(is_zero, torch.inf)
    return (vectors / (values + l2)) @ vectors.T @ y


# ------------------------------------------------------------------------------------------------ by name


def best_classes(inputs: Inputs, settings: None) -> Outcome:
    """Compare the head's top classes with the labels, for the protocols top-1, top-5, real and per-class."""
    best = PROTOCOLS[inputs.name].best
    return Outcome({inputs.name: [inputs.is_right(inputs.test.predictions[:, :best])]})


# The function that computes the outcome from the inputs and the protocol's settings. A function for any other protocol
# has the protocol's name and is in pipeline/extras/probes.py.
COMPUTE: dict[str, Callable[[Inputs, Any], Outcome]] = {
    "top-1": best_classes,
    "top-5": best_classes,
    "real": best_classes,
    "per-class": best_classes,
    "fewshot": few_shot,
}


def compute(inputs: Inputs, settings: Any) -> Outcome:
    """Compute the outcome of the protocol `inputs.name`. Raises MissingExtra if its extra is not in this checkout."""
    name = inputs.name
    if name not in COMPUTE:
        return load_optional(f"pipeline.extras.probes:{name}", f"the protocol {name}")(inputs, settings)
    return COMPUTE[name](inputs, settings)
