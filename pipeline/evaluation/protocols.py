"""The protocols by which weights are judged: what each needs, what it computes, and what stands for it in a document.

Of the head, every prediction being right where it is one of the sample's labels:
  top-1, top-5    the sample's label is the best, or one of the five best classes
  real            top-1 on the labels of Beyer et al. 2020 (ReaL): any of several; images without one are left out
  per-class       the mean over classes of the share right in each (mean per-class accuracy), and each class by name
Of the features alone, learned from a training set and judged on the test set:
  fewshot         ridge regression on a few images a class, in closed form (probe.py)
  linear          the same on all images (probe.py)
  knn             a vote of the nearest (neighbours.py)
  logistic        logistic regression (logistic.py)

A protocol gives `Judged`: of every test sample whether it was right. What is made of that: document.py.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from data.checks import at_least
from data.shards.subset import few_shot_rows
from models.checks import did_you_mean
from pipeline import config
from pipeline.config import require
from pipeline.evaluation.evaluate import L2, ProbeConfig
from pipeline.evaluation.features import FeatureStore
from pipeline.evaluation.logistic import LogisticConfig, logistic
from pipeline.evaluation.neighbours import NeighboursConfig, knn
from pipeline.evaluation.probe import Beat, LinearMap, fit, fit_all

# N samples of the test set that are there, L labels of a sample at most, K best classes

BEST = {"top-1": 1, "top-5": 5, "real": 1, "per-class": 1}  # protocols of the head → best classes that each looks at
FEATURES = ("fewshot", "linear", "knn", "logistic")
PROTOCOLS = (*BEST, *FEATURES)


@dataclass(frozen=True)
class FewShotConfig:
    """Protocol fewshot: the paper's few-shot accuracy (section 4.1), as big_vision computes it."""

    shots: tuple[int, ...] = (1, 5, 10, 25)  # training images a class (big_vision configs/common_fewshot.py)
    seeds: tuple[int, ...] = (0, 1, 2)  # of the pick of the shots; the value is the mean over them
    l2: float = L2  # weight of the ridge regression's penalty (big_vision configs/common_fewshot.py)

    def __post_init__(self) -> None:
        require(min(self.shots, default=0) > 0, f"fewshot.shots are {self.shots}, expected 1 or more")
        require(min(self.seeds, default=-1) >= 0, f"fewshot.seeds are {self.seeds}, expected one or more, from 0 on")
        at_least(self, 0, "l2", "fewshot.")


@dataclass(frozen=True)
class LinearConfig:
    """Protocol linear: the map of the few-shot probe, fitted to all training images."""

    l2: float = L2  # weight of the ridge regression's penalty

    def __post_init__(self) -> None:
        at_least(self, 0, "l2", "linear.")


@dataclass(frozen=True)
class Protocol:
    """One way to judge, whole: with what is in its fields anybody gets the same value."""

    name: str
    fields: dict[str, Any]  # as JSON has them

    @property
    def digest(self) -> str:
        """Return the sha256 of the protocol's name and fields as canonical JSON."""
        return config.digest({"protocol": self.name, "fields": self.fields})

    @property
    def best(self) -> int:
        """Return how many of the head's best classes it looks at; 0 for a protocol of features."""
        return BEST.get(self.name, 0)


@dataclass
class Judged:
    """What a protocol found of a test set."""

    right: dict[str, list[np.ndarray]]  # value → of every seed, or once: (N,) bool, whether a sample was right
    shots: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # value → seed → numbers of the samples
    chosen: dict[str, float] = field(default_factory=dict)  # what was selected on held-out training samples


def check_names(names: tuple[str, ...]) -> None:
    """Raise ConfigError where there is no such protocol, or where none or one twice is named."""
    for name in names:
        require(
            name in PROTOCOLS,
            f"protocols has {name!r}{did_you_mean(name, PROTOCOLS)}\n  expected some of {', '.join(PROTOCOLS)}",
        )
    require(len(names) > 0, f"protocols is empty\n  expected some of {', '.join(PROTOCOLS)}")
    require(len(set(names)) == len(names), f"protocols names one twice: {', '.join(names)}")


def judge(
    protocol: Protocol, train: FeatureStore | None, test: FeatureStore, device: torch.device, beat: Beat
) -> Judged:
    """Judge a test set by a protocol, from what was collected of it; `beat` is called between pieces of work.

    Raises ConfigError where the sets cannot be judged so.
    """
    if protocol.best:
        is_right = right(test.predictions[:, : protocol.best], test.labels)
        return Judged({protocol.name: [is_right]})
    assert train is not None, "the stage refuses a protocol of features without a training set"
    require(len(train.rows) > 0, f"{protocol.name}: none of the training samples could be read")
    options = protocol.fields["options"]
    if protocol.name == "fewshot":
        shots = FewShotConfig(tuple(options["shots"]), tuple(options["seeds"]), options["l2"])
        return few_shot(train, test, test.labels, shots, beat)
    if protocol.name == "linear":
        predicted = predictions_of(fit_all(train, options["l2"], beat), test, beat)
        return Judged({"linear": [right(predicted[:, None], test.labels)]})
    if protocol.name == "knn":
        neighbours = NeighboursConfig(**{**options, "k": tuple(options["k"])})
        count = len(train.rows)
        require(
            max(neighbours.k) <= count,
            f"knn.k is {max(neighbours.k)}, the training set has {count} samples\n  type knn.k=[{count}], or less",
        )
        votes = knn(train, test, neighbours, device, beat)
        return Judged({f"knn-{k}": [right(predicted[:, None], test.labels)] for k, predicted in votes.items()})
    predicted, chosen = logistic(train, test, LogisticConfig(**{**options, "l2": tuple(options["l2"])}), device, beat)
    return Judged({"logistic": [right(predicted[:, None], test.labels)]}, chosen=chosen)


def right(predicted: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(N, K), (N, L) → (N,) bool: one of the predictions is one of the labels; padding of −1 equals none."""
    return (predicted[:, :, None] == labels[:, None, :]).any((1, 2))


def few_shot(
    train: FeatureStore,
    test: FeatureStore,
    expected: np.ndarray,
    cfg: FewShotConfig | ProbeConfig,
    beat: Beat,
) -> Judged:
    """Fit the closed form to the shots of every seed; values are called 1shot, 5shot, … (big_vision fewshot_lsr.py).

    `expected` (N, L) are the labels of the test set of which a prediction must be one.
    """
    judged = Judged({})
    rows = train.rows
    labels = train.first_labels
    for count in cfg.shots:
        value = f"{count}shot"
        judged.right[value] = []
        judged.shots[value] = {}
        for seed in cfg.seeds:
            picked = few_shot_rows(labels, count, seed)
            fitted = fit(train.features(rows[picked]), torch.from_numpy(labels[picked]), cfg.l2)
            beat()
            predicted = predictions_of(fitted, test, beat)
            judged.right[value].append(right(predicted[:, None], expected))
            judged.shots[value][str(seed)] = rows[picked].tolist()
    return judged


def predictions_of(fitted: LinearMap, test: FeatureStore, beat: Beat) -> np.ndarray:
    """Return the class (N,) that a linear map gives each test sample."""
    predicted = []
    for _, features in test.blocks():
        predicted.append(fitted.predict(features).numpy())
        beat()
    return np.concatenate(predicted)


def few_shot_metrics(train: FeatureStore, test: FeatureStore, cfg: ProbeConfig, beat: Beat) -> dict[str, float]:
    """Return {"10shot-seed-0": accuracy, …, "10shot": mean over seeds} (names of big_vision evaluators/fewshot_lsr.py).

    A prediction is right where it is the test sample's first label, as it always was: curves go on as they began.
    Raises ValueError where one of the sets has no sample that could be read.
    """
    if not len(train.rows) or not len(test.rows):
        raise ValueError(f"{len(train.rows)} samples to train, {len(test.rows)} to test: expected some of each")
    metrics: dict[str, float] = {}
    for value, of_seeds in few_shot(train, test, test.first_labels[:, None], cfg, beat).right.items():
        scores = [float(is_right.mean()) for is_right in of_seeds]
        for seed, score in zip(cfg.seeds, scores, strict=True):
            metrics[f"{value}-seed-{seed}"] = score
        metrics[value] = sum(scores) / len(scores)
    return metrics


def protocols_of(names: tuple[str, ...], options: dict[str, Any], common: dict[str, Any]) -> list[Protocol]:
    """Return the protocols of these names; `options` are the configs of those that have one, `common` is of all."""
    protocols = []
    for name in names:
        fields = dict(common)
        if name in options:
            fields["options"] = asdict(options[name])
        protocols.append(Protocol(name, config.as_json(fields)))
    return protocols
