"""Defines the evaluation protocols; each is a row of PROTOCOLS and a function in probes.py.

Protocols of the head; a prediction is correct if it is any of the sample's labels:
  top-1, top-5    the highest-scoring class, or one of the five highest-scoring classes, is correct
  real            top-1 on the labels of Beyer et al. 2020 (ReaL), several per image; unlabelled images are excluded
  per-class       mean per-class accuracy, and the accuracy of each class by name
Protocols of features, fitted on a training set and evaluated on the test set:
  fewshot, linear, knn, logistic

A protocol's outcome holds the correctness of every test sample; document.py turns it into values and intervals.

To add a protocol, add a row here and a function in probes.py, or with the protocol's name in pipeline/extras/probes.py.
It takes `Inputs` and the protocol's settings and returns an `Outcome`. A protocol with settings also needs a field with
its name in jobs/stages/evaluate.py. This module does not import torch, because recipes are checked without it.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from data.checks import at_least, more_than_0
from models.checks import did_you_mean
from pipeline import config
from pipeline.config import require
from pipeline.training_config import L2, ProbeConfig

# ------------------------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class FewShotConfig:
    """Protocol fewshot: the paper's few-shot accuracy (section 4.1), computed as in big_vision."""

    shots: tuple[int, ...] = (1, 5, 10, 25)  # training images per class (big_vision configs/common_fewshot.py)
    seeds: tuple[int, ...] = (0, 1, 2)  # seeds for picking the shots; the value is the mean over them
    l2: float = L2  # weight of the ridge regression's penalty (big_vision configs/common_fewshot.py)

    def __post_init__(self) -> None:
        require(min(self.shots, default=0) > 0, f"fewshot.shots is {self.shots}, expected one or more numbers ≥ 1")
        require(min(self.seeds, default=-1) >= 0, f"fewshot.seeds is {self.seeds}, expected one or more seeds ≥ 0")
        require(len(set(self.seeds)) == len(self.seeds), f"fewshot.seeds is {self.seeds}, expected no duplicates")
        at_least(self, 0, "l2", "fewshot.")


@dataclass(frozen=True)
class LinearConfig:
    """Protocol linear: the linear map of the few-shot probe, fitted to all training images."""

    l2: float = L2  # weight of the ridge regression's penalty

    def __post_init__(self) -> None:
        at_least(self, 0, "l2", "linear.")


@dataclass(frozen=True)
class NeighboursConfig:
    """Protocol knn: a vote of the nearest training samples."""

    k: tuple[int, ...] = (10, 20)  # numbers of neighbours, with one value for each (DINO eval_knn.py: 20 was best)
    weighted: bool = True  # votes weighted by exp(cosine / temperature); otherwise equal votes
    temperature: float = 0.07  # temperature of the vote weights (DINO eval_knn.py)

    def __post_init__(self) -> None:
        require(min(self.k, default=0) > 0, f"knn.k is {self.k}, expected one or more numbers ≥ 1")
        more_than_0(self, "temperature", "knn.")


@dataclass(frozen=True)
class LogisticConfig:
    """Protocol logistic: logistic regression on frozen features."""

    l2: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # penalties of the mean loss to choose from
    held_out: float = 0.1  # share of the training rows used to choose the penalty (DINOv2)
    seed: int = 0  # seed for drawing the held-out rows
    iterations: int = 1000  # maximum number of L-BFGS iterations (CLIP A.3)

    def __post_init__(self) -> None:
        require(min(self.l2, default=-1.0) >= 0, f"logistic.l2 is {self.l2}, expected one or more penalties ≥ 0")
        require(0 < self.held_out < 1, f"logistic.held_out is {self.held_out}, expected a fraction between 0 and 1")
        at_least(self, 0, "seed", "logistic.")
        at_least(self, 1, "iterations", "logistic.")


# ------------------------------------------------------------------------------------------------ the protocols


@dataclass(frozen=True)
class ProtocolKind:
    """A row of PROTOCOLS: the properties of one kind of protocol."""

    settings: type | None = None  # frozen dataclass of the section with the protocol's name in a recipe
    best: int = 0  # number of the head's best classes to check; 0: a protocol of features
    interval: Literal["share", "seeds", "classes"] = "share"  # kind of interval (document.value_entries)
    value_names: Callable[[Any], list[str]] | None = None  # from the settings; None: one value with the protocol's name


@dataclass(frozen=True)
class Protocol:
    """A fully specified protocol: protocols with equal fields always give the same value."""

    name: str
    fields: dict[str, Any]  # JSON values

    @property
    def kind(self) -> ProtocolKind:
        """Return the protocol's row in PROTOCOLS."""
        return PROTOCOLS[self.name]

    @property
    def digest(self) -> str:
        """Return the sha256 of the protocol's name and fields as canonical JSON."""
        return config.digest({"protocol": self.name, "fields": self.fields})

    @property
    def settings(self) -> Any:
        """Return the settings as an instance of their class; None if the protocol has no settings."""
        if self.kind.settings is None:
            return None
        return config.build(self.kind.settings, self.fields["options"], "options")


PROTOCOLS: dict[str, ProtocolKind] = {
    "top-1": ProtocolKind(best=1),
    "top-5": ProtocolKind(best=5),
    "real": ProtocolKind(best=1),
    "per-class": ProtocolKind(best=1, interval="classes"),
    "fewshot": ProtocolKind(
        FewShotConfig,
        interval="seeds",
        value_names=lambda settings: [f"{shots}shot" for shots in settings.shots],
    ),
    "linear": ProtocolKind(LinearConfig),
    "knn": ProtocolKind(NeighboursConfig, value_names=lambda settings: [f"knn-{k}" for k in settings.k]),
    "logistic": ProtocolKind(LogisticConfig),
}
FEATURES = tuple(name for name, kind in PROTOCOLS.items() if not kind.best)  # protocols that need a training set


# ------------------------------------------------------------------------------------------------ protocols of a recipe


def probe_protocol(probe: ProbeConfig) -> Protocol:
    """Return the fewshot protocol with the settings of a probe."""
    settings = FewShotConfig(probe.shots, probe.seeds, probe.l2)
    return Protocol("fewshot", config.as_json({"options": asdict(settings)}))


def protocols_of(names: tuple[str, ...], stage_config: object, common: dict[str, Any]) -> list[Protocol]:
    """Build the protocols with these names; their settings are fields of the stage's config.

    `common` holds the fields shared by all protocols: preprocessing, precision, batch size.
    """
    protocols = []
    for name in names:
        fields = dict(common)
        if PROTOCOLS[name].settings is not None:
            fields["options"] = asdict(getattr(stage_config, name))
        protocols.append(Protocol(name, config.as_json(fields)))
    return protocols


def check_names(names: tuple[str, ...]) -> None:
    """Raise ConfigError if the list of names is empty, or if a name is unknown or repeated."""
    for name in names:
        require(
            name in PROTOCOLS,
            f"protocols contains {name!r}{did_you_mean(name, PROTOCOLS)}\n"
            f"  expected one or more of {', '.join(PROTOCOLS)}",
        )
    require(len(names) > 0, f"protocols is empty\n  expected one or more of {', '.join(PROTOCOLS)}")
    require(len(set(names)) == len(names), f"protocols contains a duplicate: {', '.join(names)}")
