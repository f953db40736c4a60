"""The few-shot probe, exactly as big_vision evaluators/fewshot_lsr.py computes it (paper, section 4.1).

1. Of every class of the training set, `shots` rows are picked by a seed.
2. Features are standardised with the picked rows' mean and deviation.
3. A linear map from features to {−1, 1}^C is fitted to the picked rows in closed form: regularised least squares.
4. The class with the largest output is the prediction on the test set.

    fit(train[rows], labels[rows]).predict(test)    (n,) classes, with rows = few_shot_rows(labels, shots=10, seed=0)

`fit_all` is the same map fitted to every row of the training set, which is read block by block.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.evaluation.features import FeatureStore
from pipeline.evaluation.group import Beat

# N rows, D features, C classes

L2 = 2.0**10  # of the penalty (configs/common_fewshot.py): fixed, never selected on validation data
BIAS = 100.0  # value of the constant feature: large, so that its weight is almost unregularised


class LinearMap(NamedTuple):
    """Maps features (N, D) to a score for each class; what they are standardised with goes with it."""

    mean: Tensor  # (D,)
    std: Tensor  # (D,)
    weights: Tensor  # (D + 1, C)

    def predict(self, features: Tensor) -> Tensor:
        """Return the class (N,) with the largest score of each row."""
        return (standardised(features.double(), self.mean, self.std) @ self.weights).argmax(1)


def solve(x: Tensor, y: Tensor, l2: float) -> Tensor:
    """(N, D), (N, C) → (D, C): ridge regression, by the eigenvectors of the smaller of the two Gram matrices."""
    # Both forms give the same map; the smaller matrix is the cheaper one to decompose.
    if len(x) < x.shape[1]:
        return x.T @ solve_gram(x @ x.T, y, l2)
    return solve_gram(x.T @ x, x.T @ y, l2)


def solve_gram(gram: Tensor, y: Tensor, l2: float) -> Tensor:
    """(K, K), (K, C) → (K, C): what a Gram matrix with `l2` on its diagonal takes to y."""
    values, vectors = torch.linalg.eigh(gram)
    return (vectors / (values + l2)) @ vectors.T @ y


def fit(x: Tensor, labels: Tensor, l2: float = L2) -> LinearMap:
    """Fit the map to features (N, D) and labels (N,), in float64.

    That is at least as close to the original's float32 answer as its own platforms are to each other.
    """
    x = x.double()
    mean = x.mean(0)
    std = x.std(0, correction=0) + 1e-5
    # Classes are counted from these rows: a class above them in the test set can only be predicted wrongly.
    targets = targets_of(labels, int(labels.max()) + 1)
    return LinearMap(mean, std, solve(standardised(x, mean, std), targets, l2))


def fit_all(train: FeatureStore, l2: float, beat: Beat) -> LinearMap:
    """Fit the map to every row of a training set, as `fit` would where it all fitted in memory; `beat` as in Beat."""
    labels = torch.from_numpy(train.first_labels)
    classes = int(labels.max()) + 1
    mean, std = moments(train, train.rows, beat)
    gram = torch.zeros(train.width + 1, train.width + 1, dtype=torch.float64)
    products = torch.zeros(train.width + 1, classes, dtype=torch.float64)
    for place, features in train.blocks():
        x = standardised(features.double(), mean, std)
        gram += x.T @ x
        products += x.T @ targets_of(labels[place], classes)
        beat()
    return LinearMap(mean, std, solve_gram(gram, products, l2))


def moments(store: FeatureStore, rows: np.ndarray, beat: Beat) -> tuple[Tensor, Tensor]:
    """Return mean and population deviation + 1e-5 (D,) of a store's rows, in float64; `beat` as in Beat."""
    total = torch.zeros(store.width, dtype=torch.float64)
    for _, features in store.blocks(rows):
        total += features.double().sum(0)
        beat()
    mean = total / len(rows)
    # A second pass, because the difference of large squares would lose digits.
    squares = torch.zeros_like(total)
    for _, features in store.blocks(rows):
        squares += (features.double() - mean).square().sum(0)
        beat()
    return mean, (squares / len(rows)).sqrt() + 1e-5


def targets_of(labels: Tensor, classes: int) -> Tensor:
    """(N,) → (N, C) float64: 1 at the label, −1 elsewhere."""
    return 2.0 * torch.nn.functional.one_hot(labels.long(), classes).double() - 1


def standardised(features: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(N, D) → (N, D + 1): centred, scaled, and with the constant feature at the end."""
    return torch.nn.functional.pad((features - mean) / std, (0, 1), value=BIAS)
