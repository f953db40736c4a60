"""The few-shot probe, exactly as big_vision evaluators/fewshot_lsr.py computes it (paper, section 4.1).

1. Of every class of the training set, `shots` rows are picked by a seed.
2. Features are standardised with the picked rows' mean and deviation.
3. A linear map from features to {−1, 1}^C is fitted to the picked rows in closed form: regularised least squares.
4. The class with the largest output is the prediction on the test set.

    linear_probe(train_features, train_labels, test_features, test_labels, shots=10, seed=0)  →  0.8713
"""

import numpy as np
import torch
from torch import Tensor

from data.shards.subset import few_shot_rows

# N rows, D features, C classes

L2 = 2.0**10  # configs/common_fewshot.py: fixed, never selected on validation data
BIAS = 100.0  # value of the constant feature: large, so that its weight is almost unregularised


def solve(x: Tensor, y: Tensor, l2: float) -> Tensor:
    """(N, D), (N, C) → (D, C): ridge regression, by the eigenvectors of the smaller of the two Gram matrices."""
    # Both forms give the same map; the smaller matrix is the cheaper one to decompose.
    fewer_rows = len(x) < x.shape[1]
    gram = x @ x.T if fewer_rows else x.T @ x
    values, vectors = torch.linalg.eigh(gram)
    inverse = (vectors / (values + l2)) @ vectors.T
    if fewer_rows:
        return x.T @ (inverse @ y)
    return inverse @ (x.T @ y)


def linear_probe(
    train_features: Tensor | np.ndarray,
    train_labels: Tensor | np.ndarray,
    test_features: Tensor | np.ndarray,
    test_labels: Tensor | np.ndarray,
    shots: int,
    seed: int,
    l2: float = L2,
) -> float:
    """Return the test accuracy of the linear map fitted to `shots` rows a class.

    Features (N, D) are standardised with the picked rows' mean and population std + 1e-5. Solved in float64, which
    is at least as close to the original's float32 answer as its own platforms are to each other. Raises ValueError
    where rows and labels do not match.
    """
    train = torch.as_tensor(train_features).double()
    test = torch.as_tensor(test_features).double()
    labels = torch.as_tensor(train_labels).long()
    expected = torch.as_tensor(test_labels).long()
    match = len(train) == len(labels) and len(test) == len(expected)
    if not match or len(train) == 0 or len(test) == 0 or shots < 1:
        raise ValueError(
            f"expected a label for each row, a row in each set and shots of 1 or more; found {len(train)} rows and "
            f"{len(labels)} labels to train, {len(test)} and {len(expected)} to test, {shots} shots"
        )

    # The map is fitted to the picked rows, and so is the standardisation: the test set stays unseen.
    rows = torch.from_numpy(few_shot_rows(labels.numpy(), shots, seed))
    x = train[rows]
    picked_labels = labels[rows]
    mean = x.mean(0)
    std = x.std(0, correction=0) + 1e-5
    # Classes are counted from the picked rows: a class above them in the test set can only be predicted wrongly.
    targets = 2.0 * torch.nn.functional.one_hot(picked_labels, int(picked_labels.max()) + 1) - 1
    weights = solve(standardised(x, mean, std), targets.double(), l2)

    predicted = (standardised(test, mean, std) @ weights).argmax(1)
    return float((predicted == expected).double().mean())


def standardised(features: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(N, D) → (N, D + 1): centred, scaled, and with the constant feature at the end."""
    return torch.nn.functional.pad((features - mean) / std, (0, 1), value=BIAS)
