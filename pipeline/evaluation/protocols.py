"""The protocols by which weights are evaluated: each is one row of PROTOCOLS, and one function of probes.py.

Of the head, every prediction being right where it is one of the sample's labels:
  top-1, top-5    the sample's label is the best, or one of the five best classes
  real            top-1 on the labels of Beyer et al. 2020 (ReaL): any of several; images without one are left out
  per-class       the mean over classes of the share right in each (mean per-class accuracy), and each class by name
Of the features alone, learned from a training set and evaluated on the test set:
  fewshot, linear, knn, logistic

A protocol's outcome says of every test sample whether it was right; document.py makes values and intervals of that.

To add a protocol: a row here, and in COMPUTE of probes.py a function of `Inputs` and its settings that returns an
`Outcome`. A protocol with settings also has a field of its name in jobs/stages/evaluate.py. Nothing here imports torch:
a recipe is checked without it.
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
class NeighboursConfig:
    """Protocol knn: a vote of the nearest training samples."""

    k: tuple[int, ...] = (10, 20)  # neighbours that vote; a value each (DINO eval_knn.py: 20 did best)
    weighted: bool = True  # by exp(cosine / temperature); else each neighbour has one vote
    temperature: float = 0.07  # of the weights (DINO eval_knn.py)

    def __post_init__(self) -> None:
        require(min(self.k, default=0) > 0, f"knn.k is {self.k}, expected 1 or more neighbours")
        more_than_0(self, "temperature", "knn.")


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


# ------------------------------------------------------------------------------------------------ the protocols


@dataclass(frozen=True)
class ProtocolKind:
    """A row of PROTOCOLS."""

    settings: type | None = None  # frozen dataclass; a section of the protocol's name in a recipe
    best: int = 0  # classes of the head that are looked at, the best ones; 0: a protocol of features
    interval: Literal["share", "seeds", "classes"] = "share"  # the value's kind (document.value_entries)
    value_names: Callable[[Any], list[str]] | None = None  # of the settings; None: one value, named as the protocol


@dataclass(frozen=True)
class Protocol:
    """Names a way to evaluate, whole: the same fields always give the same value."""

    name: str
    fields: dict[str, Any]  # as JSON has them

    @property
    def kind(self) -> ProtocolKind:
        """Return the protocol's row."""
        return PROTOCOLS[self.name]

    @property
    def digest(self) -> str:
        """Return the sha256 of the protocol's name and fields as canonical JSON."""
        return config.digest({"protocol": self.name, "fields": self.fields})

    @property
    def settings(self) -> Any:
        """Return the settings as an instance of their class; None for a protocol without any."""
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
FEATURES = tuple(name for name, kind in PROTOCOLS.items() if not kind.best)  # those that need a training set


# ------------------------------------------------------------------------------------------------ a recipe's choice


def probe_protocol(probe: ProbeConfig) -> Protocol:
    """Return the protocol fewshot with the settings of a probe."""
    settings = FewShotConfig(probe.shots, probe.seeds, probe.l2)
    return Protocol("fewshot", config.as_json({"options": asdict(settings)}))


def protocols_of(names: tuple[str, ...], stage_config: object, common: dict[str, Any]) -> list[Protocol]:
    """Return the protocols of these names; a field of the stage's config holds the settings of each that has some.

    `common` are fields of all: how images are prepared, the precision, the batches.
    """
    protocols = []
    for name in names:
        fields = dict(common)
        if PROTOCOLS[name].settings is not None:
            fields["options"] = asdict(getattr(stage_config, name))
        protocols.append(Protocol(name, config.as_json(fields)))
    return protocols


def check_names(names: tuple[str, ...]) -> None:
    """Raise ConfigError where there is no such protocol, or where none or the same twice is named."""
    for name in names:
        require(
            name in PROTOCOLS,
            f"protocols has {name!r}{did_you_mean(name, PROTOCOLS)}\n  expected some of {', '.join(PROTOCOLS)}",
        )
    require(len(names) > 0, f"protocols is empty\n  expected some of {', '.join(PROTOCOLS)}")
    require(len(set(names)) == len(names), f"protocols names one twice: {', '.join(names)}")
