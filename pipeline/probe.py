"""Few-shot linear evaluation, exactly as big_vision evaluators/fewshot_lsr.py computes it (paper, section 4.1).

Closed-form regularised least squares from features to {−1, 1}^C. N rows, D features, C classes.
"""

import numpy as np
import torch
from torch import Tensor

L2 = 2.0**10  # configs/common_fewshot.py: fixed, never selected on validation data
BIAS = 100.0  # value of the constant feature: large, so that its weight is almost unregularised


def few_shot_rows(labels: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """Rows picked for training: the first `shots` of a permutation of every class, classes in order, one generator.

    A class with fewer rows gives all it has; larger shots contain smaller ones.
    """
    rng = np.random.default_rng(seed)
    picked = [rng.permutation(np.flatnonzero(labels == c))[:shots] for c in range(int(labels.max()) + 1)]
    return np.concatenate(picked)


def solve(x: Tensor, y: Tensor, l2: float) -> Tensor:
    """(N, D), (N, C) → (D, C): ridge regression through the smaller of the two Gram matrices' eigenvectors."""
    wide = len(x) < x.shape[1]
    gram = x @ x.T if wide else x.T @ x
    values, vectors = torch.linalg.eigh(gram)
    inverse = (vectors / (values + l2)) @ vectors.T
    return x.T @ (inverse @ y) if wide else inverse @ (x.T @ y)


def linear_probe(
    train_features: Tensor | np.ndarray,
    train_labels: Tensor | np.ndarray,
    test_features: Tensor | np.ndarray,
    test_labels: Tensor | np.ndarray,
    shots: int,
    seed: int,
    l2: float = L2,
) -> float:
    """Test accuracy of the linear map fitted to `shots` rows a class.

    Features (N, D) are standardised with the picked rows' mean and population std + 1e-5. Solved in float64, which
    is at least as close to the original's float32 answer as its own platforms are to each other. ValueError where
    rows and labels do not match.
    """
    x, test = (torch.as_tensor(f).double() for f in (train_features, test_features))
    labels, expected = (torch.as_tensor(t).long() for t in (train_labels, test_labels))
    if len(x) != len(labels) or len(test) != len(expected) or not len(x) or not len(test) or shots < 1:
        raise ValueError(
            f"expected a label for each row, a row in each set and shots of 1 or more; found {len(x)} rows and "
            f"{len(labels)} labels to train, {len(test)} and {len(expected)} to test, {shots} shots"
        )
    rows = torch.from_numpy(few_shot_rows(labels.numpy(), shots, seed))
    x, labels, classes = x[rows], labels[rows], int(labels.max()) + 1
    mean, std = x.mean(0), x.std(0, correction=0) + 1e-5

    def prepare(features: Tensor) -> Tensor:
        return torch.nn.functional.pad((features - mean) / std, (0, 1), value=BIAS)

    y = 2.0 * torch.nn.functional.one_hot(labels, classes) - 1
    predicted = (prepare(test) @ solve(prepare(x), y.double(), l2)).argmax(1)
    return float((predicted == expected).double().mean())
