"""The logistic probe: multinomial logistic regression on frozen features, its penalty chosen on held-out training rows.

It is the linear probe of CLIP (Radford et al. 2021, appendix A.3) and of DINOv2 (eval/log_regression.py): L-BFGS on all
rows, no augmentation, and a grid of penalties that is judged on a part of the training set that the fit has not seen.

1. Features are standardised with mean and deviation of the rows that are fitted.
2. A share `held_out` of the training rows, drawn by a seed, judges a fit to the others for each l2 of the grid.
3. The l2 with the most right predictions, the larger of equal ones, is fitted to all rows.

    minimised: mean over rows of cross-entropy(W x + b, label) + l2 / 2 · sum of W²; b is not penalised

Rows are read block by block in every pass, and summed in float64 in a fixed order. scikit-learn's LogisticRegression
with C = 1 / (l2 · rows) minimises the same.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from data.checks import at_least
from pipeline.config import require
from pipeline.evaluation.features import FeatureStore
from pipeline.evaluation.group import Beat
from pipeline.evaluation.probe import moments

# D features, C classes

TOLERANCE = 1e-7  # of the largest entry of the gradient, and of the change of the loss: converged


@dataclass(frozen=True)
class LogisticConfig:
    """Protocol logistic: logistic regression on frozen features."""

    l2: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # penalties to choose from, for the mean loss
    held_out: float = 0.1  # share of the training rows that chooses among several (DINOv2)
    seed: int = 0  # of the draw of these rows
    iterations: int = 1000  # of L-BFGS, at most (CLIP A.3)

    def __post_init__(self) -> None:
        require(min(self.l2, default=-1.0) >= 0, f"logistic.l2 is {self.l2}, expected one or more, 0 or larger")
        require(0 < self.held_out < 1, f"logistic.held_out is {self.held_out}, expected a share between 0 and 1")
        at_least(self, 0, "seed", "logistic.")
        at_least(self, 1, "iterations", "logistic.")


@dataclass
class Regression:
    """What is fitted: scores are ((features − mean) / std) @ weights + bias."""

    mean: Tensor  # (D,)
    std: Tensor  # (D,)
    weights: Tensor  # (D, C)
    bias: Tensor  # (C,)

    def scores(self, features: Tensor) -> Tensor:
        """(rows, D) → (rows, C), in float64."""
        return (features.to(self.weights).sub(self.mean) / self.std) @ self.weights + self.bias

    def predict(self, store: FeatureStore, rows: np.ndarray, beat: Beat) -> np.ndarray:
        """Return the class (rows,) with the largest score of a store's rows."""
        predicted = []
        with torch.no_grad():
            for _, features in store.blocks(rows):
                predicted.append(self.scores(features).argmax(1).cpu().numpy())
                beat()
        return np.concatenate(predicted)


def logistic(
    train: FeatureStore, test: FeatureStore, cfg: LogisticConfig, device: torch.device, beat: Beat
) -> tuple[np.ndarray, dict[str, float]]:
    """Return the prediction (test rows,) and what was chosen: l2, and the held-out accuracy of each of the grid."""
    chosen: dict[str, float] = {}
    l2 = cfg.l2[0]
    if len(cfg.l2) > 1:
        held_out, fitted = split(train.rows, cfg)
        labels = label_of_row(train)
        best = -1.0
        # From the largest on: each fit begins where the one before ended, and of equal ones the larger stays.
        regression = None
        for penalty in sorted(cfg.l2, reverse=True):
            regression = fit(train, fitted, penalty, cfg.iterations, device, beat, regression)
            accuracy = float((regression.predict(train, held_out, beat) == labels[held_out]).mean())
            chosen[f"held-out accuracy at l2 {penalty:g}"] = accuracy
            if accuracy > best:
                best = accuracy
                l2 = penalty
    chosen = {"l2": l2, **chosen}
    regression = fit(train, train.rows, l2, cfg.iterations, device, beat)
    return regression.predict(test, test.rows, beat), chosen


def split(rows: np.ndarray, cfg: LogisticConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that are held out and those that are fitted, both in the order of the set."""
    order = np.random.default_rng(cfg.seed).permutation(len(rows))
    count = max(1, round(cfg.held_out * len(rows)))
    require(count < len(rows), f"logistic.held_out {cfg.held_out} leaves none of {len(rows)} training samples to fit")
    return rows[np.sort(order[:count])], rows[np.sort(order[count:])]


def label_of_row(store: FeatureStore) -> np.ndarray:
    """Return the first label of every sample by its number; −1 where it is not there."""
    labels = np.full(len(store.is_there), -1)
    labels[store.rows] = store.first_labels
    return labels


def fit(
    store: FeatureStore,
    rows: np.ndarray,
    l2: float,
    iterations: int,
    device: torch.device,
    beat: Beat,
    start: Regression | None = None,
) -> Regression:
    """Fit the regression to a store's rows by L-BFGS, from `start` or from zero; `beat` as in Beat."""
    labels = torch.from_numpy(label_of_row(store)).to(device)
    classes = int(labels.max()) + 1
    mean, std = moments(store, rows, beat)
    weights = torch.zeros(store.width, classes, dtype=torch.float64, device=device)
    bias = torch.zeros(classes, dtype=torch.float64, device=device)
    if start is not None:
        weights.copy_(start.weights)
        bias.copy_(start.bias)
    regression = Regression(mean.to(device), std.to(device), weights.requires_grad_(), bias.requires_grad_())
    optimizer = torch.optim.LBFGS(
        [weights, bias],
        max_iter=iterations,
        max_eval=2 * iterations,
        tolerance_grad=TOLERANCE,
        tolerance_change=TOLERANCE**1.5,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = l2 / 2 * weights.square().sum()
        total.backward()
        loss = total.detach()
        for place, features in store.blocks(rows):
            expected = labels[torch.from_numpy(rows[place]).to(device)]
            part = cross_entropy(regression.scores(features), expected, reduction="sum") / len(rows)
            part.backward()
            loss = loss + part.detach()
            beat()
        return loss

    optimizer.step(closure)
    weights.requires_grad_(False)
    bias.requires_grad_(False)
    return regression
