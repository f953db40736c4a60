"""The config of an `evaluate` stage: which weights, which sets, which protocols; and whether they fit each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from data.checks import at_least, check_name, more_than_0
from data.errors import DataError
from data.index.index import Index
from data.remote.cache import CacheConfig
from pipeline.config import Tags, require, tags
from pipeline.evaluation.evaluate import check_ops, check_shape
from pipeline.evaluation.logistic import LogisticConfig
from pipeline.evaluation.neighbours import NeighboursConfig
from pipeline.evaluation.protocols import FEATURES, FewShotConfig, LinearConfig, check_names


@dataclass(frozen=True)
class JudgedConfig:
    """A set to judge on, and the set that protocols of features learn from."""

    test: str = "???"  # the set's index, or its folder; or "@stage/name"
    train: str | None = None  # what fewshot, linear, knn and logistic learn from; the same

    RESUME: ClassVar[Tags] = tags(forbid="test train")


@dataclass(frozen=True)
class EvaluationConfig:
    """Which weights are judged on which sets, and how."""

    init: str = "???"  # weights: a folder of ours, timm or Hugging Face, an official .npz, or "@stage"
    model: dict[str, Any] = field(default_factory=dict)  # what the file of others cannot tell, as heads: 3
    sets: dict[str, JudgedConfig] = field(default_factory=dict)  # by name
    # top-1, top-5, real, per-class, and of features fewshot, linear, knn, logistic (docs/evaluation.md)
    protocols: tuple[str, ...] = ("top-1",)
    fewshot: FewShotConfig = field(default_factory=FewShotConfig)  # of the protocol fewshot
    linear: LinearConfig = field(default_factory=LinearConfig)  # of the protocol linear
    knn: NeighboursConfig = field(default_factory=NeighboursConfig)  # of the protocol knn
    logistic: LogisticConfig = field(default_factory=LogisticConfig)  # of the protocol logistic
    leaks: str | None = None  # a leaks.json of `python -m jobs leaks`: every value with and without leaked samples
    preprocess: str | None = None  # evaluation ops (SPEC 2.5); None: resize(image_size), the few-shot squash
    max_labels: int = 16  # labels a sample has at most; ReaL has 9
    micro_batch: int = 64  # images a worker takes at a time; part of the protocol: another number may round otherwise
    cache: CacheConfig = field(default_factory=CacheConfig)  # of remote shards, on every node
    precision: Literal["bf16", "fp32"] = "fp32"  # in which the model computes
    stall_s: float = 600.0  # in which no worker enters a new phase; then the attempt ends and the next begins

    RESUME: ClassVar[Tags] = tags(
        forbid="init model sets protocols fewshot linear knn logistic leaks preprocess max_labels micro_batch "
        "precision",
        free="cache stall_s",
    )

    def __post_init__(self) -> None:
        check_names(self.protocols)
        check_ops(self.preprocess)
        at_least(self, 1, "micro_batch max_labels")
        more_than_0(self, "stall_s")
        for name, judged in self.sets.items():
            check_name(name, "a set of sets", "rename it")
            learned = [protocol for protocol in self.protocols if protocol in FEATURES]
            require(
                judged.train is not None or not learned,
                f"sets.{name}.train is missing: {', '.join(learned)} learn from a training set\n"
                f"  type sets.{name}.train=…, an index or @stage/name, or leave these protocols out",
            )

    def paths(self) -> dict[str, str]:
        """Return every set by the field that names it."""
        paths = {}
        for name, judged in self.sets.items():
            paths[f"sets.{name}.test"] = judged.test
            if judged.train is not None:
                paths[f"sets.{name}.train"] = judged.train
        return paths

    def metrics(self) -> list[str]:
        """Return the names of the values that come out, as `document.metrics_of` calls them."""
        values: list[str] = []
        for protocol in self.protocols:
            if protocol == "fewshot":
                values += [f"{shots}shot" for shots in self.fewshot.shots]
            elif protocol == "knn":
                values += [f"knn-{k}" for k in self.knn.k]
            else:
                values.append(protocol)
        if len(self.sets) == 1:
            return values
        return [f"{name} {value}" for name in self.sets for value in values]

    def judges_head(self) -> bool:
        """Tell whether a protocol looks at what the head says."""
        return any(protocol not in FEATURES for protocol in self.protocols)


def check_head(cfg: EvaluationConfig, model: Any, indexes: Mapping[str, Index], stage: str) -> None:
    """Raise ConfigError or DataError where a set or a protocol does not fit the weights; `indexes` are by path.

    Names are compared in jobs/recipe/class_names.py.
    """
    check_shape(cfg.preprocess, model, f"{stage}.preprocess")
    if not cfg.judges_head():
        return
    require(
        model.classes > 0,
        f"{stage}: the weights have no head, which {', '.join(set(cfg.protocols) - set(FEATURES))} judge\n"
        f"  expected protocols of features: {', '.join(FEATURES)}",
    )
    require(
        "top-5" not in cfg.protocols or model.classes >= 5,
        f"{stage}: top-5 needs 5 classes, the weights have {model.classes}\n  leave it out of {stage}.protocols",
    )
    for name, judged in cfg.sets.items():
        index = indexes.get(judged.test)
        if index is not None and index.classes > model.classes:
            more = ", ".join(index.class_name(label) for label in range(model.classes, index.classes)[:5])
            raise DataError(
                f"{stage}.sets.{name}: {judged.test} has {index.classes} classes, the weights {model.classes}: "
                f"they know no {more}\n"
                "  expected a set of the weights' classes, or protocols of features: " + ", ".join(FEATURES)
            )
