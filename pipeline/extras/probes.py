"""Probes of frozen features other than the few-shot probe (pipeline/evaluation/probes.py); each is one protocol.

linear     the linear map of the few-shot probe, fitted to all training images
knn        majority vote of the nearest training samples
logistic   logistic regression, with a penalty chosen on held-out training samples

  knn(Inputs("knn", train, test, test.labels, device, beat), NeighboursConfig((10, 20)))
  → Outcome(right={"knn-10": [array([True, False, …])], "knn-20": [array([True, True, …])]})
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, one_hot

from pipeline.config import require
from pipeline.evaluation.features import Beat, FeatureStore
from pipeline.evaluation.probes import Inputs, LinearMap, Outcome, predict, solve_gram, standardised
from pipeline.evaluation.protocols import LinearConfig, LogisticConfig, NeighboursConfig

# N: readable rows of the test set, D: features, C: classes

TEST_BLOCK = 1024  # test rows of kNN; with a block of 4,096 training rows: 16 MiB of similarities
TOLERANCE = 1e-7  # logistic regression has converged if its largest gradient or the change of its loss is below this


# ------------------------------------------------------------------------------------------------ least squares


def linear(inputs: Inputs, settings: LinearConfig) -> Outcome:
    """Fit the closed-form linear map to all training samples."""
    fitted = fit_all(inputs.training_set(), settings.l2, inputs.beat)
    predicted = predict(fitted, inputs.test, inputs.test.rows, inputs.beat)
    return Outcome({"linear": [inputs.is_right(predicted)]})


def fit_all(train: FeatureStore, l2: float, beat: Beat) -> LinearMap:
    """Fit the linear map to all rows of a training set that may exceed memory; the result is the same as with `fit`."""
    labels = torch.from_numpy(train.labels[:, 0])
    classes = int(labels.max()) + 1
    mean, std = moments(train, train.rows, beat)
    gram = torch.zeros(train.width + 1, train.width + 1, dtype=torch.float64)
    products = torch.zeros(train.width + 1, classes, dtype=torch.float64)
    for place, features in train.blocks():
        x = standardised(features.double(), mean, std)
        gram += x.T @ x
        products += x.T @ (2.0 * one_hot(labels[place], classes).double() - 1)
        beat()
    return LinearMap(mean, std, solve_gram(gram, products, l2))


def moments(store: FeatureStore, rows: np.ndarray, beat: Beat) -> tuple[Tensor, Tensor]:
    """Return the mean, and the population standard deviation plus 1e-5, of rows of a store: both (D,), float64."""
    total = torch.zeros(store.width, dtype=torch.float64)
    for _, features in store.blocks(rows):
        total += features.double().sum(0)
        beat()
    mean = total / len(rows)
    # Use a second pass, because the difference of large squares would lose precision.
    squares = torch.zeros_like(total)
    for _, features in store.blocks(rows):
        squares += (features.double() - mean).square().sum(0)
        beat()
    return mean, (squares / len(rows)).sqrt() + 1e-5


# ------------------------------------------------------------------------------------------------ nearest neighbours


def knn(inputs: Inputs, settings: NeighboursConfig) -> Outcome:
    """Predict each test sample's class by a vote of the training samples with the most similar features.

    The similarity of two samples is the cosine of the angle between their features. With weights, each of the k nearest
    neighbours votes with exp(similarity / 0.07), as in DINO's eval_knn.py (Caron et al. 2021, appendix F.1); without
    weights, each votes with 1. The class with the most votes wins, and the lowest class wins a tie. The values are
    named knn-10, knn-20, … Raises ConfigError if k is larger than the training set.
    """
    train = inputs.training_set()
    most = max(settings.k)
    count = len(train.rows)
    require(most <= count, f"knn.k is {most}, but there are only {count} training samples\n  set knn.k=[{count}]")
    device = inputs.device
    labels = torch.from_numpy(train.labels[:, 0]).to(device)
    classes = int(labels.max()) + 1
    predicted: dict[int, list[Tensor]] = {k: [] for k in settings.k}
    for _, block in inputs.test.blocks(size=TEST_BLOCK):
        # Find the nearest training rows of each test row: compare the best so far with one block after another.
        queries = normalize(block.to(device))  # (n, D)
        similarities = queries.new_empty(len(queries), 0)  # (n, ≤ k), the largest first
        neighbours = torch.empty(len(queries), 0, dtype=torch.long, device=device)  # the training rows with them
        for place, features in train.blocks():
            of_block = queries @ normalize(features.to(device)).T
            numbers = torch.arange(place.start, place.stop, device=device).expand(len(queries), -1)
            candidates = torch.cat([similarities, of_block], dim=1)
            similarities, chosen = candidates.topk(min(most, candidates.shape[1]), dim=1)
            neighbours = torch.cat([neighbours, numbers], dim=1).gather(1, chosen)
            inputs.beat()

        # Add the votes one neighbour at a time: otherwise a GPU would sum them in a varying order.
        weights = torch.ones_like(similarities, dtype=torch.float64)
        if settings.weighted:
            # Relative to the nearest neighbour's vote; otherwise, a low temperature would make all votes infinite.
            nearer = similarities.double() - similarities[:, :1].double()
            weights = (nearer / settings.temperature).exp()
        votes = torch.zeros(len(queries), classes, dtype=torch.float64, device=device)
        every_row = torch.arange(len(queries), device=device)
        for number in range(most):
            votes[every_row, labels[neighbours[:, number]]] += weights[:, number]
            if number + 1 in predicted:
                predicted[number + 1].append(votes.argmax(1))
    right = {}
    for k, parts in predicted.items():
        right[f"knn-{k}"] = [inputs.is_right(torch.cat(parts).cpu().numpy())]
    return Outcome(right)


# ------------------------------------------------------------------------------------------------ logistic regression

# The linear probe of CLIP (Radford et al. 2021, appendix A.3) and of DINOv2 (eval/log_regression.py): L-BFGS on all
# rows, no augmentation, and a grid of penalties compared on a held-out part of the training set.
#
#     minimised: mean over rows of cross-entropy(W x + b, label) + l2 / 2 · sum of W²; b is not penalised
#
# Rows are summed in float64 in a fixed order. scikit-learn's LogisticRegression with C = 1 / (l2 · rows) minimises the
# same objective.


class Regression(NamedTuple):
    """A logistic regression: scores are ((features − mean) / std) @ weights + bias."""

    mean: Tensor  # (D,)
    std: Tensor  # (D,)
    weights: Tensor  # (D, C)
    bias: Tensor  # (C,)

    def scores(self, features: Tensor) -> Tensor:
        """Return the scores (N, C) of features (N, D), in float64."""
        return (features.to(self.weights).sub(self.mean) / self.std) @ self.weights + self.bias


def logistic(inputs: Inputs, settings: LogisticConfig) -> Outcome:
    """Fit a logistic regression with the l2 penalty that gives the highest accuracy on held-out training rows.

    Among equally good penalties, the largest is used; the final regression is fitted to all rows. Raises ConfigError if
    no rows remain for fitting.
    """
    train = inputs.training_set()
    device = inputs.device
    beat = inputs.beat
    accuracies: dict[str, float] = {}
    l2 = settings.l2[0]
    if len(settings.l2) > 1:
        # Select the held-out rows and the rows for fitting, both in the order of the set.
        order = np.random.default_rng(settings.seed).permutation(len(train.rows))
        count = max(1, round(settings.held_out * len(train.rows)))
        require(
            count < len(train.rows),
            f"logistic.held_out {settings.held_out} leaves none of the {len(train.rows)} training samples for "
            "fitting; use a smaller fraction",
        )
        held_out = train.rows[np.sort(order[:count])]
        fitted_rows = train.rows[np.sort(order[count:])]
        best = -1.0
        # Start with the largest l2: each fit starts from the previous one, and in a tie the larger l2 wins.
        regression = None
        for penalty in sorted(settings.l2, reverse=True):
            regression = fit_logistic(train, fitted_rows, penalty, settings.iterations, device, beat, regression)
            predicted = predict(regression, train, held_out, beat)
            accuracy = float((predicted == train.all_labels[held_out, 0]).mean())
            accuracies[f"held-out accuracy at l2 {penalty:g}"] = accuracy
            if accuracy > best:
                best = accuracy
                l2 = penalty
    regression = fit_logistic(train, train.rows, l2, settings.iterations, device, beat)
    predicted = predict(regression, inputs.test, inputs.test.rows, beat)
    return Outcome({"logistic": [inputs.is_right(predicted)]}, chosen={"l2": l2, **accuracies})


def fit_logistic(
    store: FeatureStore,
    rows: np.ndarray,
    l2: float,
    iterations: int,
    device: torch.device,
    beat: Beat,
    start: Regression | None = None,
) -> Regression:
    """Fit the regression to a store's rows by L-BFGS, starting from `start` or from zero."""
    labels = torch.from_numpy(store.all_labels[:, 0]).to(device)
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
